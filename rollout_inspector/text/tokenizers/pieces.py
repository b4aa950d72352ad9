"""Encodes a text in pieces: each stretch between two control tokens is encoded once, however often it is repeated.
Encoders first cut a text at its control tokens and encode each stretch by itself. So the ids of a text are the ids of
its stretches, joined. Where a tokenizer has rules that reach across a control token, nothing is cut."""

import re
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

from rollout_inspector.streams.trajectory import NO_IDS, Ids
from rollout_inspector.text.tokenizers.files import TokenizerUnusable
from rollout_inspector.text.tokenizers.loaded import LoadedTokenizer

MAX_KEPT = 20_000
MAX_KEPT_CHARACTERS = 20_000  # How many pieces are kept, and the characters of the longest one.
SHORT = 400  # A text with fewer characters is not compared with the text before it.


class PieceEncoder:
    """``encode`` of a tokenizer with a memory of pieces. Not thread-safe."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self._encode_batch = tokenizer.encode_batch
        self._kept: dict[str, Ids] = {}
        cuts, sample = tokenizer.pieces()
        self._longest = max(map(len, cuts), default=0)
        self._cut, self._head, self._seen = 0, NO_IDS, "\0"
        self._pattern = re.compile(f"({'|'.join(map(re.escape, cuts))})") if cuts else None
        if self._pattern is not None and not self._is_exact(sample):
            self._pattern = None

    def _is_exact(self, sample: list[str]) -> bool:
        """Whether the pieces of each text of a sample have the ids of the whole text."""
        try:
            whole = self._encode_batch(sample)
            return all(np.array_equal(self.encode(text), ids) for text, ids in zip(sample, whole, strict=True))
        except TokenizerUnusable:
            return False

    def encode(self, text: str) -> Ids:
        """The ids ``[n]`` that the tokenizer returns for the whole text. They are cached: do not write to the array."""
        if self._pattern is None:
            return self._pieces([text])[0]
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

    def prefetch(self, texts: Sequence[str]) -> None:
        """Encode all pieces of texts that come later, in one request. Each may add to the end of the one before it."""
        if self._pattern is None:
            return
        new_texts: dict[str, None] = {}
        before, cut = "\0", 0
        for text in texts:
            pieces = self._pattern.split(text[cut if text.startswith(before) else 0 :])
            new_texts.update((piece, None) for piece in pieces if piece and len(piece) <= MAX_KEPT_CHARACTERS)
            before, cut = text, len(text) - len(pieces[-1])
        if len(new_texts) <= MAX_KEPT:
            with suppress(TokenizerUnusable):  # the text on which the tokenizer fails meets the failure later
                self._pieces(list(new_texts))

    def _joined(self, pieces: Sequence[str], head: Ids = NO_IDS) -> Ids:
        encoded = self._pieces([piece for piece in pieces if piece])
        if len(encoded) == 1 and not len(head):
            return encoded[0]
        return np.concatenate([head, *encoded])

    def _remember(self, text: str, ids: Ids, pieces: Sequence[str]) -> None:
        """Keep the last place at which every text with this beginning is cut, no matter what follows. A longer control
        token that begins before this place would have to end within the text that was seen."""
        end, n_ids = len(text), len(ids)
        for index in range(len(pieces) - 1, 0, -1):
            end -= len(pieces[index])
            n_ids -= len(self._pieces([pieces[index]])[0]) if pieces[index] else 0
            # Every second piece is a control token; the cut lies after it.
            if index % 2 == 0 and end + self._longest <= len(text):
                self._cut, self._head, self._seen = end, ids[:n_ids], text[: end + self._longest]
                return

    def _pieces(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each piece. Those that are not known yet are encoded in one request."""
        cache = self._kept
        missing = [text for text in dict.fromkeys(texts) if text not in cache]
        if not missing:
            return [cache[text] for text in texts]
        new = dict(zip(missing, self._encode_batch(missing), strict=True))
        encoded = [new[text] if text in new else cache[text] for text in texts]
        if len(cache) + len(new) > MAX_KEPT:
            cache.clear()
        # A copy, because the arrays of one request share their memory.
        cache.update((text, ids.copy()) for text, ids in new.items() if len(text) <= MAX_KEPT_CHARACTERS)
        return encoded
