"""How many token ids a fork stores for each new one: from both sides of every break of the gallery, and from tokens.

    pytest -q -s benchmarks/bench_forks.py

A new token is one that no stream of the fork had before at this place: a node of the tree of its streams behind the
prefix that the fork shares. Every strategy continues a trajectory of its own; with the demo policy, in this process.
"""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.jobs import forks, gallery
from rollouts.jobs.forks import ForkSettings
from rollouts.jobs.launch import LaunchSettings, launch
from rollouts.store.models import Fork, Run, StepTokens, StoredTrajectory
from rollouts.store.token_arrays.reading import fork_prefix
from rollouts.store.trajectories.trajectories import load_trajectory
from rollouts.store.trajectories.trajectory_parts import read_steps
from rollouts.worker import run_rollouts

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("engines", "tiny_tokenizer")]
LIMIT = 1.1
"""Stored ids for each new one."""
SAMPLES = 4


def worked(run: Run) -> list[StoredTrajectory]:
    """The trajectories of a run when the work is done; those that the environment stopped have stored nothing."""
    run_rollouts.work_on(run.pk)
    run.refresh_from_db()
    return list(run.trajectories.filter(status="done").select_related("run"))


def count_ids(run: Run) -> tuple[int, int]:
    """Ids that the database holds of a fork, and ids that are new in it."""
    fork = Fork.objects.get(run=run)
    prefix, n_new = fork_prefix(fork).tolist(), len(fork.tail_ids)
    n_stored = len(fork.tail_ids)
    for trajectory in worked(run):
        tokens = StepTokens.objects.filter(step__trajectory=trajectory).values_list("delta_ids", "completion_ids")
        n_stored += sum(len(delta) + len(completion) for delta, completion in tokens)
        streams = [step.stream.tolist() for step in load_trajectory(trajectory).steps]
        n_new += len({tuple(stream[:end]) for stream in streams for end in range(1, len(stream) + 1)}
                     - {tuple(prefix[:end]) for end in range(1, len(prefix) + 1)})
    return n_stored, n_new


def forks_of_breaks() -> Iterator[tuple[str, Run]]:
    """Name and run of each side of each finding of the gallery that has two sides."""
    for trajectory in gallery.load().trajectories.select_related("run").order_by("index"):
        for number in range(1, trajectory.n_findings + 1):
            settings = ForkSettings(finding=number, samples=SAMPLES, seed=1, goes_on=True)
            try:
                runs = forks.fork(trajectory, settings, enqueue=False)
            except Refusal:  # it has no two sides
                continue
            for run in runs:
                yield f"{trajectory.external_id}, {run.fork.side}", run


def forks_of_tokens() -> Iterator[tuple[str, Run]]:
    """Name and run of a fork at each kind of place, under each strategy that can launch here."""
    for strategy in STRATEGIES:
        try:
            run = launch(LaunchSettings(prompts=4, group=1, seed=7, strategy=strategy), enqueue=False)
        except Refusal:
            continue
        parent = next((trajectory for trajectory in worked(run) if trajectory.n_steps > 1), None)
        if parent is None:
            continue
        first, second = read_steps(parent)[:2]
        places = {"first turn": (first.row, first.prompt_length + 3), "later turn": (second.row, second.prompt_length)}
        for place, (row, at) in places.items():
            settings = ForkSettings(row=row, at=at, samples=SAMPLES, seed=1, goes_on=True)
            yield f"{strategy}, {place}", forks.fork(parent, settings, enqueue=False)[0]
            settings = replace(settings, token=300)
            yield f"{strategy}, {place}, another token", forks.fork(parent, settings, enqueue=False)[0]


def test_a_fork_stores_what_is_new() -> None:
    counts = {}
    for forks_made in (forks_of_breaks, forks_of_tokens):
        for name, run in forks_made():
            counts[name] = count_ids(run)
    print()
    for name, (n_stored, n_new) in counts.items():
        print(f"{name:60} {n_stored:7,} stored {n_new:7,} new  {n_stored / max(1, n_new):5.2f}")
    stored, new = (sum(column) for column in zip(*counts.values(), strict=True))
    print(f"{len(counts)} forks: {stored:,} ids stored, {new:,} new: {stored / new:.3f} times")
    print(f"the largest: {max(stored / max(1, new) for stored, new in counts.values()):.3f} times")
    assert {name for name, (n_stored, n_new) in counts.items() if n_stored > LIMIT * n_new} == set()
