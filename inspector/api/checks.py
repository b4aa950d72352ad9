"""Template checks: listed, and read with verdict, repair and generation tags."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.urls import reverse
from ninja import Query, Router

from inspector.api.answers import answer, fresh, part_of, the_check, with_etag
from inspector.api.callers import access
from inspector.api.documented import NOT_CHANGED, PartAsked, extra
from inspector.web.twins import Page, from_columns, json_page
from rollouts.models import TemplateCheck
from rollouts.selectors.activity import is_active
from rollouts.selectors.visible import visible_checks

router = Router(tags=["checks"])


@dataclass(frozen=True)
class CheckValues(Page):
    """A chat-template check as a line of a list."""

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

    @classmethod
    def of(cls, check: TemplateCheck, /, **more: Any) -> Any:
        """A check whose tokenizer, template, job and project are loaded."""
        return from_columns(
            cls,
            check,
            url=reverse("check", args=[check.code]),
            project=check.project.code,
            tokenizer=check.tokenizer.name if check.tokenizer else None,
            chat_template=check.chat_template_id,
            **more,
        )


@dataclass(frozen=True)
class ChecksPart(Page):
    """Part of the list of template checks."""

    items: list[CheckValues]
    """Newest first."""
    next: str | None
    """What ``cursor`` takes for the following part; null on the last."""


@dataclass(frozen=True)
class WholeCheck(CheckValues):
    """A chat-template check with its verdict."""

    question: dict[str, Any]
    """Tools, kwargs and conversation, where they were asked about."""
    verdicts: dict[str, str]
    """Purpose -> what the template is worth for it; empty until the verdict is there."""
    prefix_preserving: bool | None
    """Whether appending a tool result leaves what was rendered before; null = not known."""
    probes: list[dict[str, Any]]
    """Each probe with its outcome, its renders and the lines that decided."""
    repair: dict[str, Any] | None
    """The smallest verified change of the template, ``wider`` for the next one; null = none was found."""
    repair_detail: str
    """Why there is no repair, or what it does."""
    marks: dict[str, Any] | None
    """The template with verified generation tags; null = none were found."""
    marks_detail: str
    """Why there are none."""


@router.get("/checks", response=ChecksPart, openapi_extra=extra(422))
def list_checks(request: HttpRequest, asked: Query[PartAsked]) -> HttpResponse:
    """The template checks of the caller's projects, newest first."""
    items, following = part_of(lambda: visible_checks(access(request), asked.cursor, asked.limit), CheckValues.of)
    return answer(ChecksPart(items, following))


@router.get("/checks/{code}", response=WholeCheck, openapi_extra=extra(answers=NOT_CHANGED))
def get_check(request: HttpRequest, code: str) -> HttpResponseBase:
    """One template check with its verdict, its repair and its generation tags."""
    check = the_check(request, code)
    if is_active(check) or is_active(check.job):
        return fresh(json_page(whole_check(check)))
    parts = check.pk, check.version, check.job.pk, check.job.finished_at, check.job.error
    return with_etag(request, parts, lambda: json_page(whole_check(check)))


def whole_check(check: TemplateCheck) -> WholeCheck:
    """The values of a check, from its report."""
    report: dict[str, Any] = check.report or {}
    whole: WholeCheck = WholeCheck.of(
        check,
        question=check.question,
        verdicts=report.get("verdicts", {}),
        prefix_preserving=report.get("prefix_preserving"),
        probes=report.get("checks", []),
        repair=report.get("repair"),
        repair_detail=report.get("repair_detail") or "",
        marks=report.get("marks"),
        marks_detail=report.get("marks_detail") or "",
    )
    return whole
