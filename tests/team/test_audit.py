"""The audit log: what is written down, by which call, and what never gets in the way."""

import logging
from datetime import timedelta
from typing import Any

import pytest
from django.db import DatabaseError
from django.utils import timezone

from rollouts.store.models import AuditEvent, Run, default_project
from rollouts.store.people import activity_log
from rollouts.store.people.activity_log import Action
from rollouts.store.runs.runs import create_run, delete_run
from tests.people import make_member

pytestmark = pytest.mark.django_db


def test_one_call_writes_the_row_and_the_line(caplog: Any) -> None:
    run = create_run(Run.Kind.IMPORT, "grpo\n7")
    ada = make_member("ada")
    actor = activity_log.Actor(ada, "10.0.0.1")
    with caplog.at_level(logging.INFO, "inspector.audit"), activity_log.acting(lambda: actor):
        activity_log.record(Action.DELETED, run)
    event = AuditEvent.objects.get()
    assert (event.user, event.user_name, event.address, event.action) == (ada, "ada", "10.0.0.1", "run deleted")
    assert (event.target, event.code, event.detail, event.project_id) == (
        "run", run.code, "grpo\n7", default_project()
    )
    (line,) = [vars(one) for one in caplog.records]
    assert (line["message"], line["user"], line["object"]) == ("run deleted", "ada", f"{run.code} grpo\n7")


def test_the_name_stays_when_the_account_goes_and_a_deleted_object_can_be_named() -> None:
    ada = make_member("ada")
    run = create_run(Run.Kind.IMPORT, "gone")
    code = run.code
    delete_run(run)
    activity_log.record(Action.DELETED, user=ada, of=run)
    ada.delete()
    event = AuditEvent.objects.get()
    assert (event.user_id, event.user_name, event.code, event.detail) == (None, "ada", code, "gone")


def test_a_log_that_cannot_be_written_fails_nothing(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise DatabaseError("disk full")

    monkeypatch.setattr(AuditEvent, "save", full)
    with caplog.at_level(logging.INFO, "inspector.audit"):
        activity_log.record(Action.LOGIN_FAILED, user="x" * 500 + "\0")
    assert [one.levelname for one in caplog.records] == ["INFO", "ERROR"] and not AuditEvent.objects.exists()


def test_old_events_go(settings: Any) -> None:
    activity_log.record(Action.LOGIN, user="old")
    AuditEvent.objects.update(at=timezone.now() - timedelta(days=11))
    activity_log.record(Action.LOGIN, user="new")
    settings.AUDIT_DAYS = 0
    assert activity_log.drop_old_events() == 0
    settings.AUDIT_DAYS = 10
    assert activity_log.drop_old_events() == 1 and AuditEvent.objects.get().user_name == "new"
