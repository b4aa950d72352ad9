"""Moves the token arrays of a run from one store to the other, in batches, while the run is read."""

from collections.abc import Iterator

from rollout_inspector.streams.batches import batched
from rollouts.jobs.broker import send_job
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, ask_job, end_job
from rollouts.store.models import Job, Run, StoredTrajectory
from rollouts.store.token_arrays import STORES
from rollouts.store.trajectories.token_moves import move_arrays, runs_to_gather, set_token_store, trajectories_to_move

BATCH = 500  # Trajectories that are read at once at most.
BATCH_TOKENS = 1_000_000  # Tokens of a batch, which becomes one segment.


def move_run(run: Run, to: str, after: int = -1) -> Iterator[tuple[StoredTrajectory, int]]:
    """Move the arrays of the trajectories after an index into the store named ``to``, which the run then keeps. Yields
    after each batch its last trajectory, and how many steps and rows were moved. What is in the store already stays, so
    a move that was killed is begun again. Trajectories that still grow keep their arrays where they are."""
    set_token_store(run, to)
    while page := trajectories_to_move(run, after, BATCH):
        for batch in batched(page, BATCH_TOKENS, lambda one: one.n_tokens):
            yield batch[-1], move_arrays(run, batch, STORES[to])
        after = page[-1].index


def do_job(job: Job, beat: Beat) -> None:
    """Move what a run of the store ``segments`` still has in the database."""
    run = job.run
    if run is None:
        raise JobLost
    beat(n_done=0, n_total=run.n_trajectories)
    for last, _ in move_run(run, job.options["to"], job.reached):
        beat(n_done=last.index + 1, reached=last.index)
    end_job(job, Job.Status.DONE)


def gather() -> None:
    """Send a job for each run that has ended, or was diagnosed, since its arrays were last moved into segments. Steps
    that are stored one by one, and small batches, are in the database first: a file for each would be millions."""
    for run in runs_to_gather(KIND.slug):
        job, is_new = ask_job(run, KIND.slug, {"to": "segments"}, run.created_by)
        if is_new:
            send_job(job)


KIND = JobKind("move_tokens", "Move Tokens", do_job)
"""The token arrays of a run move into the store that ``options`` names."""
