"""A chat template whose small renders are made once: the diagnosis asks the same of each row."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from rollout_inspector.streams.interfaces import Renderer
from rollout_inspector.streams.trajectory import Ids, Message

MAX_KNOWN = 256
MAX_KEY_CHARACTERS = 2_000
"""Longer conversations are those of rollouts, which hardly come twice."""
T = TypeVar("T")


class KnownRenders:
    """Implements :class:`rollout_inspector.streams.interfaces.Renderer`. Several threads may use it at once."""

    def __init__(self, renderer: Renderer) -> None:
        self.chat_template_sha256 = renderer.chat_template_sha256
        self._renderer = renderer
        self._known: dict[str, Any] = {}

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The rendered conversation. Raises :class:`~rollout_inspector.streams.interfaces.RenderFailed`."""
        return self._of(self._renderer.render_text, messages, tools, kwargs, add_generation_prompt)

    def render_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Ids:
        """The rendered conversation as ids. Raises :class:`~rollout_inspector.streams.interfaces.RenderFailed`."""
        return self._of(self._renderer.render_ids, messages, tools, kwargs, add_generation_prompt)

    def _of(self, render: Callable[..., T], *asked: Any) -> T:
        key = "" if len(asked[0]) > 4 or asked[1] else render.__name__ + json.dumps(asked, default=repr)
        if not key or len(key) > MAX_KEY_CHARACTERS:
            return render(*asked)
        found: T | None = self._known.get(key)
        if found is None:
            found = render(*asked)
            if len(self._known) < MAX_KNOWN:
                self._known[key] = found
        return found
