"""Muted kinds of findings: what pages say of a rule, the form that makes one, and the button that takes it back."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.http import require_POST

from inspector.html.inspector_tags import finding_title
from inspector.web.access import reader_of, require_rule, run_of_form, writes_run
from inspector.web.twins import Page, error_page, json_page, told, wants_json
from rollout_inspector.refusal import Refusal
from rollouts.store.models import MutedKind, Run
from rollouts.store.runs.muted import find_rule, mute, muted_in, unmute
from rollouts.store.trajectories.trajectories import find_trajectory


@dataclass(frozen=True)
class MutedValues(Page):
    """A rule that mutes a kind of finding."""

    id: int
    """Names it in addresses."""
    kind: str
    """The slug of the kind."""
    title: str
    """The kind in words."""
    scope: str
    """``run``, ``template`` (the runs with one chat template) or ``project``."""
    reason: str | None
    """Why; null for the visitor of a share link."""
    author: str | None
    """Who muted it; null for the visitor of a share link."""
    created_at: datetime
    """When."""
    run: str | None
    """Code of the run of a rule that holds in one run; null = it holds in several."""
    run_name: str
    """What that run is called; empty without one."""

    @classmethod
    def of(cls, rule: MutedKind, is_member: bool, run: Run | None) -> MutedValues:
        """``is_member``: the reader has a role in the project. ``run``: that of the rule, where it has one."""
        scope = "run" if rule.run_id else "template" if rule.chat_template_id else "project"
        return cls(
            rule.pk, rule.kind, finding_title(rule.kind), scope, rule.reason if is_member else None,
            rule.author_name if is_member else None, rule.created_at,
            run.code if run and rule.run_id else None, run.name if run and rule.run_id else "",
        )

    @property
    def reach(self) -> str:
        """How far it reaches, in words."""
        if self.scope == "run":
            return f"in the run “{self.run_name}”"
        return "in runs with this chat template" if self.scope == "template" else "in the whole project"


def muted_values(request: HttpRequest, run: Run) -> list[MutedValues]:
    """The rules that hold in a run, by kind. One query for a run object."""
    is_member = reader_of(request) is not None
    return [MutedValues.of(rule, is_member, run) for _, rule in sorted(muted_in(run).items())]


@writes_run
def mute_kind(request: HttpRequest, run: Run) -> HttpResponse:
    """Mute the ``kind`` that a form names, with its ``reason``, as far as its ``scope`` says."""
    params = request.POST
    try:
        muted = mute(run, params.get("kind", ""), params.get("scope", ""), params.get("reason", ""), request.user)
    except Refusal as refusal:
        if wants_json(request):
            return json_page({"errors": {refusal.field: [str(refusal)]}}, 422)
        return error_page(request, 422, "Nothing was muted", str(refusal), run=run.code)
    sentence = f"“{finding_title(muted.kind)}” is muted. It still counts, and stands under “muted”."
    return told(request, sentence, _back(request, run), twin=MutedValues.of(muted, True, run), status=201)


@require_POST
def unmute_kind(request: HttpRequest, pk: int) -> HttpResponse:
    """Take a rule back: what it muted is met first again."""
    rule = require_rule(request, find_rule(pk), "rule")
    unmute(rule)
    run = run_of_form(request, rule)
    back = ("project", rule.project.code) if run is None else (_back(request, run),)
    return told(request, f"“{finding_title(rule.kind)}” is no longer muted.", *back, twin={"unmuted": rule.kind})


def _back(request: HttpRequest, run: Run) -> str:
    """The trajectory of the run from which the form was sent, or the run."""
    code = request.POST.get("trajectory", "")[:64].replace("\0", "")
    trajectory = find_trajectory(code) if code else None
    if trajectory is not None and trajectory.run_id == run.pk:
        return reverse("trajectory", args=[code])
    return reverse("run", args=[run.code])
