"""Classes of tokens by which the gap is told apart: control, white space, digits, tool call, reasoning, other."""

from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.trajectory import Ids


class TokenClass(IntEnum):
    """What a token is. The first class that fits holds."""

    CONTROL = 0  # A control token: a role marker, a stop token, the mark of a call.
    TOOL_CALL = 1  # Between the marks that open and close a tool call.
    REASONING = 2  # Between the marks that open and close reasoning.
    WHITE_SPACE = 3
    DIGITS = 4
    OTHER = 5

    @property
    def label(self) -> str:
        return self.name.lower().replace("_", " ")


_MARKS = {
    TokenClass.TOOL_CALL: (
        ("<tool_call>", "</tool_call>"), ("<|tool_call|>", "<|/tool_call|>"),
        ("<|tool_call_begin|>", "<|tool_call_end|>"),
        ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"), ("<|python_tag|>", "<|eom_id|>"),
        ("[TOOL_CALLS]", "</s>"), ("<start_function_call>", "<end_function_call>"),
        ("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    TokenClass.REASONING: (
        ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|begin_of_thought|>", "<|end_of_thought|>"),
        ("<seed:think>", "</seed:think>"),
    ),
}
"""Tokens that open and close a stretch, in the vocabularies of today's models."""


class TokenClasses:
    """The classes of the tokens of one tokenizer."""

    def __init__(self, codec: Codec) -> None:
        every = np.arange(codec.vocab_size, dtype=np.int32)
        pieces = codec.token_bytes(every)
        table = np.full(codec.vocab_size + 1, TokenClass.OTHER, np.uint8)  # the last is an id outside the vocabulary
        for index, piece in enumerate(pieces):
            inner = piece.strip()
            if piece and not inner:
                table[index] = TokenClass.WHITE_SPACE
            elif inner.isdigit():
                table[index] = TokenClass.DIGITS
        special = [token_id for token_id in codec.special_ids if 0 <= token_id < codec.vocab_size]
        table[special] = TokenClass.CONTROL
        self._table = table
        where = {piece: index for index, piece in reversed(list(enumerate(pieces)))}
        self._marks = [
            (int(of), where[opening.encode()], where[closing.encode()])
            for of, pairs in _MARKS.items()
            for opening, closing in pairs
            if opening.encode() in where and closing.encode() in where
        ]
        for _, opening, closing in self._marks:
            table[[opening, closing]] = TokenClass.CONTROL

    def of_row(self, ids: Ids) -> NDArray[np.uint8]:
        """The class of each token of a row ``[T]``, as :class:`TokenClass` numbers. A token lies in a stretch when the
        last mark before it opens one. All ids of the row count, trained or not."""
        last = len(self._table) - 1
        classes: NDArray[np.uint8] = self._table[np.where((ids < 0) | (ids > last), last, ids)]
        inner = classes != TokenClass.CONTROL
        for of, opening, closing in reversed(self._marks):
            marks = np.flatnonzero((ids == opening) | (ids == closing))
            if len(marks):
                before = np.searchsorted(marks, np.arange(len(ids)), side="left") - 1
                opened = (before >= 0) & (ids[marks[before]] == opening)
                classes[opened & inner] = of
        return classes
