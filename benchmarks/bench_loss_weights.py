"""What every loss makes of ten million trained tokens, beside the ratio of each token alone. Prints times and ratios.

    pytest -q -s benchmarks/bench_loss_weights.py

``BENCH_TOKENS`` tokens in rows of 16,000 and in rows of 500, with a finding in each row. The measure is the exponential
of the difference of both log-probabilities of each row: what any rule has to compute at least.
"""

import os
import time
from collections.abc import Callable

import numpy as np
import pytest

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.loss_weights.figures import WeightSums
from rollout_inspector.streams.trajectory import Row, Trajectory

TOKENS = int(os.environ.get("BENCH_TOKENS", "10000000"))
KEPT = 200
"""Trajectories that are made; they are counted again and again."""


def trajectories(n: int) -> list[Trajectory]:
    rng = np.random.default_rng(0)
    made = []
    for index in range(KEPT):
        mask = np.arange(n) >= n // 4
        sampler = -rng.random(n, dtype=np.float32)
        columns = {
            "trainer_logprobs": (sampler + rng.normal(0, 0.1, n)).astype(np.float32),
            "advantages": np.full(n, rng.normal(), np.float32),
        }
        row = Row(np.arange(n, dtype=np.int32), mask, sampler, columns=columns)
        made.append(Trajectory(str(index), rows=(row,), training_step=index % 10))
    return made


def spent(work: Callable[[], None]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


@pytest.mark.parametrize("n", [16_000, 500])
def test_weights(n: int, capsys: pytest.CaptureFixture[str]) -> None:
    made = trajectories(n)
    findings = [Finding(Axis.ROW, "odd", Severity.ERROR, row=0, start=n // 2, stop=n // 2 + 10)]
    trained = n - n // 4
    rounds = -(-TOKENS // (trained * KEPT))
    sums = WeightSums()

    def count() -> None:
        for _ in range(rounds):
            for one in made:
                sums.add(one, one.rows, None, findings)

    def ratios() -> None:
        for _ in range(rounds):
            for one in made:
                row = one.rows[0]
                assert row.logprobs is not None
                np.exp(row.columns["trainer_logprobs"][row.loss_mask] - row.logprobs[row.loss_mask])

    seconds, least = spent(count), spent(ratios)
    per_second = sums.tokens / seconds / 1e6
    with capsys.disabled():
        print(
            f"\nrows of {n:,}: {sums.tokens / 1e6:.1f}M trained tokens in {seconds:.2f} s of one core "
            f"({per_second:.1f}M/s, {1e3 * seconds / (rounds * KEPT):.2f} ms a row), "
            f"{seconds / least:.1f} times the ratios"
        )
