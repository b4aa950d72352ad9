"""What a trajectory was asked and what it answered, each as one short line for lists."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rollout_inspector.streams.trajectory import Ids, Row, Step

MAX_LINE = 160
"""Characters of a line."""
MAX_DECODED = 2_048
"""Ids that are decoded for a line, where the source has no text."""
MAX_READ = 20_000
"""Characters of a text that are looked at for its first line."""
Pieces = Callable[[Ids], Sequence[str]]
"""Ids as texts, cut at control tokens."""

_CONTROL = re.compile(r"<\|[^|<>]{1,40}\|>|</?s>|<(?:start|end)_of_turn>")
_ROLES = frozenset({"user", "assistant", "system", "tool", "model", "developer"})


class Preview(NamedTuple):
    """Empty = the source does not tell."""

    prompt: str
    """The first line of the task: of the last user message of the first request."""
    answer: str
    """The first line of the last answer, without its reasoning."""


def preview_of(steps: Sequence[Step], rows: Sequence[Row] = (), pieces: Pieces | None = None) -> Preview:
    """The lines of a trajectory. Messages and texts count first, ids only where there are none."""
    if not steps:
        return _of_row(rows[0], pieces) if rows and pieces is not None else Preview("", "")
    first, last = steps[0], steps[-1]
    prompt, answer = _asked(first), _answered(last)
    if pieces is not None:
        prompt = prompt or _of_pieces(pieces(first.prompt_ids[-MAX_DECODED:]), last=True)
        answer = answer or _of_pieces(pieces(last.completion_ids[:MAX_DECODED]))
    return Preview(prompt, answer)


def first_line(text: str) -> str:
    """The first line that says something, with single spaces, at most ``MAX_LINE`` characters."""
    for line in _CONTROL.sub(" ", text[:MAX_READ]).splitlines():
        said = " ".join(letters for letters in line.split() if letters)
        if said:
            return said if len(said) <= MAX_LINE else f"{said[: MAX_LINE - 1]}…"
    return ""


def _asked(step: Step) -> str:
    if step.request is not None:
        return _of_messages(step.request.messages)
    prompt = step.extra.get("prompt")
    if isinstance(prompt, str):
        return first_line(prompt)
    return _of_messages(prompt) if isinstance(prompt, list) else ""


def _of_messages(messages: Sequence[Any]) -> str:
    """Of the last user message; where there is none, of the last message at all."""
    said = [message for message in messages if isinstance(message, Mapping)]
    asked = next((message for message in reversed(said) if message.get("role") == "user"), None)
    chosen = asked if asked is not None else said[-1] if said else None
    return "" if chosen is None else first_line(_text_of(chosen.get("content")))


def _answered(step: Step) -> str:
    reply = step.reply
    if reply is not None:
        if said := first_line(_without_thought(_text_of(reply.get("content")))):
            return said
        for key, form in (("tool_calls", "calls {}"), ("reasoning_content", "thinks: {}"), ("reasoning", "thinks: {}")):
            if said := _calls(reply[key]) if key == "tool_calls" and reply.get(key) else _text_of(reply.get(key)):
                return first_line(form.format(said))
    return first_line(_without_thought(step.text or ""))


def _calls(calls: Any) -> str:
    """``name(arguments)`` of each call."""
    found = []
    for call in calls if isinstance(calls, list | tuple) else ():
        inner = call.get("function", call) if isinstance(call, Mapping) else None
        if isinstance(inner, Mapping):
            found.append(f"{inner.get('name', '')}({inner.get('arguments', '')})"[:MAX_LINE])
    return ", ".join(found[:5])


def _text_of(content: Any) -> str:
    """A content as text: of parts those with text, and the kind of the others in brackets."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list | tuple) else ()
    said = (
        str(part.get("text") or f"[{str(part.get('type', 'part'))[:20]}]") if isinstance(part, Mapping) else str(part)
        for part in parts
    )
    return " ".join(said)


def _without_thought(text: str) -> str:
    """What follows the reasoning; all of it where nothing follows."""
    _, closed, rest = text.rpartition("</think>")
    return rest if closed and rest.strip() else text.replace("<think>", " ")


def _of_pieces(texts: Sequence[str], last: bool = False) -> str:
    """The first line of the last or of the first stretch between control tokens that is more than a role."""
    for text in reversed(texts) if last else texts:
        said = _without_thought(text)
        head, line_end, rest = said.strip().partition("\n")
        if head.strip() in _ROLES:
            said = rest if line_end else ""
        if line := first_line(said):
            return line
    return ""


def _of_row(row: Row, pieces: Pieces) -> Preview:
    """Of a row without steps: what stands before the first trained token, and the last trained stretch."""
    trained = np.flatnonzero(row.loss_mask[: len(row.ids)])
    if not len(trained):
        return Preview(_of_pieces(pieces(row.ids[-MAX_DECODED:]), last=True), "")
    start, stop = int(trained[0]), int(trained[-1]) + 1
    gaps = np.flatnonzero(np.diff(trained) > 1)
    begin = int(trained[gaps[-1] + 1]) if len(gaps) else start
    prompt = pieces(row.ids[max(0, start - MAX_DECODED) : start])
    return Preview(_of_pieces(prompt, last=True), _of_pieces(pieces(row.ids[begin : min(stop, begin + MAX_DECODED)])))
