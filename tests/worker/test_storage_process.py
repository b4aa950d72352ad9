"""What a worker does when its storage process or its database does not store: it tries again, with a limit."""

from collections.abc import Callable

import pytest

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.text.processes import ProcessEnded
from rollouts.worker import storage_process
from rollouts.worker.storage_process import NotStored, StorageBatch, StorageClient, StorageOutage

FULL = "The database does not store results (database or disk is full)."
Fails = Callable[[StorageBatch], Exception | None]


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch) -> tuple[list[StorageBatch], list[Fails]]:
    """What processes have stored, and the function that says how a batch fails (to be appended)."""
    batches: list[StorageBatch] = []
    fails: list[Fails] = []

    class Process:
        def write(self, batch: StorageBatch) -> None:
            if (error := fails[0](batch)) is not None:
                raise error
            batches.append(batch)

        def close(self) -> None:
            pass

    monkeypatch.setattr(storage_process, "take", Process)
    monkeypatch.setattr(storage_process, "DEATH_PAUSES", (0.0,) * 4)
    monkeypatch.setattr(storage_process, "OUTAGE_PAUSES", (0.0,) * 4)
    return batches, fails


def ended() -> ProcessEnded:
    return ProcessEnded("The process that stores results", -9)


def batch(*keys: int) -> StorageBatch:
    return StorageBatch(1, (), [TrajectoryEnd(key, 1, reward=1.0) for key in keys])


@pytest.mark.parametrize("error", [ended(), StorageOutage(FULL)])
def test_what_passes_is_stored_after_all(stored: tuple[list[StorageBatch], list[Fails]], error: Exception) -> None:
    """M9: two deaths of the storage process within seconds failed a whole run."""
    batches, fails = stored
    left = [error] * 4
    fails.append(lambda _: left.pop() if left else None)
    StorageClient().write(batch(1, 2))
    assert [end.key for one in batches for end in one.ends] == [1, 2] and not left


def test_a_trajectory_whose_diagnosis_ends_every_process_fails_alone(
    stored: tuple[list[StorageBatch], list[Fails]],
) -> None:
    batches, fails = stored
    fails.append(lambda one: ended() if any(end.key == 2 and not end.error for end in one.ends) else None)
    StorageClient().write(batch(1, 2, 3))
    ends = {end.key: end for one in batches for end in one.ends}
    assert sorted(ends) == [1, 2, 3] and [ends[1].error, ends[3].error] == ["", ""]
    assert ends[2].attempt == 1
    assert ends[2].error.startswith("This trajectory could not be diagnosed: 5 processes ended at it. The process that")


@pytest.mark.parametrize(
    ("error", "words"),
    [(ended(), "Results could not be stored. The process"), (StorageOutage(FULL), FULL)],
)
def test_what_does_not_pass_ends_with_a_sentence(
    stored: tuple[list[StorageBatch], list[Fails]], error: Exception, words: str
) -> None:
    _, fails = stored
    fails.append(lambda _: error)
    with pytest.raises(NotStored) as caught:
        StorageClient().write(batch(1))
    assert str(caught.value).startswith(words)


def test_a_worker_that_stops_does_not_wait(
    stored: tuple[list[StorageBatch], list[Fails]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(storage_process, "OUTAGE_PAUSES", (600.0,))
    _, fails = stored
    fails.append(lambda _: StorageOutage(FULL))
    with pytest.raises(NotStored):
        StorageClient(lambda: True).write(batch(1))
