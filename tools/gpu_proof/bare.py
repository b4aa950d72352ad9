"""The yardstick: a plain loop around an engine that samples the same as a run did, and does nothing else.

It has the same prompts, turns of the same lengths, the same ids between them and as many trajectories at once. It does
no parsing, template, environment, storage or diagnosis. It needs no Django: ``EngineOwner.call`` runs it beside the
engine.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

from rollout_inspector.streams.trajectory import Trajectory
from rollouts.sampling.engines.vllm_engine import VllmEngine


@dataclass(frozen=True)
class Plan:
    """One trajectory's work: a prompt; for each turn how many tokens are sampled, and which ids follow them."""

    prompt: list[int]
    lengths: tuple[int, ...]
    deltas: tuple[list[int], ...]
    """One entry fewer than ``lengths``."""
    seed: int


@dataclass(frozen=True)
class Measured:
    tokens: int
    """Sampled tokens."""
    seconds: float

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds


def plan(trajectory: Trajectory, seed: int) -> Plan:
    """The work that made this trajectory. Every step must extend the step before."""
    steps = trajectory.steps
    deltas = [
        after.prompt_ids[len(before.prompt_ids) + len(before.completion_ids) :].tolist()
        for before, after in pairwise(steps)
    ]
    return Plan(steps[0].prompt_ids.tolist(), tuple(len(step.completion_ids) for step in steps), tuple(deltas), seed)


class Plain(Protocol):
    """The thinnest layer between a loop and an engine."""

    def ask(self, name: str, ids: list[int], n_tokens: int, seed: int) -> None:
        """Sample exactly ``n_tokens``, as many as the run did, so that both sample equally many."""
        ...

    def step(self) -> Iterable[tuple[str, Sequence[int]]]:
        """Names and ids of the completions that finished."""
        ...

    def is_busy(self) -> bool: ...


class PlainVllm:
    """vLLM's own engine, without this project's code around it."""

    def __init__(self, engine: VllmEngine) -> None:
        self._llm, self._new_params = engine.llm_engine, engine.new_params

    def ask(self, name: str, ids: list[int], n_tokens: int, seed: int) -> None:
        params = self._new_params(temperature=1.0, max_tokens=n_tokens, ignore_eos=True, logprobs=0, seed=seed)
        self._llm.add_request(name, {"prompt_token_ids": ids}, params)

    def step(self) -> Iterable[tuple[str, Sequence[int]]]:
        return [(out.request_id, out.outputs[0].token_ids) for out in self._llm.step() if out.finished]

    def is_busy(self) -> bool:
        return bool(self._llm.has_unfinished_requests())


def run_bare(engine: Plain, plans: Sequence[Plan], max_live: int) -> Measured:
    """Do the work of ``plans``, ``max_live`` at once. Each turn starts as soon as the turn before it has ended."""
    waiting: Iterable[tuple[int, Plan]] = iter(enumerate(plans))
    ids: dict[int, list[int]] = {}
    turns: dict[int, int] = {}
    n_tokens = 0

    def ask(place: int) -> None:
        turn = turns[place]
        engine.ask(f"bare-{place}-{turn}", ids[place], plans[place].lengths[turn], plans[place].seed + turn)

    def start_next() -> None:
        for place, work in waiting:
            ids[place], turns[place] = list(work.prompt), 0
            ask(place)
            return

    began = time.perf_counter()
    for _ in range(max_live):
        start_next()
    while engine.is_busy():
        for name, completion in engine.step():
            place = int(name.split("-")[1])
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
