"""What a pile of a launched run becomes: steps stored, trajectories judged and ended, a transaction for all of each."""

from __future__ import annotations

from collections.abc import Sequence

from rollouts import selectors, services
from rollouts.models import Run, StoredTrajectory
from rollouts.tasks.storage_process import Ended, StorageBatch
from rollouts.tito import trajectory as tito
from rollouts.tito.diagnose.finding import Finding
from rollouts.tito.trajectory import Step


class Writing:
    """The storing of one run. Steps are kept until their trajectory ends, so that its end need not read them back."""

    def __init__(self, run_id: int) -> None:
        self.run_id = run_id
        self._run = Run.objects.select_related("tokenizer", "chat_template", "rows_chat_template").get(pk=run_id)
        self._steps: dict[int, list[Step]] = {}

    def write(self, batch: StorageBatch) -> None:
        """Store a pile; one that was stored already changes nothing."""
        services.save_steps(batch.steps)
        for key, index, step in batch.steps:
            held = self._steps.setdefault(key, [])
            if index == len(held):
                held.append(step)
        done = [one for one in batch.ended if not one.error]
        for one in batch.ended:
            if one.error:
                services.fail_trajectory(one.key, one.attempt, one.error, one.findings)
        services.finish_trajectories(self._ends(done))
        for one in batch.ended:
            self._steps.pop(one.key, None)

    def _ends(self, ended: Sequence[Ended]) -> list[services.End]:
        records = {
            record.pk: record
            for record in StoredTrajectory.objects.filter(pk__in=[one.key for one in ended]).defer("extra_id")
        }
        ends = []
        for one in ended:
            record = records.get(one.key)
            if record is None or record.attempt != one.attempt:
                continue  # deleted, or another worker's by now
            findings = self._diagnose(record, one)
            ends.append(
                services.End(
                    one.key, one.attempt, one.reward, one.reward_parts or {}, one.stop_reason, findings, one.rows
                )
            )
        return ends

    def _diagnose(self, record: StoredTrajectory, one: Ended) -> list[Finding]:
        from rollouts.work.diagnosis import findings_for

        steps = self._steps.get(one.key, [])
        if len(steps) != record.n_steps:
            # An earlier attempt, or a process before this one, stored the first of them.
            steps = list(selectors.load_trajectory(record).steps)
        value = tito.Trajectory(
            external_id=record.external_id,
            steps=tuple(steps),
            rows=one.rows or (),
            reward=one.reward,
            stop_reason=one.stop_reason,
            group=record.group,
        )
        return findings_for(value, self._run)
