"""A chat template bound to a tokenizer: text, ids, and which line of the template wrote which character."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from rollout_inspector.streams.interfaces import Codec, Conversation, RenderFailed
from rollout_inspector.streams.recorded_renders import NOW
from rollout_inspector.streams.strategies.protocol import Extends
from rollout_inspector.streams.trajectory import Ids, Message
from rollout_inspector.text.chat_templates.jinja_source.scan import switches
from rollout_inspector.text.chat_templates.sandbox import client
from rollout_inspector.text.processes import Faults

PLACEHOLDER_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
"""The tokens that a template sees when it is checked without a tokenizer."""
RESERVED = frozenset({"messages", "tools", "add_generation_prompt"})
_RECENT = 128
_RECENT_MESSAGES, _RECENT_CHARACTERS = 4, 20_000
"""A render is remembered if its conversation has no more messages, and its input and text no more characters."""


class TemplateTokenizer(Codec, Protocol):
    """A codec that also knows the tokens a chat template can name."""

    named_tokens: Mapping[str, str]


@dataclass
class _Render:
    rendered: client.Rendered
    ids: Ids | None = None  # None = not encoded yet. They are shared, so they cannot be written to.


class TemplateRenderer:
    """Implements :class:`rollout_inspector.streams.interfaces.Renderer`; every render runs in the sandbox. Short
    renders are remembered: the trajectories of a prompt begin alike, and rules render the same few words."""

    notes: Sequence[str] = ()  # What a report says of it.
    bridge: Callable[[Mapping[str, Any]], Extends] | None = None  # What extends a stream; None = a template cannot.
    parse: Callable[..., Message] | None = None  # What reads a reply; None = a template cannot.

    def __init__(
        self, tokenizer: TemplateTokenizer | None, chat_template: str, now: str = "", faults: Faults | None = None
    ) -> None:
        """``now``: the clock of templates that print the date. ``faults``: of all that render; None = counts alone."""
        self.tokenizer = tokenizer
        self.chat_template = chat_template
        self.chat_template_sha256 = hashlib.sha256(chat_template.encode("utf-8", "surrogatepass")).hexdigest()
        self.reads_clock = "strftime_now" in chat_template  # Whether a render may hold today's date.
        self._clock = {NOW: now} if now else {}
        self._faults = faults or Faults()
        self._recent: dict[str, _Render] = {}
        self._named = dict(tokenizer.named_tokens) if tokenizer is not None else PLACEHOLDER_TOKENS

    @cached_property
    def switches(self) -> Mapping[str, Sequence[object]]:
        """:func:`scan.switches` of the template, without what the tokenizer names."""
        return {name: values for name, values in switches(self.chat_template).items() if name not in self._named}

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
        return self._outcomes([client.RenderJob(self.variables(c), lines) for c in conversations])

    def _outcomes(self, jobs: Sequence[client.RenderJob]) -> list[client.Rendered]:
        """The outcome of each job, in order. A template that ended its sandbox several times is not rendered."""
        if refusal := self.refusal:
            return [client.Rendered(error=refusal, kind="time")] * len(jobs)
        outcomes = client.render(self.chat_template, jobs)
        if fault := next((outcome for outcome in outcomes if outcome.spoils), None):
            self._faults.add(fault.error)
        return outcomes

    @property
    def refusal(self) -> str:
        """Why this template is not rendered now, as a sentence; empty = it is."""
        return self._faults.refusal

    def rendered(self, conversation: Conversation) -> client.Rendered:
        """The render of one conversation. Raises :class:`RenderFailed`."""
        return self._render(conversation).rendered

    def _render(self, conversation: Conversation) -> _Render:
        key = self._recent_key(conversation)
        if (render := self._recent.get(key)) is None:
            rendered = self.render_many([conversation])[0].or_raise()
            render = _Render(rendered, rendered.ids)
            if key and len(render.rendered.text) <= _RECENT_CHARACTERS:
                if len(self._recent) >= _RECENT:
                    self._recent = {}
                self._recent[key] = render
        return render

    def _recent_key(self, conversation: Conversation) -> str:
        """What decides a render, as text; empty = it is not remembered."""
        variables = self.variables(conversation)
        if len(variables["messages"]) > _RECENT_MESSAGES:
            return ""
        try:
            key = json.dumps(variables)
        except (TypeError, ValueError, RecursionError):
            return ""  # the sandbox refuses it with a sentence
        return key if len(key) <= _RECENT_CHARACTERS else ""

    def render_text(self, conversation: Conversation) -> str:
        """The rendered conversation. Raises :class:`RenderFailed`."""
        return self.rendered(conversation).text

    def render_tracked(self, conversation: Conversation) -> tuple[str, tuple[tuple[int, int], ...]]:
        """The text, and its characters ``[start, stop)`` that generation blocks wrote, as ``transformers`` counts them.
        Raises :class:`RenderFailed`."""
        rendered = self.rendered(conversation)
        return rendered.text, rendered.tracked_spans

    def render_ids(self, conversation: Conversation) -> Ids:
        """The rendered conversation encoded as one text. Raises :class:`RenderFailed`."""
        if self.tokenizer is None:
            raise RenderFailed("Without a tokenizer a conversation can be rendered to text, not to ids.")
        render = self._render(conversation)
        if render.ids is None:
            render.ids = self.tokenizer.encode(render.rendered.text)
            render.ids.flags.writeable = False
        return render.ids
