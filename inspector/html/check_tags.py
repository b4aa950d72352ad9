"""The link from a finding with a chat template as its cause to the probe that shows it."""

from __future__ import annotations

from urllib.parse import urlencode

from django import template
from django.template.context import Context
from django.urls import reverse

from inspector.web.access import may_write
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.store.models import Run, StoredTrajectory

register = template.Library()


@register.simple_tag(takes_context=True)
def template_probe(context: Context, kind: str, run: Run, trajectory: StoredTrajectory, step: int | None) -> str:
    """The check of the step's template, tools and kwargs, at the probe of that kind; empty without a probe."""
    request, probe = context.get("request"), KINDS[kind].probe if kind in KINDS else ""
    if not probe or run.chat_template_id is None or request is None or not may_write(request):
        return ""
    return f"{reverse('templates')}?{urlencode({'trajectory': trajectory.code, 'step': step or 0, 'probe': probe})}"
