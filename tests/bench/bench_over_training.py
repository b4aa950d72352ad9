"""The page *Over training*, and what keeping its figures costs an import and pushes. Prints times and ratios.

    pytest -q -s tests/bench/bench_over_training.py

``BENCH_STEPS`` training steps and ``BENCH_PER_STEP`` trajectories each; the figures of a step are counted as in work.
Then an import of rows with both log-probabilities is timed with and without the counting.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.test import Client

from rollouts import services
from rollouts.models import Run, StoredTrajectory, TrainingStepFigures
from rollouts.services.training_steps import take_training_steps
from rollouts.tito.gap.figures import GapFigures
from rollouts.work import imports
from tests.people import make_member

pytestmark = pytest.mark.django_db
STEPS = int(os.environ.get("BENCH_STEPS", "1000"))
PER_STEP = int(os.environ.get("BENCH_PER_STEP", "100"))
ROUNDS = 9
LINES = int(os.environ.get("BENCH_LINES", "4000"))


def stored_run() -> Run:
    run = services.create_run(Run.Kind.IMPORT, "steps")
    gap = GapFigures.of(np.random.default_rng(0).normal(0, 0.1, 500)).to_json()
    StoredTrajectory.objects.bulk_create(
        (
            StoredTrajectory(
                run=run, external_id=str(n), index=n, group=f"g{n // 8}", reward=n % 3 / 3, n_steps=3, n_rows=1,
                n_tokens=500, n_sampled=100, n_trained=100, n_lost=0, training_step=n // PER_STEP, checks={}, gap=gap,
                worst_severity="error" if n % 9 == 0 else "",
            )
            for n in range(STEPS * PER_STEP)
        ),
        batch_size=2000,
    )  # fmt: skip
    Run.objects.filter(pk=run.pk).update(n_trajectories=STEPS * PER_STEP, status="done")
    return run


def test_page_and_counting(capsys: Any) -> None:
    run = stored_run()
    whole = timed(lambda: take_training_steps(run))
    one = [timed(lambda: take_training_steps(run, {STEPS // 2})) for _ in range(ROUNDS)]
    client = Client()
    client.force_login(make_member("ada"))
    times: dict[str, list[float]] = {}
    for suffix in ("", ".json"):
        look = partial(client.get, f"/runs/{run.code}/training{suffix}")
        look()
        times[suffix] = [timed(look) for _ in range(ROUNDS)]
    assert TrainingStepFigures.objects.count() == STEPS
    page, twin, step = (1000 * statistics.median(found) for found in (times[""], times[".json"], one))
    with capsys.disabled():
        print(f"\n{STEPS:,} training steps of {PER_STEP:,} trajectories: page {page:.0f} ms, its JSON {twin:.0f} ms")
        print(f"  counting all steps {whole:.2f} s, one step {step:.1f} ms")


def test_share_of_an_import(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    rng = np.random.default_rng(1)
    with file.open("w", encoding="utf-8") as out:
        for n in range(LINES):
            ids, logprobs = rng.integers(10, 400, 400), -rng.exponential(0.5, 400)
            mask = [0] * 100 + [1] * 300
            out.write(json.dumps({
                "token_ids": [ids.tolist()], "token_loss_mask": [mask], "generation_logprobs": [logprobs.tolist()],
                "prev_logprobs": [(logprobs - 0.01).tolist()], "global_step": [n // 100], "idx": n,
            }) + "\n")  # fmt: skip
    spent: list[float] = []

    def counted(run: Run, steps: Any = None) -> None:
        spent.append(timed(lambda: take_training_steps(run, steps)))

    monkeypatch.setattr("rollouts.services.figures.take_training_steps", counted)
    run = services.create_run(Run.Kind.IMPORT, "rows")
    took = timed(lambda: imports.import_files(run, [file]))
    assert TrainingStepFigures.objects.filter(run=run).count() == -(-LINES // 100)
    with capsys.disabled():
        print(f"\nan import of {LINES:,} rows took {took:.1f} s, of which the figures {sum(spent):.2f} s: "
              f"{100 * sum(spent) / took:.1f} %")  # fmt: skip


def timed(work: Callable[[], object]) -> float:
    """Seconds that the work takes."""
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun
