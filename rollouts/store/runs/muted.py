"""Muted kinds of findings. A rule speaks of runs and kinds alone, so that no list reads findings."""

from collections.abc import Sequence
from typing import Any

from django.db import transaction
from django.db.models import Q, QuerySet

from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.refusal import Refusal
from rollouts.store.models import MutedKind, Project, Run
from rollouts.store.people.activity_log import Action, record
from rollouts.store.text import storable_text

MAX_REASON = 500  # Characters of a reason.
SCOPES = ("run", "template", "project")
"""How far a rule reaches: this run, the runs of the project with its chat template, or all runs of the project."""


def rules_of(run: Run) -> QuerySet[MutedKind]:
    """The rules that hold in a run, the oldest first."""
    here = Q(run=None) | Q(run=run.pk)
    template = Q(chat_template=None) | Q(chat_template=run.chat_template_id)
    return MutedKind.objects.filter(here, template, project=run.project_id).order_by("pk")


def muted_in(run: Run) -> dict[str, MutedKind]:
    """Kind -> the rule that mutes it in a run; of several the oldest. One query for a run object."""
    if not hasattr(run, "muted"):
        run.muted = {rule.kind: rule for rule in rules_of(run).reverse()}  # type: ignore[attr-defined]
    return run.muted  # type: ignore[attr-defined, no-any-return]


def muted_in_runs(runs: Sequence[Run]) -> dict[int, set[str]]:
    """Key of a run -> the kinds that are muted in it. One query; none without runs."""
    if not runs:
        return {}
    rules = list(MutedKind.objects.filter(project__in={run.project_id for run in runs}))
    return {
        run.pk: {
            rule.kind
            for rule in rules
            if rule.project_id == run.project_id
            and rule.run_id in (None, run.pk)
            and rule.chat_template_id in (None, run.chat_template_id)
        }
        for run in runs
    }


def rules_of_project(project: Project) -> list[MutedKind]:
    """The rules of a project with their runs, the newest first. One query."""
    return list(MutedKind.objects.filter(project=project).select_related("run").order_by("-pk"))


def find_rule(pk: int) -> MutedKind | None:
    """A rule with its project and run. One query."""
    return MutedKind.objects.select_related("project", "run").filter(pk=pk).first()


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
        other = MutedKind.objects.filter(project=run.project_id, kind=kind, **places).first()
        if other is not None:
            raise Refusal(f"{other.author_name} has muted this already: {other.reason}", field="kind")
        rule = MutedKind.objects.create(
            project=run.project, kind=kind, reason=reason, author=author, author_name=author.get_username(),
            **places,
        )
    record(Action.MUTED, run, detail=f"{kind}, {scope}: {reason}")
    return rule


def unmute(rule: MutedKind) -> None:
    """Take a rule back. One that is gone already is nothing to it."""
    if MutedKind.objects.filter(pk=rule.pk).delete()[0]:
        record(Action.UNMUTED, rule.run or rule.project, detail=f"{rule.kind}: {rule.reason}")
