"""The page of the audit log and its files."""

import csv
import io
import json
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from inspector.team import activity_page
from rollouts.store.models import AuditEvent, Project, Role
from rollouts.store.people import activity_log
from rollouts.store.people.activity_log import Action
from tests.team.conftest import PASSWORD, person

pytestmark = pytest.mark.django_db


def events(client: Client, **asked: Any) -> list[dict[str, Any]]:
    return list(client.get("/audit.json", asked).json()["events"])


def text(answer: Any) -> str:
    return b"".join(answer.streaming_content).decode()


def test_who_sees_what(ours: Project, theirs: Project, admin: Client, root: Client) -> None:
    for project in (ours, theirs, None):
        activity_log.record(Action.LAUNCHED, user="x", of=project)
    assert len(events(root)) == 3 and [one["project"] for one in events(admin)] == ["maths"]
    assert "secret project" not in text(admin.get("/audit.csv")) + text(admin.get("/audit.jsonl"))
    assert b"secret project" not in admin.get("/audit").content
    assert admin.get("/audit", {"project": theirs.code}).status_code == 404
    _, member = person("bob", ours, Role.MEMBER)
    assert [member.get(path).status_code for path in ("/audit", "/audit.json", "/audit.csv")] == [403, 403, 403]


def test_a_page_does_not_tell_when_a_hidden_event_happened(ours: Project, theirs: Project, admin: Client) -> None:
    for project in (ours, theirs):
        activity_log.record(Action.LAUNCHED, user="x", of=project)
    hidden, before = AuditEvent.objects.get(project=theirs), events(admin)
    asked = {"before": hidden.pk}
    assert events(admin, **asked) == before  # the event of ours has the smaller key
    AuditEvent.objects.filter(pk=hidden.pk).update(at=hidden.at - timedelta(days=1))
    assert events(admin, **asked) == before


def test_filters_and_pages(ours: Project, root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity_page, "EVENTS_PER_PAGE", 2)
    for n in range(5):
        activity_log.record(Action.LAUNCHED if n % 2 else Action.IMPORTED, user=f"u{n % 3}", of=ours, detail=str(n))
    assert [one["detail"] for one in events(root, action="run launched")] == ["maths: 3", "maths: 1"]
    assert [one["detail"] for one in events(root, user="u1")] == ["maths: 4", "maths: 1"]
    seen, page = [], root.get("/audit.json", {"project": ours.code}).json()
    while page["next"]:
        seen += page["events"]
        page = root.get("/audit.json", {"project": ours.code, "before": page["next"]}).json()
    assert [one["detail"][-1] for one in [*seen, *page["events"]]] == list("43210")
    assert f"before={seen[1]['id']}" in root.get("/audit").content.decode()
    assert root.get("/audit?action=dance").status_code == 404 and root.get("/audit?before=x").status_code == 200
    assert root.get("/audit.xml").status_code == 404


def test_no_cell_is_a_formula(root: Client) -> None:
    hostile = ("=HYPERLINK(1)", "+1", "-1", "@x", "\t=1")
    for detail in hostile:
        activity_log.record(Action.LOGIN_FAILED, user=detail, detail=f'{detail},"quoted"\nline')
    rows = list(csv.DictReader(io.StringIO(text(root.get("/audit.csv")))))
    assert [row["user"] for row in rows] == [f"'{one}" for one in reversed(hostile)]
    assert all(row["detail"].startswith("'") and row["detail"].endswith('"quoted"\nline') for row in rows)
    lines = [json.loads(line) for line in text(root.get("/audit.jsonl")).splitlines()]
    assert [line["user"] for line in lines] == list(reversed(hostile))


def test_logins_and_their_failures_are_events() -> None:
    person("bob")
    client = Client()
    client.post("/login", {"username": "bob", "password": "wrong"}, REMOTE_ADDR="10.3.3.3")
    client.post("/login", {"username": "bob", "password": PASSWORD})
    client.get("/login?token=made-up")
    client.post("/logout")
    client.post("/logout")
    found = list(AuditEvent.objects.order_by("pk").values_list("action", "user_name", "detail"))
    assert found == [
        ("login failed", "bob", "by password"), ("login", "bob", "by password"),
        ("login failed", "bob", "a link that was used or is too old"), ("logout", "bob", ""),
    ]
    failed = AuditEvent.objects.order_by("pk")[0]
    assert failed.user_id is None and failed.address == "10.3.3.3"


def test_a_page_of_the_log_asks_few_queries(ours: Project, root: Client, django_assert_max_num_queries: Any) -> None:
    for _ in range(30):
        activity_log.record(Action.LAUNCHED, user=get_user_model().objects.get(username="root"), of=ours)
    with django_assert_max_num_queries(5):
        assert root.get("/audit").status_code == 200
