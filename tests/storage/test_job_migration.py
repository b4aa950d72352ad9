"""The migration that gives all background work to jobs: results stay, and unfinished work ends with a sentence."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader

from rollouts.models import Job, Replay, Run, TemplateCheck
from rollouts.work import template_checks

pytestmark = pytest.mark.django_db(transaction=True)

BEFORE, (AFTER,) = ("rollouts", "0010_stored_names"), MigrationLoader(None).graph.leaf_nodes("rollouts")
SENTENCE = "It was under way when the server was updated. Start it again."


def migrate(to: tuple[str, str]) -> Any:
    """The models of a state, once the database is in it."""
    executor = MigrationExecutor(connection)
    executor.migrate([to])
    return MigrationExecutor(connection).loader.project_state([to]).apps


@pytest.fixture
def old() -> Iterator[Any]:
    yield migrate(BEFORE)
    migrate(AFTER)


def test_results_stay_and_unfinished_work_ends(old: Any) -> None:
    template = old.get_model("rollouts", "ChatTemplate").objects.create(sha256="a" * 64, text="x")
    checks = old.get_model("rollouts", "TemplateCheck").objects
    report = {"checks": [], "prefix_preserving": True}
    for code, fields in {
        "done": {"status": "done", "report": report | {"repair_detail": "No repair."}, "version": 7, "cells": {}},
        "failed": {"status": "failed", "error": "The template raises."},
        "queued": {"status": "queued"},
        "running": {"status": "running"},
        "search": {"status": "done", "report": report, "progress": "3 of 9", "version": 7, "cells": {}},
    }.items():
        checks.create(code=code, chat_template=template, **fields)
    runs = old.get_model("rollouts", "Run").objects
    files = {"files": ["a", "b"], "imported": {"files": 1, "next_index": 2, "formats": ["nemo_gym"]}}
    run = runs.create(code="half", name="half", kind="import", status="running", settings=files, n_trajectories=4)
    others = {
        "recorded": runs.create(code="recorded", name="recorded", kind="import", status="running"),
        "launched": runs.create(code="launched", name="launched", kind="launch", status="running"),
        "imported": runs.create(code="imported", name="imported", kind="import", status="done", settings=files),
        "pushed": runs.create(code="pushed", name="pushed", kind="import", status="done", settings={"judged_to": 0}),
    }
    trajectories = old.get_model("rollouts", "StoredTrajectory").objects
    stored = [
        trajectories.create(run=of, index=n, external_id=str(n), n_steps=1, n_tokens=10, reward=1.0)
        for of in (run, others["imported"], others["pushed"])
        for n in range(4)
    ]
    finding = {"axis": "stream", "kind": "branch", "severity": "info", "start": 0, "stop": 1, "evidence": "x",
               "version": 1, "expected_ids": [], "actual_ids": []}
    for one in stored[:4]:
        old.get_model("rollouts", "StoredFinding").objects.create(run=run, trajectory=one, **finding)
    replays = old.get_model("rollouts", "Replay").objects
    for one, status, figures in zip(
        stored[4:8], ("done", "failed", "queued", "running"), ([1], None, None, None), strict=True
    ):
        replays.create(trajectory=one, key=status, status=status, error="Too long." * (status == "failed"),
                       report=figures and {"strategies": figures})
    exported = old.get_model("rollouts", "Job").objects.create(run=others["imported"], kind="export", status="done")
    migrate(AFTER)

    found = {check.code: check for check in TemplateCheck.objects.select_related("job")}
    assert {code: (check.status, check.error) for code, check in found.items()} == {
        "done": ("done", ""), "failed": ("failed", "The template raises."), "queued": ("failed", SENTENCE),
        "running": ("failed", SENTENCE), "search": ("done", ""),
    }
    assert found["done"].report == report | {"repair_detail": "No repair."} and found["done"].version == 7
    search = found["search"]
    assert (search.job.kind, search.job.error, search.progress) == ("repair_template", SENTENCE, "")
    assert template_checks.wants_repair(search) and not template_checks.wants_repair(found["done"])
    assert {replay.key: (replay.job.status, replay.job.error) for replay in Replay.objects.select_related("job")} == {
        "done": ("done", ""), "failed": ("failed", "Too long."), "queued": ("failed", SENTENCE),
        "running": ("failed", SENTENCE),
    }
    assert Replay.objects.get(key="done").report == {"strategies": [1]}
    half = Run.objects.get(code="half")
    assert (half.status, half.error, half.n_trajectories, half.n_tokens) == ("failed", SENTENCE, 2, 20)
    assert half.finding_counts == {"branch": 2} and half.reward_sum == 2.0 and half.finished_at is not None
    assert list(half.trajectories.order_by("index").values_list("index", flat=True)) == [0, 1]
    assert dict(Run.objects.exclude(code="half").values_list("code", "status")) == {
        "recorded": "running", "launched": "running", "imported": "done", "pushed": "done",
    }
    assert Job.objects.get(pk=exported.pk).run.code == "imported"  # type: ignore[union-attr]
    assert list(Job.objects.filter(kind="diagnose_pushed").values_list("run__code", "status")) == [("pushed", "queued")]
