"""What one check asks of a chat template, and the answers that it can get."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rollout_inspector.text.chat_templates.probes.compare import RenderSide
from rollout_inspector.text.chat_templates.probes.render_cache import RenderCache
from rollout_inspector.text.chat_templates.probes.report import Check, CheckStatus, Purpose

CheckFunction = Callable[[RenderCache], Check]
"""Answers one question. It asks the cache for renders, and is called again once they are there."""


@dataclass(frozen=True)
class Question:
    """Makes the :class:`Check` of each answer; ``more`` are further fields of it."""

    name: str
    title: str
    purpose: Purpose
    decisive: bool = True
    """False = the answer does not change the verdict of its purpose."""

    def _check(self, status: CheckStatus, detail: str, more: dict[str, Any]) -> Check:
        return Check(self.name, self.title, self.purpose, status, detail, **{"decisive": self.decisive, **more})

    def ok(self, detail: str, **more: Any) -> Check:
        """The property holds."""
        return self._check(CheckStatus.OK, detail, more)

    def broken(self, detail: str, **more: Any) -> Check:
        """The property does not hold."""
        return self._check(CheckStatus.BROKEN, detail, more)

    def unsupported(self, detail: str, **more: Any) -> Check:
        """The template has no place for what is asked about."""
        return self._check(CheckStatus.UNSUPPORTED, detail, more)

    def raised(self, *sides: RenderSide) -> Check | None:
        """The check of the first render that the template raised on; None when it raised on none."""
        failed = next((side for side in sides if side.error), None)
        if failed is None:
            return None
        place = ""
        if failed.rendered.kind == "raises" and failed.conversation.messages:
            roles = ", ".join(str(message.get("role")) for message in failed.conversation.messages)
            place = f" (with the messages {roles})."
        return self._check(CheckStatus.RAISES, failed.error + place, {"failed": failed, "line": failed.rendered.line})
