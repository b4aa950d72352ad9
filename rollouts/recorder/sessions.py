"""Finds the trajectory of a call that names no session: the one whose conversation the call continues."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.streams.prefix import shared_with_stream, stream_length
from rollout_inspector.streams.trajectory import Message, Step

MAX_REMEMBERED = 10_000
"""How many conversations a call may still continue. The ones without a call for longest are forgotten first."""
MAX_STREAMS = 256
"""The same for conversations without messages, which are compared id by id."""


@dataclass
class _Chat:
    name: str
    reply: Message | None


@dataclass
class _Text:
    name: str
    last: Step


class Conversations:
    """Names the trajectory of each call without a session.

    A chat continues the conversation whose last request is the beginning of its messages. When several match (a group
    of one prompt), it continues the one whose answer it quotes. A text completion continues the stream that its prompt
    begins with. Every other call begins a trajectory.
    """

    def __init__(self) -> None:
        self._chats: OrderedDict[str, list[_Chat]] = OrderedDict()
        """By the hash of the last request's messages."""
        self._streams: list[_Text] = []

    def name(self, step: Step, fresh: str) -> str:
        """The trajectory of a call; ``fresh`` when the call begins one."""
        messages = step.request.messages if step.request else ()
        return self._chat(step, messages, fresh) if messages else self._text(step, fresh)

    def _chat(self, step: Step, messages: Sequence[Message], fresh: str) -> str:
        keys = _prefix_keys(messages)
        found: _Chat | None = None
        for n in range(len(messages) - 1, 0, -1):
            candidates = self._chats.get(keys[n - 1])
            if candidates:
                found = next((one for one in candidates if _quotes(messages[n], one.reply)), candidates[0])
                candidates.remove(found)
                if not candidates:
                    del self._chats[keys[n - 1]]
                break
        current = _Chat(found.name if found else fresh, step.reply)
        self._chats.setdefault(keys[-1], []).append(current)
        self._chats.move_to_end(keys[-1])
        while len(self._chats) > MAX_REMEMBERED:
            self._chats.popitem(last=False)
        return current.name

    def _text(self, step: Step, fresh: str) -> str:
        current = _Text(fresh, step)
        for one in reversed(self._streams):
            length = stream_length(one.last)
            if length and len(step.prompt_ids) > length and shared_with_stream(step.prompt_ids, one.last) == length:
                current.name = one.name
                self._streams.remove(one)
                break
        self._streams = [*self._streams, current][-MAX_STREAMS:]
        return current.name


def _prefix_keys(messages: Sequence[Message]) -> list[str]:
    """The hash of the first message, of the first two messages, and so on."""
    running = hashlib.sha256()
    keys = []
    for message in messages:
        running.update(canonical_json(message).encode() + b"\n")
        keys.append(running.hexdigest())
    return keys


def _quotes(message: Message, reply: Message | None) -> bool:
    """Whether a message repeats an answer: text and calls are equal. Other fields may differ."""
    if reply is None or message.get("role") != "assistant":
        return False
    return _gist(message) == _gist(reply)


def _gist(message: Message) -> tuple[str, list[tuple[str, str]]]:
    content = message.get("content")
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    named = [(str(f.get("name")), canonical_json(f.get("arguments"))) for f in functions if isinstance(f, dict)]
    return (content or "") if isinstance(content, str) or content is None else canonical_json(content), named
