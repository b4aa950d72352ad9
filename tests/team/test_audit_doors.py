"""Who did it: each door to the same work leaves the same event, with its account and address, or as a command."""

import io
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.test import Client
from django.utils import timezone

from rollouts.jobs.storage import retention
from rollouts.store.models import ApiToken, AuditEvent, Job, Project, Role, Run
from rollouts.store.people import activity_log
from rollouts.store.people.activity_log import Action
from rollouts.store.people.shares import create_api_key
from tests.push.conftest import episodes
from tests.samples.pages import form_of
from tests.team.conftest import person
from tests.web.samples import stored_run

pytestmark = pytest.mark.usefixtures("sent")

ADDRESS = "10.4.4.4"
LINES = "\n".join(json.dumps(call) for call in episodes(1)).encode()
Events = Callable[[], list[tuple[str, str, str]]]


@pytest.fixture
def events(db: None) -> Events:
    """Action, user and address of each event since the last call."""

    def read() -> list[tuple[str, str, str]]:
        found = [(one.action, one.user_name, one.address) for one in AuditEvent.objects.order_by("pk")]
        AuditEvent.objects.all().delete()
        return found

    return read


@pytest.fixture
def bob(ours: Project, events: Events) -> Any:
    """A member, with the function that sends a request of his browser, and the one for a program of his."""
    user, browser = person("bob", ours, Role.MEMBER)
    _, token = create_api_key(user, "program", project=ours, scopes=list(ApiToken.Scope.values))
    events()

    def press(address: str, form: dict[str, Any] | None = None) -> int:
        return int(browser.post(address, form or {}, REMOTE_ADDR=ADDRESS).status_code)

    def call(verb: str, address: str, body: Any = None, **more: Any) -> int:
        more |= {} if "data" in more else {"data": json.dumps(body or {}), "content_type": "application/json"}
        ask = getattr(Client(), verb)
        headers = {"authorization": f"Bearer {token}"}
        return int(ask(f"/api/{address}", headers=headers, REMOTE_ADDR=ADDRESS, **more).status_code)

    return user, browser, press, call


def by(action: str) -> list[tuple[str, str, str]]:
    return [(action, "bob", ADDRESS)]


def test_launches_and_imports(bob: Any, events: Events) -> None:
    _, browser, press, call = bob
    first = [("tokenizer registered", "bob", ADDRESS), *by("run launched")]
    assert press("/runs/new", form_of(browser, "/runs/new")) == 302 and events() == first
    small = {"settings": {"prompts": 1, "group": 1}}
    assert call("post", "v1/launches", small) == 201 and events() == by("run launched")
    for address, send in (("/import", press), ("v1/imports", lambda url, form: call("post", url, data=form))):
        form = {"files": SimpleUploadedFile("a.jsonl", LINES), "format": "auto", "tokenizer": "none"}
        assert send(address, form) in (202, 302) and events() == by("run imported")
    assert call("post", "runs", {"name": "x"}) == 201 and events() == by("run made to push to")
    assert call("post", "v1/runs", {"name": "x"}) == 201 and events() == by("run made to push to")


def test_cancelling_and_resuming(bob: Any, events: Events) -> None:
    _, browser, press, call = bob
    assert press("/runs/new", form_of(browser, "/runs/new")) == 302
    assert call("post", "v1/launches", {"settings": {"prompts": 1, "group": 1}}) == 201
    one, other = Run.objects.order_by("pk")
    events()
    assert press(f"/runs/{one.code}/cancel") == 302 and events() == by("work cancelled")
    assert call("post", f"v1/runs/{other.code}/cancel") == 200 and events() == by("work cancelled")
    assert call("post", f"v1/runs/{other.code}/cancel") == 200 and events() == [], "it had ended"
    assert press(f"/runs/{one.code}/resume") == 302 and events() == by("run resumed")
    assert call("post", f"v1/runs/{other.code}/resume") == 200 and events() == by("run resumed")
    assert call("post", f"v1/runs/{other.code}/resume") == 409 and events() == [], "it is queued"


def test_exports_and_deletions(bob: Any, ours: Project, events: Events) -> None:
    user, _, press, call = bob
    one, other = (stored_run(1, project=ours, user=user) for _ in range(2))
    assert press(f"/runs/{one.code}/exports.json", {"format": "sft"}) == 202 and events() == by("export started")
    assert call("post", f"v1/runs/{other.code}/exports", {"format": "sft"}) == 202
    assert AuditEvent.objects.get().project == ours and "format sft" in AuditEvent.objects.get().detail
    assert events() == by("export started")
    first, second = Job.objects.filter(kind="export").order_by("pk")
    assert press(f"/runs/{one.code}/jobs/{first.code}/cancel") == 302 and events() == by("work cancelled")
    assert call("post", f"v1/jobs/{second.code}/cancel") == 200 and AuditEvent.objects.get().project == ours
    assert events() == by("work cancelled")
    assert press(f"/runs/{one.code}/delete", {"sure": "yes"}) == 302 and events() == by("run deleted")
    assert call("delete", f"v1/runs/{other.code}") == 204 and events() == by("run deleted")


def test_commands_act_as_nobody(ours: Project, events: Events, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(LINES)
    call_command("import_rollouts", str(tmp_path / "a.jsonl"), "--project", ours.name)
    assert events() == [("run imported", "", "")]
    run = Run.objects.get()
    call_command("export_rollouts", run.code, "--output", str(tmp_path / "out.jsonl"))
    assert AuditEvent.objects.get().detail.endswith("command") and events() == [("export started", "", "")]
    call_command("move_tokens", run.code, "--to", "segments")
    assert AuditEvent.objects.get().code == run.code and events() == [("token arrays moved", "", "")]
    user, _ = person("bob", ours, Role.MEMBER)
    events()
    call_command("api_token", "trainer", "--user", user.username, "--project", ours.code)
    call_command("api_token", "--revoke", str(ApiToken.objects.get().pk))
    assert events() == [("API token made", "", ""), ("API token revoked", "", "")]
    call_command("launch_rollouts", "--prompts", "1", "--group", "1", "--project", ours.name)
    assert events() == [("tokenizer registered", "", ""), ("run launched", "", "")]
    call_command("diagnose", run.code)
    assert AuditEvent.objects.get().detail.endswith("command") and events() == [("diagnosis started", "", "")]


def test_accounts_made_by_commands(events: Events, monkeypatch: pytest.MonkeyPatch) -> None:
    call_command("createsuperuser", "--noinput", "--username", "root", "--email", "root@example.com")
    assert AuditEvent.objects.get().detail == "root: admin of the server: command"
    assert events() == [("account made", "", "")]
    monkeypatch.setattr("getpass.getpass", lambda *_, **__: "correct horse battery")
    call_command("changepassword", "root", stdout=io.StringIO())
    assert AuditEvent.objects.get().detail == "root: command" and events() == [("password changed", "", "")]


def test_retention_says_by_whom_and_why(ours: Project, events: Events, settings: Any) -> None:
    old = timezone.now() - timedelta(days=9)
    for _ in range(2):
        run = stored_run(1, project=ours)
        Run.objects.filter(pk=run.pk).update(created_at=old, finished_at=old)
        run.trajectories.update(created_at=old)
        if not AuditEvent.objects.exists():
            call_command("retention", "--days", "5", "--delete")
            assert "9 days ago: command" in AuditEvent.objects.get().detail
    settings.KEEP_DAYS = 5
    events_before = events()
    retention.sweep()
    assert events_before == [("run deleted", "", "")] and events() == [("run deleted", "retention", "")]


def test_who_acts_ends_with_the_request(bob: Any, events: Events) -> None:
    _, _, press, _ = bob
    press("/shares", {})
    activity_log.record(Action.RESTORED)
    assert events() == [("backup restored", "", "")]
