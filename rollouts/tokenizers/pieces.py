"""Encodes a text in pieces: each stretch between two control tokens is encoded once, however often it is repeated.

Encoders first cut a text at its control tokens and encode each stretch by itself. So the ids of a text are the ids of
its stretches, joined. Where a tokenizer has rules that reach across a control token, nothing is cut.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollouts.tito.trajectory import NO_IDS, Ids
from rollouts.tokenizers.byte_table import parts
from rollouts.tokenizers.encoders import sample_texts
from rollouts.tokenizers.loaded import LoadedTokenizer

MAX_KEPT = 20_000
MAX_KEPT_CHARACTERS = 20_000
"""How many pieces are kept, and the characters of the longest one."""
SHORT = 400
"""A text with fewer characters is not compared with the text before it."""


class PieceEncoder:
    """``encode`` of a tokenizer with a memory of pieces. Not thread-safe."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self._encode = tokenizer.encode
        self._kept: dict[str, Ids] = {}
        cuts = cut_at(tokenizer.definition.tokenizer)
        self._longest = max(map(len, cuts), default=0)
        self._cut, self._head, self._seen = 0, NO_IDS, "\0"
        self._pattern = re.compile(f"({'|'.join(map(re.escape, cuts))})") if cuts else None
        if self._pattern is not None and not self._is_exact(tokenizer.definition.tokenizer):
            self._pattern = None

    def encode(self, text: str) -> Ids:
        """The ids ``[n]`` that the tokenizer returns for the whole text. They are cached: do not write to the array."""
        if self._pattern is None:
            return self._piece(text)
        if not text.isascii():  # a lone surrogate must be replaced before the text is cut
            text = text.encode("utf-8", "replace").decode("utf-8")
        if len(text) < SHORT:
            return self._joined(self._pattern.split(text))
        # A long text mostly repeats the one before it and adds to its end: all before the last control token is known.
        head = self._head if text.startswith(self._seen) else NO_IDS
        pieces = self._pattern.split(text[self._cut if len(head) else 0 :])
        ids = self._joined(pieces, head)
        self._remember(text, ids, pieces)
        return ids

    def _joined(self, pieces: Sequence[str], head: Ids = NO_IDS) -> Ids:
        kept = self._kept
        known = [kept[piece] if piece in kept else self._piece(piece) for piece in pieces if piece]
        if len(known) == 1 and not len(head):
            return known[0]
        return np.concatenate([head, *known])

    def _remember(self, text: str, ids: Ids, pieces: Sequence[str]) -> None:
        """Keep the last place at which every text with this beginning is cut, no matter what follows.

        A longer control token that begins before this place would have to end within the text that was seen.
        """
        end, n_ids = len(text), len(ids)
        for index in range(len(pieces) - 1, 0, -1):
            end -= len(pieces[index])
            n_ids -= len(self._piece(pieces[index])) if pieces[index] else 0
            # Every second piece is a control token; the cut lies after it.
            if index % 2 == 0 and end + self._longest <= len(text):
                self._cut, self._head, self._seen = end, ids[:n_ids], text[: end + self._longest]
                return

    def _piece(self, text: str) -> Ids:
        ids = self._kept.get(text)
        if ids is None:
            ids = self._encode(text)
            if len(text) <= MAX_KEPT_CHARACTERS:
                if len(self._kept) >= MAX_KEPT:
                    self._kept.clear()
                self._kept[text] = ids
        return ids

    def _is_exact(self, definition: Mapping[str, Any]) -> bool:
        """Whether the pieces of each text of a sample have the ids of the whole text."""
        return all(np.array_equal(self.encode(text), self._encode(text)) for text in sample_texts(definition))


def cut_at(definition: Mapping[str, Any]) -> list[str]:
    """The control tokens at which a text may be cut, the longest first. Empty where rules reach across them.

    Encoders look for the tokens with ``normalized: false`` before they do anything else.
    """
    if definition.get("truncation") or definition.get("padding"):
        return []
    before = [*parts(definition.get("pre_tokenizer")), *parts(definition.get("normalizer"))]
    if any(part.get("type") in ("Metaspace", "Prepend") or part.get("add_prefix_space") for part in before):
        return []
    found = [token for token in definition.get("added_tokens") or () if not token.get("normalized", True)]
    if any(token.get(rule) for token in found for rule in ("lstrip", "rstrip", "single_word")):
        return []
    return sorted((token["content"] for token in found if token["content"]), key=len, reverse=True)
