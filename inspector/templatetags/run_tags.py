"""What can be done to a run, as a card of its page."""

from __future__ import annotations

from typing import Any

from django import template

from rollouts.models import Run, Tokenizer
from rollouts.tito.diagnose import VERSION
from rollouts.tito.strategies import STRATEGIES
from rollouts.work.exporting import WRITERS, is_rows, title_of

register = template.Library()


@register.inclusion_tag("runs/_work.html", takes_context=True)
def run_work(context: Any, run: Run, writer: bool) -> dict[str, Any]:
    """The export form, for a writer the form that judges the run anew, and the work that was asked for."""
    can_replay = writer and run.n_steps and run.tokenizer_id is not None
    return {
        "run": run,
        "writer": writer,
        "writers": {
            "whole trajectories": [(name, title_of(name)) for name in WRITERS if not is_rows(name)],
            "training rows": [(name, title_of(name)) for name in WRITERS if is_rows(name)],
        },
        "strategies": {slug: one.about for slug, one in STRATEGIES.items()} if can_replay else {},
        "version": VERSION,
        "outdated": run.diagnosis_version is not None and run.diagnosis_version < VERSION,
        "tokenizers": list(Tokenizer.objects.order_by("name").values_list("name", flat=True)[:500]) if writer else [],
        "csrf_token": context.get("csrf_token"),
        "request": context.get("request"),
        "jobs": context.get("jobs"),
        "jobs_live": context.get("jobs_live"),
    }
