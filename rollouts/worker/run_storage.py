"""Stores a launched run: inserts steps, then diagnoses and ends trajectories, in one transaction each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rollout_inspector.diagnose import Diagnosis
from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.canonical import EncodedAgain
from rollout_inspector.streams.trajectory import FORKED, Step, Trajectory
from rollouts.store.models import StoredTrajectory
from rollouts.store.runs.forks import find_fork
from rollouts.store.runs.runs import get_run
from rollouts.store.token_arrays.reading import fork_prefix
from rollouts.store.trajectories.launched_trajectories import fail_trajectory, finish_trajectories, save_steps
from rollouts.store.trajectories.retokenized import keep_retokenized
from rollouts.store.trajectories.trajectories import load_trajectory, trajectories_by_key


@dataclass(frozen=True, eq=False)
class StorageBatch:
    """What is stored in one go. A batch that was stored already changes nothing."""

    run: int  # Primary key of the run.
    steps: Sequence[tuple[int, int, Step]]  # (trajectory key, step index, step).
    ends: Sequence[TrajectoryEnd]


class RunStorage:
    """Stores one run. Steps stay in memory until their trajectory ends, so that they need not be read back."""

    def __init__(self, run_id: int) -> None:
        self.run_id = run_id
        self._run = get_run(run_id)
        fork = find_fork(self._run)
        self._prefix = None if fork is None else fork_prefix(fork)
        self._steps: dict[int, list[Step]] = {}

    def write(self, batch: StorageBatch) -> None:
        """Store a batch. A batch that was stored already changes nothing."""
        save_steps(batch.steps, self._prefix)
        for key, index, step in batch.steps:
            steps = self._steps.setdefault(key, [])
            if index == len(steps):
                steps.append(step)
        for end in batch.ends:
            if end.error:
                fail_trajectory(end)
        ends, again = self._diagnosed([end for end in batch.ends if not end.error])
        ended = finish_trajectories(ends)
        keep_retokenized(self._run, [(key, again[key]) for key in sorted(ended)])
        for end in batch.ends:
            self._steps.pop(end.key, None)

    def _diagnosed(
        self, ends: Sequence[TrajectoryEnd]
    ) -> tuple[list[TrajectoryEnd], dict[int, tuple[EncodedAgain, ...]]]:
        """Returns the ends with their findings, and by key what changes when the text is encoded again. It drops the
        ends of deleted trajectories and of other attempts."""
        records = {record.pk: record for record in trajectories_by_key([end.key for end in ends])}
        ours = [end for end in ends if end.key in records and records[end.key].attempt == end.attempt]
        diagnoses = [self._diagnosis(records[end.key], end) for end in ours]
        diagnosed = [
            replace(end, findings=diagnosis.findings, checks=diagnosis.checks)
            for end, diagnosis in zip(ours, diagnoses, strict=True)
        ]
        return diagnosed, {end.key: diagnosis.again for end, diagnosis in zip(ours, diagnoses, strict=True)}

    def _diagnosis(self, record: StoredTrajectory, end: TrajectoryEnd) -> Diagnosis:
        from rollouts.jobs.diagnosis import diagnosis_for

        steps = self._steps.get(end.key, [])
        if len(steps) != record.n_steps:
            # An earlier attempt or an earlier process stored the first steps.
            steps = list(load_trajectory(record).steps)
        value = Trajectory(
            external_id=record.external_id,
            steps=tuple(steps),
            rows=end.rows or (),
            reward=end.reward,
            stop_reason=end.stop_reason,
            group=record.group,
            extra={name: self._run.settings[name] for name in (FORKED,) if name in self._run.settings},
        )
        return diagnosis_for(value, self._run)
