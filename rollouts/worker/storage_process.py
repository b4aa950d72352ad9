"""The storage process: it runs beside a worker and diagnoses and stores what the worker samples.

The loop must answer an engine at once, and the diagnosis of a trajectory costs a good part of the time of sampling it.
So steps and ends go through a pipe to another process in batches: the larger the backlog, the fewer the transactions.
The process ends with its worker, because the pipe closes. What it has received is stored before it ends.
"""

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing.connection import Connection

from django.conf import settings
from django.db import connection

from rollout_inspector.diagnose import Diagnosis
from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import FORKED, Step, Trajectory
from rollout_inspector.text.processes import PipedProcess, ProcessEnded, pipe_to_parent
from rollouts.sampling.engines import reason
from rollouts.store.models import StoredTrajectory
from rollouts.store.outages import OUTAGE_PAUSES, is_outage, said_of, try_again
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
        # The ends of deleted trajectories and of other attempts are dropped.
        ends = [end for end in batch.ends if not end.error]
        records = {record.pk: record for record in trajectories_by_key([end.key for end in ends])}
        ours = [end for end in ends if end.key in records and records[end.key].attempt == end.attempt]
        diagnoses = {end.key: self._diagnosis(records[end.key], end) for end in ours}
        ended = finish_trajectories(
            [replace(end, findings=diagnoses[end.key].findings, checks=diagnoses[end.key].checks) for end in ours]
        )
        keep_retokenized(self._run, [(key, diagnoses[key].again) for key in sorted(ended)])
        for end in batch.ends:
            self._steps.pop(end.key, None)

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


log = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0
NICE = 5  # On a busy machine the engine and the loop go first, because nobody waits for the storing.
DEATH_PAUSES = (0.5, 1.0, 2.0, 4.0)  # Seconds before a lost process is replaced once more at the same batch.
PREPARE = f"import os; os.nice({NICE}); import django; django.setup(); "
"""Statements at the start of the process. Models can be imported only after ``setup``."""


class StorageProcess:
    """One storage process. It is not thread-safe, and belongs to one run at a time."""

    def __init__(self) -> None:
        self._child = PipedProcess(
            "The process that stores results", __name__, PREPARE, {"OMP_NUM_THREADS": "1"}, cwd=settings.BASE_DIR
        )
        names = ("ENGINE", "NAME", "USER", "PASSWORD", "HOST", "PORT")
        # A test's database is not the one of the settings.
        self._child.send({name: connection.settings_dict[name] for name in names})

    def write(self, batch: StorageBatch) -> None:
        """Store a batch; returns when it is stored. Raises ``ProcessEnded``, or :class:`NotStored`."""
        self._child.send(batch)
        answer = self._child.receive()
        if answer is not None:
            raise answer

    def forget(self) -> None:
        """The run is over: the process frees its memory of the run and closes its connection to the database."""
        self._child.send(None)

    def close(self) -> None:
        self._child.close(CLOSE_SECONDS)


_idle: list[StorageProcess] = []
_lock = threading.Lock()


def take() -> StorageProcess:
    """Returns a process without a run, a warm one if possible."""
    with _lock:
        if _idle:
            return _idle.pop()
    return StorageProcess()


def close_idle() -> None:
    """End the processes that have no run."""
    with _lock:
        stopped, _idle[:] = list(_idle), []
    for storage in stopped:
        storage.close()


class NotStored(Refusal):
    """A batch could not be stored. The message is a sentence for the run page."""


class StorageOutage(NotStored):
    """An outage of the database or of the disk: it may be stored later."""


class StorageClient:
    """The storage process of one run, taken with the first batch. A lost process is replaced, and a database in trouble
    is asked again, both with pauses and with a limit. A trajectory whose diagnosis ends every process fails, and the
    others are stored."""

    def __init__(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """``should_stop``: whether the pauses are to end."""
        self._should_stop = should_stop
        self._storage: StorageProcess | None = None

    def write(self, batch: StorageBatch) -> None:
        """Store a batch; returns when it is stored. Raises :class:`NotStored`."""
        try:
            try:
                self._try(batch)
            except ProcessEnded:
                self._try(replace(batch, ends=()))
                for end in batch.ends:
                    self._write_end(StorageBatch(batch.run, (), (end,)))
        except ProcessEnded as ended:
            raise NotStored(f"Results could not be stored. {ended} Resume the run to go on.") from ended

    def _write_end(self, batch: StorageBatch) -> None:
        try:
            self._try(batch)
        except ProcessEnded as ended:
            (end,) = batch.ends
            error = f"This trajectory could not be diagnosed: {len(DEATH_PAUSES) + 1} processes ended at it. {ended}"
            self._try(replace(batch, ends=(TrajectoryEnd(end.key, end.attempt, error=error),)))

    def _try(self, batch: StorageBatch) -> None:
        def once() -> None:
            try:
                self._storage = self._storage or take()
                self._storage.write(batch)
            except ProcessEnded:
                if self._storage is not None:
                    self._storage.close()
                    self._storage = None
                raise
            except (OSError, MemoryError) as error:  # no process can be started
                raise StorageOutage(f"Results could not be stored. {reason(error)}") from error

        with_others = partial(
            try_again, once, lambda error: isinstance(error, ProcessEnded), DEATH_PAUSES, self._should_stop
        )
        try_again(with_others, lambda error: isinstance(error, StorageOutage), OUTAGE_PAUSES, self._should_stop)

    def close(self) -> None:
        """Keep the process warm for the next run."""
        storage, self._storage = self._storage, None
        if storage is not None:
            try:
                storage.forget()
            except ProcessEnded:
                storage.close()
                return
            with _lock:
                _idle.append(storage)


# -- in the process ----------------------------------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """Store what comes until the pipe closes."""
    storage: RunStorage | None = None
    while True:
        try:
            message = pipe.recv()
        except EOFError:
            return
        if isinstance(message, dict):
            connection.close()
            connection.settings_dict.update(message)
            continue
        if message is None:
            storage = None
            connection.close()
            continue
        try:
            if storage is None or storage.run_id != message.run:
                storage = RunStorage(message.run)
            storage.write(message)
            answer: NotStored | None = None
        except Exception as error:
            connection.close()
            if is_outage(error):
                log.warning("batch not stored run=%s: %s", message.run, error)
                answer = StorageOutage(
                    f"Results could not be stored. {said_of(error)} Resume the run when it works again."
                )
            else:
                log.exception("batch not stored run=%s", message.run)
                answer = NotStored(f"Results could not be stored, by an error of the program: {reason(error)}.")
        try:
            pipe.send(answer)
        except OSError:
            return  # the worker is gone, and what it had sent is stored


def main() -> None:
    """Serve the worker that started this process."""
    serve(pipe_to_parent())
