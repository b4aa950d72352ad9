"""Every strategy replayed over trajectories of 8 steps, against one canonical check of them. A ratio, printed."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest

from rollouts import tokenizers
from rollouts.chat_templates import renderer
from rollouts.tito.canonical import canonical_check_batch
from rollouts.tito.strategies import STRATEGIES, Context
from rollouts.tito.strategies.replay import replay
from rollouts.tito.trajectory import Message, Request, Step, Trajectory

pytestmark = pytest.mark.bench

N, STEPS = 100, 8


def recorded(n: int, context: Context) -> Trajectory:
    """A conversation of eight turns, each prompt the stream before it and the template's delta."""
    messages: list[Message] = [{"role": "user", "content": f"Add {n} and {n + 1}, then double it."}]
    steps: list[Step] = []
    strategy = STRATEGIES["tool_delta"](context)
    prompt = strategy.begin(messages, None, {})
    for turn in range(STEPS):
        reply: Message = {"role": "assistant", "content": f"Turn {turn}: the value is {n * turn + 1}, so I go on. " * 4}
        ids = np.append(context.codec.encode(reply["content"]), sorted(context.stop_ids)[0]).astype(np.int32)
        logprobs = np.full(len(ids), -0.5, dtype=np.float32)
        steps.append(Step(np.array(prompt), ids, logprobs, request=Request(tuple(messages)), reply=reply))
        strategy.sampled(ids, logprobs, reply)
        asked: Message = {"role": "user", "content": f"And what is {turn + n} more?"}
        messages = [*messages, reply, asked]
        prompt = strategy.observe([asked])
    return Trajectory(str(n), tuple(steps))


def test_all_strategies_against_one_canonical_check(tiny_tokenizer: Path) -> None:
    codec = tokenizers.load(tiny_tokenizer)
    text = codec.hf.chat_template
    context = Context(codec, renderer(codec, text), codec.stop_ids)
    trajectories = [recorded(n, context) for n in range(N)]
    began = time.perf_counter()
    canonical_check_batch([step.stream for one in trajectories for step in one.steps], codec)
    checked = time.perf_counter() - began
    began = time.perf_counter()
    slugs = {}
    for slug, strategy in STRATEGIES.items():
        start = time.perf_counter()
        for one in trajectories:
            replay(one, strategy, context)
        slugs[slug] = time.perf_counter() - start
    replayed = time.perf_counter() - began
    worst = ", ".join(f"{slug} {seconds / checked:.2f}" for slug, seconds in sorted(slugs.items(), key=lambda x: -x[1]))
    print(
        f"\n{N} trajectories of {STEPS} steps: every strategy {replayed:.2f} s, one canonical check of each stream "
        f"{checked:.2f} s; ratio {replayed / checked:.2f} (target 3), by strategy: {worst}"
    )
