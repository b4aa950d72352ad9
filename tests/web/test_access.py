"""Every address x caller x verb: the table of ``access_table.py`` is held against the site, and nothing leaks.

One dataset serves the whole module; what a request changes is rolled back.
"""

import copy
import html
import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import transaction
from django.http import HttpResponse
from django.test import Client
from django.utils import timezone

from rollout_inspector.diagnose.gap.figures import GapFigures
from rollouts.store.models import AuditEvent, Comment, Job, Project, Run, StoredTrajectory, TemplateCheck, Tokenizer
from tests.samples.pages import form_of
from tests.samples.places import SECRET, Places, page_of, routes
from tests.web.access_table import PEOPLE, ROWS, TOKENS, Row

pytestmark = pytest.mark.django_db

_requests = itertools.count()
UNKNOWN = "zzzzzzzzzzzz"


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


@pytest.mark.sqlite_only  # who may do what is the same on any database; test_answers.py asks every address there
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
    "trajectories/<code:code>/forks/new": {"row": "0", "at": "1", "samples": "1"},
    "api/v1/trajectories/<code>/forks": {"settings": {"row": 0, "at": 1, "samples": 1}},
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
}
"""Route -> a form that is taken, where the table has one that is refused."""
UNWRITTEN = {
    "api/runs/<code:code>/trajectories": "the run is written down when it is made to be pushed to",
    "api/v1/runs/<code>/trajectories": "the same",
    "runs/<code:code>/exports": "it leads to the download of a small run, which is written down; test_audit_doors.py",
    "runs/<code:code>/check-files": "a server without open files refuses; tests/open/test_server.py",
    "runs/<code:code>/import-files": "the same",
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


@pytest.mark.sqlite_only  # who may do what is the same on any database
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
)


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
                             headers={"authorization": f"Bearer {places.tokens['push']}"})
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


FORM = re.compile(r'<form\b[^>]*method="post"[^>]*>.*?</form>', re.DOTALL)
INPUT = re.compile(r"<input\b[^>]*>")


@pytest.mark.sqlite_only  # who may do what is the same on any database
@pytest.mark.parametrize("caller", [name for name in PEOPLE if name not in ("visitor", "foreign", "server")])
def test_what_a_page_offers_may_be_pressed(places: Places, caller: str) -> None:
    """Members saw buttons at what others had made, which answered 403."""
    refused, pressed = [], set()
    for route in routes():
        if page_of(route) != route or not any(row.verb == "GET" for row in ROWS.get(route, [])):
            continue
        page = ask(places, caller, "GET", places.url(route))
        assert page.status_code != 500, route
        if page.status_code != 200 or page.streaming or not page["Content-Type"].startswith("text/html"):
            continue
        for form in FORM.findall(page.content.decode()):
            action = re.search(r'action="([^"]+)"', form)
            target = html.unescape(action[1]) if action else places.url(route)
            if target in pressed or target == "/logout":
                continue
            pressed.add(target)
            boxes = [box for box in INPUT.findall(form) if 'type="hidden"' in box or " checked" in box]
            named = [(re.search(r'name="(\w+)"', box), re.search(r'value="([^"]*)"', box)) for box in boxes]
            values = {name[1]: html.unescape(value[1]) for name, value in named if name and value}
            if ask(places, caller, "POST", target, values).status_code == 403:
                refused.append(f"{places.url(route)} offers {target}")
    assert not refused, "\n".join(refused)
    assert pressed or caller in ("link", "viewer")
