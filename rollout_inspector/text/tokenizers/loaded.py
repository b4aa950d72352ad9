"""The one way to a tokenizer: ``load`` returns a codec that encodes exactly, decodes to bytes, knows its stop ids.

A tokenizer is a program that strangers may have written: its patterns can run for hours and take all memory. So its
files are parsed, and its library runs, in a limited process (``worker``). What stays here is the
table of the tokens' bytes.
"""

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.trajectory import Ids
from rollout_inspector.text.tokenizers import limited, wire
from rollout_inspector.text.tokenizers.byte_table import ByteTable
from rollout_inspector.text.tokenizers.files import WANTED, TokenizerUnusable, file_marks, tokenizer_folder

PART_CHARACTERS = 4_000_000  # Texts that are encoded in one request hold so many characters, or are one text.


class LoadedTokenizer:
    """A tokenizer. Implements :class:`rollout_inspector.streams.interfaces.Codec`. Several threads may use it at once.
    What encodes or decodes raises :class:`TokenizerUnusable` where the tokenizer fails on a text, or takes too long or
    too much memory for it."""

    def __init__(self, folder: Path, nice: int = 0) -> None:
        self._process = limited.TokenizerProcess(folder, nice)
        about, (offsets, data, special, skipped) = self._process.load()
        self.path = folder
        self.name = folder.name
        self.sha256: str = about["sha256"]  # The SHA-256 of the bytes of tokenizer.json.
        self.chat_template: str | None = about["chat_template"]
        self.named_tokens: Mapping[str, str] = about["named_tokens"]
        """``bos_token``, ``eos_token``, ...: the tokens that a chat template can name."""
        control = np.frombuffer(special, np.bool_).copy()
        self.table = ByteTable(
            np.frombuffer(offsets, dtype="<u4").astype(np.uint32), bytes(data) or b"\0", control, about["kind"]
        )
        self.vocab_size = self.table.vocab_size
        self.special_ids = frozenset(np.flatnonzero(self.table.special).tolist())
        """Control tokens: the added tokens that the encoder matches before anything else."""
        self.skipped_ids = frozenset(wire.as_ints(skipped).tolist())
        """The ids that ``decode(skip_special_tokens=True)`` drops; a subset of ``special_ids``."""
        self.bos_id: int | None = about["named_ids"].get("bos_token")
        self.eos_id: int | None = about["named_ids"].get("eos_token")
        eos = () if self.eos_id is None else (self.eos_id,)
        self.stop_ids: frozenset[int] = frozenset((*eos, *about["stop_token_ids"]))
        """The end-of-sequence token and the end-of-sequence ids of generation_config.json."""
        self._class: str = about["tokenizer_class"]

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
        known_ids = np.asarray(ids, dtype=np.int64).reshape(-1)
        known_ids = known_ids[(known_ids >= 0) & (known_ids < self.vocab_size)]
        return str(self._process.ask("decode", wire.ints(known_ids))[1][0], "utf-8")

    def encode(self, text: str) -> Ids:
        """The ids ``[n]`` of a text. Control tokens are recognised; nothing is added (no BOS)."""
        return self._encode([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """``encode`` of each text, in parallel where the encoder can, and in few requests to the process."""
        return [ids for part in _parts(texts) for ids in self._encode(part)]

    def _encode(self, texts: Sequence[str]) -> list[Ids]:
        return wire.unpack_arrays(*self._process.ask("encode", *wire.pack_texts(texts))[1])

    # -- beyond the protocol

    @property
    def encoder(self) -> str:
        """What encodes now: ``fastokens`` or ``tokenizers``."""
        return self._process.encoder

    def fastest(self) -> str:
        """The name of the fastest encoder that is exact for this tokenizer, which encodes from now on. Loads it."""
        return self._process.ask("fastest")[0]["encoder"]

    def encode_offsets(self, text: str) -> tuple[Ids, list[tuple[int, int]]]:
        """Ids and the characters ``[start, stop)`` that each id covers, by the reference encoder."""
        ids, offsets = self._process.ask("offsets", wire.pack_texts([text])[1])[1]
        return wire.as_ints(ids), [(start, stop) for start, stop in wire.as_ints(offsets).reshape(-1, 2).tolist()]

    def token_id(self, text: str) -> int | None:
        """The id of the token with this text, added tokens first; None when there is none."""
        return self._process.ask("id_of", text=text)[0]["id"]

    def pieces(self) -> tuple[list[str], list[str]]:
        """The control tokens at which a text may be cut, the longest first; and texts on which to try that."""
        about = self._process.ask("pieces")[0]
        return about["cuts"], about["sample"]

    def close(self) -> None:
        """End the process of this tokenizer; the next request starts it again."""
        self._process.close()

    @cached_property
    def hf(self) -> Any:
        """The ``transformers`` tokenizer, loaded into this process. For tokenizers of configured models alone.
        ``AutoTokenizer`` imports torch: 3 s and 260 MB. A folder that names the general class does not need it. No code
        in the folder is run, but nothing limits what the tokenizer itself does."""
        if self._class in ("PreTrainedTokenizerFast", "TokenizersBackend"):
            from transformers import PreTrainedTokenizerFast as Found
        else:
            from transformers import AutoTokenizer as Found

        return Found.from_pretrained(str(self.path), trust_remote_code=False, local_files_only=True)


def _parts(texts: Sequence[str]) -> Iterator[list[str]]:
    part: list[str] = []
    n = 0
    for text in texts:
        if part and n + len(text) > PART_CHARACTERS:
            yield part
            part, n = [], 0
        part.append(text)
        n += len(text)
    if part:
        yield part


MAX_LOADED, MAX_FAILED = 16, 100
FAILED_SECONDS = 300.0
"""A folder that could not be loaded is not tried again for so long, unless one of its files changes."""
Marks = tuple[object, ...]
_loaded: dict[str, tuple[Marks, LoadedTokenizer]] = {}
_failed: dict[str, tuple[Marks, float, str]] = {}
_loading: dict[str, threading.Lock] = {}
"""One lock for each folder that is being loaded: no tokenizer waits for another one."""


def load(path: str | Path, nice: int = 0) -> LoadedTokenizer:
    """The tokenizer of a folder or of a tokenizer.json, cached until one of its files changes. ``nice``: how much less
    urgent than this process its own process is, if it is not loaded yet. Raises :class:`TokenizerUnusable` (a
    ``ValueError``) with a sentence for the user."""
    folder = tokenizer_folder(path).resolve()
    name, marks = str(folder), file_marks(folder, WANTED)
    if (loaded := _known(name, marks)) is not None:
        return loaded
    turn = _loading.setdefault(name, threading.Lock())
    if not turn.acquire(timeout=limited.WAIT_SECONDS):
        raise limited.TokenizerBusy("The tokenizer is being loaded. Try again in a minute.")
    try:
        if (loaded := _known(name, marks)) is not None:
            return loaded
        try:
            tokenizer = LoadedTokenizer(folder, nice)
        except limited.TokenizerBusy:
            raise
        except TokenizerUnusable as error:
            _put(_failed, MAX_FAILED, name, (marks, time.monotonic() + FAILED_SECONDS, str(error)))
            raise
        _put(_loaded, MAX_LOADED, name, (marks, tokenizer))
        return tokenizer
    finally:
        _loading.pop(name, None)
        turn.release()


def _known(name: str, marks: Marks) -> LoadedTokenizer | None:
    failed, tokenizer = _failed.get(name), _loaded.get(name)
    if failed is not None and failed[0] == marks and time.monotonic() < failed[1]:
        raise TokenizerUnusable(failed[2])
    return tokenizer[1] if tokenizer is not None and tokenizer[0] == marks else None


def _put(held: dict[str, Any], most: int, name: str, value: Any) -> None:
    held.pop(name, None)
    while len(held) >= most:
        held.pop(next(iter(held)), None)
    held[name] = value


os.register_at_fork(after_in_child=_loading.clear)
