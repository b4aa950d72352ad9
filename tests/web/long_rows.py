"""Long rows with the text of this repository: words, code and numbers as a tool-using model writes and reads them."""

from collections.abc import Callable
from typing import Any

import numpy as np

from rollout_inspector.streams.trajectory import Step, Trajectory
from tests.conftest import ROOT

REPLY, ANSWER = 1500, 900
"""Tokens of a completion, and of the tool's answer after it."""


def real_text() -> str:
    """The documentation and the code of the project, about two megabytes."""
    files = [*sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "rollouts").rglob("*.py"))]
    return "\n".join(file.read_text() for file in files)


def long_trajectory(encode: Callable[[str], Any], n_tokens: int, name: str = "long") -> Trajectory:
    """Steps that extend each other, ``n_tokens`` in all, with a log-probability for each sampled token."""
    words = np.resize(encode(real_text()), n_tokens + ANSWER)
    head = encode("<|im_start|>user\nRead the project, and say what it does.<|im_end|>\n<|im_start|>assistant\n")
    between = encode("<|im_end|>\n<|im_start|>user\n<tool_response>\n")
    after = encode("\n</tool_response><|im_end|>\n<|im_start|>assistant\n")
    rng = np.random.default_rng(0)
    steps: list[Step] = []
    stream, at = head, 0
    while len(stream) < n_tokens:
        size = min(REPLY, n_tokens - len(stream))
        completion = words[at : at + size].astype(np.int32)
        # Most tokens of a trained policy are nearly certain, a few are surprises.
        surprise = np.where(rng.random(size) < 0.6, rng.exponential(0.02, size), rng.exponential(1.2, size))
        steps.append(Step(stream, completion, -surprise.astype(np.float32), "processed", "stop", temperature=1.0))
        at += size
        delta = np.concatenate([between, words[at : at + ANSWER], after]).astype(np.int32)
        at = (at + ANSWER) % max(n_tokens - REPLY - ANSWER, 1)
        stream = np.concatenate([stream, completion, delta])
    return Trajectory(name, tuple(steps), reward=1.0, stop_reason="answered", group="g0")
