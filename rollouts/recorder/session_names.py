"""What names the session of a call: a table of the headers that harnesses send, the address, or the API key. Sources:
LangSmith's and LiteLLM's lists of coding agents' headers (langchain-ai/docs#6088, BerriAI/litellm#37895), and Codex's
turn metadata (openai/codex#17374)."""

import hashlib
import json
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass

MAX_REMEMBERED = 10_000  # Sessions whose parent is remembered. Those without a call for longest are forgotten first.
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


@dataclass(frozen=True)
class Caller:
    """Who calls."""

    session: str = ""  # The trajectory of the call; empty = the conversation decides.
    agent: str = ""  # The sub-agent in it; empty = none is named.


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
            caller = self._by(harness, headers)
            if caller.session:
                return caller
        return Caller(tidy_name(of_address) or tidy_name(of_key))

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
            return Caller(root, session)
        if session in self._roots:  # a sub-agent that names its parent once
            return Caller(self._roots[session], session)
        return Caller(session, agent)

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
