"""The measure: a plain loop around vLLM that does the same work as a run did, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rollouts.engines.vllm_engine import VllmEngine
from rollouts.tito.trajectory import Trajectory


@dataclass(frozen=True)
class Plan:
    """One trajectory's work: a prompt, then by turn how many tokens are sampled and which ids follow them."""

    prompt: list[int]
    lengths: tuple[int, ...]
    deltas: tuple[list[int], ...]
    """One fewer than ``lengths``."""
    seed: int


@dataclass(frozen=True)
class Measured:
    tokens: int
    """Sampled."""
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def plan(trajectory: Trajectory, seed: int) -> Plan:
    """The work that made a trajectory whose every step extends the one before."""
    steps = trajectory.steps
    deltas = [
        after.prompt_ids[len(before.prompt_ids) + len(before.completion_ids) :].tolist()
        for before, after in pairwise(steps)
    ]
    return Plan(steps[0].prompt_ids.tolist(), tuple(len(step.completion_ids) for step in steps), tuple(deltas), seed)


def run_bare(engine: VllmEngine, plans: Sequence[Plan], max_live: int) -> Measured:
    """Do the work of ``plans``, ``max_live`` at once, each turn as soon as the one before it has ended."""
    llm = engine.llm_engine
    waiting: Iterable[tuple[int, Plan]] = iter(enumerate(plans))
    ids: dict[int, list[int]] = {}
    turns: dict[int, int] = {}
    n_tokens = 0

    def ask(place: int) -> None:
        # Lengths are the run's own, so that both sample equally many tokens.
        params = engine.new_params(
            temperature=1.0,
            max_tokens=plans[place].lengths[turns[place]],
            ignore_eos=True,
            logprobs=0,
            seed=plans[place].seed + turns[place],
        )
        llm.add_request(f"bare-{place}-{turns[place]}", {"prompt_token_ids": ids[place]}, params)

    def start_next() -> None:
        for place, work in waiting:
            ids[place], turns[place] = list(work.prompt), 0
            ask(place)
            return

    began = time.perf_counter()
    for _ in range(max_live):
        start_next()
    while llm.has_unfinished_requests():
        for out in llm.step():
            if not out.finished:
                continue
            place = int(out.request_id.split("-")[1])
            completion = out.outputs[0].token_ids
            n_tokens += len(completion)
            work = plans[place]
            if turns[place] < len(work.deltas):
                ids[place] += [*completion, *work.deltas[turns[place]]]
                turns[place] += 1
                ask(place)
            else:
                del ids[place], turns[place]
                start_next()
    return Measured(n_tokens, time.perf_counter() - began)
