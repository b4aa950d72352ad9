"""Finds the trajectory of a call that names no session: the one whose conversation the call continues."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence

from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.streams.prefix import shared_with_stream, stream_length
from rollout_inspector.streams.trajectory import Message, Step

MAX_REMEMBERED = 10_000
"""How many conversations a call may still continue. The ones without a call for longest are forgotten first."""
MAX_STREAMS = 256  # The same for conversations without messages, which are compared id by id.


class Conversations:
    """Names the trajectory of each call without a session. A chat continues the conversation whose last request is the
    beginning of its messages. When several match (a group of one prompt), it continues the one whose answer it quotes.
    A text completion continues the stream that its prompt begins with. Every other call begins a trajectory."""

    def __init__(self) -> None:
        self._chats: OrderedDict[str, list[tuple[str, Message | None]]] = OrderedDict()
        """Hash of the last request's messages -> names and last replies."""
        self._answers: OrderedDict[str, str] = OrderedDict()
        """Id of an answer -> name, for requests that name the answer they go on from."""
        self._streams: list[tuple[str, Step]] = []  # Names and last steps of conversations without messages.

    def name(self, step: Step, fresh: str) -> str:
        """The trajectory of a call; ``fresh`` when the call begins one."""
        messages = step.request.messages if step.request else ()
        previous = step.extra.get("request", {}).get("previous_response_id")
        if isinstance(previous, str) and previous in self._answers:
            name = self._answers[previous]
        else:
            name = self._chat(step, messages, fresh) if messages else self._text(step, fresh)
        answer = step.extra.get("response", {}).get("id")
        if isinstance(answer, str):
            self._answers[answer] = name
            while len(self._answers) > MAX_REMEMBERED:
                self._answers.popitem(last=False)
        return name

    def _chat(self, step: Step, messages: Sequence[Message], fresh: str) -> str:
        keys = _prefix_keys(messages)
        name = fresh
        for n in range(len(messages) - 1, 0, -1):
            if candidates := self._chats.get(keys[n - 1]):
                quoted = (place for place, (_, reply) in enumerate(candidates) if _quotes(messages[n], reply))
                name, _ = candidates.pop(next(quoted, 0))
                if not candidates:
                    del self._chats[keys[n - 1]]
                break
        self._chats.setdefault(keys[-1], []).append((name, step.reply))
        self._chats.move_to_end(keys[-1])
        while len(self._chats) > MAX_REMEMBERED:
            self._chats.popitem(last=False)
        return name

    def _text(self, step: Step, fresh: str) -> str:
        name = fresh
        for place, (candidate, last) in reversed(list(enumerate(self._streams))):
            length = stream_length(last)
            if length and len(step.prompt_ids) > length and shared_with_stream(step.prompt_ids, last) == length:
                name = candidate
                del self._streams[place]
                break
        self._streams = [*self._streams, (name, step)][-MAX_STREAMS:]
        return name


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
    named_calls = [(str(f.get("name")), canonical_json(f.get("arguments"))) for f in functions if isinstance(f, dict)]
    return (content or "") if isinstance(content, str) or content is None else canonical_json(content), named_calls
