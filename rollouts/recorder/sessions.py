"""Finds the trajectory of a call: the session that a header, the address or the API key names, or the conversation that
the call continues. Sources of the headers: LangSmith's and LiteLLM's lists of those of coding agents
(langchain-ai/docs#6088, BerriAI/litellm#37895), and Codex's turn metadata (openai/codex#17374)."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.streams.prefix import shared_with_stream, stream_length
from rollout_inspector.streams.trajectory import Message, Step

MAX_REMEMBERED = 10_000
"""Conversations that a call may continue, and sessions whose parent is remembered. The oldest are forgotten first."""
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
                # A message quotes an answer whose text and calls it repeats. Other fields may differ.
                gist = _gist(messages[n]) if messages[n].get("role") == "assistant" else None
                replies = [None if reply is None else _gist(reply) for _, reply in candidates]
                quoted = (place for place, other in enumerate(replies) if gist is not None and gist == other)
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


def _gist(message: Message) -> tuple[str, list[tuple[str, str]]]:
    content = message.get("content")
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    named_calls = [(str(f.get("name")), canonical_json(f.get("arguments"))) for f in functions if isinstance(f, dict)]
    return (content or "") if isinstance(content, str) or content is None else canonical_json(content), named_calls


KEY = "session:"  # An API key ``session:NAME`` names a session; ``session:NAME:KEY`` also has the server's own key.
MAX_NAME = 200


@dataclass(frozen=True)
class Harness:
    """Which headers name a session."""

    name: str
    session: tuple[str, ...]  # The headers of the session; the first that is there decides.
    agent: str = ""  # The header of the sub-agent in that session.
    parent: str = ""  # The header of the session that began this one: this one is then a sub-agent of it.
    metadata: str = ""
    """A header that holds a JSON object with ``session_id`` and, of a sub-agent, ``agent_name`` or ``thread_id``."""


HARNESSES = (
    Harness("any, and OpenCode", ("X-Session-Id", "X-OpenCode-Session"), parent="X-Parent-Session-Id"),
    Harness("Claude Code", ("X-Claude-Code-Session-Id",), agent="X-Claude-Code-Agent-Id"),
    Harness("Codex", ("Session-Id", "Session_Id", "Conversation_Id"), metadata="X-Codex-Turn-Metadata"),
)


Caller = tuple[str, str]
"""The trajectory of a call, empty = the conversation decides; and the sub-agent in it, empty = none is named."""


def tidy_name(name: str) -> str:
    """A name as the database accepts it: printable, at most 200 characters. A longer name ends in a hash."""
    name = "".join(letter if letter.isprintable() else "\ufffd" for letter in name.strip())
    if len(name) > MAX_NAME:
        name = f"{name[:180]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
    return name


class SessionNames:
    """Names the session of each call. A session that another one began belongs to the first of them."""

    def __init__(self) -> None:
        self._roots: OrderedDict[str, str] = OrderedDict()

    def caller(self, headers: Mapping[str, str], of_address: str = "", of_key: str = "") -> Caller:
        """Who calls, by the headers of the request, else by the address, else by the API key."""
        for harness in HARNESSES:
            session, agent = self._by(harness, headers)
            if session:
                return session, agent
        return tidy_name(of_address) or tidy_name(of_key), ""

    def _by(self, harness: Harness, headers: Mapping[str, str]) -> Caller:
        names = (tidy_name(headers.get(header, "")) for header in harness.session)
        session = next((name for name in names if name), "")
        agent = tidy_name(headers.get(harness.agent, "")) if harness.agent else ""
        if harness.metadata and (turn := _object(headers.get(harness.metadata, ""))):
            session = tidy_name(_string(turn, "session_id")) or session
            thread = tidy_name(_string(turn, "thread_id"))
            agent = tidy_name(_string(turn, "agent_name")) or (thread if thread != session else "")
        parent = tidy_name(headers.get(harness.parent, "")) if harness.parent else ""
        if session and parent and (root := self._root(session, parent)) != session:
            return root, session
        if session in self._roots:  # a sub-agent that names its parent once
            return self._roots[session], session
        return session, agent

    def _root(self, session: str, parent: str) -> str:
        root = self._roots.get(parent, parent)
        if root == session:  # its own parent, or two that name each other
            return session
        self._roots[session] = root
        self._roots.move_to_end(session)
        while len(self._roots) > MAX_REMEMBERED:
            self._roots.popitem(last=False)
        return root


def session_of_key(authorization: str) -> tuple[str, str]:
    """The session that an API key names, and the ``Authorization`` for the server; both empty = it names none."""
    scheme, _, key = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not key.startswith(KEY):
        return "", ""
    session, _, own = key[len(KEY) :].partition(":")
    return session, f"Bearer {own}" if own else ""


def _object(text: str) -> dict[str, object]:
    try:
        value = json.loads(text) if text else {}
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _string(turn: Mapping[str, object], name: str) -> str:
    value = turn.get(name)
    return value if isinstance(value, str) else ""
