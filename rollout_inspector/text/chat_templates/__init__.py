"""Chat templates: render in a sandbox, check, repair. Pure: knows neither storage nor the web."""

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.text.chat_templates.jinja_source.scan import wants_call_ids
from rollout_inspector.text.chat_templates.package_renderer import is_renderer, kept_text, renderer
from rollout_inspector.text.chat_templates.probes.checks import cannot_render, check
from rollout_inspector.text.chat_templates.probes.report import CheckReport, CheckStatus
from rollout_inspector.text.chat_templates.repair.generation_tags import find_marks, with_marks
from rollout_inspector.text.chat_templates.repair.search import Repair, find_repair, with_repair
from rollout_inspector.text.chat_templates.sandbox.prefetching_renderer import PrefetchingRenderer
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer

VERSION = 9  # Raise it when a check can come out differently: stored reports of older versions are then stale.

__all__ = [
    "VERSION", "CheckReport", "CheckStatus", "Conversation", "PrefetchingRenderer", "Repair", "TemplateRenderer",
    "cannot_render", "check", "find_marks", "find_repair", "is_renderer", "kept_text", "renderer", "wants_call_ids",
    "with_marks", "with_repair",
]
