"""What the pure floor costs: ratios in one run, printed, never timed tests."""

import time
from pathlib import Path

import numpy as np
import pytest

from rollout_inspector.diagnose import diagnose
from rollout_inspector.formats import Source, read
from rollout_inspector.streams.canonical import canonical_check_batch
from rollout_inspector.streams.prefix import link_steps
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.tokenizers import load
from tests.samples.model_setups import model_setup


@pytest.mark.bench
def test_canonical_check_against_a_loop_of_encode(corpus: Path) -> None:
    for name in ("qwen2.5", "llama3.1"):
        codec = load(corpus / "tokenizers" / name)
        canonical_check_batch([codec.encode("warm")], codec)
        source = Source.of_path(corpus / "labelled" / f"{name}.calls.jsonl")
        trajectories = [one for one in read(source)[1] if isinstance(one, Trajectory)]
        streams = [step.stream for one in trajectories for step in one.steps]
        reference = codec._reference.raw
        began = time.perf_counter()
        loop = []
        for ids in streams:
            text = reference.decode(ids.tolist(), skip_special_tokens=False)
            loop.append(reference.encode(text, add_special_tokens=False).ids != ids.tolist())
        slow = time.perf_counter() - began
        began = time.perf_counter()
        drifts = canonical_check_batch(streams, codec)
        fast = time.perf_counter() - began
        assert [bool(found) for found in drifts] == loop
        print(f"\n{name}: {sum(map(len, streams)):,} tokens, {slow / fast:.1f} times as fast as a loop of encode")


@pytest.mark.bench
def test_an_n_step_trajectory_costs_its_new_tokens() -> None:
    s = model_setup("stable")
    turn = s.turn()
    messages, stream, steps = list(turn.messages), turn.p, []
    for _ in range(64):
        steps.append(s.step(messages, stream, turn.g, turn.reply))
        messages = [*messages, turn.reply, *turn.new]
        stream = np.concatenate([stream, turn.g, turn.d])
    diagnose(Trajectory("warm", tuple(steps[:2])), s.codec, lambda sha: s.renderer)
    first = 0.0
    print("\nsteps  new tokens  links us/step  diagnosis ms/step")
    for n in (1, 2, 4, 8, 16, 32, 64):
        some = Trajectory("t", tuple(steps[:n]))
        began = time.perf_counter()
        link_steps(some.steps)
        linked = time.perf_counter() - began
        began = time.perf_counter()
        findings = diagnose(some, s.codec, lambda sha: s.renderer)
        took = time.perf_counter() - began
        assert all(f.severity == "info" for f in findings)
        first = first or took
        print(f"{n:5d}  {len(some.steps[-1].stream):10d}  {linked / n * 1e6:13.1f}  {took / n * 1e3:17.2f}")
