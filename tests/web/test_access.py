"""Every address x caller x verb: the table of ``access_table.py`` is held against the site, and nothing leaks.

One dataset serves the whole module; what a request changes is rolled back.
"""

from __future__ import annotations

import copy
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import transaction
from django.http import HttpResponse
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver
from django.utils import timezone

from inspector.celery import app
from rollout_inspector.diagnose.gap.figures import GapFigures
from rollouts.jobs import template_checks
from rollouts.store.models import (
    ApiToken,
    AuditEvent,
    Comment,
    Job,
    LoginSession,
    Project,
    Role,
    Run,
    ScoredColumn,
    StoredTrajectory,
    TemplateCheck,
    Tokenizer,
)
from rollouts.store.people.api_keys import create_api_key
from rollouts.store.people.members import invite
from rollouts.store.people.share_writes import create_share
from rollouts.store.people.tokenizers import register_chat_template, register_tokenizer
from rollouts.store.runs.alarm_writes import set_limit
from rollouts.store.runs.muted_writes import mute
from rollouts.store.trajectories.comment_writes import add_comment
from tests.people import make_member
from tests.web.access_table import PEOPLE, ROWS, TOKENS, Row
from tests.web.test_forms import form_of
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db

_requests = itertools.count()
SECRET = "kestrel"
"""A part of every name in the project that is hidden from foreign callers."""
UNKNOWN = "zzzzzzzzzzzz"
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
            "comment": self.values["comment"], "id": self.values["muted_key"],
        }  # fmt: skip
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


@pytest.fixture(scope="module")
def places(django_db_setup: None, django_db_blocker: Any, tiny_tokenizer: Path) -> Iterator[Places]:
    patch = pytest.MonkeyPatch()
    patch.setattr(app, "send_task", lambda *_, **__: None)
    with django_db_blocker.unblock(), transaction.atomic():
        yield _places(tiny_tokenizer)
        transaction.set_rollback(True)
    patch.undo()


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
    job = Job.objects.create(run=run, kind=Job.Kind.EXPORT, created_by=maker, heartbeat_at=alive)
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
    column = ScoredColumn.objects.create(run=run, model="m", engine="e", finished_at=timezone.now())
    invitation, invited = invite(ours, Role.VIEWER, users["admin"], 7, f"{SECRET} guest")
    values = {
        "run": run.code, "trajectory": run.trajectories.get().code, "check": check.code, "job": job.code,
        "project": ours.code, "sha256": template.sha256, "share": str(links["run"][0].pk),
        "share_token": links["run"][1], "token_key": str(record.pk),
        "invitation": invited, "invitation_key": str(invitation.pk), "user_key": str(users["viewer"].pk),
        "comment": comment.code, "muted_key": str(rule.pk), "limit_key": str(limit.pk),
        "column": column.code,
        "session_key": str(LoginSession.objects.get(user=users["foreign"]).pk),
    }  # fmt: skip
    return Places(people, tokens, values)


def _token(user: Any, project: Project, scopes: list[str], expires_at: Any = None) -> str:
    record, token = create_api_key(user, "test")
    ApiToken.objects.filter(pk=record.pk).update(project=project, scopes=scopes, expires_at=expires_at)
    return token


def ask(
    places: Places, caller: str, verb: str, url: str, form: dict[str, Any] | None = None, keep: bool = False
) -> HttpResponse:
    """The answer; what the request changed is undone, unless the caller of this wants to ``keep`` it."""
    client, headers = places.people.get(caller, Client(raise_request_exception=False)), {}
    if caller in places.tokens:
        headers["authorization"] = f"Bearer {places.tokens[caller]}"
    body: dict[str, Any] = {}
    if caller in places.tokens:  # an address of its own, because one address may try few wrong tokens
        n = next(_requests)
        body["REMOTE_ADDR"] = f"10.{n >> 16 & 255}.{n >> 8 & 255}.{n & 255}"
    if url.endswith("/imports"):
        body |= {"data": {**(form or {}), "files": SimpleUploadedFile("a.jsonl", b"{}")}}
    elif verb != "GET" and url.startswith("/api/"):
        kind = "application/x-ndjson" if url.endswith("/trajectories") else "application/json"
        body |= {"data": json.dumps(form or {}), "content_type": kind}
    elif verb != "GET":
        body |= {"data": form or {}}
    cookies = copy.deepcopy(client.cookies)
    with transaction.atomic():
        answer: HttpResponse = getattr(client, verb.lower())(url, headers=headers, **body)
        transaction.set_rollback(not keep)
    client.cookies = cookies
    return answer


def wanted(row: Row, caller: str, is_json: bool, url: str) -> int:
    if caller in TOKENS:
        return int(row.tokens.split()[TOKENS.index(caller)])
    status = row.people.split()[PEOPLE.index(caller)]
    if status == "door":
        return 401 if is_json or (url.startswith("/api/") and url != "/api/docs") else 302
    if is_json and row.json is not None and status == "302":
        return row.json
    return int(status)


def test_every_address_has_a_row() -> None:
    known = {page_of(route) for route in routes()}
    assert known - ROWS.keys() == set(), "an address without a row in access_table.py"
    assert ROWS.keys() - known == set(), "a row without an address"


def secrets_in(places: Places, answer: HttpResponse, url: str) -> list[str]:
    """What an answer tells of the hidden project, apart from what ``url`` says: the address, and the form."""
    body = b"".join(answer.streaming_content) if answer.streaming else answer.content  # type: ignore[attr-defined]
    text = body.decode("utf-8", "replace") + answer.get("Location", "")
    names = {SECRET, *(value for name, value in places.values.items() if not name.endswith("key") and name != "share")}
    return [name for name in names if name in text and name not in url and name not in ("tool_delta",)]


def test_every_caller_gets_what_the_table_says(places: Places) -> None:
    faults = []
    for route in routes():
        is_json = route.endswith(".json") and page_of(route) != route
        for row in ROWS.get(page_of(route), []):
            url = places.url(route) + ("?" + places.fill(row.query) if row.query else "")
            form = {n: places.fill(value) if isinstance(value, str) else value for n, value in row.form.items()}
            for caller in (*(PEOPLE[:5] if is_json else PEOPLE), *(TOKENS if row.tokens else ())):  # a twin: its doors
                answer = ask(places, caller, row.verb, url, form)
                expected = wanted(row, caller, is_json, url)
                if answer.status_code != expected:
                    faults.append(f"{row.verb} {url} as {caller}: {answer.status_code}, not {expected}")
                if caller in ("visitor", "foreign", "of_foreign", "expired") and not url.startswith(("/s/", "/join/")):
                    faults += [
                        f"{row.verb} {url} tells {caller} {name}"
                        for name in secrets_in(places, answer, url + str(form))
                    ]
    assert not faults, "\n".join(faults)


# -- what is written down

UPLOAD = b'{"prompt_ids": [[1, 2]], "completion_ids": [[3]]}'
FORMS: dict[str, dict[str, Any]] = {
    "import": {"project": "{project}", "format": "auto", "tokenizer": "none"},
    "runs/new": {},  # as its page offers it
    "templates": {"project": "{project}", "chat_template": "{{{{ messages }}}}"},
    "templates/conversation": {
        "project": "{project}", "tokenizer": f"{SECRET} tokenizer",
        "conversation": '[{{"role": "user", "content": "a"}}, {{"role": "assistant", "content": "b"}}, '
        '{{"role": "user", "content": "c"}}]',
    },
    "tokenizers": {"project": "{project}", "name": "another"},
    "projects": {"name": "a project"},
    "projects/<code:code>/delete": {},
    "api/v1/launches": {"project": "{project}", "settings": {"prompts": 1, "group": 1}},
}  # fmt: skip
"""Route -> a form that is taken, where the table has one that is refused."""
UNWRITTEN = {
    "api/runs/<code:code>/trajectories": "the run is written down when it is made to be pushed to",
    "api/v1/runs/<code>/trajectories": "the same",
    "runs/<code:code>/exports": "it leads to the download of a small run, which is written down; test_audit_doors.py",
    "runs/<code:code>/resume": "this run is done; test_audit_doors.py",
    "api/v1/runs/<code>/resume": "the same",
    "trajectories/<code:code>/seen": "a mark of one's own, which nobody else sees",
    "api/v1/trajectories/<code>/seen": "the same",
    "api/v1/trajectories/<code>/comments/<comment>/edit": "its author alone edits; tests/api/test_comments.py",
    "templates/matrix": "it asks for nothing new here: the questions have their checks",
}
"""Route that changes something -> why no line says so, or which test holds it."""


def ready(places: Places, route: str) -> None:
    """Bring the dataset into a state in which a POST to the address has something to do."""
    run = Run.objects.get(code=places.values["run"])
    if route.endswith(("replay", "diagnose", "exports", "weigh")):
        Job.objects.filter(run=run).delete()
    elif route.endswith(("runs/<code:code>/cancel", "runs/<code>/cancel")):
        Run.objects.filter(pk=run.pk).update(status="queued")
    elif route.endswith(("gap/read", "runs/<code>/gap")):
        run.trajectories.update(gap=GapFigures(tokens=1).to_json())
    elif route.endswith("reopen"):
        Comment.objects.update(resolved_at=timezone.now())
    elif route.endswith("search"):
        Job.objects.filter(template_check__code=places.values["check"]).update(status="done", n_done=1)
        TemplateCheck.objects.filter(code=places.values["check"]).update(report={"checks": []})
    elif route == "projects/<code:code>/delete":
        Run.objects.filter(pk=run.pk).delete()
        TemplateCheck.objects.all().delete()
        Tokenizer.objects.filter(project__code=places.values["project"]).delete()


def test_what_somebody_changes_is_written_down(places: Places, tiny_tokenizer: Path) -> None:
    """A door that changes something, and of which the audit log says nothing, fails here."""
    unsaid = []
    for route in sorted({page_of(one) for one in routes()}):
        for row in ROWS[route]:
            if row.verb == "GET" or route in UNWRITTEN:
                continue
            url = places.url(route)
            form = FORMS.get(route, row.form)
            form = {n: places.fill(value) if isinstance(value, str) else value for n, value in form.items()}
            if route == "runs/new":
                form = form_of(places.people["server"], url) | {"project": places.values["project"]}
            if route == "tokenizers":
                form["upload"] = SimpleUploadedFile("tokenizer.json", (tiny_tokenizer / "tokenizer.json").read_bytes())
            if route == "import":
                form["files"] = SimpleUploadedFile("a.jsonl", UPLOAD)
            callers = [*("server", "foreign")[:: -1 if "sessions" in route or "join" in route else 1], *TOKENS[:3]]
            with transaction.atomic():
                ready(places, route)
                AuditEvent.objects.all().delete()
                for caller in callers if row.tokens else callers[:2]:
                    answers = [(caller, ask(places, caller, row.verb, url, form, keep=True).status_code)]
                    if answers[-1][1] < 400:
                        break
                said = list(AuditEvent.objects.values_list("action", "user_name"))
                if not said or not all(name for _, name in said):
                    unsaid.append((row.verb, url, answers, said))
                transaction.set_rollback(True)
    assert not unsaid, "\n".join(map(str, unsaid))


def plain(answer: HttpResponse, code: str) -> tuple[int, str]:
    """An answer without what differs between any two requests."""
    text = re.sub(r'name="csrfmiddlewaretoken" value="\w+"', "", answer.content.decode())
    return answer.status_code, text.replace(code, "CODE")


def test_a_hidden_object_is_answered_as_one_that_does_not_exist(places: Places) -> None:
    for route in routes():
        for row in ROWS.get(page_of(route), []):
            if "<code" not in route:
                continue
            for caller in ("visitor", "foreign", *(("of_foreign",) if row.tokens else ())):
                there, nowhere = places.url(route), places.url(route, code=UNKNOWN, job=UNKNOWN)
                code = there.split("/")[4 if "/v1/" in there else 3 if there.startswith(("/api", "/templates")) else 2]
                code = code.removesuffix(".json")
                hidden = ask(places, caller, row.verb, there, row.form)
                unknown = ask(places, caller, row.verb, nowhere, row.form)
                assert plain(hidden, code)[0] == plain(unknown, UNKNOWN)[0], (there, caller)
                if caller != "visitor":  # the login page names the address that it leads back to
                    job = places.values["job"]
                    one, other = plain(hidden, code)[1].replace(job, "CODE"), plain(unknown, UNKNOWN)[1]
                    assert one == other, (there, caller)


FOREIGN_NAMES = (
    "/?after={run}", "/?project={project}", "/?text={run}", "/runs/new?again={run}", "/runs/new?chat_template={check}",
    "/runs/new?chat_template={sha256}", "/runs/new?rows_chat_template={sha256}", "/runs/new?project={project}",
    "/import?project={project}", "/templates?run={run}", "/templates?trajectory={trajectory}&step=0",
    "/templates?check={check}", "/templates?project={project}", "/templates/conversation?check={check}",
    "/templates/matrix?project={project}", "/templates/matrix.csv?project={project}", "/tokenizers?project={project}",
    "/templates/compare?project={project}", "/templates/compare?a={sha256}&b={sha256}",
)  # fmt: skip


def test_an_address_that_names_foreign_things_leads_nowhere(places: Places) -> None:
    for address in FOREIGN_NAMES:
        url = places.fill(address)
        for asked in (url, url.replace("?", ".json?", 1) if url[1] != "?" and ".csv" not in url else url):
            answer = ask(places, "foreign", "GET", asked)
            assert answer.status_code in (200, 404) and secrets_in(places, answer, asked) == [], asked


def test_a_member_sees_the_same_addresses_filled_in(places: Places) -> None:
    """The witness of the test above: for a member they do lead somewhere."""
    empty = []
    for address in FOREIGN_NAMES:
        url = places.fill(address)
        answer = ask(places, "member", "GET", url)
        if answer.status_code not in (200, 302) or not secrets_in(places, answer, url):
            empty.append(address)
    assert not empty


def test_a_form_makes_things_in_no_project_of_others(places: Places) -> None:
    project = places.values["project"]
    for url in ("/runs/new", "/import", "/tokenizers", "/templates", "/templates/conversation", "/templates/compare"):
        for caller, status in (("foreign", 404), ("viewer", 403), ("member", (200, 400, 422))):
            answer = ask(places, caller, "POST", url, {"project": project})
            assert answer.status_code in (status if isinstance(status, tuple) else (status,)), (url, caller)
    said = ask(places, "viewer", "POST", "/runs/new", {"project": project}).content.decode()
    assert "This takes the role member" in said and f"Ask {SECRET}-admin for it" in said


def test_what_is_made_is_in_the_project_that_the_form_names(places: Places) -> None:
    project = Project.objects.get(code=places.values["project"])
    client = places.people["server"]
    with transaction.atomic():
        client.post("/templates", {"project": project.code, "chat_template": "{{ messages }}", "label": "x"})
        made = TemplateCheck.objects.order_by("-pk").first()
        client.post("/templates", {"project": "default", "chat_template": "{{ messages }}", "label": "y"})
        other = TemplateCheck.objects.order_by("-pk").first()
        assert made is not None and other is not None and made.code != other.code
        assert (made.project, made.label, other.project.code, other.label) == (project, "x", "default", "y")
        answer = client.post("/api/runs", "{}", content_type="application/json",
                             headers={"authorization": f"Bearer {places.tokens['push']}"})  # fmt: skip
        assert Run.objects.get(code=answer.json()["run"]).project == project
        transaction.set_rollback(True)


def test_pages_name_projects_only_to_who_sees_several(places: Places) -> None:
    url, name = f"/runs/{places.values['run']}", f"{SECRET} project"
    assert name in ask(places, "server", "GET", url).content.decode()
    assert name in ask(places, "server", "GET", "/").content.decode()
    for page in (url, "/", "/tokenizers", "/templates", "/runs/new"):
        assert name not in ask(places, "member", "GET", page).content.decode()
    trajectory = StoredTrajectory.objects.get(code=places.values["trajectory"])
    assert name in ask(places, "server", "GET", f"/trajectories/{trajectory.code}").content.decode()
