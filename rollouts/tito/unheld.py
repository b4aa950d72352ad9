"""What sampled ids say and no message holds: the text that a parser dropped."""

from __future__ import annotations

import re

_TAG = re.compile(r"<[^<>\s]{1,60}(?:\s[^<>]{0,60})?>|\[/?[A-Z_]{3,}\]")
_WORD = re.compile(r"\w+")
_OF_THE_FORM = {"name", "arguments", "parameters", "function", "functions", "type", "tool", "call", "calls", "id",
                "assistant", "analysis", "commentary", "final", "json", "think", "to", "null",
                "true", "false"}  # fmt: skip
SHORTEST = 3
"""Fewer words in a row are an escape or a word of the form."""


def unheld(decoded: str, held: str) -> list[tuple[int, int]]:
    """The stretches ``[start, stop)`` of a decoded completion whose words a message does not hold, in order.

    ``held``: all texts of the message. Tags and the words that the form of a call writes are left out. A stretch has at
    least three words in a row, or is all that the completion says. Words are compared, not their order.
    """
    text = _TAG.sub(lambda match: " " * len(match[0]), decoded)
    known = {word.lower() for word in _WORD.findall(held)}
    words = [match for match in _WORD.finditer(text) if match[0].lower() not in _OF_THE_FORM]
    missing = [match[0].lower() not in known for match in words]
    if words and all(missing):
        return [(words[0].start(), words[-1].end())]
    found, first = list[tuple[int, int]](), 0
    for at in range(len(words) + 1):
        if at == len(words) or not missing[at]:
            if at - first >= SHORTEST:
                found.append((words[first].start(), words[at - 1].end()))
            first = at + 1
    return found
