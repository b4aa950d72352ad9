"""The kinds of findings that a project knows: which are muted in a run; muted and taken back."""

from django.http import HttpRequest, HttpResponse
from ninja import Path, Router

from inspector.api.answers import AnswerItems, Body, LongText, answer, extra, members_run, the_run
from inspector.runs.muted import MutedValues, muted_values
from inspector.web.access import require_rule
from rollouts.store.parameters import Count, Text
from rollouts.store.runs.muted import find_rule, mute, unmute

router = Router(tags=["muted findings"])


class MuteAsked(Body):
    """A kind of finding that is known. It still counts everywhere."""

    kind: Text
    """The slug of the kind, such as `noncanonical_sampling`."""
    reason: LongText
    """Why it is known, at most 500 characters."""
    scope: Text = "run"
    """How far it reaches: `run`, `template` (the runs with the chat template of this run) or `project`."""


@router.get("/runs/{code}/muted", response=AnswerItems[MutedValues], openapi_extra=extra())
def list_muted(request: HttpRequest, code: str) -> HttpResponse:
    """The kinds of findings that are muted in a run."""
    return answer(AnswerItems(muted_values(request, the_run(request, code))))


@router.post("/runs/{code}/muted", response={201: MutedValues}, openapi_extra=extra(422))
def mute_kind(request: HttpRequest, code: str, asked: MuteAsked) -> HttpResponse:
    """Mute a kind of finding. A list that asks with `muted=hide` leaves it out."""
    run = members_run(request, code)
    rule = mute(run, asked.kind, asked.scope, asked.reason, request.user)
    return answer(MutedValues.of(rule, True, run), 201)


@router.delete("/muted/{id}", response={204: None}, openapi_extra=extra(422))
def unmute_kind(request: HttpRequest, id: Path[Count]) -> HttpResponse:
    """Take a rule back: what it muted is met first again."""
    unmute(require_rule(request, find_rule(id), "rule"))
    return HttpResponse(status=204)
