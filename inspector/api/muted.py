"""The kinds of findings that a project knows: which are muted in a run; muted and taken back."""

from __future__ import annotations

from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from ninja import Path, Router

from inspector.api.answers import answer, found, the_run
from inspector.api.documented import Body, LongText, extra
from inspector.runs.muted import MutedValues, muted_values
from inspector.web.access import access, require, too_low
from inspector.web.twins import Page
from rollouts.store.models import Role
from rollouts.store.parameters import Count, Text
from rollouts.store.runs.muted import find_rule, mute, unmute

router = Router(tags=["muted findings"])


@dataclass(frozen=True)
class MutedList(Page):
    """The rules that mute kinds of findings in a run."""

    items: list[MutedValues]
    """By kind."""


class MuteAsked(Body):
    """A kind of finding that is known. It still counts everywhere."""

    kind: Text
    """The slug of the kind, such as `noncanonical_sampling`."""
    reason: LongText
    """Why it is known, at most 500 characters."""
    scope: Text = "run"
    """How far it reaches: `run`, `template` (the runs with the chat template of this run) or `project`."""


@router.get("/runs/{code}/muted", response=MutedList, openapi_extra=extra())
def list_muted(request: HttpRequest, code: str) -> HttpResponse:
    """The kinds of findings that are muted in a run."""
    return answer(MutedList(muted_values(request, the_run(request, code))))


@router.post("/runs/{code}/muted", response={201: MutedValues}, openapi_extra=extra(422))
def mute_kind(request: HttpRequest, code: str, asked: MuteAsked) -> HttpResponse:
    """Mute a kind of finding. A list that asks with `muted=hide` leaves it out."""
    run = the_run(request, code)
    require(request, run, Role.MEMBER)
    made = mute(run, asked.kind, asked.scope, asked.reason, request.user)
    return answer(MutedValues.of(made, True, run), 201)


@router.delete("/muted/{id}", response={204: None}, openapi_extra=extra(422))
def unmute_kind(request: HttpRequest, id: Path[Count]) -> HttpResponse:
    """Take a rule back: what it muted is met first again."""
    held, rule = access(request), find_rule(id)
    role = None if rule is None else held.role_in(rule.project_id)
    rule = found(None if role is None else rule, "rule", str(id))
    if not held.may(rule.project_id, Role.MEMBER):
        raise too_low(rule.project, role or Role.VIEWER, Role.MEMBER)
    unmute(rule)
    return HttpResponse(status=204)
