"""A chat template bound to a tokenizer: text, ids, and which line of the template wrote which character."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Protocol

from rollouts.chat_templates.sandbox import client
from rollouts.tito.interfaces import Codec, RenderFailed
from rollouts.tito.interfaces import (
    Conversation as Conversation,  # offered here too: checks and probes are made of them
)
from rollouts.tito.trajectory import Ids, Message

PLACEHOLDER_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
"""What a template sees when it is checked without a tokenizer."""
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})


class TemplateTokenizer(Codec, Protocol):
    """A codec that also knows the tokens a chat template can name."""

    named_tokens: Mapping[str, str]


@dataclass(frozen=True)
class Provenance:
    """A render with the template line of every character, and the characters that generation blocks wrote."""

    text: str
    lines: tuple[tuple[int, int], ...]
    """(number of characters, 1-based template line) in order; line 0 = not known."""
    spans: tuple[tuple[int, int], ...]
    """Characters ``[start, stop)`` inside ``{% generation %}``."""
    tracked_spans: tuple[tuple[int, int], ...]
    """The same as ``transformers`` counts them for ``return_assistant_tokens_mask``."""

    @cached_property
    def _stops(self) -> list[int]:
        return list(accumulate(n for n, _ in self.lines))

    def line_at(self, character: int) -> int | None:
        """The template line that wrote a character; at the end of the text, the line that wrote the last one."""
        if not self.lines:
            return None
        index = min(bisect_right(self._stops, character), len(self.lines) - 1)
        return self.lines[index][1] or None


class TemplateRenderer:
    """Implements :class:`rollouts.tito.interfaces.Renderer`; every render runs in the sandbox."""

    def __init__(self, tokenizer: TemplateTokenizer | None, chat_template: str, now: str = "") -> None:
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.chat_template_sha256 = hashlib.sha256(chat_template.encode("utf-8", "surrogatepass")).hexdigest()
        self.now = now
        self._named = dict(tokenizer.named_tokens) if tokenizer is not None else PLACEHOLDER_TOKENS

    def variables(self, conversation: Conversation) -> dict[str, Any]:
        """What the template sees, as ``apply_chat_template`` hands it over."""
        return {
            **self.base_variables(),
            **self.template_kwargs_of(conversation.kwargs),
            "messages": list(conversation.messages),
            "tools": None if conversation.tools is None else list(conversation.tools),
            "add_generation_prompt": conversation.add_generation_prompt,
        }

    def base_variables(self) -> dict[str, Any]:
        """What every render sees, whatever the conversation."""
        return {"documents": None, **self._named}

    def template_kwargs_of(self, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Template kwargs without those that only the conversation decides."""
        return {k: v for k, v in (kwargs or {}).items() if k not in RESERVED}

    def render_many(
        self, conversations: Sequence[Conversation], lines: bool = False, now: str | None = None
    ) -> list[client.Rendered]:
        """Many renders in one round trip; a failure is an outcome, not an exception."""
        clock = self.now if now is None else now
        jobs = [client.RenderJob(self.variables(c), lines=lines, now=clock) for c in conversations]
        return client.render(self.chat_template, jobs)

    def render_text(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> str:
        """The rendered conversation. Raises :class:`RenderFailed`."""
        return self.render_tracked(messages, tools, kwargs, add_generation_prompt)[0]

    def render_tracked(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text, and its characters ``[start, stop)`` that generation blocks wrote, as ``transformers`` counts them.

        Raises :class:`RenderFailed`.
        """
        conversation = Conversation(messages, tools, kwargs, add_generation_prompt)
        rendered = self.render_many([conversation])[0].or_raise()
        return rendered.text, rendered.tracked_spans

    def render_ids(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = False,
    ) -> Ids:
        """The rendered conversation encoded as one text. Raises :class:`RenderFailed`."""
        if self.tokenizer is None:
            raise RenderFailed("Without a tokenizer a conversation can be rendered to text, not to ids.")
        return self.tokenizer.encode(self.render_text(messages, tools, kwargs, add_generation_prompt))


def provenance(rendered: client.Rendered) -> Provenance:
    """The provenance of a render that was asked for with ``lines=True``."""
    return Provenance(rendered.text, rendered.lines, rendered.spans, rendered.tracked_spans)


def renderer(tokenizer: TemplateTokenizer | None, chat_template: str, now: str = "") -> TemplateRenderer:
    """A renderer for a tokenizer and a chat template; ``now`` sets the clock of templates that print the date."""
    return TemplateRenderer(tokenizer, chat_template, now)
