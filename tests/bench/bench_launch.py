"""A launched run, its writes and its diagnosis included, beside a bare loop around the same engine. Ratios, printed."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollouts import selectors, tokenizers
from rollouts.engines import Engine, GenerationRequest, Sampling, build_engine
from rollouts.launch import LaunchForm, launch
from rollouts.loop import step_seed
from rollouts.models import Finding, Run
from rollouts.tasks import launch as work
from rollouts.tito.trajectory import Ids, Trajectory

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True)]

LIVE = 64
PROMPTS, GROUP = 64, 4
ROUNDS = 3


@pytest.fixture(autouse=True)
def engines(tiny_tokenizer: Path) -> Iterator[None]:
    yield
    work.close_engines()


def bare(engine: Engine, made: Sequence[tuple[int, Trajectory]], sampling: Sampling) -> tuple[int, float]:
    """Sample what a run sampled, with the same seeds, ``LIVE`` at once, and do nothing else; (tokens, seconds)."""
    deltas = [
        [after.prompt_ids[len(before.stream) :] for before, after in pairwise(trajectory.steps)]
        for _, trajectory in made
    ]
    waiting = iter(range(len(made)))
    prompts: dict[int, Ids] = {}
    turns: dict[int, int] = {}
    tokens = 0

    def ask(place: int) -> None:
        seed = step_seed(made[place][0], turns[place])
        settings = Sampling(
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop_token_ids,
            seed=seed,
        )
        engine.add(GenerationRequest(f"bare-{place}-{turns[place]}", prompts[place], settings))

    def start() -> None:
        for place in waiting:
            prompts[place], turns[place] = made[place][1].steps[0].prompt_ids, 0
            ask(place)
            return

    began = time.perf_counter()
    for _ in range(LIVE):
        start()
    while engine.has_unfinished():
        for generation in engine.step():
            place = int(generation.request_id.split("-")[1])
            tokens += len(generation.completion_ids)
            if turns[place] < len(deltas[place]):
                delta = deltas[place][turns[place]]
                prompts[place] = np.concatenate([prompts[place], generation.completion_ids, delta])
                turns[place] += 1
                ask(place)
            else:
                start()
    return tokens, time.perf_counter() - began


def launched(name: str, prompts: int, seed: int) -> tuple[Run, float]:
    run = launch(LaunchForm(engine=name, prompts=prompts, group=GROUP, seed=seed), enqueue=False)
    began = time.perf_counter()
    work.work_on(run.pk)
    seconds = time.perf_counter() - began
    run.refresh_from_db()
    assert run.status == "done" and not run.n_failed, run.error
    return run, seconds


@pytest.mark.parametrize("name", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_throughput_against_a_bare_loop(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "vllm":
        request.getfixturevalue("vllm_available")
    built: list[Any] = []

    def build(*arguments: Any, **options: Any) -> Engine:
        built.append(build_engine(*arguments, **options))
        return built[-1]

    monkeypatch.setattr(work, "build_engine", build)
    launched(name, 16, 1)  # loads the engine and fills every cache
    (engine,) = built  # idle between two runs, so that this thread may use it
    ratios = []
    for turn in range(ROUNDS):
        run, seconds = launched(name, PROMPTS, 10 + turn)
        made = [(record.seed or 0, selectors.load_trajectory(record)) for record in run.trajectories.order_by("index")]
        assert run.tokenizer is not None
        stops = tuple(sorted(tokenizers.load(run.tokenizer.path).stop_ids))
        sampling = Sampling(temperature=1.0, max_tokens=LaunchForm().max_tokens, stop_token_ids=stops)
        if name == "vllm":
            engine.llm_engine.reset_prefix_cache()  # what the run left would be a present to the bare loop
        tokens, bare_seconds = bare(engine, made, sampling)
        rate, bare_rate = run.n_sampled / seconds, tokens / bare_seconds
        ratios.append(rate / bare_rate)
        print(
            f"\n{name}: {len(made)} trajectories, {run.n_steps} steps, {Finding.objects.filter(run=run).count()} "
            f"findings; worker {rate:,.0f} tokens/s ({run.n_sampled} tokens), bare loop {bare_rate:,.0f} tokens/s "
            f"({tokens} tokens); ratio {rate / bare_rate:.3f}"
        )
    print(f"{name}: median ratio {sorted(ratios)[len(ratios) // 2]:.3f} (target 0.90)")
