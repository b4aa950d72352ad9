"""Template checks: listed, and read with verdict, repair and generation tags."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from ninja import Query, Router

from inspector.api.answers import (
    NOT_CHANGED, AnswerPart, Body, LongText, PartAsked, answer, extra, the_check, with_etag
)
from inspector.api.callers import named_tokenizer, project_for
from inspector.chat_templates.check_forms import TemplateCheckForm
from inspector.chat_templates.views import ask_check
from inspector.web.access import access
from inspector.web.twins import ApiProblem, Page, from_columns, json_page, some_fields
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import TemplateCheck
from rollouts.store.parameters import Text
from rollouts.store.people.visible_objects import find_visible_check, visible_checks

router = Router(tags=["checks"])


class CheckAsked(Body):
    """The question of a template check. It names a tokenizer or holds a chat template, or both."""

    tokenizer: Text = ""
    """Name of a registered tokenizer; empty = characters are compared."""
    chat_template: LongText = ""
    """Jinja text; empty = the tokenizer's own."""
    label: Text = ""
    """What the chat template is called."""
    tools: list[dict[str, Any]] | None = None
    """Function schemas that are passed to every render."""
    kwargs: dict[str, Any] | None = None
    """Template arguments that are passed to every render."""
    conversation: list[dict[str, Any]] | None = None
    """A conversation that becomes probes, OpenAI style."""
    repair: bool = True
    """Whether to look for a repair as well."""
    project: Text = ""
    """Code of the project; empty = the caller's first."""


@dataclass(frozen=True)
class CheckValues(Page):
    """A chat-template check; what its report tells only where it was read."""

    code: str
    """Names it in addresses."""
    url: str
    """Address of its page."""
    project: str
    """Code of its project."""
    status: str
    """``done`` as soon as the verdict is there, although the search for a repair may go on."""
    error: str
    """Why it failed; empty otherwise."""
    progress: str
    """How far the search for a repair is; empty = none is under way."""
    tokenizer: str | None
    """Name of the tokenizer; null = characters are compared."""
    chat_template: str
    """Hash of the chat template."""
    label: str
    """What the chat template is called."""
    version: int
    """Of the checks that answered it."""
    created_at: datetime
    """When it was asked for."""
    question: dict[str, Any] = field(default_factory=dict)
    """Tools, kwargs and conversation, where they were asked about."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """Purpose -> what the template is worth for it; empty until the verdict is there."""
    prefix_preserving: bool | None = None
    """Whether appending a tool result leaves what was rendered before; null = not known."""
    probes: list[dict[str, Any]] = field(default_factory=list)
    """Each probe with its outcome, its renders and the lines that decided."""
    repair: dict[str, Any] | None = None
    """The smallest verified change of the template, ``wider`` for the next one; null = none was found."""
    repair_detail: str = ""
    """Why there is no repair, or what it does."""
    marks: dict[str, Any] | None = None
    """The template with verified generation tags; null = none were found."""
    marks_detail: str = ""
    """Why there are none."""

    @classmethod
    def of(cls, check: TemplateCheck, /, **more: Any) -> CheckValues:
        """A check whose tokenizer, template, job and project are loaded."""
        return from_columns(
            cls, check, url=reverse("check", args=[check.code]), project=check.project.code,
            tokenizer=check.tokenizer.name if check.tokenizer else None, chat_template=check.chat_template_id, **more,
        )


LINE = "code url project status error progress tokenizer chat_template label version created_at"
CheckLine: Any = some_fields(CheckValues, "CheckValues", "A chat-template check as a line of a list.", LINE)
WholeCheck: Any = some_fields(
    CheckValues, "WholeCheck", "A chat-template check with its verdict.",
    f"{LINE} question verdicts prefix_preserving probes repair repair_detail marks marks_detail",
)


@router.get("/checks", response=AnswerPart[CheckLine], openapi_extra=extra(422))
def list_checks(request: HttpRequest, asked: Query[PartAsked]) -> HttpResponse:
    """The template checks of the caller's projects, newest first."""
    return answer(AnswerPart.of(visible_checks(access(request), asked.cursor, asked.limit), _line))


def _line(check: TemplateCheck) -> Any:
    return CheckLine.of(CheckValues.of(check))


@router.get("/checks/{code}", response=WholeCheck, openapi_extra=extra(answers=NOT_CHANGED))
def get_check(request: HttpRequest, code: str) -> HttpResponseBase:
    """One template check with its verdict, its repair and its generation tags."""
    check = the_check(request, code)
    if is_active(check) or is_active(check.job):
        return answer(whole_check(check))
    parts = check.pk, check.version, check.job.pk, check.job.finished_at, check.job.error
    return with_etag(request, parts, lambda: json_page(whole_check(check)))


@router.post("/checks", response={200: WholeCheck, 202: WholeCheck}, openapi_extra=extra(413, 422))
def make_check(request: HttpRequest, asked: CheckAsked) -> HttpResponse:
    """Have a worker check a chat template; 200 where the same question was answered before."""
    project = project_for(request, asked.project)
    if asked.tokenizer:
        named_tokenizer(project, asked.tokenizer)
    fields = asked.dict()
    texts = {name: json.dumps(fields[name]) for name in ("tools", "kwargs", "conversation") if fields[name] is not None}
    form = TemplateCheckForm(
        project, {**{name: fields[name] for name in ("tokenizer", "chat_template", "label")}, **texts}
    )
    check = ask_check(request, form, project, asked.repair) if form.is_valid() else None
    if check is None:
        errors = form.sentences()
        raise ApiProblem(422, next(iter(errors.values()))[0], errors)
    stored = find_visible_check(access(request), check.code)
    assert stored is not None
    return answer(whole_check(stored), 202 if is_active(stored.job) else 200)


def whole_check(check: TemplateCheck) -> Any:
    """The values of a check, from its report."""
    report: dict[str, Any] = check.report or {}
    return WholeCheck.of(CheckValues.of(
        check, question=check.question, verdicts=report.get("verdicts", {}),
        prefix_preserving=report.get("prefix_preserving"), probes=report.get("checks", []), repair=report.get("repair"),
        repair_detail=report.get("repair_detail") or "", marks=report.get("marks"),
        marks_detail=report.get("marks_detail") or "",
    ))
