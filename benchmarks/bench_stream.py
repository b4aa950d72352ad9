"""What streaming costs a training step: taking a batch of arrays apart and ``send``, beside ``push``, which waits.

The server takes each push at once and reads nothing, so that only the side of the trainer is measured.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.client.adapters import records
from rollout_inspector.client.adapters.stream import RolloutStream
from rollout_inspector.client.client import Client
from tests.adapters.conftest import FakeServer

pytestmark = pytest.mark.bench
ROLLOUTS, PROMPT, RESPONSE = 64, 1_000, 3_000
TIMES = 5


def batch(step: int) -> list[dict[str, Any]]:
    """The records of a step of a trainer that holds arrays."""
    rng = np.random.default_rng(step)
    ids = rng.integers(0, 150_000, (ROLLOUTS, PROMPT + RESPONSE))
    logprobs = -rng.random((ROLLOUTS, RESPONSE), dtype=np.float32)
    mask = np.ones(RESPONSE, dtype=np.int64)
    start = time.perf_counter()
    made = [
        records.trajectory(
            str(n), steps=records.calls_of(ids[n, :PROMPT], ids[n, PROMPT:], mask, logprobs[n]), reward=1.0,
            rows=[records.row(ids[n, :PROMPT], ids[n, PROMPT:], mask, logprobs[n], {"advantages": logprobs[n]}, [0])],
        )
        for n in range(ROLLOUTS)
    ]
    made[0]["seconds"] = time.perf_counter() - start
    return made


def slowest(take: Callable[[list[dict[str, Any]], str], object], pause: float = 0.0) -> tuple[float, float]:
    """The slowest reading of a batch and the slowest handing over of it, in seconds."""
    making, taking = [], []
    for step in range(TIMES):
        made = batch(step)
        making.append(made[0].pop("seconds"))
        start = time.perf_counter()
        take(made, f"{step}/")
        taking.append(time.perf_counter() - start)
        time.sleep(pause)
    return max(making), max(taking)


def test_a_training_step(tmp_path: Path) -> None:
    print(f"\n{ROLLOUTS} rollouts of {PROMPT + RESPONSE:,} tokens, slowest of {TIMES}, ms")
    print("                  read  handed over")
    for name in ("push", "stream", "stream, server away"):
        server = FakeServer()
        server.silent = name.endswith("away")
        stream = RolloutStream(server.url, "t", "r", folder=tmp_path / name)
        push, pause = Client(server.url, "t", "r", tries=1).push, 0.0
        if name != "push":
            push, pause = stream.send, 3.0  # type: ignore[assignment]
        reading, taking = slowest(push, pause)
        print(f"{name:20s} {1000 * reading:5.0f} {1000 * taking:10.2f}")
        assert stream.close(60).dropped == 0
        server.close()
