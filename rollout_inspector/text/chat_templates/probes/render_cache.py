"""Renders for checks: each conversation once, many in one round trip, encoded together."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from rollout_inspector.streams.interfaces import Codec, Conversation
from rollout_inspector.streams.trajectory import NO_IDS, Message
from rollout_inspector.text.chat_templates.probes.compare import CharacterCodec, RenderSide
from rollout_inspector.text.chat_templates.probes.message_shape import TOOLS, MessageShape, Tool, user
from rollout_inspector.text.chat_templates.probes.report import Check
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer

CONTROL_SHAPE = re.compile(r"<[|｜/]?[^<>\s]{1,40}>|\[/?[A-Z_]{2,30}\]|</s>|<s>")
"""What a control token looks like, if no tokenizer lists its control tokens."""

T = TypeVar("T")
_encoded = json.JSONEncoder(default=list).encode


class NotYet(Exception):
    """A check asked for renders that are not there yet; it is run again once they are."""


class RenderCache:
    """A chat template, the form it accepts, and the renders that its checks have asked for."""

    def __init__(
        self, renderer: TemplateRenderer, form: MessageShape, tools: Sequence[Tool] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.renderer = renderer
        self.codec: Codec = renderer.tokenizer if renderer.tokenizer is not None else CharacterCodec()
        self.form = form
        self.tools = list(TOOLS) if form.tools and tools is None else tools
        self.kwargs = kwargs or None
        self.seen: dict[str, Conversation] = {}  # Every conversation that was rendered, by key.
        self._renders: dict[str, RenderSide] = {}
        self._wanted: dict[str, Conversation] = {}

    @property
    def template(self) -> str:
        return self.renderer.chat_template

    @cached_property
    def control_pattern(self) -> re.Pattern[str]:
        """Matches the tokenizer's control tokens; without any, texts that look like control tokens."""
        ids = np.array(sorted(self.codec.special_ids), dtype=np.int32)
        texts = {piece.decode("utf-8", "replace") for piece in self.codec.token_bytes(ids)} - {""}
        if not texts:
            return CONTROL_SHAPE
        return re.compile("|".join(re.escape(text) for text in sorted(texts, key=len, reverse=True)))

    def conversation(self, messages: Sequence[Message], add_generation_prompt: bool = False) -> Conversation:
        """A conversation in the form the template accepts, with the check's own tools and kwargs."""
        return Conversation(self.form.written(messages), self.tools, self.kwargs, add_generation_prompt)

    def side(self, conversation: Conversation) -> RenderSide:
        """The render of a conversation. Raises :class:`NotYet`."""
        return self.renders(conversation)[0]

    def renders(self, *conversations: Conversation) -> list[RenderSide]:
        """The renders of conversations. Raises :class:`NotYet`, with all of them noted."""
        keys = [key_of(conversation) for conversation in conversations]
        missing = [n for n, key in enumerate(keys) if key not in self._renders]
        for n in missing:
            self._wanted[keys[n]] = conversations[n]
        if missing:
            raise NotYet
        return [self._renders[key] for key in keys]

    def fetch(self) -> None:
        """Render and encode all that was asked for."""
        conversations, self._wanted = self._wanted, {}
        self.seen |= conversations
        outcomes = self.renderer.render_many(list(conversations.values()), lines=True)
        texts = list(dict.fromkeys(outcome.text for outcome in outcomes if outcome.ok and outcome.ids is None))
        encoded = dict(zip(texts, self.codec.encode_batch(texts), strict=True))
        for (key, conversation), outcome in zip(conversations.items(), outcomes, strict=True):
            ids = outcome.ids if outcome.ids is not None else encoded.get(outcome.text, NO_IDS)
            self._renders[key] = RenderSide(conversation, self.codec, outcome, ids)

    def answer(self, checks: Sequence[Callable[[RenderCache], T]]) -> list[T]:
        """The answer of each check, in order. Renders are fetched for all checks at once."""
        answers: dict[int, T] = {}
        while len(answers) < len(checks):
            for n, check in enumerate(checks):
                if n not in answers:
                    with contextlib.suppress(NotYet):
                        answers[n] = check(self)
            if self._wanted:
                self.fetch()
        return [answers[n] for n in range(len(checks))]

    def control_tokens(self, text: str) -> list[tuple[int, str]]:
        """Offset and text of the control tokens in a text: the tokenizer's own, else what looks like one."""
        return [(match.start(), match.group()) for match in self.control_pattern.finditer(text)]

    def behind_header(self, text: str, close: int, stop: str | None) -> int:
        """Where what was sampled ends, of a turn that closes at a character of a render. A template without a stop
        token lets the model stop at the next header, which is sampled then."""
        header = self.control_pattern.match(text, close) if stop is None else None
        return close if header is None else header.end()

    def stop_text(self) -> str | None:
        """The control token right after an answer at which the model stops; None when the answer's end is open. It is
        the first one that the tokenizer names: its EOS, or a stop token of its generation config. Where none of them
        stands there, the turn's last control token is taken. Raises :class:`NotYet`."""
        once = self.side(self.conversation([user("UQ1"), self.form.assistant("ANSX1")]))
        if once.error or "ANSX1" not in once.text:
            return None
        after = once.text[once.text.rindex("ANSX1") + 5 :]
        run: list[str] = []
        end = 0
        for place, token in self.control_tokens(after):
            if place != end if run else after[:place].strip():
                break
            run.append(token)
            end = place + len(token)
        eos = () if self.codec.eos_id is None else (self.codec.eos_id,)
        stops = np.array(sorted({*eos, *getattr(self.codec, "stop_ids", ())}), dtype=np.int32)
        stop_texts = {piece.decode("utf-8", "replace") for piece in self.codec.token_bytes(stops)}
        return next((token for token in run if token in stop_texts), run[-1] if run else None)


def key_of(conversation: Conversation) -> str:
    """A key that equal conversations share."""
    messages, *others = conversation
    return _encoded([list(messages), *others])


CheckFunction = Callable[[RenderCache], Check]
"""Answers one question. It asks the cache for renders, and is called again once they are there."""
