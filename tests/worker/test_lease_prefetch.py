"""Jobs leased ahead of the loop: what is ready is given at once, and the loop waits only when it has nothing else."""

import threading
from collections.abc import Sequence

import pytest

from rollouts.sampling.environments import Task
from rollouts.sampling.loop import RolloutJob
from rollouts.worker.lease_prefetch import LeasePrefetcher


def jobs(*keys: int) -> list[RolloutJob]:
    return [RolloutJob(key, Task([], None, None, key)) for key in keys]


def keys(found: Sequence[RolloutJob] | None) -> list[int] | None:
    return None if found is None else [job.key for job in found]


def test_nothing_ready_is_not_the_end_and_the_end_is_said() -> None:
    slow = threading.Event()
    batches = iter([jobs(1, 2, 3), []])

    def lease(n: int) -> Sequence[RolloutJob]:
        assert slow.wait(60)
        return next(batches)

    with LeasePrefetcher(lease, 4) as prefetcher:
        assert keys(prefetcher.more(2, False)) == []  # not ready yet, and nobody has waited
        slow.set()
        assert keys(prefetcher.more(2, True)) == [1, 2]
        assert keys(prefetcher.more(2, True)) == [3]
        assert prefetcher.more(2, True) is None
        assert prefetcher.more(2, False) is None


def test_what_leasing_raised_comes_behind_what_it_gave() -> None:
    batches = iter([jobs(1)])

    def lease(n: int) -> Sequence[RolloutJob]:
        for batch in batches:
            return batch
        raise OSError("the database is gone")

    with LeasePrefetcher(lease, 4) as prefetcher:
        assert keys(prefetcher.more(4, True)) == [1]
        with pytest.raises(OSError, match="the database is gone"):
            prefetcher.more(4, True)
