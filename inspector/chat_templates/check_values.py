"""A chat-template check as pages show it."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from inspector.web.twins import Page, from_columns
from rollout_inspector.text.chat_templates.probes.checks import TITO_POST
from rollout_inspector.text.chat_templates.probes.report import CheckStatus, Purpose
from rollouts.jobs import template_checks
from rollouts.store.jobs.activity import is_active
from rollouts.store.models import TemplateCheck


@dataclass(frozen=True)
class CheckPage(Page):
    """A chat-template check as pages show it; as a line of a list without its report."""

    code: str
    """Names the check in addresses; follows from its question."""
    tokenizer: str | None
    """Name of its tokenizer; None compares characters."""
    chat_template: str
    """The template's label."""
    chat_template_sha256: str
    """The template's hash."""
    status: str
    """One of ``TemplateCheck.Status``."""
    error: str
    """Why it failed; empty otherwise."""
    created_at: datetime
    """When it was asked for."""
    prefix_preserving: bool | None
    """For tool messages; None while that is not answered."""
    void: bool
    """Nothing changes only because nothing is rendered."""
    broken_for_tools: int
    """Decisive probes of appended tool results that are broken."""
    own_arguments: bool
    """It asked with tools, template arguments or a conversation."""
    project: str | None
    """Name of its project, for a user who sees several."""
    question: dict[str, Any]
    """The tools, template arguments and conversation that the check asked with."""
    under_way: bool
    """A worker has not answered yet."""
    lost: bool
    """No worker has answered for minutes."""
    progress: str
    """How far the search for a repair is; empty = over."""
    report: dict[str, Any] | None = None
    """Of the page of the check: what ``rollout_inspector.text.chat_templates`` found; null until a worker answered."""
    strategies: dict[str, Any] | None = None
    """Of the page of its conversation: what each strategy puts between the completions; null until a worker answered.
    """

    @classmethod
    def of(cls, check: TemplateCheck, project: str | None, /, **more: Any) -> Self:
        """A check that was loaded with its tokenizer and template, and what a page shows of its report."""
        cells = check.cells or {}
        under_way = is_active(check)
        probes = cells.get("probes", {})
        return from_columns(
            cls,
            check,
            tokenizer=check.tokenizer.name if check.tokenizer else None,
            chat_template=check.template_name,
            chat_template_sha256=check.chat_template_id,
            prefix_preserving=cells.get("prefix_preserving"),
            void=bool(probes.get(TITO_POST, {}).get("void")),
            broken_for_tools=sum(
                probe["purpose"] == Purpose.TOOLS and probe["decisive"] and probe["status"] == CheckStatus.BROKEN
                for probe in probes.values()
            ),
            own_arguments=bool(check.question),
            project=project,
            under_way=under_way,
            lost=under_way and template_checks.is_stale(check),
            **more,
        )
