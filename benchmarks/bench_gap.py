"""The gap of a run: its figures, and the whole report with causes and tables. Prints seconds of one core, and ratios.

    pytest -q -s benchmarks/bench_gap.py

``BENCH_TOKENS`` trained tokens in rows of 2,000. The reference is one pass over the same arrays: the mean absolute
difference in float64.
"""

import os
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rollout_inspector.diagnose.gap.figures import GapFigures
from rollout_inspector.diagnose.gap.report import gap_report
from rollout_inspector.diagnose.gap.tokens import GapRow, GapTokens

TOKENS = int(os.environ.get("BENCH_TOKENS", "10000000"))
PER_ROW, PROMPT, ROUNDS = 2_000, 500, 3


def made() -> GapTokens:
    random, n = np.random.default_rng(0), TOKENS // PER_ROW * PER_ROW
    rows = [GapRow(str(one), 0, PROMPT + PER_ROW, one // 50, one.to_bytes(4)) for one in range(n // PER_ROW)]
    sampler = -random.exponential(0.5, n).astype(np.float32)
    position = np.tile(np.arange(PER_ROW, dtype=np.int32), len(rows))
    return GapTokens(
        rows, np.repeat(np.arange(len(rows), dtype=np.int32), PER_ROW), position + PROMPT,
        random.integers(0, 150_000, n).astype(np.int32), sampler,
        np.minimum(sampler + random.normal(0, 0.05, n).astype(np.float32), 0), position, np.zeros(n, np.int32),
        np.zeros(n, np.int32), ["0"], random.integers(0, 6, n).astype(np.uint8),
    )


def best_of(work: Callable[[], object]) -> float:
    taken = []
    for _ in range(ROUNDS):
        start = time.process_time()
        work()
        taken.append(time.process_time() - start)
    return min(taken)


def test_gap_of_many_tokens() -> None:
    tokens = made()
    plain = best_of(lambda: np.abs(tokens.trainer.astype(np.float64) - tokens.sampler).mean())
    figures = best_of(lambda: GapFigures.of((tokens.trainer - tokens.sampler).astype(np.float64)))
    # A copy has computed nothing: what one round keeps would spare the next its work.
    report = best_of(lambda: gap_report(replace(tokens)))
    print(
        f"\n{len(tokens):,} tokens: one pass {plain:.2f} s, figures {figures:.2f} s ({figures / plain:.1f}x), "
        f"report with causes and tables {report:.2f} s ({report / plain:.1f}x)"
    )
    assert gap_report(replace(tokens))["tokens"] == len(tokens)
