"""Answers requests about one tokenizer on the standard streams, within limits of memory and computing time. The first
request loads the tokenizer. Its files are read before the process is confined and parsed after that."""

import ctypes
import os
import resource
import select
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import fastokens  # noqa: F401  a confined process cannot import
import numpy as np
import tokenizers  # noqa: F401

from rollout_inspector.text.confinement import confine
from rollout_inspector.text.tokenizers import wire
from rollout_inspector.text.tokenizers.files import TokenizerUnusable
from rollout_inspector.text.tokenizers.worker.definition import parse_definition, read_files
from rollout_inspector.text.tokenizers.worker.encoders import (
    Encoder, Reference, fast_encoder, is_of_library, sample_texts
)
from rollout_inspector.text.tokenizers.worker.vocabulary import build, cut_at

LOAD_BYTES, TEXT_BYTES = 2_500_000_000, 600_000_000
"""Memory for loading, beyond what is mapped at the start; and then for texts, beyond what the tokenizer takes."""
MAX_IDS_PER_BYTE = 20
"""Ids for each byte of a text, beyond a few thousand. More are no encoding, and the parent would have to hold them."""
Answer = tuple[Mapping[str, Any], list[wire.Buffer]]


class ServedTokenizer:
    """The tokenizer of this process."""

    def __init__(self, files: Mapping[str, bytes]) -> None:
        definition = parse_definition(files)
        try:
            self.reference = Reference(definition.text)
        except BaseException as error:
            if not is_of_library(error) and not isinstance(error, ValueError):
                raise
            raise TokenizerUnusable(f"tokenizer.json cannot be loaded: {str(error)[:200]}") from error
        self.encoder: Encoder = self.reference
        self._unread: str | None = definition.text  # The definition, until the fast encoder reads it.
        offsets, data, special, kind = build(definition, self.reference.decode)
        self._added = {content: token_id for token_id, content, _ in definition.added()}
        vocab = definition.tokenizer["model"]["vocab"]
        self._vocab: Mapping[str, int] = (
            vocab if isinstance(vocab, Mapping) else {piece: token_id for token_id, (piece, _) in enumerate(vocab)}
        )
        self._pieces = {"cuts": cut_at(definition.tokenizer), "sample": sample_texts(definition.tokenizer)}
        self.about: Answer = (
            {
                "sha256": definition.sha256,
                "kind": kind,
                "named_tokens": definition.named_tokens,
                "named_ids": {name: self.id_of(text) for name, text in definition.named_tokens.items()},
                "chat_template": definition.chat_template,
                "stop_token_ids": definition.stop_token_ids,
                "tokenizer_class": definition.tokenizer_class,
            },
            [
                offsets.astype("<u4").tobytes(), data, special.tobytes(),
                wire.ints([token_id for token_id, _, special in definition.added() if special]),
            ],
        )

    def id_of(self, text: str) -> int | None:
        """The id of the token with this text, added tokens first."""
        token_id = self._added.get(text, self._vocab.get(text))
        return None if token_id is None else int(token_id)

    def answer(self, head: Mapping[str, Any], buffers: list[memoryview]) -> Answer:
        """The answer to one request."""
        match head["ask"]:
            case "encode":
                texts = wire.unpack_texts(*buffers)
                encoded = [self.encoder.encode(texts[0])] if len(texts) == 1 else self.encoder.encode_batch(texts)
                _refuse_more(sum(map(len, encoded)), len(buffers[1]))
                return {}, [*wire.pack_arrays(encoded)]
            case "offsets":
                ids, offsets = self.reference.offsets(str(buffers[0], "utf-8"))
                _refuse_more(len(ids), len(buffers[0]))
                return {}, [wire.ints(ids), wire.ints(np.array(offsets, dtype=np.int32).reshape(-1))]
            case "decode":
                return {}, [self.reference.decode(wire.as_ints(buffers[0]).tolist()).encode("utf-8", "replace")]
            case "id_of":
                return {"id": self.id_of(head["text"])}, []
            case "pieces":
                return self._pieces, []
            case "fastest":
                if self._unread is not None:
                    self.encoder = fast_encoder(self._unread, self._pieces["sample"], self.reference) or self.reference
                    self._unread = None
                return {"encoder": self.encoder.name}, []
        raise ValueError(head["ask"])


def _refuse_more(n_ids: int, n_bytes: int) -> None:
    if n_ids > 5_000 + MAX_IDS_PER_BYTE * n_bytes:
        raise TokenizerUnusable(f"The tokenizer makes {n_ids:,} ids of a text of {n_bytes:,} bytes; no tokenizer does.")


def _sentence(error: BaseException) -> str:
    if isinstance(error, TokenizerUnusable):
        return str(error)
    if isinstance(error, MemoryError):
        return "The tokenizer needs more memory than it may use."
    if isinstance(error, OSError):
        return f"A file of the tokenizer cannot be read: {error.strerror}."  # its name is a path of this machine
    if is_of_library(error):
        return f"The tokenizer library failed: {str(error)[:200]}."
    return f"The tokenizer cannot be read: {type(error).__name__}: {str(error)[:200]}."


def limit_seconds(seconds: int) -> None:
    """Let this process compute so many seconds more; then the kernel ends it."""
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (int(time.process_time()) + 1 + seconds, most))


def _limit_memory(statm: int | None) -> None:
    """Allow ``TEXT_BYTES`` beyond what is mapped now. ``statm``: the open file that tells how much that is."""
    if statm is None:
        return
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)
    os.lseek(statm, 0, os.SEEK_SET)
    n_bytes = int(os.read(statm, 100).split()[0]) * resource.getpagesize() + TEXT_BYTES
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (n_bytes if most == resource.RLIM_INFINITY else min(n_bytes, most), most))


def _read(n: int, idle_seconds: float) -> bytes:
    """Raises ``EOFError`` when the parent has closed the pipe, or has asked nothing for so long."""
    data = bytearray()
    while len(data) < n:
        if not select.select([0], [], [], idle_seconds)[0] or not (part := os.read(0, n - len(data))):
            raise EOFError
        data += part
    return bytes(data)


def _write(head: Mapping[str, Any], *buffers: wire.Buffer) -> None:
    frame = wire.pack(head, *buffers)
    unsent = memoryview(struct.pack("<I", len(frame)) + frame)
    while unsent:
        unsent = unsent[os.write(1, unsent) :]


def _requests(idle_seconds: float) -> Iterator[wire.Message]:
    with suppress(EOFError):
        while True:
            (n,) = struct.unpack("<I", _read(4, idle_seconds))
            yield wire.unpack(_read(n, idle_seconds))


def main(idle_seconds: float) -> None:
    """Answer requests until their stream ends, or none comes for so long. What a stranger's tokenizer raises is
    answered as a sentence."""
    statm = os.open("/proc/self/statm", os.O_RDONLY) if os.path.exists("/proc/self/statm") else None
    worker: ServedTokenizer | None = None
    _write({"ready": True})
    for head, buffers in _requests(idle_seconds):
        try:
            if worker is None:
                files = read_files(Path(head["folder"]))
                confine(LOAD_BYTES, threads=True)
                limit_seconds(head["seconds"])
                worker = ServedTokenizer(files)
                del files
                _limit_memory(statm)
                answered = worker.about
            else:
                limit_seconds(head["seconds"])
                if is_load := head["ask"] == "fastest":  # allow all that loading may take
                    most = resource.getrlimit(resource.RLIMIT_AS)[1]
                    resource.setrlimit(resource.RLIMIT_AS, (most, most))
                answered = worker.answer(head, buffers)
                if is_load:
                    _limit_memory(statm)
            _write(answered[0], *answered[1])
        except BaseException as error:
            # After its memory was full, a process is not trusted with the next text.
            ends = worker is not None and isinstance(error, MemoryError | SystemExit)
            _write({"error": _sentence(error), "ends": ends})
            if worker is None or ends:
                return
