"""A chat template bound to a tokenizer: text, ids, and which line of the template wrote which character."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rollout_inspector.streams.interfaces import Codec, Conversation, RenderFailed
from rollout_inspector.streams.recorded_renders import NOW
from rollout_inspector.streams.trajectory import Ids
from rollout_inspector.text.chat_templates.sandbox import client

PLACEHOLDER_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
"""The tokens that a template sees when it is checked without a tokenizer."""
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class TemplateTokenizer(Codec, Protocol):
    """A codec that also knows the tokens a chat template can name."""

    named_tokens: Mapping[str, str]


class TemplateRenderer:
    """Implements :class:`rollout_inspector.streams.interfaces.Renderer`; every render runs in the sandbox."""

    def __init__(self, tokenizer: TemplateTokenizer | None, chat_template: str, now: str = "") -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.chat_template_sha256 = hashlib.sha256(chat_template.encode("utf-8", "surrogatepass")).hexdigest()
        self._clock = {NOW: now} if now else {}
        self._named = dict(tokenizer.named_tokens) if tokenizer is not None else PLACEHOLDER_TOKENS

    def variables(self, conversation: Conversation) -> dict[str, Any]:
        """What the template sees: the same variables that ``apply_chat_template`` passes."""
        return {
            **self.base_variables(),
            **self.template_kwargs_of(conversation.kwargs),
            "messages": list(conversation.messages),
            "tools": None if conversation.tools is None else list(conversation.tools),
            "add_generation_prompt": conversation.add_generation_prompt,
        }

    def base_variables(self) -> dict[str, Any]:
        """The variables that every render sees."""
        return {"documents": None, **self._named, **self._clock}

    def template_kwargs_of(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Template kwargs without the names in ``RESERVED``, which the conversation sets."""
        return {k: v for k, v in (kwargs or {}).items() if k not in RESERVED}

    def render_many(self, conversations: Sequence[Conversation], lines: bool = False) -> list[client.Rendered]:
        """Many renders in one round trip; a failure is an outcome, not an exception."""
        return client.render(self.chat_template, [client.RenderJob(self.variables(c), lines) for c in conversations])

    def rendered(self, conversation: Conversation) -> client.Rendered:
        """The render of one conversation. Raises :class:`RenderFailed`."""
        return self.render_many([conversation])[0].or_raise()

    def render_text(self, conversation: Conversation) -> str:
        """The rendered conversation. Raises :class:`RenderFailed`."""
        return self.rendered(conversation).text

    def render_tracked(self, conversation: Conversation) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text, and its characters ``[start, stop)`` that generation blocks wrote, as ``transformers`` counts them.

        Raises :class:`RenderFailed`.
        """
        rendered = self.rendered(conversation)
        return rendered.text, rendered.tracked_spans

    def render_ids(self, conversation: Conversation) -> Ids:
        """The rendered conversation encoded as one text. Raises :class:`RenderFailed`."""
        if self.tokenizer is None:
            raise RenderFailed("Without a tokenizer a conversation can be rendered to text, not to ids.")
        return self.tokenizer.encode(self.render_text(conversation))


def renderer(tokenizer: TemplateTokenizer | None, chat_template: str, now: str = "") -> TemplateRenderer:
    """A renderer for a tokenizer and a chat template; ``now`` sets the clock of templates that print the date."""
    return TemplateRenderer(tokenizer, chat_template, now)
