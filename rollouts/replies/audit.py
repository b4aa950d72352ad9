"""How one completion was read: what each parser holds of it, where that stands in its tokens, and what is lost.

Pure: a parser is anything that makes a :class:`ParserReading`. All work is bounded, because a model may write anything.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollouts.tito.interfaces import Codec
from rollouts.tito.said import Said, reply_in
from rollouts.tito.trajectory import Ids
from rollouts.tito.unheld import Stretch, unheld, unheld_tokens

MAX_CALLS = 50
"""Calls of one reading that are looked for in the tokens."""
MAX_PARTS = 64
"""Parts into which a text is cut to find it, where a parser has taken something out of its middle."""
_MAX_NAMES, _MAX_LEAVES = 8, 20
_MAX_LOST = 20
_SHORTEST = 3
"""Fewer characters are found anywhere."""
_FORM = r"name|arguments|parameters|function|functions|type|tool|call|calls|id"
_OPENING = re.compile(
    rf"(?:<[^/<>][^<>]{{0,60}}>|<[\w|]{{1,30}}[=:]|\[[A-Z_]{{3,30}}\]|[\"'\s{{\[(:,=]|\b(?:{_FORM})\b)*\Z"
)
_CLOSING = re.compile(r"[\"'\s}\])]*(?:</[^<>]{1,60}>\s*|<\|[^<>]{1,60}\|>\s*|[\"'}\])]\s*)*")
_BAD = re.compile("[\udc80-\udcff]")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\([nrtbf\"/\\])")


@dataclass(frozen=True)
class ReadCall:
    """A tool call."""

    name: str
    arguments: Any
    """A value where the parser read JSON, otherwise its text."""


@dataclass(frozen=True)
class ParserReading:
    """What a parser read of a completion."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ReadCall, ...] = ()
    error: str = ""
    """Why the parser read nothing, as a sentence; empty = it did read."""
    others: str = ""
    """What a message holds in other fields."""

    @property
    def held(self) -> str:
        """All words that it holds."""
        calls = (f"{call.name} {as_text(call.arguments)}" for call in self.calls)
        return "\n".join([self.content, self.reasoning, *calls, self.others])

    @property
    def key(self) -> str:
        """The same for two parsers that read the same."""
        calls = [[call.name, call.arguments] for call in self.calls]
        return json.dumps([self.content.strip(), self.reasoning.strip(), calls, self.error], sort_keys=True)


@dataclass(frozen=True)
class PlacedPart:
    """A part of a reading, and where it stands."""

    kind: str
    """``reasoning``, ``content`` or ``call``."""
    text: str
    """The text; of a call its name."""
    arguments: Any = None
    """Of a call."""
    spans: tuple[tuple[int, int], ...] = ()
    """Tokens ``[start, stop)`` of the completion; of a call its raw text with tags. Empty = it is not found there as it
    is."""


@dataclass(frozen=True)
class ReadingAudit:
    """What a reading holds of a completion, and what it does not."""

    pieces: tuple[PlacedPart, ...] = ()
    lost: tuple[Stretch, ...] = ()
    """Sampled words that no piece holds, at most 20 stretches."""
    n_lost: int = 0
    """How many stretches there are."""
    added: tuple[str, ...] = ()
    """Words that a piece holds and the ids do not say."""
    n_unread_tokens: int = 0
    """Tokens in which no piece stands: tags, and what is lost."""


@dataclass(frozen=True, eq=False)
class Completion:
    """A completion as parsers see it: its text without the stop token, each character with its token."""

    ids: Ids
    """``[C]``, the stop token included."""
    codec: Codec
    stop_ids: frozenset[int]
    n_said: int = field(init=False)
    """Tokens before the stop token."""
    text: str = field(init=False)
    """Control tokens kept. Each byte that is no UTF-8 is U+FFFD."""

    def __post_init__(self) -> None:
        n = len(self.ids)
        stopped = n and int(self.ids[-1]) in self.stop_ids
        said = self.ids[: n - 1] if stopped else self.ids
        data, ends = self.codec.joined_bytes(said)
        text = data.decode("utf-8", "surrogateescape")
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        sizes[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1
        values = {"n_said": len(said), "text": _BAD.sub("\ufffd", text), "_ends": ends,
                  "_starts": np.concatenate([[0], np.cumsum(sizes)])}
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """The tokens in which characters ``[start, stop)`` of the text stand."""
        starts, ends = self._starts, self._ends  # type: ignore[attr-defined]
        first = int(np.searchsorted(ends, starts[start], side="right"))
        return first, int(np.searchsorted(ends, starts[stop], side="left")) + 1


def reading_of(message: Mapping[str, Any] | None) -> ParserReading:
    """A message of any source as a reading."""
    said = reply_in(message) or Said("assistant")
    texts = [one if isinstance(one, str) else "" for one in said.texts]
    others = "\n".join(as_text(value) for value in said.others.values())
    calls = tuple(ReadCall(call.name, call.arguments) for call in said.calls)
    return ParserReading("\n".join(texts), "\n".join(said.reasoning), calls, others=others)


def audit(completion: Completion, reading: ParserReading) -> ReadingAudit:
    """Where each part of a reading stands in a completion, and what no part holds. Never raises because of a text."""
    if reading.error:
        return ReadingAudit()
    placed = _places(completion.text, reading)
    covered = np.zeros(len(completion.ids), dtype=np.bool_)
    pieces = []
    for kind, text, arguments, spans in placed:
        tokens = tuple(completion.tokens(a, b) for a, b in spans if b > a)
        for start, stop in tokens:
            covered[start:stop] = True
        pieces.append(PlacedPart(kind, text, arguments, tokens))
    special = np.isin(completion.ids, np.fromiter(completion.codec.special_ids, np.int64))
    lost = unheld_tokens(completion.ids, special, completion.codec.joined_bytes, reading.held)
    said = f"{completion.text}\n{_ESCAPE.sub(_unescaped, completion.text)}"
    added = tuple(reading.held[a:b] for a, b in unheld(reading.held, said)) if reading.held.strip() else ()
    n_unread = int((~covered[: completion.n_said]).sum())
    return ReadingAudit(tuple(pieces), tuple(lost[:_MAX_LOST]), len(lost), added[:_MAX_LOST], n_unread)


Spans = list[tuple[int, int]]


def _places(text: str, reading: ParserReading) -> Iterator[tuple[str, str, Any, Spans]]:
    """Kind, text, arguments and characters of each part."""
    taken: Spans = []
    after = 0
    if reading.reasoning.strip():
        spans = _found(text, reading.reasoning, 0)
        after = spans[-1][1] if spans else 0
        taken += spans
        yield "reasoning", reading.reasoning, None, spans
    if reading.content.strip():
        spans = _found(text, reading.content, after) or _found(text, reading.content, 0)
        taken += spans
        yield "content", reading.content, None, spans
    after = 0
    for number, call in enumerate(reading.calls):
        spans = _call_place(text, call, after, taken) if number < MAX_CALLS else []
        after = spans[-1][1] if spans else after
        yield "call", call.name, call.arguments, spans


def _found(text: str, piece: str, at: int) -> Spans:
    """Where a text stands from ``at`` on: as a whole, or the longest parts of it one after the other."""
    spans: Spans = []
    rest = piece.strip()
    for _ in range(MAX_PARTS):
        if not rest:
            break
        n = _common(text, rest, at)
        if n < min(_SHORTEST, len(rest)):
            rest = rest.partition(" ")[2].lstrip()
            continue
        start = text.find(rest[:n], at)
        at = start + n
        stop = start + len(rest[:n].rstrip())
        if spans and not text[spans[-1][1] : start].strip():
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
        rest = rest[n:].lstrip()
    return spans


def _common(text: str, piece: str, at: int) -> int:
    """The length of the longest beginning of ``piece`` that stands in ``text`` behind ``at``."""
    if text.find(piece, at) >= 0:
        return len(piece)
    least, most = 0, len(piece)
    while most - least > 1:
        middle = (least + most) // 2
        if text.find(piece[:middle], at) >= 0:
            least = middle
        else:
            most = middle
    return least


def _call_place(text: str, call: ReadCall, after: int, taken: Sequence[tuple[int, int]]) -> Spans:
    """The raw text of a call: from its name to its last argument, with the tags and brackets around both."""
    if not call.name:
        return []
    leaves = [leaf for leaf in _leaves(call.arguments) if leaf.strip()][:_MAX_LEAVES]
    best: tuple[int, int, int] | None = None
    at = text.find(call.name, after)
    n = 0
    while at >= 0 and n < _MAX_NAMES:
        inside = next((stop for start, stop in taken if start <= at < stop), None)
        if inside is None:
            n += 1
            end, missed = _arguments_end(text, leaves, at + len(call.name))
            if best is None or (missed, end - at) < (best[0], best[2] - best[1]):
                best = missed, at, end
            if not missed:
                break
        at = text.find(call.name, inside if inside is not None else at + len(call.name))
    if best is None:
        return []
    _, start, stop = best
    before = max([after, *(b for a, b in taken if b <= start)])
    behind = min([len(text), *(a for a, b in taken if a >= stop)])
    head, from_ = text[max(before, start - 300) : start], max(before, start - 300)
    opening = _OPENING.search(head)
    if opening is not None:
        found = opening[0]
        start = from_ + opening.start() + len(found) - len(found.lstrip())
    closing = _CLOSING.match(text, stop, min(behind, stop + 300))
    if closing is not None:
        stop += len(closing[0].rstrip())
    return [(start, stop)]


def _arguments_end(text: str, leaves: Sequence[str], at: int) -> tuple[int, int]:
    """Where the last value of a call ends that stands behind ``at``, and how many values do not stand there."""
    end, missed = at, 0
    for leaf in leaves:
        forms = {leaf, json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1]}
        places = [(found, found + len(form)) for form in forms if (found := text.find(form, end)) >= 0]
        if places:
            end = min(places)[1]
        else:
            missed += 1
    return end, missed


def _leaves(value: Any) -> Iterator[str]:
    """Every name and every value of arguments, as text, in their order; at most a few more than are looked for."""
    stack, n = [value], 0
    while stack and n < 4 * _MAX_LEAVES:
        one = stack.pop()
        n += 1
        if isinstance(one, Mapping):
            for key, item in reversed(list(one.items())[:_MAX_LEAVES]):
                stack += [item, str(key)]
        elif isinstance(one, list):
            stack += reversed(one[:_MAX_LEAVES])
        elif isinstance(one, str):
            yield one
        elif one is not None:
            yield json.dumps(one)


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else {"n": "\n", "r": "\n", "t": "\t"}.get(match[2], " ")


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
