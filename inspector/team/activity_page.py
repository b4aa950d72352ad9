"""`/audit`: who did what, for admins; also as CSV and as JSON Lines."""

import csv
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from django.core.exceptions import PermissionDenied
from django.http import Http404, HttpRequest, HttpResponse, StreamingHttpResponse
from django.utils.http import urlencode
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from inspector.web.access import access
from inspector.web.twins import Page, from_columns, jsonable, page, whole_number
from rollouts.store.jobs.jobs import JOB_KINDS
from rollouts.store.models import AuditEvent, Role
from rollouts.store.people.activity_log import Action, activity_page, activity_rows

EVENTS_PER_PAGE = 100
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n")  # A spreadsheet takes a cell that begins so for a formula.


@dataclass(frozen=True)
class EventLine(Page):
    """One event."""

    id: int
    """Its key; `?before=` takes it."""
    at: datetime
    """When it happened."""
    user: str
    """The name of the account, or what was typed as one; empty for a visitor and the command line."""
    address: str
    """The address of the client."""
    action: str
    """What was done."""
    project: str
    """Name of the project; empty where there is none."""
    target: str
    """Kind of the object."""
    code: str
    """Code of the object, or its key."""
    detail: str
    """Its name, or what changed."""

    @classmethod
    def of(cls, record: AuditEvent) -> Self:
        """The event with its project."""
        project = record.project.name if record.project is not None else ""
        return from_columns(cls, record, user=record.user_name, project=project)


@dataclass(frozen=True)
class ActivityPage(Page):
    """The audit log, a page of it."""

    events: list[EventLine]
    """Newest first."""
    next: int | None
    """The key after which the next page begins; None on the last one."""
    actions: list[str]
    """What can be asked for as `?action=`."""
    projects: dict[str, str]
    """What can be asked for as `?project=`: code -> name."""


def _actions() -> list[str]:
    """Everything that is written down, in the words of the log."""
    activities = [kind.activity for kind in JOB_KINDS.values() if kind.activity]
    return list(dict.fromkeys([*(action.value for action in Action), *activities]))


def _asked(request: HttpRequest) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """The filter of an address, the projects it may name, and its parameters. For admins of a project or the server."""
    reader = access(request)
    projects = {each_project.code: each_project for each_project in reader.projects(least=Role.ADMIN)}
    if not projects and not reader.is_server_admin:
        raise PermissionDenied("The audit log is for admins of a project or of the server. Ask one of them.")
    params = {name: request.GET.get(name, "")[:150] for name in ("action", "user", "project")}
    if params["action"] and params["action"] not in _actions():
        raise Http404(f"No action is called “{params['action'][:40]}”. Choose one of the list.")
    if params["project"] and params["project"] not in projects:
        raise Http404(f"There is no project with the code {params['project'][:40]}.")
    key = projects[params["project"]].pk if params["project"] else None
    names = {code: project.name for code, project in projects.items()}
    return {"action": params["action"], "user_name": params["user"], "project": key}, names, params


@require_safe
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """A page of the log, newest first. `?action=`, `?user=` and `?project=` filter; `?before=` goes on."""
    filters, projects, params = _asked(request)
    events = activity_page(access(request), filters, whole_number(request.GET.get("before"), 18), EVENTS_PER_PAGE + 1)
    listed, more = events[:EVENTS_PER_PAGE], len(events) > EVENTS_PER_PAGE
    data = ActivityPage(
        [EventLine.of(event) for event in listed], listed[-1].pk if more else None, _actions(), projects
    )
    query = urlencode({name: value for name, value in params.items() if value})
    return page(request, "team/activity.html", data, asked=params, query=query)


def safe_cell(value: object) -> str:
    """A cell that no spreadsheet runs: a text that begins like a formula gets an apostrophe in front."""
    text = str(value)
    return f"'{text}" if text.startswith(FORMULA_STARTS) else text


class _Line:
    """A file for ``csv.writer`` that hands each line back instead of keeping it."""

    def write(self, text: str) -> str:
        return text


def _csv_lines(request: HttpRequest, wanted: dict[str, Any]) -> Iterator[str]:
    writer = csv.writer(_Line())
    names = list(EventLine.__dataclass_fields__)
    yield writer.writerow(names)
    for record in activity_rows(access(request), wanted):
        yield writer.writerow([safe_cell(value) for value in jsonable(EventLine.of(record)).values()])


def _json_lines(request: HttpRequest, wanted: dict[str, Any]) -> Iterator[str]:
    for record in activity_rows(access(request), wanted):
        yield json.dumps(jsonable(EventLine.of(record))) + "\n"


@require_safe
@never_cache
def export(request: HttpRequest, kind: str) -> StreamingHttpResponse:
    """All wanted events, newest first, as `csv` or `jsonl`."""
    filters, _, _ = _asked(request)
    lines, content_type = {
        "csv": (_csv_lines, "text/csv; charset=utf-8"), "jsonl": (_json_lines, "application/x-ndjson"),
    }.get(kind, (None, ""))
    if lines is None:
        raise Http404("The audit log is written as csv or as jsonl.")
    response = StreamingHttpResponse(lines(request, filters), content_type=content_type)
    response["Content-Disposition"] = f'attachment; filename="audit.{kind}"'
    return response
