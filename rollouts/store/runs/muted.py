"""Which kinds of findings are muted in a run. A rule speaks of runs and kinds alone, so that no list reads findings."""

from __future__ import annotations

from collections.abc import Sequence

from django.db.models import Q, QuerySet

from rollouts.store.models import MutedKind, Project, Run


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
