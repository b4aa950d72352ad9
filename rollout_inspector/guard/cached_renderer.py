"""A chat template whose small renders are made once: the diagnosis asks the same of each row."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

from rollout_inspector.streams.interfaces import Conversation, Renderer
from rollout_inspector.streams.trajectory import Ids

MAX_KNOWN = 256
MAX_KEY_CHARACTERS = 2_000
"""Longer conversations are those of rollouts, which hardly come twice."""
T = TypeVar("T")


class CachedRenderer:
    """Implements :class:`rollout_inspector.streams.interfaces.Renderer`. Several threads may use it at once."""

    def __init__(self, renderer: Renderer) -> None:
        self.chat_template_sha256 = renderer.chat_template_sha256
        self._renderer = renderer
        self._known: dict[str, Any] = {}

    def render_text(self, conversation: Conversation) -> str:
        """The rendered conversation. Raises :class:`~rollout_inspector.streams.interfaces.RenderFailed`."""
        return self._of(self._renderer.render_text, conversation)

    def render_ids(self, conversation: Conversation) -> Ids:
        """The rendered conversation as ids. Raises :class:`~rollout_inspector.streams.interfaces.RenderFailed`."""
        return self._of(self._renderer.render_ids, conversation)

    def _of(self, render: Callable[[Conversation], T], conversation: Conversation) -> T:
        is_long = len(conversation.messages) > 4 or conversation.tools
        key = "" if is_long else render.__name__ + json.dumps(conversation, default=repr)
        if not key or len(key) > MAX_KEY_CHARACTERS:
            return render(conversation)
        rendered: T | None = self._known.get(key)
        if rendered is None:
            rendered = render(conversation)
            if len(self._known) < MAX_KNOWN:
                self._known[key] = rendered
        return rendered
