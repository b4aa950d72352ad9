"""What is looked for in tokens: ids with wildcards, a text, or a regular expression; each finds ranges of a buffer."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import groupby, pairwise

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Ids
from rollout_inspector.text import expressions
from rollout_inspector.text.expressions import ExpressionTooSlow
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.jobs.search.token_buffer import TokenBuffer

MAX_IDS, MAX_TEXT = 256, 2000
REGEX_SECONDS = 2.0  # Processor time that a regular expression may take on one trajectory.
REGEX_CARRY = 1024  # Tokens before a break that are read again with what follows it.

Range = tuple[int, int]


class PatternTooSlow(Exception):
    """A regular expression takes too long, or too much memory, on one trajectory."""

    def __init__(self, trajectory: int) -> None:
        super().__init__(trajectory)
        self.trajectory = trajectory  # The number of the trajectory in the buffer.


@dataclass(frozen=True)
class Pattern:
    """What is looked for."""

    find: Callable[[TokenBuffer, ByteTable | None, int], Iterator[Range]]
    """The ranges ``[start, stop)`` of the buffer that match and start at the number or later, in order. A range may lie
    across two blocks, which no stream holds: the caller leaves it out. It may raise ``PatternTooSlow``."""
    carry: int  # How many tokens before a break a match can begin, so that it still ends behind the break.
    needs_text: bool = True  # Nothing can be found without the bytes of the tokens.
    shares_tokens: bool = True  # Two results may have tokens in common.
    token_texts: tuple[bytes, ...] = ()  # Each must be the text of one token.

    def unknown(self, tables: Sequence[ByteTable]) -> str:
        """The first token text that is a token of none of the tokenizers; empty = there is none."""
        missing = (text for text in self.token_texts if not any(len(ids_of_text(table, text)) for table in tables))
        return next(missing, b"").decode("utf-8", "replace")


Part = int | bytes | None
"""Of a pattern of ids: an id; the bytes of a token, which stand for every id with these bytes; None = any one id."""


def _find_ids(parts: Sequence[Part], buffer: TokenBuffer, table: ByteTable | None, first: int) -> Iterator[Range]:
    """Ids in a row. Occurrences may overlap."""
    choices = [_ids_of(part, table) for part in parts]
    n, ids = len(choices), buffer.ids
    if len(ids) - first < n or any(choice is not None and not len(choice) for choice in choices):
        return
    # Byte-pair encoders give rare tokens large ids, so that few places are left after the first look.
    anchor = min((len(choice), -int(choice[0]), k) for k, choice in enumerate(choices) if choice is not None)[2]
    starts = first + np.flatnonzero(_is_among(ids[first + anchor : len(ids) - (n - 1 - anchor)], choices[anchor]))
    for k, choice in enumerate(choices):
        if choice is not None and k != anchor:
            starts = starts[_is_among(ids[starts + k], choice)]
    for start in starts:
        yield int(start), int(start) + n


def _ids_of(part: Part, table: ByteTable | None) -> Ids | None:
    if isinstance(part, bytes):
        return np.zeros(0, np.int32) if table is None else ids_of_text(table, part)
    return None if part is None else np.array([part], np.int32)


def _is_among(ids: Ids, wanted: Ids | None) -> NDArray[np.bool_]:
    assert wanted is not None
    return ids == wanted[0] if len(wanted) == 1 else np.isin(ids, wanted)


@lru_cache(maxsize=256)
def ids_of_text(table: ByteTable, text: bytes) -> Ids:
    """The ids of the tokens with exactly these bytes."""
    offsets, data, _ = table.arrays()
    of_length = np.flatnonzero(np.diff(offsets.astype(np.int64)) == len(text))
    places = offsets[of_length].astype(np.int64)[:, None] + np.arange(len(text))
    same = (np.frombuffer(data, np.uint8)[places] == np.frombuffer(text, np.uint8)).all(axis=1)
    return of_length[same].astype(np.int32)


def _find_text(text: bytes, buffer: TokenBuffer, table: ByteTable | None, first: int) -> Iterator[Range]:
    """A text in the joined bytes of the tokens, exact in case. It may begin and end inside a token."""
    assert table is not None
    data, ends = table.joined(buffer.ids)
    n = len(text)
    at = int(ends[first - 1]) if first else 0
    before: Range | None = None
    while (at := data.find(text, at)) >= 0:
        if (tokens := _tokens(ends, at, at + n)) != before:
            yield tokens
        before, at = tokens, at + 1


def _find_regex(expression: str, buffer: TokenBuffer, table: ByteTable | None, first: int) -> Iterator[Range]:
    """A regular expression over the text of each block. Two ranges share no token. Raises :class:`PatternTooSlow`."""
    assert table is not None
    data, ends = table.joined(buffer.ids)
    edges = [0, *ends.tolist()] if len(buffer.ids) < 4096 else np.concatenate([[0], ends])
    blocks = pairwise([*buffer.block_starts, len(buffer.ids)])
    unsearched = (block for block in blocks if block[1] > first)
    for trajectory, of_trajectory in groupby(unsearched, lambda block: buffer.trajectory_at(block[0])):
        lows = [(int(edges[start]), int(edges[stop])) for start, stop in of_trajectory]
        texts = [data[low:high].decode("utf-8", "surrogateescape") for low, high in lows]
        at = _characters(texts[0], max(int(edges[first]) - lows[0][0], 0))
        block, start, start_bytes = 0, 0, 0  # a character of a block, and how many bytes stand before it
        try:
            for match in expressions.matches(expression, texts, REGEX_SECONDS, at):
                if match[0] != block:
                    block, start, start_bytes = match[0], 0, 0
                first_byte = start_bytes + _n_bytes(texts[block][start : match[1]])
                start, start_bytes = match[2], first_byte + _n_bytes(texts[block][match[1] : match[2]])
                yield _tokens(ends, lows[block][0] + first_byte, lows[block][0] + start_bytes)
        except ExpressionTooSlow as slow:
            raise PatternTooSlow(trajectory) from slow


def _n_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogateescape"))


def _characters(text: str, n_bytes: int) -> int:
    """How many characters the first bytes of a text are."""
    if not n_bytes or text.isascii():
        return n_bytes
    return len(text.encode("utf-8", "surrogateescape")[:n_bytes].decode("utf-8", "surrogateescape"))


def _tokens(ends: NDArray[np.int64], first: int, last: int) -> Range:
    """The tokens that hold the bytes ``[first, last)``."""
    return int(ends.searchsorted(first, "right")), int(ends.searchsorted(last - 1, "right")) + 1


# -- reading what a user writes

_PART = re.compile(r"[\s,\[\]]*(?:(\*)|(-?\d+)|`([^`]+)`|\"([^\"]+)\"|'([^']+)'|(after\b)|([^\s,\[\]]+))[\s,\[\]]*")


def read_ids(text: str) -> Pattern:
    """A pattern of ids: ``271 * 151657``, or ``271 after `</tool_response>```. Raises :class:`Refusal`."""
    if len(text) > MAX_TEXT:
        raise Refusal(f"This has {len(text):,} characters; at most {MAX_TEXT:,} are searched for.")
    parts: list[Part] = []
    behind: list[Part] | None = None
    for match in _PART.finditer(text):
        star, number, back, double, single, after, wrong = match.groups()
        token = back or double or single
        if wrong is not None:
            raise Refusal(
                f"“{wrong[:40]}” at character {match.start(7) + 1} is no id. Write ids such as 271, * for any one id, "
                "and the text of a token in quotes or backquotes."
            )
        if after is not None:
            if behind is not None or not parts:
                raise Refusal("“after” stands once, between two parts: 271 after `</tool_response>`.")
            behind, parts = parts, []
        elif star is not None:
            parts.append(None)
        elif number is not None:
            if not 0 <= (value := int(number[:12])) < 2**31:
                raise Refusal(f"There is no id {number[:20]}: ids are whole numbers from 0 to 2,147,483,647.")
            parts.append(value)
        else:
            parts.append(token.encode())
    if behind is not None:
        if not parts:
            raise Refusal("Nothing stands behind “after”: 271 after `</tool_response>`.")
        parts += behind
    if not parts:
        raise Refusal("Write at least one id, such as 271.")
    if all(part is None for part in parts):
        raise Refusal("A pattern of wildcards alone matches everywhere. Name at least one id or token.")
    if len(parts) > MAX_IDS:
        raise Refusal(f"This pattern has {len(parts):,} ids; at most {MAX_IDS} are searched for.")
    texts = tuple(part for part in parts if isinstance(part, bytes))
    return Pattern(partial(_find_ids, parts), len(parts) - 1, bool(texts), token_texts=texts)


def read_text(text: str) -> Pattern:
    """A text. Raises :class:`Refusal`."""
    if not text:
        raise Refusal("Write the text to search for.")
    if len(text) > MAX_TEXT:
        raise Refusal(f"This text has {len(text):,} characters; at most {MAX_TEXT:,} are searched for.")
    data = text.encode("utf-8", "replace")
    return Pattern(partial(_find_text, data), len(data) - 1)


def read_regex(text: str) -> Pattern:
    """A regular expression in the syntax of Python. Raises :class:`Refusal` with the place that is wrong."""
    if not text:
        raise Refusal("Write the regular expression to search for.")
    expressions.check(text)
    return Pattern(partial(_find_regex, text), REGEX_CARRY, shares_tokens=False)
