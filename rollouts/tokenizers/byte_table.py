"""The bytes of every token id, built once from tokenizer.json and memory-mapped. The web process draws pages with them.

The bytes of a stream, joined, are exactly the bytes that the encoder read. A token that holds half a character keeps
its half. Opening a table needs numpy and the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollouts.tokenizers.files import (
    Definition,
    TokenizerUnusable,
    file_marks,
    read_definition,
    tokenizer_folder,
    whole_folder,
)

FORMAT = 2
"""Part of the name of a table's folder. Raise it when the content of a table changes."""
MAX_VOCAB = 4_000_000
NO_BYTES = b""
METASPACE = "▁"


class ByteTable:
    """The bytes of every token of one tokenizer. ``special`` ``[vocab_size]`` is True for control tokens."""

    def __init__(self, offsets: NDArray[np.uint32], data: bytes | mmap.mmap, special: NDArray[np.bool_], kind: str):
        self.vocab_size = len(offsets) - 1
        self.special = special
        self.kind = kind
        """``byte_level``, ``metaspace``, ``wordpiece`` or ``decoded``: how the bytes were found."""
        self._offsets = offsets
        self._data = data
        self._bytes = np.frombuffer(data, dtype=np.uint8)

    def token_bytes(self, ids: NDArray[np.int32] | Sequence[int]) -> list[bytes]:
        """The bytes of each id; ``b""`` for an id outside the vocabulary."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        known = (array >= 0) & (array < self.vocab_size)
        safe = np.where(known, array, 0)
        starts = self._offsets[safe]
        stops = np.where(known, self._offsets[safe + 1], starts)
        data = self._data
        return [data[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]

    def joined(self, ids: NDArray[np.int32] | Sequence[int]) -> tuple[bytes, NDArray[np.int64]]:
        """The bytes of a stream, and for each of its ids ``[n]`` where its bytes end. Makes no object per token."""
        array = np.asarray(ids, dtype=np.int64).reshape(-1)
        if not len(array):
            return b"", array
        known = None
        if array.view(np.uint64).max() >= self.vocab_size:  # as unsigned, a negative id is a huge one
            known = (array >= 0) & (array < self.vocab_size)
            array = np.where(known, array, 0)
        starts = self._offsets.take(array).astype(np.int64)
        lengths = self._offsets.take(array + 1) - starts
        if known is not None:
            lengths *= known
        ends = lengths.cumsum()
        places = (starts - ends + lengths).repeat(lengths)
        places += np.arange(len(places))
        return self._bytes.take(places).tobytes(), ends

    def join(self, ids: NDArray[np.int32] | Sequence[int]) -> bytes:
        """The bytes of a stream."""
        return self.joined(ids)[0]

    def text(self, ids: NDArray[np.int32] | Sequence[int]) -> str:
        """The stream as text; bytes that are not UTF-8 become U+FFFD."""
        return self.join(ids).decode("utf-8", "replace")


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """The alphabet of byte-level BPE (GPT-2): each of the 256 bytes as one printable character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    for n, byte in enumerate(b for b in range(256) if b not in set(printable)):
        alphabet[chr(256 + n)] = byte
    return alphabet


def byte_level_bytes(piece: str) -> bytes:
    """The bytes of a byte-level piece. A piece outside the alphabet stands for its own text, as in the decoder."""
    alphabet = _byte_of_char()
    try:
        return bytes([alphabet[char] for char in piece])
    except KeyError:
        return piece.encode("utf-8", "replace")


def metaspace_bytes(piece: str) -> bytes:
    """The bytes of a SentencePiece piece: ``<0xE2>`` is one byte, ``▁`` (U+2581) is a space."""
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(METASPACE, " ").encode("utf-8", "replace")


def parts(node: Any) -> Iterator[Mapping[str, Any]]:
    """A normalizer, pre-tokenizer or decoder of tokenizer.json, and every part nested in it."""
    if isinstance(node, Mapping):
        yield node
        for key in ("normalizers", "pretokenizers", "decoders", "processors"):
            for child in node.get(key) or ():
                yield from parts(child)


def kind_of(tokenizer: Mapping[str, Any]) -> str:
    """How the pieces of this tokenizer stand for bytes: ``byte_level``, ``metaspace`` or ``decoded``."""
    decoder = [part.get("type") for part in parts(tokenizer.get("decoder"))]
    before = [part.get("type") for part in parts(tokenizer.get("pre_tokenizer"))]
    if "ByteLevel" in decoder or (not decoder and "ByteLevel" in before):
        return "byte_level"
    replaced = any(
        part.get("type") == "Replace" and METASPACE in json.dumps(part, ensure_ascii=False)
        for part in [*parts(tokenizer.get("normalizer")), *parts(tokenizer.get("decoder"))]
    )
    if {"Metaspace", "ByteFallback"} & {*decoder, *before} or replaced or tokenizer["model"].get("byte_fallback"):
        return "metaspace"
    return "decoded"


def _decoded_pieces(definition: Definition) -> Callable[[int], bytes]:
    """For all other decoders: what a token adds to the decoded text when it follows another token."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_str(definition.text)
    except Exception as error:
        raise TokenizerUnusable(f"tokenizer.json cannot be loaded: {error}") from error
    words = (token_id for token_id, piece in definition.base() if piece.isalnum() and piece.isascii())
    anchor = next(words, 0)
    base = tokenizer.decode([anchor], skip_special_tokens=False)

    def piece(token_id: int) -> bytes:
        text = tokenizer.decode([anchor, token_id], skip_special_tokens=False)
        return (text[len(base) :] if text.startswith(base) else tokenizer.decode([token_id])).encode()

    return piece


def is_control(content: str, special: bool) -> bool:
    """Whether an added token is a control token. Added runs of spaces or newlines, and added plain words, are text."""
    return special or bool(content.strip() and not content.strip().isalnum())


def build(definition: Definition) -> tuple[NDArray[np.uint32], bytes, NDArray[np.bool_], str]:
    """Offsets ``[V+1]``, all bytes, control mask ``[V]`` and the kind of table. Raises :class:`TokenizerUnusable`."""
    try:
        kind = kind_of(definition.tokenizer)
        base = dict(definition.base())
        added = {token_id: (content, special) for token_id, content, special in definition.added()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise TokenizerUnusable(f"The vocabulary of tokenizer.json is malformed: {error!r}") from error
    size = max([*base, *added]) + 1
    if min([*base, *added]) < 0 or size > MAX_VOCAB:
        raise TokenizerUnusable(f"The vocabulary has ids outside 0 to {MAX_VOCAB:,}; no tokenizer has such ids.")
    of_piece = {"byte_level": byte_level_bytes, "metaspace": metaspace_bytes}.get(kind)
    decoded = None if of_piece else _decoded_pieces(definition)
    pieces: list[bytes] = [NO_BYTES] * size
    for token_id, piece in base.items():
        if decoded is not None:
            pieces[token_id] = decoded(token_id)
        elif of_piece is not None:
            pieces[token_id] = of_piece(piece)
    special = np.zeros(size, dtype=np.bool_)
    for token_id, (content, is_special) in added.items():
        byte_fallback = kind == "metaspace" and content.startswith("<0x") and len(content) == 6
        pieces[token_id] = metaspace_bytes(content) if byte_fallback else content.encode("utf-8", "replace")
        special[token_id] = is_control(content, is_special) and not byte_fallback
    offsets = np.zeros(size + 1, dtype=np.uint32)
    offsets[1:] = np.cumsum([len(piece) for piece in pieces])
    return offsets, b"".join(pieces), special, kind


def from_definition(definition: Definition) -> ByteTable:
    """A table in memory."""
    return ByteTable(*build(definition))


def byte_table(tokenizer_dir: str | Path, cache_dir: str | Path) -> ByteTable:
    """The table of a tokenizer's folder, built at first use under ``cache_dir`` and memory-mapped from there.

    Raises :class:`~rollouts.tokenizers.files.TokenizerUnusable` when the folder holds no usable tokenizer.
    """
    folder = tokenizer_folder(tokenizer_dir)
    marks = file_marks(folder, ("tokenizer.json", "tokenizer_config.json"))
    return _opened(str(folder.resolve()), str(cache_dir), marks)


@lru_cache(maxsize=32)
def _opened(folder: str, cache_dir: str, _marks: tuple[object, ...]) -> ByteTable:
    definition = None
    # The cache folder is named after the contents, so that the same tokenizer in two folders has one table.
    pointer = Path(cache_dir) / "by-folder" / f"{_key(folder, _marks)}.txt"
    if pointer.is_file():
        place = Path(cache_dir) / pointer.read_text().strip()
    else:
        definition = read_definition(folder)
        place = Path(cache_dir) / f"{definition.sha256}-{_key(json.dumps(definition.tokenizer['added_tokens']))}"
        place = place.with_name(f"{place.name}-{FORMAT}")
    if not (place / "meta.json").is_file():
        _write(place, definition or read_definition(folder))
    if not pointer.is_file():
        pointer.parent.mkdir(parents=True, exist_ok=True)
        scratch = pointer.with_suffix(f".{os.getpid()}")
        scratch.write_text(place.name)
        scratch.replace(pointer)
    return open_table(place)


def _key(*values: object) -> str:
    return hashlib.sha256(repr((FORMAT, *values)).encode()).hexdigest()[:16]


def _write(place: Path, definition: Definition) -> None:
    offsets, data, special, kind = build(definition)
    with whole_folder(place, "meta.json") as draft:
        np.save(draft / "offsets.npy", offsets)
        np.save(draft / "special.npy", special)
        # An empty file cannot be mapped, so an empty table still has one byte.
        (draft / "bytes.bin").write_bytes(data or b"\0")
        (draft / "meta.json").write_text(json.dumps({"format": FORMAT, "kind": kind, "sha256": definition.sha256}))


def open_table(place: Path) -> ByteTable:
    """A table that was written before. Needs numpy and the standard library alone."""
    # A plain view of the mapping, because indexing the ``memmap`` class is slow.
    offsets = np.load(place / "offsets.npy", mmap_mode="r").view(np.ndarray)
    special = np.load(place / "special.npy")
    kind = json.loads((place / "meta.json").read_text())["kind"]
    with (place / "bytes.bin").open("rb") as file:
        data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return ByteTable(offsets, data, special, kind)
