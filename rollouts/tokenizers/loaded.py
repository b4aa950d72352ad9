"""The one way to a tokenizer: ``load`` returns a codec that encodes exactly, decodes to bytes, knows its stop ids."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollouts.tito.trajectory import Ids
from rollouts.tokenizers.byte_table import ByteTable, from_definition
from rollouts.tokenizers.encoders import Encoder, Reference, fast_encoder
from rollouts.tokenizers.files import Definition, TokenizerUnusable, file_marks, read_definition, tokenizer_folder


class LoadedTokenizer:
    """A tokenizer in memory. Implements :class:`rollouts.tito.interfaces.Codec`. Several threads may use it at once."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self.path = definition.folder
        self.name = definition.folder.name
        self.sha256 = definition.sha256
        """The SHA-256 of the bytes of tokenizer.json."""
        self.chat_template = definition.chat_template
        self.named_tokens: Mapping[str, str] = definition.named_tokens
        """``bos_token``, ``eos_token``, ...: the tokens that a chat template can name."""
        self.table: ByteTable = from_definition(definition)
        self.vocab_size = self.table.vocab_size
        self.special_ids = frozenset(np.flatnonzero(self.table.special).tolist())
        """Control tokens: the added tokens that the encoder matches before anything else."""
        self.skipped_ids = frozenset(token_id for token_id, _, special in definition.added() if special)
        """The ids that ``decode(skip_special_tokens=True)`` drops; a subset of ``special_ids``."""
        self._ids = {content: token_id for token_id, content, _ in definition.added()}
        self.bos_id = self._named_id("bos_token")
        self.eos_id = self._named_id("eos_token")
        eos = () if self.eos_id is None else (self.eos_id,)
        self.stop_ids = frozenset((*eos, *definition.stop_token_ids))
        """The end-of-sequence token and the end-of-sequence ids of generation_config.json."""
        text = definition.text
        try:
            self._reference = Reference(text)
        except Exception as error:
            raise TokenizerUnusable(f"tokenizer.json cannot be loaded: {error}") from error
        self._fast: Encoder = fast_encoder(definition.tokenizer, text, self._reference) or self._reference
        self.encoder = self._fast.name
        """The encoder that was found exact: ``fastokens`` or ``tokenizers``."""

    def _named_id(self, name: str) -> int | None:
        text = self.named_tokens.get(name)
        return None if text is None else self.token_id(text)

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text, added tokens first; None when there is none."""
        if text in self._ids:
            return self._ids[text]
        vocab = self.definition.tokenizer["model"]["vocab"]
        if isinstance(vocab, Mapping):
            return vocab.get(text)
        return next((token_id for token_id, (piece, _) in enumerate(vocab) if piece == text), None)

    # -- Codec

    def token_bytes(self, ids: Ids | Sequence[int]) -> list[bytes]:
        """The bytes of each id; ``b""`` for an id outside the vocabulary."""
        return self.table.token_bytes(ids)

    def joined_bytes(self, ids: Ids | Sequence[int]) -> tuple[bytes, NDArray[np.int64]]:
        """The bytes of a stream, and for each of its ids ``[n]`` where its bytes end."""
        return self.table.joined(ids)

    def decode(self, ids: Ids | Sequence[int]) -> str:
        """The text of ids, special tokens kept. Bytes that are not UTF-8 become U+FFFD."""
        if self.table.kind == "byte_level":
            return self.table.text(ids)
        # Other decoders have rules across tokens (a leading space is dropped), so the library itself decodes.
        known = [int(i) for i in ids if 0 <= int(i) < self.vocab_size]
        return self._reference.decode(known)

    def encode(self, text: str) -> Ids:
        """The ids ``[n]`` of a text. Control tokens are recognised; nothing is added (no BOS)."""
        return self._fast.encode(_whole(text))

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """``encode`` of each text, in parallel where the encoder can."""
        return self._fast.encode_batch([_whole(text) for text in texts])

    # -- beyond the protocol

    def encode_offsets(self, text: str) -> tuple[Ids, list[tuple[int, int]]]:
        """Ids and the characters ``[start, stop)`` that each id covers, by the reference encoder."""
        return self._reference.offsets(_whole(text))

    @cached_property
    def hf(self) -> Any:
        """The ``transformers`` tokenizer, loaded at first use from this folder alone. No code in the folder is run.

        ``AutoTokenizer`` imports torch: 3 s and 260 MB. A folder that names the general class does not need it.
        """
        if self.definition.tokenizer_class in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            from transformers import PreTrainedTokenizerFast as Found
        else:
            from transformers import AutoTokenizer as Found

        return Found.from_pretrained(str(self.path), trust_remote_code=False, local_files_only=True)


def _whole(text: str) -> str:
    """The text with lone surrogates, which cannot be encoded, replaced by U+FFFD, as writing to a file would do."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8", "replace")


_loaded: dict[str, tuple[tuple[object, ...], LoadedTokenizer]] = {}
_lock = threading.Lock()
_MAX_LOADED = 16
_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


def load(path: str | Path) -> LoadedTokenizer:
    """The tokenizer of a folder or of a tokenizer.json, cached until one of its files changes.

    Raises :class:`~rollouts.tokenizers.files.TokenizerUnusable` (a ``ValueError``) with a sentence for the user.
    """
    folder = tokenizer_folder(path).resolve()
    marks = file_marks(folder, _FILES)
    with _lock:
        held = _loaded.get(str(folder))
        if held is not None and held[0] == marks:
            return held[1]
        tokenizer = LoadedTokenizer(read_definition(folder))
        while len(_loaded) >= _MAX_LOADED:
            _loaded.pop(next(iter(_loaded)))
        _loaded[str(folder)] = (marks, tokenizer)
        return tokenizer
