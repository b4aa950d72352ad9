"""Muting: say that findings of a kind are known, with a reason; and take that back."""

from __future__ import annotations

from typing import Any

from django.db import transaction

from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.refusal import Refusal
from rollouts.store.models import MutedKind, Run
from rollouts.store.people.activity_log import Action, record
from rollouts.store.text import storable_text

MAX_REASON = 500
"""Characters of a reason."""
SCOPES = ("run", "template", "project")
"""How far a rule reaches: this run, the runs of the project with its chat template, or all runs of the project."""


def mute(run: Run, kind: str, scope: str, reason: str, author: Any) -> MutedKind:
    """Mute a kind as far as ``scope`` says. Raises :class:`Refusal`."""
    reason = " ".join(storable_text(reason).split())
    if kind not in KINDS and kind not in run.finding_counts:
        raise Refusal(f"There is no kind of finding “{kind[:40]}”. /help/findings lists them.", field="kind")
    if scope not in SCOPES:
        raise Refusal(f"Say how far it reaches: {', '.join(SCOPES)}.", field="scope")
    if scope == "template" and run.chat_template_id is None:
        raise Refusal("This run names no chat template. Mute the kind in this run, or in the project.", field="scope")
    if not reason:
        raise Refusal("Write the reason: others will ask why this is not looked at.", field="reason")
    if len(reason) > MAX_REASON:
        raise Refusal(f"Write at most {MAX_REASON} characters; these are {len(reason):,}.", field="reason")
    places = {
        "run": run if scope == "run" else None,
        "chat_template_id": run.chat_template_id if scope == "template" else None,
    }
    with transaction.atomic():
        # Two people who mute the same at once: the second is told.
        Run.objects.select_for_update(no_key=True).filter(pk=run.pk).first()
        held = MutedKind.objects.filter(project=run.project_id, kind=kind, **places).first()
        if held is not None:
            raise Refusal(f"{held.author_name} has muted this already: {held.reason}", field="kind")
        made = MutedKind.objects.create(
            project=run.project, kind=kind, reason=reason, author=author, author_name=author.get_username(),
            **places,
        )
    record(Action.MUTED, run, detail=f"{kind}, {scope}: {reason}")
    return made


def unmute(rule: MutedKind) -> None:
    """Take a rule back. One that is gone already is nothing to it."""
    if MutedKind.objects.filter(pk=rule.pk).delete()[0]:
        record(Action.UNMUTED, rule.run or rule.project, detail=f"{rule.kind}: {rule.reason}")
