"""A table of role formats: what stands around a role's messages is encoded apart from their text (verl, source 4)."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.strategies.appending import BASE, FORMS, content_text, dummy_conversation
from rollout_inspector.streams.strategies.protocol import ConversationSegment, StrategyRefused, T
from rollout_inspector.streams.strategies.rendering import DUMMY, MessageDelta, RenderedPiece
from rollout_inspector.streams.trajectory import Message

_MARK, _CALL_ID = re.compile(r"content\d{3,}"), re.compile(r"callid\d{3,}")


class RoleFormats(MessageDelta):
    """``per_message`` with a format table, as verl kept one by hand for each family of models.

    The table is read from the chat template: texts before a run of messages, before and after each text, and behind
    the run. Every entry and every text is encoded alone, so two newlines that meet stay two tokens. No default system
    text is written: only the first prompt is a render of whole messages. Source: ``format_config`` of
    https://github.com/volcengine/verl/blob/fe23634116ab69cacc38e7570e3c0e344eb1c711/verl/workers/rollout/schemas.py
    """

    slug = "role_formats"
    about = (
        "What the chat template writes around each role's messages is a table of texts. Its entries and the text of "
        "each message are encoded alone, and the ids are joined."
    )

    _n_written = 0

    def foresee(self, segment: ConversationSegment) -> Iterator[Conversation]:
        yield from segment.prompt_asks[:1]
        for turn in segment.turns:
            if turn.reply is not None:
                yield Conversation([*DUMMY, turn.reply], None, segment.kwargs, False)

    def _grow(self, generation: bool, is_trained: bool) -> None:
        messages, self._n_written = self._messages[self._n_written :], len(self._messages)
        if not self._pieces:
            self._pieces.append(RenderedPiece(self._ids(messages, True)))
        elif is_trained:
            self._pieces.append(self._reply(messages[-1]))
        else:
            self._pieces += [RenderedPiece(self._context.encode(text)) for text in self._texts(messages) if text]

    def _reply(self, reply: Message) -> RenderedPiece:
        """An assistant's text with the stop token that its format ends with; both are trained."""
        prompt = self._remember("prompt", lambda: self._alone(DUMMY, True))
        text = self._alone([*DUMMY, reply], False)
        shared = common_length(prompt, text)
        if shared < len(prompt):  # the prompt begins a thought that this reply lacks: the header ends before it
            ids = self._context.encode(text[:shared])
            line = self._context.codec.decode(ids[self._context.after_last(ids, self._context.codec.special_ids) :])
            shared -= len(line.rpartition("\n")[2])
        ids = self._context.encode(text[shared:])
        ids = ids[: self._context.after_last(ids, self._context.stop_ids) or len(ids)]
        return RenderedPiece(ids, 0, len(ids))

    def _texts(self, messages: Sequence[Message]) -> list[str]:
        """The texts to encode, in their order: what stands before the messages, then each text and what follows it."""
        key = "frames", *(repr(_marked(message, 0)) for message in messages)
        first, *others = self._remember(key, lambda: self._frames(messages))
        call_ids = {_call_id(place): str(message.get("tool_call_id")) for place, message in enumerate(messages)}

        def with_ids(frame: Sequence[str]) -> list[str]:
            return [_CALL_ID.sub(lambda match: call_ids.get(match[0], match[0]), text) for text in frame]

        texts = with_ids(first)
        for message, frame in zip(messages, others, strict=True):
            texts += [content_text(message), *with_ids(frame)]
        return texts

    def _frames(self, messages: Sequence[Message]) -> list[list[str]]:
        """What the template writes before, between and behind the messages, each cut into the entries of the table."""
        frames = self._around(messages)
        entries = [
            self._remember(("entry", repr(_marked(message, 0))), partial(self._entry, message)) for message in messages
        ]
        cut = []
        for place, frame in enumerate(frames):
            suffix = entries[place - 1][1] if place else ""
            prefix = entries[place][0] if place < len(entries) else ""
            suffix = suffix if frame.startswith(suffix) else ""
            prefix = prefix if frame[len(suffix) :].endswith(prefix) else ""
            cut.append([suffix, frame[len(suffix) : len(frame) - len(prefix)], prefix])
        return cut

    def _entry(self, message: Message) -> tuple[str, str]:
        """What stands directly before and after the text of each message in a run of such messages."""
        try:
            before, between, behind = self._around([message, message])
        except (RenderFailed, StrategyRefused):
            return "", ""  # a template that takes no two in a row: the frame is one entry
        prefix = between[len(between) - common_length(before[::-1], between[::-1]) :]
        while not (self._parts_at(before, -len(prefix)) and self._parts_at(between, -len(prefix))):
            prefix = prefix[1:]
        suffix = between[: len(between) - len(prefix)]
        return prefix, suffix if behind.startswith(suffix) and self._parts_at(behind, len(suffix)) else ""

    def _parts_at(self, text: str, cut: int) -> bool:
        """Whether a text can be encoded in two parts without a control token that is cut in two."""
        are, encode, special_ids = self._context.are, self._context.encode, self._context.codec.special_ids
        whole, *parts = (int(are(encode(part), special_ids).sum()) for part in (text, text[:cut], text[cut:]))
        return not cut or whole == sum(parts)

    def _around(self, messages: Sequence[Message]) -> list[str]:
        """``[n + 1]``: the texts around n messages that follow a small conversation."""
        marked = [_marked(message, place) for place, message in enumerate(messages)]
        failure: RenderFailed | None = None
        for before in (*(dummy_conversation(marked, arguments) for arguments in FORMS), BASE):
            try:
                shorter = self._alone(before, False).rstrip()  # the separator behind a reply belongs to what follows
                longer = self._alone([*before, *marked], True)
            except RenderFailed as error:
                failure = failure or error
                continue
            if longer.startswith(shorter) and _MARK.findall(longer) == [str(message["content"]) for message in marked]:
                return _MARK.split(longer[len(shorter) :])
        raise failure or StrategyRefused(
            "role_formats reads a table of formats from the chat template, and this one does not write each new "
            "message once, as it is, behind those before. Choose tool_delta, or another strategy."
        )

    def _alone(self, messages: Sequence[Message], generation: bool) -> str:
        return self._context.renderer.render_text(Conversation(messages, None, self._kwargs, generation))

    def _remember(self, key: Any, make: Callable[[], T]) -> T:
        return self._context.cache.remember((self.slug, key, self._context.repr_of(self._kwargs)), make)


def _marked(message: Message, place: int) -> Message:
    """The message with marks in place of what differs from call to call: its text and its call's id."""
    marks = {"content": f"content{place:03}"}
    return {**message, **marks, **({"tool_call_id": _call_id(place)} if message.get("tool_call_id") else {})}


def _call_id(place: int) -> str:
    return f"callid{place:03}"  # nine letters and digits, as Mistral wants it
