"""What a tokenizer's definition says of its tokens: their bytes, which are control tokens, where a text may be cut."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.text.tokenizers.files import TokenizerUnusable
from rollout_inspector.text.tokenizers.worker.definition import Definition

MAX_VOCAB = 4_000_000
MAX_PIECE = 4_096
"""Bytes of the longest token; real ones have up to 1,000. A page repeats them as often as the token occurs."""
NO_BYTES = b""
METASPACE = "▁"
Decode = Callable[[Sequence[int]], str]


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


def _decoded_pieces(definition: Definition, decode: Decode) -> Callable[[int], bytes]:
    """For all other decoders: what a token adds to the decoded text when it follows another token."""
    words = (token_id for token_id, piece in definition.base() if piece.isalnum() and piece.isascii())
    anchor = next(words, 0)
    base = decode([anchor])

    def piece(token_id: int) -> bytes:
        text = decode([anchor, token_id])
        return (text[len(base) :] if text.startswith(base) else decode([token_id])).encode()

    return piece


def is_control(content: str, special: bool) -> bool:
    """Whether an added token is a control token. Added runs of spaces or newlines, and added plain words, are text."""
    return special or bool(content.strip() and not content.strip().isalnum())


def build(definition: Definition, decode: Decode) -> tuple[NDArray[np.uint32], bytes, NDArray[np.bool_], str]:
    """Offsets ``[V+1]``, all bytes, control mask ``[V]`` and the kind of table: the arguments of a ``ByteTable``.
    ``decode``: the text of ids, by the reference encoder. Raises :class:`TokenizerUnusable`."""
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
    decoded = None if of_piece else _decoded_pieces(definition, decode)
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
    longest = max(map(len, pieces))
    if longest > MAX_PIECE:
        raise TokenizerUnusable(f"The vocabulary has a token of {longest:,} bytes; at most {MAX_PIECE:,} are read.")
    offsets = np.zeros(size + 1, dtype=np.uint32)
    offsets[1:] = np.cumsum([len(piece) for piece in pieces])
    return offsets, b"".join(pieces), special, kind


def cut_at(definition: Mapping[str, Any]) -> list[str]:
    """The control tokens at which a text may be cut, the longest first. Empty where rules reach across them. Encoders
    look for the tokens with ``normalized: false`` before they do anything else."""
    if definition.get("truncation") or definition.get("padding"):
        return []
    before = [*parts(definition.get("pre_tokenizer")), *parts(definition.get("normalizer"))]
    if any(part.get("type") in ("Metaspace", "Prepend") or part.get("add_prefix_space") for part in before):
        return []
    tokens = [token for token in definition.get("added_tokens") or () if not token.get("normalized", True)]
    if any(token.get(rule) for token in tokens for rule in ("lstrip", "rstrip", "single_word")):
        return []
    return sorted((token["content"] for token in tokens if token["content"]), key=len, reverse=True)
