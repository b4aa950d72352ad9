"""How one completion was read: what each parser holds of it, where that stands in its tokens, and what is lost. Pure: a
parser is anything that makes a :class:`ParserReading`. All work is bounded, because a model may write anything."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rollout_inspector.streams.dropped_text import Stretch, unheld, unheld_tokens
from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.messages import ChatMessage, ToolCall, as_text, reply_in
from rollout_inspector.streams.trajectory import Ids

MAX_CALLS = 50  # Calls of one reading that are looked for in the tokens.
MAX_PARTS = 64  # Parts into which a text is cut to find it, where a parser has taken something out of its middle.
_MAX_NAMES, _MAX_LEAVES = 8, 20
_MAX_LOST = 20
_SHORTEST = 3  # Fewer characters are found anywhere.
_FORM = r"name|arguments|parameters|function|functions|type|tool|call|calls|id"
_OPENING = re.compile(
    rf"(?:<[^/<>][^<>]{{0,60}}>|<[\w|]{{1,30}}[=:]|\[[A-Z_]{{3,30}}\]|[\"'\s{{\[(:,=]|\b(?:{_FORM})\b)*\Z"
)
_CLOSING = re.compile(r"[\"'\s}\])]*(?:</[^<>]{1,60}>\s*|<\|[^<>]{1,60}\|>\s*|[\"'}\])]\s*)*")
_BAD = re.compile("[\udc80-\udcff]")
_ESCAPE = re.compile(r"\\u([0-9a-fA-F]{4})|\\([nrtbf\"/\\])")


@dataclass(frozen=True)
class ParserReading:
    """What a parser read of a completion."""

    content: str = ""
    reasoning: str = ""
    calls: tuple[ToolCall, ...] = ()
    error: str = ""  # Why the parser read nothing, as a sentence; empty = it did read.
    others: str = ""  # What a message holds in other fields.

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


PlacedPart = tuple[str, str, Any, list[tuple[int, int]]]
"""A part of a reading: ``reasoning``, ``content`` or ``call``; its text, of a call its name; the arguments of a call;
where it stands ``[start, stop)``, a call as its raw text with tags. No span = it is not found as it is."""


@dataclass(frozen=True)
class ReadingAudit:
    """What a reading holds of a completion, and what it does not."""

    pieces: tuple[PlacedPart, ...] = ()  # Their spans count tokens of the completion.
    lost: tuple[Stretch, ...] = ()  # Sampled words that no piece holds, at most 20 stretches.
    n_lost: int = 0  # How many stretches there are.
    added: tuple[str, ...] = ()  # Words that a piece holds and the ids do not say.
    n_unread_tokens: int = 0  # Tokens in which no piece stands: tags, and what is lost.


class Completion:
    """A completion as parsers see it: its text without the stop token, each character with its token."""

    def __init__(self, ids: Ids, codec: Codec, stop_ids: frozenset[int]) -> None:
        """``ids`` ``[C]``, the stop token included."""
        self.ids, self.codec = ids, codec
        self.n_said = len(ids) - bool(len(ids) and int(ids[-1]) in stop_ids)  # Tokens before the stop token.
        data, self._ends = codec.joined_bytes(ids[: self.n_said])
        text = data.decode("utf-8", "surrogateescape")
        codes = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), "<u4")
        sizes = 1 + (codes >= 0x80).astype(np.int64) + (codes >= 0x800) + (codes >= 0x10000)
        sizes[(codes >= 0xDC80) & (codes <= 0xDCFF)] = 1
        self.text = _BAD.sub("\ufffd", text)  # Control tokens kept. Each byte that is no UTF-8 is U+FFFD.
        self._starts = np.concatenate([[0], np.cumsum(sizes)])

    def tokens(self, start: int, stop: int) -> tuple[int, int]:
        """The tokens in which characters ``[start, stop)`` of the text stand."""
        first = int(np.searchsorted(self._ends, self._starts[start], side="right"))
        return first, int(np.searchsorted(self._ends, self._starts[stop], side="left")) + 1


def reading_of(message: Mapping[str, Any] | None) -> ParserReading:
    """A message of any source as a reading."""
    reply = reply_in(message) or ChatMessage("assistant")
    texts = [text if isinstance(text, str) else "" for text in reply.texts]
    others = "\n".join(as_text(value) for value in reply.others.values())
    return ParserReading("\n".join(texts), "\n".join(reply.reasoning), tuple(reply.calls), others=others)


def audit(completion: Completion, reading: ParserReading) -> ReadingAudit:
    """Where each part of a reading stands in a completion, and what no part holds. Never raises because of a text."""
    if reading.error:
        return ReadingAudit()
    placed = _places(completion.text, reading)
    covered = np.zeros(len(completion.ids), dtype=np.bool_)
    pieces = []
    for kind, text, arguments, spans in placed:
        tokens = [completion.tokens(a, b) for a, b in spans if b > a]
        for start, stop in tokens:
            covered[start:stop] = True
        pieces.append((kind, text, arguments, tokens))
    special = np.isin(completion.ids, np.fromiter(completion.codec.special_ids, np.int64))
    lost = unheld_tokens(completion.ids, special, completion.codec.joined_bytes, reading.held)
    texts = f"{completion.text}\n{_ESCAPE.sub(_unescaped, completion.text)}"
    added = tuple(reading.held[a:b] for a, b in unheld(reading.held, texts)) if reading.held.strip() else ()
    n_unread = int((~covered[: completion.n_said]).sum())
    return ReadingAudit(tuple(pieces), tuple(lost[:_MAX_LOST]), len(lost), added[:_MAX_LOST], n_unread)


Spans = list[tuple[int, int]]


def _places(text: str, reading: ParserReading) -> Iterator[PlacedPart]:
    """Each part; its spans count characters of the text."""
    spans_so_far: Spans = []
    after = 0
    if reading.reasoning.strip():
        spans = _found(text, reading.reasoning, 0)
        after = spans[-1][1] if spans else 0
        spans_so_far += spans
        yield "reasoning", reading.reasoning, None, spans
    if reading.content.strip():
        spans = _found(text, reading.content, after) or _found(text, reading.content, 0)
        spans_so_far += spans
        yield "content", reading.content, None, spans
    after = 0
    for number, call in enumerate(reading.calls):
        spans = _call_place(text, call, after, spans_so_far) if number < MAX_CALLS else []
        after = spans[-1][1] if spans else after
        yield "call", call.name, call.arguments, spans


def _found(text: str, piece: str, at: int) -> Spans:
    """Where a text stands from ``at`` on: as a whole, or the longest parts of it one after the other."""
    spans: Spans = []
    text_left = piece.strip()
    for _ in range(MAX_PARTS):
        if not text_left:
            break
        n = _common(text, text_left, at)
        if n < min(_SHORTEST, len(text_left)):
            text_left = text_left.partition(" ")[2].lstrip()
            continue
        start = text.find(text_left[:n], at)
        at = start + n
        stop = start + len(text_left[:n].rstrip())
        if spans and not text[spans[-1][1] : start].strip():
            spans[-1] = (spans[-1][0], stop)
        else:
            spans.append((start, stop))
        text_left = text_left[n:].lstrip()
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


def _call_place(text: str, call: ToolCall, after: int, taken: Sequence[tuple[int, int]]) -> Spans:
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
        place = opening[0]
        start = from_ + opening.start() + len(place) - len(place.lstrip())
    closing = _CLOSING.match(text, stop, min(behind, stop + 300))
    if closing is not None:
        stop += len(closing[0].rstrip())
    return [(start, stop)]


def _arguments_end(text: str, leaves: Sequence[str], at: int) -> tuple[int, int]:
    """Where the last value of a call ends that stands behind ``at``, and how many values do not stand there."""
    end, missed = at, 0
    for leaf in leaves:
        forms = {leaf, json.dumps(leaf)[1:-1], json.dumps(leaf, ensure_ascii=False)[1:-1]}
        places = [(form_start, form_start + len(form)) for form in forms if (form_start := text.find(form, end)) >= 0]
        if places:
            end = min(places)[1]
        else:
            missed += 1
    return end, missed


def _leaves(value: Any) -> Iterator[str]:
    """Every name and every value of arguments, as text, in their order; at most a few more than are looked for."""
    stack, n = [value], 0
    while stack and n < 4 * _MAX_LEAVES:
        node = stack.pop()
        n += 1
        if isinstance(node, Mapping):
            for key, item in reversed(list(node.items())[:_MAX_LEAVES]):
                stack += [item, str(key)]
        elif isinstance(node, list):
            stack += reversed(node[:_MAX_LEAVES])
        elif isinstance(node, str):
            yield node
        elif node is not None:
            yield json.dumps(node)


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else {"n": "\n", "r": "\n", "t": "\t"}.get(match[2], " ")
