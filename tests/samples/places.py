"""Each place of the site, and who asks for it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import transaction
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import timezone

from inspector.celery import app
from rollouts.jobs import template_checks
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.models import ApiToken, Job, LoginSession, Project, Role, Run, ScoredColumn
from rollouts.store.people.members import invite
from rollouts.store.people.shares import create_api_key, create_share
from rollouts.store.runs.alarms import set_limit
from rollouts.store.runs.muted import mute
from rollouts.store.trajectories.comments import add_comment
from tests.people import make_member
from tests.web.access_table import PEOPLE, ROWS
from tests.web.trajectory_samples import Maker

SECRET = "kestrel"
"""A part of every name in the project that is hidden from foreign callers."""

TEMPLATE = "{# kestrel text #}{% for m in messages %}{{ m.content }}{% endfor %}"

KEYS = {
    "tokens/<": "token_key",
    "muted/<": "muted_key",
    "alarms/<": "limit_key",
    "members/<": "user_key",
    "invitations/<": "invitation_key",
    "accounts/<": "user_key",
    "sessions/<": "session_key",
}
"""A part of a route -> the value that is its ``pk``; else it is that of a share link."""


@dataclass(frozen=True)
class Places:
    """The dataset: a project with one object of each kind, the callers, and the values that routes and forms take."""

    people: dict[str, Client]
    tokens: dict[str, str]
    values: dict[str, str]
    """Name of a value -> it; codes among them."""

    def url(self, route: str, **changes: str) -> str:
        kind = "check" if "checks/" in route else "trajectory" if "trajectories/<" in route else "run"
        kind = "project" if route.startswith("projects/") else kind
        held = {
            "code": self.values[kind], "number": "1", "kind": "jinja", "index": "0", "strategy": "tool_delta",
            "pk": self.values[next((key for start, key in KEYS.items() if start in route), "share")],
            "token": self.values["invitation" if route.startswith("join/") else "share_token"],
            "job": self.values["job"], "key": "g0", "step": "0", "column": self.values["column"],
            "comment": self.values["comment"], "name": "quickstart", "id": self.values["muted_key"],
        }
        if route.startswith("audit."):
            held["kind"] = "jsonl"
        if re.search(r"v1/jobs/<", route):
            held["code"] = self.values["job"]
        return "/" + re.sub(r"<(?:\w+:)?(\w+)>", lambda match: (held | changes)[match[1]], route)

    def fill(self, text: str) -> str:
        return text.format(**self.values)


def routes(resolver: URLResolver | None = None, prefix: str = "") -> Iterator[str]:
    for pattern in (resolver or get_resolver()).url_patterns:
        route = prefix + str(pattern.pattern)
        if isinstance(pattern, URLPattern):
            yield route
        else:
            yield from routes(pattern, route)


def page_of(route: str) -> str:
    """The page of a twin."""
    return route if route in ROWS else {"runs.json": ""}.get(route, route.removesuffix(".json"))


@contextmanager
def stored_places(folder: Path) -> Iterator[Places]:
    """The dataset, in a transaction that is undone. ``folder`` holds a tokenizer; no order reaches a worker."""
    with pytest.MonkeyPatch.context() as patch, transaction.atomic():
        patch.setattr(app, "send_task", lambda *_, **__: None)
        yield _places(folder)
        transaction.set_rollback(True)


def _places(folder: Path) -> Places:
    ours = Project.objects.create(name=f"{SECRET} project")
    theirs = Project.objects.create(name="theirs")
    users = {
        "viewer": make_member(f"{SECRET}-viewer", Role.VIEWER, ours),
        "member": make_member(f"{SECRET}-member", Role.MEMBER, ours),
        "maker": make_member(f"{SECRET}-maker", Role.MEMBER, ours),
        "admin": make_member(f"{SECRET}-admin", Role.ADMIN, ours),
        "foreign": make_member("foreign", Role.ADMIN, theirs),
        "server": make_member("server", Role.VIEWER, theirs, is_superuser=True, is_staff=True),
    }
    maker = users["maker"]
    make = Maker(folder)
    tokenizer = register_tokenizer(folder, f"{SECRET} tokenizer", project=ours)
    template = register_chat_template(TEMPLATE, f"{SECRET} template", ours)
    broken, findings = make.broken(f"{SECRET} trajectory")
    run = make.run([broken], [findings], project=ours, tokenizer=tokenizer, chat_template=template, user=maker)
    Run.objects.filter(pk=run.pk).update(name=f"{SECRET} run")
    alive = timezone.now() + timedelta(hours=1)  # a silent job is asked for again, and this test may take minutes
    job = Job.objects.create(run=run, kind="export", created_by=maker, heartbeat_at=alive)
    check, _ = template_checks.ask(tokenizer, template, user=maker, project=ours)
    links = {
        kind: create_share(maker, target, note=f"{SECRET} note")
        for kind, target in (("run", run), ("trajectory", run.trajectories.get()), ("check", check))
    }
    people = {name: Client(raise_request_exception=False) for name in PEOPLE}
    for name, user in users.items():
        people[name].force_login(user)
    for _, token in links.values():
        assert people["link"].get(f"/s/{token}").status_code == 302
    tokens = {scope: _token(users["member"], ours, [scope]) for scope in ("read", "push", "launch")}
    every = list(ApiToken.Scope.values)
    tokens |= {"of_viewer": _token(users["viewer"], ours, every), "of_foreign": _token(users["foreign"], theirs, every)}
    tokens["expired"] = _token(users["member"], ours, every, timezone.now() - timedelta(days=1))
    record, _ = create_api_key(maker, f"{SECRET} program")
    ApiToken.objects.filter(pk=record.pk).update(project=ours)
    comment = add_comment(run.trajectories.get(), maker, f"{SECRET} comment", (0, 1, 3))
    rule = mute(run, "unclassified", "run", f"{SECRET} reason", maker)
    limit = set_limit(run, "broken", "", "20", "run", maker)
    column = ScoredColumn.objects.create(run=run, model="m", engine="e", created_by=maker, finished_at=timezone.now())
    invitation, invited = invite(ours, Role.VIEWER, users["admin"], 7, f"{SECRET} guest")
    values = {
        "run": run.code, "trajectory": run.trajectories.get().code, "check": check.code, "job": job.code,
        "project": ours.code, "sha256": template.sha256, "share": str(links["run"][0].pk),
        "share_token": links["run"][1], "token_key": str(record.pk),
        "invitation": invited, "invitation_key": str(invitation.pk), "user_key": str(users["viewer"].pk),
        "comment": comment.code, "muted_key": str(rule.pk), "limit_key": str(limit.pk),
        "column": column.code,
        "session_key": str(LoginSession.objects.get(user=users["foreign"]).pk),
    }
    return Places(people, tokens, values)


def _token(user: Any, project: Project, scopes: list[str], expires_at: Any = None) -> str:
    record, token = create_api_key(user, "test")
    ApiToken.objects.filter(pk=record.pk).update(project=project, scopes=scopes, expires_at=expires_at)
    return token
