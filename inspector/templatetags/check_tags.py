"""From a finding that a chat template causes to the probe that shows it."""

from __future__ import annotations

from urllib.parse import urlencode

from django import template
from django.template.context import Context
from django.urls import reverse

from inspector.web.access import may_write
from rollouts.models import Run, StoredTrajectory

register = template.Library()

PROBES = {
    "empty_think_toggled": "tool_append",
    "template_not_append_only": "tool_append",
    "thinking_stripped": "user_append_after_reasoning",
    "whitespace_changed": "tool_append_after_content",
    "message_dropped": "tool_append_marked",
    "tool_messages_split": "tool_append_one_by_one",
    "turn_separator_lost": "seam",
    "stop_token_doubled": "seam",
    "system_prompt_injected": "default_system",
    "special_tokens_injected": "control_text_in_content",
    "generation_prompt_missing": "generation_prompt_written",
    "bos_mismatch": "bos_once",
}
"""Kind of a finding -> the probe of the template check that asks for its cause."""


@register.simple_tag(takes_context=True)
def template_probe(context: Context, kind: str, run: Run, trajectory: StoredTrajectory, step: int | None) -> str:
    """The way to the check of the step's own template, tools and kwargs, at that probe; empty where it has none."""
    request, probe = context.get("request"), PROBES.get(kind)
    if probe is None or run.chat_template_id is None or request is None or not may_write(request):
        return ""
    return f"{reverse('templates')}?{urlencode({'trajectory': trajectory.code, 'step': step or 0, 'probe': probe})}"
