"""Chat templates: render in a sandbox, check, repair. Pure: knows neither storage nor the web."""

from rollouts.chat_templates.checks import cannot_render, check, is_prefix_preserving
from rollouts.chat_templates.generation_tags import Marks, find_marks, with_marks
from rollouts.chat_templates.prefetching_renderer import RememberingRenderer
from rollouts.chat_templates.render import Conversation, Provenance, TemplateRenderer, renderer
from rollouts.chat_templates.repair import Repair, find_repair, with_repair
from rollouts.chat_templates.report import Check, CheckReport, Purpose, Status

VERSION = 4
"""Raise it when a check can come out differently: stored reports of older versions are made anew."""

__all__ = [
    "VERSION",
    "Check",
    "CheckReport",
    "Conversation",
    "Marks",
    "Provenance",
    "Purpose",
    "RememberingRenderer",
    "Repair",
    "Status",
    "TemplateRenderer",
    "cannot_render",
    "check",
    "find_marks",
    "find_repair",
    "is_prefix_preserving",
    "renderer",
    "with_marks",
    "with_repair",
]
