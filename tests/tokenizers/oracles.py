"""What an encoder reads and gives, worked out from the tokenizer's definition."""

import json
import re
from functools import lru_cache
from pathlib import Path

from rollout_inspector.streams.trajectory import Ids
from rollout_inspector.text.tokenizers import LoadedTokenizer
from rollout_inspector.text.tokenizers.worker.definition import Definition, parse_definition, read_files
from rollout_inspector.text.tokenizers.worker.encoders import Reference
from rollout_inspector.text.tokenizers.worker.vocabulary import parts


def read_definition(folder: Path) -> Definition:
    """The definition of a tokenizer that is trusted, read in this process."""
    return parse_definition(read_files(folder))


@lru_cache(maxsize=8)
def reference(folder: Path) -> tuple[Definition, Reference]:
    """The definition of a tokenizer that is trusted, and the library's tokenizer, in this process."""
    definition = read_definition(folder)
    return definition, Reference(definition.text)


def encode_plain(tokenizer: LoadedTokenizer, text: str) -> Ids:
    """Ids ``[n]`` of content: a text that spells a control token is split like any other text."""
    definition = {**reference(tokenizer.path)[0].tokenizer, "added_tokens": [], "post_processor": None}
    return Reference(json.dumps(definition)).encode(text)


def encoder_input(tokenizer: LoadedTokenizer, text: str) -> bytes:
    """The bytes that the encoder really reads: normalised, with the space that a SentencePiece encoder puts first.

    The joined bytes of ``tokenizer.encode(text)`` equal them for every text.
    """
    contents = sorted((content for _, content, _ in reference(tokenizer.path)[0].added()), key=len, reverse=True)
    pieces = re.split(f"({'|'.join(map(re.escape, contents))})", text) if contents else [text]
    # Every second piece is an added token.
    filled = [(piece, n % 2 == 1) for n, piece in enumerate(pieces) if piece]
    read = [
        piece if is_added else _as_read(tokenizer, piece, is_first=n == 0) for n, (piece, is_added) in enumerate(filled)
    ]
    return "".join(read).encode("utf-8", "replace")


def _as_read(tokenizer: LoadedTokenizer, piece: str, is_first: bool) -> str:
    normalizer = reference(tokenizer.path)[1].raw.normalizer
    read = normalizer.normalize_str(piece) if normalizer is not None else piece
    for part in parts(reference(tokenizer.path)[0].tokenizer.get("pre_tokenizer")):
        scheme = part.get("prepend_scheme") or ("always" if part.get("add_prefix_space") else "never")
        prepends = part.get("type") in ("Metaspace", "ByteLevel") and scheme != "never"
        if prepends and (scheme == "always" or is_first) and not read.startswith((" ", "▁")):
            read = " " + read
    return read.replace("▁", " ") if tokenizer.table.kind == "metaspace" else read
