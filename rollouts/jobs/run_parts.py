"""Ranges of the trajectories of a run, which workers go through side by side."""

from itertools import pairwise

from rollouts.store.jobs.jobs import Beat
from rollouts.store.models import Job
from rollouts.store.runs.runs import run_of_job
from rollouts.store.trajectories.trajectories import LAST, finished_trajectories, last_index

PART_TOKENS = 1_000_000  # New tokens of a part. Runs of less than two such parts are gone through by one worker.
PART_TRAJECTORIES = 2_000  # Trajectories of a part that hold few tokens.
MAX_PARTS = 256


def range_of(job: Job) -> tuple[int, int]:
    """First and last index that a job or a shard goes through."""
    return job.options.get("first", 0), job.options.get("last", LAST)


def cut_run(job: Job, beat: Beat) -> list[dict[str, int]]:
    """The options of each part of a job that goes through a run: ``first`` and ``last`` index. Empty if the run is
    small: one worker goes through it. The job knows then how many trajectories it has to go through."""
    run = run_of_job(job)
    finished = finished_trajectories(run)
    size = max(run.n_tokens / PART_TOKENS, run.n_finished / PART_TRAJECTORIES)
    if size < 2:
        return []
    stop = (last_index(finished) or 0) + 1
    n = min(int(size) + 1, MAX_PARTS, stop)
    beat(n_done=0, n_total=finished.count())
    edges = [stop * k // n for k in range(n + 1)]
    return [{"first": first, "last": end - 1} for first, end in pairwise(edges)]
