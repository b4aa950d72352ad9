"""The page *Over training*, and what keeping its figures costs imports and pushes. Prints times and shares.

    pytest -q -s benchmarks/bench_over_training.py

``BENCH_STEPS`` training steps of ``BENCH_PER_STEP`` trajectories each. The page is answered from stored figures; those
of one step are counted as in work, and stand for all steps. Then rows with both log-probabilities are imported, and
pushed in parts of several sizes to that large run. Times are those of the processor: another program may use it too.
"""

import gzip
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.db import connection
from django.db.models import Model
from django.test import Client
from django.utils import timezone

from rollout_inspector.diagnose.gap.figures import GapFigures
from rollout_inspector.formats.containers.source import Source
from rollouts.jobs.diagnosis import do_pushed_job
from rollouts.jobs.imports import imports
from rollouts.jobs.pushes import take_push
from rollouts.store.jobs.jobs import take_job
from rollouts.store.models import (
    Job, PushedFigures, Run, RunFigures, StoredFinding, StoredTrajectory, TrainingStepFigures
)
from rollouts.store.runs import figures
from rollouts.store.runs.policy_versions import count_due
from rollouts.store.runs.runs import create_run
from rollouts.store.runs.training_steps import count_training_steps
from rollouts.store.trajectories.save_trajectories import DIAGNOSED_TO
from tests.people import make_member

pytestmark = pytest.mark.django_db
STEPS = int(os.environ.get("BENCH_STEPS", "1000"))
PER_STEP = int(os.environ.get("BENCH_PER_STEP", "1000"))
LINES = int(os.environ.get("BENCH_LINES", "4000"))
ROUNDS = 9
KINDS = ("boundary_merge", "template_rewrites", "reply_text_lost", "row_not_sampled", "noncanonical_sampling")


def stored_run() -> Run:
    """A large run. Only the trajectories of its last step have a gap, as large as that of 500 tokens is."""
    run, total = create_run(Run.Kind.IMPORT, "steps"), STEPS * PER_STEP
    one = StoredTrajectory.objects.create(
        run=run, external_id="0", index=0, group="g0", reward=0.5, n_steps=3, n_rows=1, n_tokens=500, n_sampled=100,
        n_trained=100, n_lost=0, training_step=0, checks={}, worst_severity="error", n_findings=2,
    )
    copy(one, total, {
        "code": "'t' || i", "external_id": "CAST(i AS TEXT)", "index": "i", "group": "'g' || (i / 8)",
        "training_step": f"i / {PER_STEP}", "reward": "(i % 3) / 3.0",
        "worst_severity": "CASE i % 9 WHEN 0 THEN 'error' ELSE '' END",
        "n_findings": "CASE i % 9 WHEN 0 THEN 2 ELSE 0 END",
    })
    finding = StoredFinding.objects.create(
        run=run,
        trajectory=one,
        axis="stream",
        kind=KINDS[0],
        severity="error",
        start=0,
        stop=1,
        evidence="x",
        version=1,
    )
    first = f"{one.pk} + 9 * (i / 2)"
    kinds = " ".join(f"WHEN {n} THEN '{kind}'" for n, kind in enumerate(KINDS))
    copy(finding, 2 * -(-total // 9), {"trajectory_id": first, "kind": f"CASE i % {len(KINDS)} {kinds} END"})
    gap = GapFigures.of(np.random.default_rng(0).normal(0, 0.1, 500)).to_json()
    StoredTrajectory.objects.filter(run=run, training_step=STEPS - 1).update(gap=gap)
    last = StoredTrajectory.objects.latest("pk").pk
    Run.objects.filter(pk=run.pk).update(n_trajectories=total, status="done", settings={DIAGNOSED_TO: last})
    run.refresh_from_db()
    (last,) = count_training_steps(run, {STEPS - 1})
    columns = {one.attname: getattr(last, one.attname) for one in last._meta.concrete_fields if one.attname != "id"}
    TrainingStepFigures.objects.bulk_create(
        TrainingStepFigures(**columns | {"training_step": step, "first_index": step, "last_index": step})
        for step in range(STEPS)
    )
    RunFigures.objects.create(run=run, state=figures.state_of(run), body=figures.count(run))
    return run


def copy(one: Model, n: int, columns: dict[str, str]) -> None:
    """Store ``n`` rows in all, which are the first one but for some columns: SQL of the number ``i`` of the row."""
    names = [field.column for field in one._meta.concrete_fields if not field.primary_key]
    values = ", ".join(columns.get(name, f'old."{name}"') for name in names)
    quoted, table = ", ".join(f'"{name}"' for name in names), one._meta.db_table
    with connection.cursor() as cursor:
        cursor.execute(
            f'INSERT INTO "{table}" ({quoted}) WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n '
            f'WHERE i + 1 < {n}) SELECT {values} FROM n, "{table}" old WHERE old.id = {one.pk} ORDER BY i'
        )


def rows(n: int, step: Callable[[int], int]) -> Iterator[bytes]:
    """Lines of NeMo RL of 400 tokens, 300 of them trained."""
    rng = np.random.default_rng(1)
    for at in range(n):
        ids, logprobs = rng.integers(10, 400, 400), -rng.exponential(0.5, 400)
        yield json.dumps({
            "token_ids": [ids.tolist()], "token_loss_mask": [[0] * 100 + [1] * 300], "idx": at,
            "generation_logprobs": [logprobs.tolist()], "prev_logprobs": [(logprobs - 0.01).tolist()],
            "global_step": [step(at)], "rewards": [at % 3],
        }).encode() + b"\n"


def test_page_and_push(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = stored_run()
    client = Client()
    client.force_login(make_member("ada"))

    def say(line: str) -> None:
        with capsys.disabled():
            print(line, flush=True)

    say(f"\n{STEPS:,} training steps of {PER_STEP:,} trajectories, and their findings:")
    for suffix in ("", ".json"):
        look = partial(client.get, f"/runs/{run.code}/training{suffix}")
        assert look().status_code == 200
        say(f"  page{suffix} {1000 * statistics.median(timed(look) for _ in range(ROUNDS)):.0f} ms")
    one = statistics.median(timed(lambda: list(count_training_steps(run, {STEPS - 1}))) for _ in range(ROUNDS))
    say(f"  counting one step {1000 * one:.0f} ms")
    monkeypatch.setattr("rollouts.jobs.pushes.send_job", lambda job: "")
    spent = measured(monkeypatch)
    for n, part in enumerate((PER_STEP, 100, 10)):
        lines = list(rows(PER_STEP, lambda _, step=STEPS + n: step))
        spent.clear()

        def push(lines: list[bytes] = lines, part: int = part, n: int = n) -> None:
            for at in range(0, len(lines), part):
                source = Source.of_bytes(gzip.compress(b"".join(lines[at : at + part])))
                take_push(Run.objects.get(pk=run.pk), source, "nemo_rl", f"{n}-{at}-")
                job = take_job(Job.objects.get(run=run, kind="diagnose_pushed", status=Job.Status.QUEUED).pk)
                assert job is not None
                do_pushed_job(job, lambda **_: None)

        took = timed(push)
        PushedFigures.objects.filter(run=run).update(due_at=timezone.now())
        last = timed(lambda: count_due(run))  # what the clock of the workers does
        took, _ = took + last, spent.append(last)
        assert TrainingStepFigures.objects.get(run=run, training_step=STEPS + n).n_trajectories == PER_STEP
        say(f"  a step pushed {part:,} at a time: {took:.2f} s, of which the figures {100 * sum(spent) / took:.1f} %")


def test_share_of_an_import(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_bytes(b"".join(rows(LINES, lambda at: at // 100)))
    spent = measured(monkeypatch)
    run = create_run(Run.Kind.IMPORT, "rows")
    took = timed(lambda: imports.import_files(run, [file]))
    assert TrainingStepFigures.objects.filter(run=run).count() == -(-LINES // 100)
    with capsys.disabled():
        print(f"\nan import of {LINES:,} rows took {took:.1f} s, of which the figures {100 * sum(spent) / took:.1f} %")


def measured(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of each call that keeps figures by training step and policy version."""
    spent: list[float] = []

    def watch(place: str) -> None:
        module, _, name = place.rpartition(".")
        work = getattr(importlib.import_module(module), name)

        def counted(*args: Any) -> Any:
            begun = time.process_time()
            try:
                return work(*args)
            finally:
                spent.append(time.process_time() - begun)

        monkeypatch.setattr(place, counted)

    for place in ("jobs.diagnosis.count_due", "jobs.diagnosis.note_uncounted", "store.runs.runs.take_training_steps"):
        watch(f"rollouts.{place}")
    watch("rollouts.store.runs.runs.take_policy_versions")
    return spent


def timed(work: Callable[[], object]) -> float:
    """Seconds of the processor that the work takes."""
    begun = time.process_time()
    work()
    return time.process_time() - begun
