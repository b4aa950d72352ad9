"""Template checks: listed, and read with verdict, repair and generation tags."""

from __future__ import annotations

import json
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from ninja import Query, Router

from inspector.api.answers import (
    NOT_CHANGED, AnswerPart, Body, LongText, PartAsked, answer, extra, the_check, with_etag
)
from inspector.api.callers import named_tokenizer, project_for
from inspector.chat_templates.check_forms import TemplateCheckForm
from inspector.chat_templates.check_values import CheckValues
from inspector.chat_templates.views import ask_check
from inspector.web.access import access
from inspector.web.twins import ApiProblem, json_page, some_fields
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
    """Jinja text, or renderer:NAME; empty = the tokenizer's own."""
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


LINE = (
    "code url project=project_code status error progress tokenizer chat_template=chat_template_sha256 "
    "label=chat_template version created_at"
)
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
    return CheckLine.of(CheckValues.of(check, None, project_code=check.project.code))


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
    """The values of a check whose tokenizer, template, job and project are loaded."""
    return WholeCheck.of(CheckValues.of(check, None, project_code=check.project.code, report=check.report))
