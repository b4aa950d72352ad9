"""Every strategy replayed over trajectories of 8 steps, against one canonical check of them. Ratios, printed.

The canonical check is ours, with the fastest exact encoder and all streams in one batch. The second reference is the
loop that somebody without it writes: the ``transformers`` tokenizer decodes each stream and encodes the text.

Beside the wall clock stands computing time, of this process and of the sandbox that renders, because a machine on which
other things run stretches the one and not the other.
"""

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from rollout_inspector.streams.canonical import canonical_check_batch
from rollout_inspector.streams.strategies import STRATEGIES, Context
from rollout_inspector.streams.strategies.replay import replay, replay_many
from rollout_inspector.streams.trajectory import Message, Request, Step, Trajectory
from rollout_inspector.text import tokenizers
from rollout_inspector.text.chat_templates import PrefetchingRenderer, renderer
from rollout_inspector.text.chat_templates.sandbox import client
from rollout_inspector.text.tokenizers.pieces import PieceEncoder

pytestmark = pytest.mark.bench

N, STEPS = 1000, 8


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
    plain = Context(codec, renderer(codec, text), codec.stop_ids)
    trajectories = [recorded(n, plain) for n in range(N)]
    streams = [step.stream for one in trajectories for step in one.steps]

    def check() -> None:
        canonical_check_batch(streams, codec)

    def replays() -> None:
        pieces = PieceEncoder(codec)
        shared = PrefetchingRenderer(codec, text, pieces.encode, prefetch=pieces.prefetch)
        context = Context(codec, shared, codec.stop_ids, fast_encode=pieces.encode)
        assert sum(1 for _ in replay_many(trajectories, list(STRATEGIES.values()), context)) == N

    def one_by_one() -> None:
        alone = Context(codec, renderer(codec, text), codec.stop_ids)  # it remembers nothing of the run before
        for strategy in STRATEGIES.values():
            for one in trajectories[: N // 20]:
                replay(one, strategy, alone)

    def library() -> None:
        for ids in streams:
            codec.hf.encode(codec.hf.decode(ids), add_special_tokens=False)

    check_wall, check_cpu, _ = best(check)
    library_wall, library_cpu, _ = best(library)
    wall, cpu, sandboxed = best(replays)
    slow_wall, slow_cpu, _ = (20 * value for value in best(one_by_one))
    print(
        f"\n{N} trajectories of {STEPS} steps, every strategy {wall:.2f} s, one canonical check of each stream "
        f"{check_wall:.2f} s: ratio {wall / check_wall:.1f} (target 3). Computing time: {cpu / check_cpu:.1f} of the "
        f"check's here and {sandboxed / check_cpu:.1f} in the sandbox, side by side. A plain loop of tokenizer.encode("
        f"tokenizer.decode(stream)) with transformers {library_wall:.2f} s: ratio {wall / library_wall:.1f}, computing "
        f"time {(cpu + sandboxed) / library_cpu:.1f} with the sandbox's. Each strategy and trajectory by "
        f"itself: ratio {slow_wall / check_wall:.0f}, computing time here {slow_cpu / check_cpu:.0f}"
    )


def best(work: Callable[[], None]) -> tuple[float, float, float]:
    """The smallest of three: seconds on the wall, of computing here, of computing in the sandbox."""
    found = []
    for _ in range(3):
        before = (time.perf_counter(), time.process_time(), _sandboxed())
        work()
        after = (time.perf_counter(), time.process_time(), _sandboxed())
        found.append(tuple(b - a for a, b in zip(before, after, strict=True)))
    return tuple(min(values) for values in zip(*found, strict=True))  # type: ignore[return-value]


def _sandboxed() -> float:
    return sum(worker.cpu_seconds() for worker in client.pool().idle)
