"""The turns of a row and its findings, arranged for reading. Nothing here reads the database."""

import json
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain, groupby, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspector.trajectories.tokens.findings import DrawnFinding
from rollout_inspector.streams.figures import trained_words
from rollout_inspector.streams.roles import RoleTurn
from rollout_inspector.streams.token_origins import mask_runs
from rollout_inspector.streams.trajectory import Origin
from rollout_inspector.text.html.tokens import Block
from rollouts.store.trajectories.findings import worst_severity
from rollouts.store.trajectories.rows import Span


@dataclass(frozen=True)
class Turn:
    """A span of a row, as a section of the page: tokens ``[start, stop)``."""

    number: int
    role: str
    part: str
    step: int | None
    start: int
    stop: int
    n_trained: int | None  # None: only the loss mask tells it, and the mask was not read.
    findings: tuple[int, ...] = ()  # Numbers of the findings that begin in it.
    worst: str = ""  # The worst severity of these, or empty.
    finish_reason: str = ""

    @property
    def n_tokens(self) -> int:
        return self.stop - self.start


def stored_json(text: str | None) -> Any:
    """A stored JSON value; None without a text, or when the text is no JSON."""
    try:
        return json.loads(text) if text else None
    except (ValueError, RecursionError):
        return None


def roles_of(messages_json: str | None) -> list[str]:
    """The roles of a stored list of messages; empty when the text holds no such list."""
    messages = stored_json(messages_json)
    if not isinstance(messages, list):
        return []
    return [str(message.get("role", "message")) for message in messages if isinstance(message, dict)]


@lru_cache(maxsize=4096)
def role_label(part: str, roles: Sequence[str]) -> str:
    """``assistant`` for a completion; otherwise the roles of the span's messages, counted."""
    if part == "completion":
        return "assistant"
    if part == "history":
        part, roles = "prompt", ["history", *(role for role in roles if role not in ("assistant", "history"))]
    new = [role for role in roles if role not in ("assistant", "history")] if part == "delta" else list(roles)
    if not new:
        return "prompt" if part == "prompt" else "between turns" if part == "delta" else "row"
    # A short list keeps its order: "user, assistant, user".
    counts = [(role, len(list(same))) for role, same in groupby(new)]
    if len(set(new)) > 3 or len(counts) > 6:
        counts = list(Counter(new).items())
    return ", ".join(f"{role} ×{n}" if n > 1 else role for role, n in counts)


MAX_ORIGIN_SPANS = 4000
MAX_TURNS = 20_000  # A row of more messages is not cut into them.


def header_spans(turns: Sequence[RoleTurn]) -> list[Span]:
    """The spans of a row that has its own arrays and no origins, by its role headers."""
    parts = {"assistant": "reply", "prompt": "prompt"}
    return [Span(start, stop, None, parts.get(role, "message"), roles=(role,)) for start, stop, role in turns]


def cut_at_headers(spans: Sequence[Span], headers: Sequence[RoleTurn]) -> list[Span]:
    """The spans of a row; what stands between completions is cut into its messages. The header that opens a completion
    belongs to the message before it: as a part of history it opens the same turn."""
    starts, parts = [start for start, _, _ in headers], list[Span]()
    for number, span in enumerate(spans):
        inside = headers[bisect_left(starts, span.start) : bisect_left(starts, span.stop)]
        is_answered = number + 1 < len(spans) and spans[number + 1].part == "completion"
        if inside and inside[-1][2] == "assistant" and is_answered:
            inside = inside[:-1]
        if len(inside) < 2 or span.part == "completion" or len(headers) > MAX_TURNS:
            parts.append(span)
            continue
        edges = [span.start, *(start for start, _, _ in inside[1:]), span.stop]
        parts += [
            replace(span, start=start, stop=stop, roles=(role,))
            for (start, stop), (_, _, role) in zip(pairwise(edges), inside, strict=True)
        ]
    return parts


def origin_spans(origin: NDArray[np.uint8]) -> list[Span]:
    """The spans of a row that has its own arrays: sampled stretches, and the stretches between them. A row with more
    than ``MAX_ORIGIN_SPANS`` stretches stays one span, because the page would be all headers."""
    n = int(origin.size)
    if not n:
        return []
    sampled = origin == Origin.SAMPLED
    edges = sorted({0, n, *chain.from_iterable(mask_runs(sampled))})
    if len(edges) > MAX_ORIGIN_SPANS:
        return [Span(0, n, None, "row")]
    parts = ["completion" if sampled[a] else "delta" if a else "prompt" for a in edges[:-1]]
    return [Span(a, b, None, part) for (a, b), part in zip(pairwise(edges), parts, strict=True)]


def make_turns(
    spans: Iterable[tuple[int, Span]], roles: Mapping[int, Sequence[str]], findings: Sequence[DrawnFinding], row: int,
    trained_steps: frozenset[int] | None, finish_reasons: Mapping[int, str], mask: NDArray[np.bool_] | None = None,
) -> list[Turn]:
    """The turns of one row, of its spans and their numbers. ``trained_steps``: steps whose completions it trains; None:
    it has its own ``mask``."""
    in_row = [item for item in findings if item.drawn_row == row]
    turns = []
    for number, span in spans:
        n_trained: int | None = 0
        if trained_steps is None:
            n_trained = None if mask is None else int(mask[span.start : span.stop].sum())
        elif span.part == "completion" and span.step_index in trained_steps:
            n_trained = span.stop - span.start
        step = -1 if span.step_index is None else span.step_index
        here = [item for item in in_row if span.start <= item.drawn_places[0][0] < max(span.stop, span.start + 1)]
        role = "".join(span.roles) or role_label(span.part, tuple(roles.get(step, ())))
        turns.append(Turn(
            number, role, span.part, span.step_index,
            span.start, span.stop, n_trained, tuple(item.number for item in here),
            worst_severity(item.weight for item in here),
            finish_reasons.get(step, "") if span.part == "completion" else "",
        ))
    return turns


def mask_table(turns: Sequence[Turn], mask: NDArray[np.bool_]) -> list[dict[str, Any]]:
    """For each role: its turns, its tokens, and the number of trained tokens. ``mask``: ``[n]`` of the row."""
    table: dict[str, dict[str, Any]] = {}
    for turn in turns:
        line = table.setdefault(turn.role, {"role": turn.role, "turns": 0, "tokens": 0, "trained": 0})
        line["turns"] += 1
        line["tokens"] += turn.n_tokens
        line["trained"] += int(mask[turn.start : turn.stop].sum())
    return list(table.values())


@dataclass(frozen=True)
class TurnSection:
    """The part of one turn that is shown."""

    turn: Turn
    start: int
    stop: int
    url: str  # The address of the turn in the token view.
    blocks: Sequence[Block] = ()
    n_foreign: int = 0  # Tokens of the part that are trained, and not as they were sampled.

    @property
    def is_continued(self) -> bool:
        return self.start > self.turn.start

    @property
    def tokens_text(self) -> str:
        return f"tokens {self.turn.start:,}-{self.turn.stop:,}" if self.turn.n_tokens else "no tokens"

    @property
    def trained_text(self) -> str:
        n = self.turn.n_trained
        if n is None:
            return ""
        words = trained_words(n, self.turn.n_tokens)
        return words + (f", {self.n_foreign:,} not as sampled" if self.n_foreign else "")

    @property
    def findings_text(self) -> str:
        n = len(self.turn.findings)
        return f"{n} finding{'s' * (n != 1)}" if n else ""
