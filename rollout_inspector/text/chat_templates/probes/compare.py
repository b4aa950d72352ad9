"""Compares two renders: whether the first is a prefix of the second, in text and in tokens, and where they differ."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.interfaces import Codec, Conversation
from rollout_inspector.streams.prefix import common_length, common_prefix
from rollout_inspector.streams.trajectory import NO_IDS, Ids
from rollout_inspector.text.chat_templates.sandbox.client import Rendered

WINDOW_BEFORE, WINDOW_AFTER = 8, 24


class CharacterCodec:
    """A codec with characters in place of tokens. Chat templates are checked with it if there is no tokenizer."""

    name = "characters"
    vocab_size = 0x110000
    bos_id: int | None = None
    eos_id: int | None = None
    special_ids: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()

    def token_bytes(self, ids: Ids) -> list[bytes]:
        return [chr(int(i)).encode("utf-8", "replace") for i in ids]

    def joined_bytes(self, ids: Ids) -> tuple[bytes, NDArray[np.int64]]:
        pieces = self.token_bytes(ids)
        return b"".join(pieces), np.cumsum([len(piece) for piece in pieces], dtype=np.int64)

    def decode(self, ids: Ids) -> str:
        return "".join(chr(int(i)) for i in ids)

    def encode(self, text: str) -> Ids:
        return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype=np.int32)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        return [self.encode(text) for text in texts]


@dataclass(frozen=True, eq=False)
class RenderSide:
    """One render and its ids."""

    conversation: Conversation
    codec: Codec
    rendered: Rendered  # With ``lines``.
    ids: Ids = field(default_factory=lambda: NO_IDS)  # ``[T]``; empty where the render failed.

    @property
    def text(self) -> str:
        """The rendered text; empty where the render failed."""
        return self.rendered.text

    @property
    def error(self) -> str:
        """The sentence that says why the render failed; empty = it did not."""
        return self.rendered.error

    @cached_property
    def _starts(self) -> list[int]:
        """The character that each token starts in, and the length of the text."""
        widths = np.array([len(piece) for piece in self.codec.token_bytes(self.ids)], dtype=np.int64)
        starts = np.concatenate([[0], np.cumsum(widths)])
        # Byte offset -> character: the character that holds the byte.
        per_char = np.array([len(char.encode("utf-8", "replace")) for char in self.text], dtype=np.int64)
        ends = np.cumsum(per_char)
        return [int(i) for i in np.searchsorted(ends, starts, side="right")]

    def char_of(self, index: int) -> int:
        """The character that a token starts in."""
        starts = self._starts
        return starts[min(index, len(starts) - 1)]

    def tokens(self, start: int, stop: int) -> list[dict[str, Any]]:
        """Id, text and template line of the tokens ``[start, stop)``."""
        start, stop = max(start, 0), min(stop, len(self.ids))
        pieces = self.codec.token_bytes(self.ids[start:stop])
        return [
            {
                "id": int(self.ids[start + n]),
                "text": piece.decode("utf-8", "replace"),
                "line": self.rendered.line_at(self.char_of(start + n)),
            }
            for n, piece in enumerate(pieces)
        ]

    def to_dict(self, with_ids: bool) -> dict[str, Any]:
        """The whole render as JSON."""
        fields: dict[str, Any] = {"text": self.text, "lines": [list(pair) for pair in self.rendered.lines]}
        if self.error:
            fields["error"] = self.error
        if with_ids:
            fields["ids"] = self.ids.tolist()
            fields["tokens"] = [piece.decode("utf-8", "replace") for piece in self.codec.token_bytes(self.ids)]
        return fields


def whole_until(text: str, stop: int) -> int:
    """The nearest place from ``stop`` on at which a text can be cut: not inside a control token, nor inside a word."""
    stop = min(stop, len(text))
    opening = text.rfind("<", max(0, stop - 40), stop)
    if opening >= 0 and ">" not in text[opening:stop]:
        closing = text.find(">", stop, opening + 40)
        if closing >= 0:
            return closing + 1
    for n in range(stop, min(stop + 16, len(text))):
        if not (text[n - 1 : n].isalnum() and text[n].isalnum()):
            return n
    return min(stop + 16, len(text))


def token_start(text: str, place: int) -> int:
    """``place``, or where the control token that it lies in begins."""
    opening = text.rfind("<", max(0, place - 40), place)
    inside = opening >= 0 and ">" not in text[opening:place] and text.find(">", place, opening + 40) >= 0
    return opening if inside else place


@dataclass(frozen=True, eq=False)
class RenderComparison:
    """Is ``before`` a prefix of ``after`` (or, with ``whole``, the same)?"""

    before: RenderSide
    after: RenderSide
    whole: bool = False

    @property
    def text_passed(self) -> bool:
        return self.after.text == self.before.text if self.whole else self.after.text.startswith(self.before.text)

    @cached_property
    def _shared(self) -> int:
        return common_prefix(self.before.ids, self.after.ids)

    @property
    def passed(self) -> bool:
        """Whether it holds token for token."""
        same_length = len(self.before.ids) == len(self.after.ids)
        return self._shared == len(self.before.ids) and (same_length or not self.whole)

    @property
    def index(self) -> int | None:
        """The first token that differs; None where none does."""
        return None if self.passed else self._shared

    @property
    def char_index(self) -> int | None:
        """The first character that differs, or the one the first differing token starts in."""
        if not self.text_passed:
            return common_length(self.before.text, self.after.text)
        return None if self.passed else self.before.char_of(self._shared)

    @property
    def lines(self) -> tuple[int | None, int | None]:
        """The template lines that wrote the two sides at the first difference."""
        char = self.char_index
        if char is None:
            return None, None
        return self.before.rendered.line_at(char), self.after.rendered.line_at(char)

    @property
    def delta_ids(self) -> Ids:
        """What the second render adds; empty where it does not extend the first."""
        return self.after.ids[len(self.before.ids) :] if self.passed else NO_IDS

    @property
    def delta_text(self) -> str | None:
        """What the second render adds as text; None where it does not extend the first."""
        return self.after.text[len(self.before.text) :] if self.text_passed else None

    def lost_and_gained(self) -> tuple[str, str]:
        """The texts of both sides between the start and the end that they share."""
        before, after = self.before.text, self.after.text
        start = common_length(before, after)
        a, b = before[start:], after[start:]
        # Find the earliest place from which the rest of the first text is found in the second.
        for gone in range(len(a)):
            lost_text = a[gone : gone + 24]
            if len(lost_text) < 12:
                break
            place = b.find(lost_text)
            if place >= 0:
                return _rotated(before[:start], a[:gone], b[:place])
        return _rotated(before[:start], a, b[: whole_until(b, len(a))]) if a else (a, b)


def _rotated(shared: str, lost: str, gained: str) -> tuple[str, str]:
    """The same edit. If one side is empty, it is moved left as far as possible, so that it begins at a tag."""
    text = lost or gained
    if lost and gained:
        # A difference inside a control token is shown as a difference between two whole tokens.
        opening = shared.rfind("<", max(0, len(shared) - 16))
        head = shared[opening:] if opening >= 0 and ">" not in shared[opening:] else ""
        return head + lost, head + gained
    if not text:
        return lost, gained
    while shared and shared[-1] == text[-1]:
        text, shared = text[-1] + text[:-1], shared[:-1]
    return (text, "") if lost else ("", text)
