"""Retention: what goes by age, size and project, what stays, and that a dry run changes nothing."""

import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.core.cache import cache
from django.core.management import CommandError, call_command
from django.utils import timezone

from rollouts.jobs.storage import retention, unused_files
from rollouts.store import files
from rollouts.store.models import AuditEvent, Job, Project, Replay, Run, StepTokens, StoredTrajectory, TokenSegment
from rollouts.store.people.accounts import local_user
from rollouts.store.people.shares import create_share
from rollouts.store.trajectories.save_trajectories import save_trajectories
from tests.storage.build import chain

pytestmark = pytest.mark.django_db
NOW = timezone.now()


def ended(name: str, days: float, n_tokens: int = 1_000_000, **fields: Any) -> Run:
    """A run that ended so many days ago."""
    run = Run.objects.create(
        name=name, kind=Run.Kind.IMPORT, **{"status": Run.Status.DONE, "n_tokens": n_tokens, **fields}
    )
    Run.objects.filter(pk=run.pk).update(created_at=NOW - timedelta(days=days), finished_at=NOW - timedelta(days=days))
    return run


def names(**limits: Any) -> list[str]:
    return [run.name for run, _, _ in retention.plan(**limits).leaving]


def said(*options: str) -> str:
    out = io.StringIO()
    call_command("retention", *options, stdout=out)
    return out.getvalue()


def test_old_runs_go_and_a_dry_run_changes_nothing() -> None:
    for name, days in (("old", 40), ("older", 50), ("new", 20)):
        ended(name, days)
    assert names(days=30) == ["older", "old"] and names(days=45) == ["older"]
    text = said("--days", "30")
    assert "Nothing was deleted." in text and "2 runs, 0.02 GB of 0.02 GB." in text and Run.objects.count() == 3
    body = json.loads(said("--days", "30", "--delete", "--json"))
    assert len(body["deleted"]) == 2 and body["bytes_left"] == 8_000_000
    assert list(Run.objects.values_list("name", flat=True)) == ["new"]
    assert AuditEvent.objects.filter(action="run deleted", user_name="", detail__endswith="command").count() == 2


def test_the_oldest_go_until_the_rest_fits() -> None:
    for days in (2, 3, 4):
        ended(f"{days}", days, n_tokens=100_000_000)  # 0.8 GB each
    assert names(n_bytes=2_400_000_000) == []
    assert names(n_bytes=1_700_000_000) == ["4"]
    assert names(n_bytes=1) == ["4", "3", "2"]
    segment = {"key": "segments/a/b.parquet", "n_items": 1, "n_tokens": 1, "n_bytes": 5}
    TokenSegment.objects.create(run=Run.objects.get(name="4"), **segment)
    assert retention.plan(days=1).n_bytes == 1_600_000_005


def test_a_project_counts_alone() -> None:
    team = Project.objects.create(name="team")
    ended("ours", 40, project=team)
    ended("theirs", 50)
    assert names(days=30, project=team) == ["ours"]
    Project.objects.create(name=team.code)
    for named in ("team", team.code):  # a code wins over the same word as the name of another project
        text = said("--days", "30", "--project", named)
        assert "ours" in text and "theirs" not in text
    with pytest.raises(CommandError, match="There is no project 'nobody'"):
        said("--days", "30", "--project", "nobody")


def test_what_somebody_uses_stays_and_is_said() -> None:
    running = ended("running", 90, status=Run.Status.RUNNING)
    job = ended("has a job", 90)
    Job.objects.create(run=job, kind="diagnose")
    replayed = ended("a trajectory is replayed", 90)
    save_trajectories(replayed, [chain("r")])
    Job.objects.create(
        replay=Replay.objects.create(trajectory=replayed.trajectories.get(), key="k"), kind="replay_trajectory"
    )
    exported = ended("an export is offered", 90)
    offered = {"kind": "export", "status": Job.Status.DONE}
    Job.objects.create(run=exported, expires_at=NOW + timedelta(hours=1), **offered)
    shared = ended("shared", 90)
    create_share(local_user(), shared, query="", note="", days=5)
    part = ended("a trajectory is shared", 90)
    save_trajectories(part, [chain("a")])
    StoredTrajectory.objects.update(created_at=NOW - timedelta(days=90))
    create_share(local_user(), part.trajectories.get(), query="", note="", days=5)
    pushed = ended("pushed to today", 90)
    save_trajectories(pushed, [chain("b")])
    revoked = ended("no longer shared", 90)
    Job.objects.create(run=revoked, expires_at=NOW - timedelta(hours=1), **offered)
    link, _ = create_share(local_user(), revoked, query="", note="", days=5)
    link.revoked_at = NOW
    link.save()
    made = retention.plan(days=30)
    assert [run for run, _, _ in made.leaving] == [revoked]
    assert made.staying == {
        "work is under way": 3, "a file of an export is offered": 1, "a share link is live": 2,
    }
    assert names(n_bytes=1) == ["no longer shared"]
    text = said("--days", "30", "--delete")
    assert "2 more would go and stay: a share link is live." in text
    assert set(Run.objects.all()) == {running, job, replayed, exported, shared, part, pushed}


def test_a_run_that_is_shared_after_the_plan_stays() -> None:
    run = ended("old", 40)
    (leaving,) = retention.plan(days=30).leaving
    create_share(local_user(), run, query="", note="", days=5)
    assert not retention.delete(leaving) and Run.objects.filter(pk=run.pk).exists()


def test_a_run_goes_with_arrays_and_files() -> None:
    run = ended("old", 40)
    save_trajectories(run, [chain("a"), chain("b")])
    StoredTrajectory.objects.update(created_at=NOW - timedelta(days=40))
    files.put(f"uploads/{run.code}/a.jsonl", io.BytesIO(b"{}"))
    assert StepTokens.objects.exists()
    said("--days", "30", "--delete")
    assert not StepTokens.objects.exists() and not StoredTrajectory.objects.exists()
    assert list(files.listed(f"uploads/{run.code}/")) == []


def test_the_plan_costs_two_queries(django_assert_num_queries: Any) -> None:
    for n in range(30):
        ended(str(n), 40)
    with django_assert_num_queries(2):
        assert len(retention.plan(days=30).leaving) == 30


def test_a_worker_does_it_once_an_hour_where_the_settings_say_so(settings: Any) -> None:
    cache.clear()
    ended("old", 40)
    unused_files.sweep()
    assert Run.objects.count() == 1
    settings.KEEP_DAYS = 30
    unused_files.sweep()
    assert Run.objects.count() == 0
    ended("later", 40)
    unused_files.sweep()
    assert Run.objects.count() == 1
    cache.clear()


def test_without_a_limit_it_asks_for_one() -> None:
    with pytest.raises(CommandError, match="Say what is kept"):
        said()
    with pytest.raises(CommandError, match="is not a whole number"):
        said("--days", "-3")
