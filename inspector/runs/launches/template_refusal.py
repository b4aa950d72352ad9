"""A launched run whose chat template was refused: the finding, the check of that template, and its repair."""

from dataclasses import dataclass
from urllib.parse import urlencode

from django.urls import reverse

from rollout_inspector.diagnose.full_render import KINDS_OF_REFUSAL
from rollouts.jobs import template_checks
from rollouts.store.chat_templates.template_checks import find_check
from rollouts.store.models import ChatTemplate, Run, StoredFinding, TemplateCheck
from rollouts.store.trajectories.findings import find_finding_of_run


@dataclass(frozen=True)
class TemplateRefusal:
    """What the page of a refused run says."""

    kind: str  # Of the finding.
    evidence: str  # The finding in words.
    of_rows: bool  # The template of the rows was refused, not that of the prompts.
    check_url: str  # The check of that template; empty while nobody has asked for it.
    ask_url: str  # The form that asks for the check.
    repair: str  # `found`, `searching`, `none`, or empty when nobody looks for a repair.
    again_url: str  # The launch form with the repaired template; empty while there is none.


def refusal(run: Run) -> TemplateRefusal | None:
    """What the page of a refused run says; None for any other run. At most two queries, none where nothing failed."""
    finding = _finding(run)
    if finding is None:
        return None
    of_rows = run.rows_chat_template is not None and finding.evidence.startswith("The chat template of the rows")
    template = run.rows_chat_template if of_rows else run.chat_template
    check = _check(run, template) if template is not None else None
    repair = _state(check)
    name = "rows_chat_template" if of_rows else "chat_template"
    query = {"again": run.code, name: check.code if check else "", "repaired": "repair"}
    return TemplateRefusal(
        kind=finding.kind, evidence=finding.evidence, of_rows=of_rows,
        check_url=reverse("check", args=[check.code]) if check else "",
        ask_url=f"{reverse('templates')}?run={run.code}" + "&rows=1" * of_rows, repair=repair,
        again_url=f"{reverse('run-new')}?{urlencode(query)}" if repair == "found" else "",
    )


def _finding(run: Run) -> StoredFinding | None:
    """The finding of a template that was refused before anything was sampled: it has neither step nor row."""
    if (
        run.kind != Run.Kind.LAUNCH
        or not run.n_failed
        or not any(run.finding_counts.get(kind) for kind in KINDS_OF_REFUSAL)
    ):
        return None
    return find_finding_of_run(run, KINDS_OF_REFUSAL)


def _check(run: Run, template: ChatTemplate) -> TemplateCheck | None:
    question = template_checks.question_of(kwargs=run.settings.get("template_kwargs"))
    code = template_checks.code_of(run.project, run.tokenizer, template.sha256, question)
    return find_check(code)


def _state(check: TemplateCheck | None) -> str:
    """Of the repair: see :class:`TemplateRefusal`."""
    if check is None or check.status == TemplateCheck.Status.FAILED:
        return ""
    if check.status != TemplateCheck.Status.DONE or check.progress:
        return "" if template_checks.is_stale(check) else "searching"
    if template_checks.wants_repair(check):
        return ""
    return "found" if (check.report or {}).get("repair") else "none"
