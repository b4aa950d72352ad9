"""Regular expressions of users. They are compiled and searched in a limited process, never in this one. Compiling alone
can take all memory: nested counts such as ``(?:(?:a?){9999}){9999}`` are written out. So the size of an expression is
estimated first, and the sandbox bounds what the estimate does not see."""

import re
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.text.chat_templates.sandbox.client import CPU_SECONDS, pool
from rollout_inspector.text.processes import Late, ProcessEnded

MAX_CHARACTERS = 500
MAX_PARTS = 20_000  # Parts of an expression whose counted repetitions are written out.
ANSWER_SECONDS = 30.0  # How long an overloaded machine may take for one answer.
MAX_MATCHES = 500  # Matches of one answer.
Match = tuple[int, int, int]  # Index of a text, and the characters ``[start, stop)`` of it.

_PART = re.compile(
    r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|(?P<open>\()|(?P<close>\))|\{(?P<least>\d*)(?P<comma>,?)(?P<most>\d*)\}|.",
    re.DOTALL,
)
_RECURSION = re.compile(r"\(\?(?:R|[+-]?\d+|&\w+|P>\w+)\)")


class ExpressionTooSlow(Exception):
    """An expression takes too long, or too much memory, on a text."""


def size_of(expression: str) -> int:
    """How many parts an expression has when each counted repetition is written out."""
    groups, last = [0], 0
    for part in _PART.finditer(expression):
        if part["open"]:
            groups.append(1)
        elif part["close"] and len(groups) > 1:
            last = groups.pop()
            groups[-1] += last
        elif part["comma"] is not None and (n := max(int(part["least"][:9] or 1), int(part["most"][:9] or 1))) > 1:
            groups[-1] += last * (n - 1)
            last *= n
        else:
            last = 1
            groups[-1] += 1
    return sum(groups)


def check(expression: str) -> int:
    """Whether an expression may be searched for; returns how many groups it has. Raises :class:`Refusal`."""
    if len(expression) > MAX_CHARACTERS:
        raise Refusal(f"This expression has {len(expression):,} characters; at most {MAX_CHARACTERS} are searched for.")
    if recursion := _RECURSION.search(expression):
        raise Refusal(f"The expression calls itself at character {recursion.start() + 1}; that is not searched for.")
    if (size := size_of(expression)) > MAX_PARTS:
        raise Refusal(
            f"The expression repeats so much that it has {size:,} parts; at most {MAX_PARTS:,} are searched for. "
            "Use smaller numbers in braces."
        )
    try:
        answered = _ask(expression, (), (0, 0), CPU_SECONDS, 0)
    except ExpressionTooSlow:
        raise Refusal("The expression takes too much time or memory to be read. Write a simpler one.") from None
    if answered["reverse"]:
        raise Refusal("The expression asks to search backwards, by (?r); leave that out.")
    return int(answered["groups"])


def matches(expression: str, texts: Sequence[str], seconds: float, at: int = 0, group: int = 0) -> Iterator[Match]:
    """What a checked expression matches in texts, in order, empty matches left out; two matches share no character.
    ``seconds``: processor time for all texts. ``at``: the character of the first text to begin at. ``group``: the one
    that is told. Raises :class:`ExpressionTooSlow`, and :class:`Refusal` where no process can be started."""
    place: tuple[int, int] | None = (0, at)
    while place is not None:
        answered = _ask(expression, texts, place, seconds, group)
        yield from map(tuple, answered["matches"])
        place, seconds = answered["next"], seconds - answered["seconds"]


def _ask(expression: str, texts: Sequence[str], at: tuple[int, int], seconds: float, group: int) -> dict[str, Any]:
    request = {
        "expression": expression, "texts": texts, "at": at, "seconds": seconds, "group": group, "most": MAX_MATCHES,
        "cpu_seconds": CPU_SECONDS,
    }
    until = time.monotonic() + ANSWER_SECONDS
    try:
        with pool("regular expressions").worker() as worker:
            worker.ask(request, until)
            answered: dict[str, Any] = worker.answer(until)
            worker.spoilt = answered.pop("spoilt")
    except (Late, ProcessEnded) as error:
        raise ExpressionTooSlow from error
    except RenderFailed as error:
        raise Refusal(str(error)) from error
    if answered.get("kind") == "syntax":
        raise Refusal(answered["error"])
    if "error" in answered:
        raise ExpressionTooSlow
    return answered
