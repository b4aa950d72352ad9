"""Finds the turns of a stream by its role headers, for rows that came without their steps."""

import re
from collections.abc import Callable, Sequence

import numpy as np

from rollout_inspector.streams.trajectory import Ids, Mask

_ROLES = {
    "system": "system", "developer": "developer",
    "user": "user", "human": "user", "inst": "user",
    "assistant": "assistant", "model": "assistant", "bot": "assistant",
    "tool": "tool", "function": "tool", "functions": "tool", "ipython": "tool", "observation": "tool",
    "environment": "tool",
}
_NO_HEADER = {"end", "eot", "eom", "sep", "call", "calls", "list", "tools", "declaration", "pad", "prefix", "suffix"}
_HEADER = re.compile(r"[ \t]*([A-Za-z]+)(?:\.[\w.\-]+)?(?:[ \t]+to=[^\n]*)?[ \t]*(?:\r?\n|\Z)")
_HEADER_BYTES = 96


RoleTurn = tuple[int, int, str]
"""Tokens ``[start, stop)`` of a stream that the header of one role opens, with the header, and the role. Roles are
``system``, ``developer``, ``user``, ``assistant``, ``tool``; ``prompt`` for text before the first header."""


def role_turns(ids: Ids, special: Mask, token_bytes: Callable[[Ids], Sequence[bytes]]) -> list[RoleTurn]:
    """The turns of a stream ``[n]``, in order and without gaps. Empty when there is no role header.

    A header is a control token that names a role (``<|user|>``), or a control token and behind it the name of a role
    (``<|im_start|>user``). Nothing else stands in that line before the next control token. ``special`` ``[n]`` marks
    the control tokens. Only control tokens and the few tokens after each are decoded.
    """
    places = np.flatnonzero(special)
    opened: list[tuple[int, str]] = []
    names, ends_at = token_bytes(ids[places]), -1
    for number, (place, name) in enumerate(zip(places.tolist(), names, strict=True)):
        end = int(places[number + 1]) if number + 1 < len(places) else len(ids)
        start, role = place, _named(name)
        if role is None and name.startswith(b"[/") and "system" not in (words := _words(name)) and (
            not _ROLES.keys().isdisjoint(words)
        ):
            # "[INST] … [/INST]": the answer follows the closing token.
            start, role = place + 1, "assistant"
        if role is None:
            behind = b"".join(token_bytes(ids[place + 1 : min(end, place + 1 + _HEADER_BYTES // 4)]))[:_HEADER_BYTES]
            header = _HEADER.match(behind.decode("utf-8", "replace"))
            role = _ROLES.get(header[1].lower()) if header else None
            if role is not None and header is not None and header.end() == len(behind.decode("utf-8", "replace")):
                ends_at = end  # nothing but the header stands before the next control token
        if role is None or start >= len(ids):
            continue
        if opened and opened[-1] == (start - 1, role):
            continue  # a header of two control tokens
        if opened and start == ends_at:
            opened[-1] = opened[-1][0], role  # a tool's result inside a message of the user
            continue
        opened.append((start, role))
    if not opened:
        return []
    if opened[0][0] > 0:
        lead_in = bool(special[: opened[0][0]].all())  # a BOS belongs to the first turn
        opened[0:1] = [(0, opened[0][1])] if lead_in else [(0, "prompt"), opened[0]]
    edges = [*(start for start, _ in opened[1:]), len(ids)]
    return [(start, stop, role) for (start, role), stop in zip(opened, edges, strict=True)]


def _words(name: bytes) -> list[str]:
    return re.findall("[a-z]+", name.decode("utf-8", "replace").lower())


def _named(name: bytes) -> str | None:
    """The role that a control token opens by its name alone."""
    words = _words(name)
    if name.startswith((b"</", b"[/")) or not _NO_HEADER.isdisjoint(words):
        return None
    return next((_ROLES[word] for word in words if word in _ROLES), None)
