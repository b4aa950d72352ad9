"""What can be done to a run, as a card of its page."""

from __future__ import annotations

from typing import Any

from django import template
from django.db.models import Min

from rollouts.exporting import WRITERS
from rollouts.models import Run, Tokenizer
from rollouts.tito.diagnose import VERSION

register = template.Library()


@register.inclusion_tag("runs/_work.html", takes_context=True)
def run_work(context: Any, run: Run, writer: bool) -> dict[str, Any]:
    """The export form, and for a writer the form that judges the run anew."""
    oldest = run.findings.aggregate(oldest=Min("version"))["oldest"]
    return {
        "run": run,
        "writer": writer,
        "writers": WRITERS,
        "outdated": oldest is not None and oldest < VERSION,
        "tokenizers": list(Tokenizer.objects.order_by("name").values_list("name", flat=True)[:500]) if writer else [],
        "csrf_token": context.get("csrf_token"),
    }
