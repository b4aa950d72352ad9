"""A file as numbered lines: compressed or not, never in memory as a whole, with limits against zip bombs."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, BinaryIO, Literal

from rollout_inspector.formats import limits
from rollout_inspector.formats.containers import parquet
from rollout_inspector.formats.containers.compression import DAMAGE, PACKED, unpacking
from rollout_inspector.formats.containers.file_part import FilePart, SessionLines, Slice
from rollout_inspector.formats.containers.json_array import ARRAY, elements, objects
from rollout_inspector.formats.containers.refusals import BadLine, FileRefused

CONVERT = (
    "Pickles can run code when they are opened, so they are never loaded here. Convert it on the machine that wrote it "
    "with `python manage.py convert_pickle IN OUT`, and import what that writes."
)

Kind = Literal["plain", "gzip", "zstd", "parquet"]


@dataclass(frozen=True)
class SourceLine:
    """One line that is not blank."""

    number: int
    """1-based. In a file of one JSON array, or of objects over several lines, it counts elements or objects."""
    data: bytes | None  # None = beyond a limit.
    problem: str = ""  # The sentence that says which limit.

    def checked(self) -> bytes:
        """The line. Raises :class:`BadLine` when it is beyond a limit."""
        if self.data is None:
            raise BadLine(self.problem)
        return self.data


class Source:
    """A file that can be opened again and again."""

    def __init__(self, name: str, opener: Callable[[], BinaryIO], size: int) -> None:
        self.name = name
        self.path = name  # The name with its folders, as far as they are known: a folder may tell the training step.
        self.folder: Path | None = None  # That it stands in; None for a file that stands alone, such as an upload.
        self.size = size  # Bytes on disk, of a compressed file its compressed size.
        self.opened = opener  # Returns the file itself, packed or not. The caller closes it.
        self._raw: BinaryIO | None = None
        self._n_own = 0
        self.part: FilePart | None = None  # The part of the file that is read; None = all of it.
        self.line = 0  # The number of the last line that :meth:`lines` yielded.
        self.only: int | None = None  # The number of the only line that :meth:`lines` yields; None = all.
        self.is_document = False
        """The file holds JSON objects over many lines. Each object is read as a line, with the limit of a line."""
        self.on_line: Callable[[], None] = lambda: None  # Called before each line. It may raise to stop the reading.

    @classmethod
    def of_path(cls, path: str | Path, name: str | None = None, alone: bool = False, buffer: int = 1 << 20) -> Source:
        """A file where it lies. ``alone``: no file beside it is read, because its folder is not its owner's.
        ``buffer``: bytes that are read at once, of which a short part of a file needs few. Raises :class:`FileRefused`
        when there is no such file or it cannot be read."""
        path = Path(path)
        try:
            if not path.is_file():
                raise FileRefused(f"There is no file {path}.")
            with path.open("rb"):
                pass
            source = cls(name or path.name, lambda: path.open("rb", buffer), path.stat().st_size)
            source.path = "/".join(path.parts[-4:])
            source.folder = None if alone else path.parent
            return source
        except OSError as error:
            raise FileRefused(f"{path} cannot be read: {error.strerror}.") from error

    @classmethod
    def of_bytes(cls, data: bytes, name: str = "file.jsonl") -> Source:
        return cls(name, lambda: io.BytesIO(data), len(data))

    def neighbour(self, *parts: str) -> Source | None:
        """A file by its path from the folder of this one; None where there is none. Links are not followed."""
        path = None if self.folder is None else self.folder.joinpath(*parts)
        return Source.of_path(path) if path is not None and path.is_file() and not path.is_symlink() else None

    def of_part(self, part: FilePart, beside: bool = False) -> Source:
        """The same file, of which a part is read, as :attr:`Format.cut` of its format made it. Lines have the numbers
        that they have in the file. ``size`` and ``position`` are those of the part. ``beside``: the files beside it are
        read too."""
        if part.groups is not None or part.sessions is not None:
            source = Source(self.name, self.opened, part.size)
        else:
            source = Source(self.name, lambda: io.BufferedReader(Slice(self.opened(), part), 1 << 20), part.size)
        source.part, source.path, source.folder = part, self.path, self.folder if beside else None
        return source

    @property
    def position(self) -> int:
        """Bytes of the file on disk that were read; 0 before the first line."""
        raw = self._raw
        if raw is None:
            return 0
        if self.part is not None and self.part.sessions is not None:
            return self._n_own
        if self.part is not None and self.part.packed is not None and not raw.closed:
            return self.size * raw.tell() // self.part.packed[2]
        if self.part is not None and self.part.groups is not None and not raw.closed:
            return min(max(raw.tell() - self.part.start, 0), self.size)
        return self.size if raw.closed else min(raw.tell(), self.size)

    def kind(self) -> Kind:
        """The kind of the file by its first bytes. Raises :class:`FileRefused` for kinds that are never read."""
        if self.part is not None:
            return "plain" if self.part.groups is None else "parquet"
        with self.opened() as raw:
            head = raw.read(4096)
        if not head:
            raise FileRefused(f"{self.name} is empty.")
        if head.startswith(PACKED):
            return "gzip" if head.startswith(PACKED[0]) else "zstd"
        if head.startswith(b"PAR1"):
            return "parquet"
        _refuse_binary(head, self.name)
        return "plain"

    def open(self) -> IO[bytes]:
        """A stream of the unpacked bytes. Reading raises :class:`FileRefused` when a file grows beyond the limits."""
        kind = self.kind()
        self._raw = raw = self.opened()
        if kind == "plain":
            return raw
        assert kind != "parquet"
        stream = io.BufferedReader(_Bounded(unpacking(raw, kind), raw, self.name), 1 << 20)
        try:
            head = stream.peek(4096)[:4096]
        except DAMAGE as error:
            raise FileRefused(f"{self.name} is damaged or cut off: {error}.") from error
        if head.startswith((*PACKED, b"PAR1")):
            raise FileRefused(f"{self.name} holds another packed file. Unpack it once, and import what comes out.")
        _refuse_binary(head, self.name)
        return stream

    def lines(self) -> Iterator[SourceLine]:
        """Yields every line that is not blank. Raises :class:`FileRefused` for a damaged or hostile file."""
        for line in self._lines():
            if self.only is not None and line.number != self.only:
                continue
            self.line = line.number
            yield line
            if self.only is not None:
                return

    def _lines(self) -> Iterator[SourceLine]:
        if self.kind() == "parquet":
            yield from self._parquet_rows()
            return
        limit = limits.current().limits.line_bytes
        with self.open() as stream:
            if self.part is not None and self.part.sessions is not None:
                yield from self._session_lines(stream, self.part.sessions, limit)
                return
            if self.is_document:
                first = self._read(stream.readline, 1 << 20).removeprefix(b"\xef\xbb\xbf")
                values = objects(self._pieces(first, stream), limit)
                yield from (_checked(n, data) for n, data in enumerate(values, start=1))
                return
            number, blank = 0 if self.part is None else self.part.line - 1, 0
            first = self._read(stream.readline, min(limit + 1, 1 << 20))
            while first and not first.removeprefix(b"\xef\xbb\xbf").strip():
                number += first.endswith(b"\n")
                blank = self._one_more_blank(blank)
                first = self._read(stream.readline, min(limit + 1, 1 << 20))
            if self.part is None and ARRAY.match(first):
                pieces = self._pieces(first.removeprefix(b"\xef\xbb\xbf"), stream)
                yield from (_checked(n, data) for n, data in enumerate(elements(pieces, limit), start=1))
                return
            if first and not first.endswith(b"\n"):
                first += self._read(stream.readline, limit + 1 - len(first))
            while data := first or self._read(stream.readline, limit + 1):
                first = b""
                number += 1
                self._go_on()
                if number == 1:
                    data = data.removeprefix(b"\xef\xbb\xbf")
                if len(data) > limit and not data.endswith(b"\n"):
                    while len(data) and not data.endswith(b"\n"):
                        data = self._read(stream.readline, 1 << 20)
                        self._go_on()
                    yield _checked(number, None)
                elif data.strip():
                    blank = 0
                    yield _checked(number, data)
                else:
                    blank = self._one_more_blank(blank)

    def _session_lines(self, stream: IO[bytes], sessions: SessionLines, limit: int) -> Iterator[SourceLine]:
        spans, own, _ = sessions
        is_own = iter(own.tolist())
        self._n_own = 0
        for start, line, n_lines in spans:
            stream.seek(start)
            for number in range(line, line + n_lines):
                data = piece = self._read(stream.readline, limit + 1)
                n_bytes = len(data)
                while len(piece) and not piece.endswith(b"\n"):
                    piece = self._read(stream.readline, 1 << 20)
                    n_bytes += len(piece)
                self._go_on()
                if next(is_own):
                    self._n_own += n_bytes
                    data = data.removeprefix(b"\xef\xbb\xbf") if number == 1 else data
                    yield _checked(number, data if n_bytes <= limit + 1 else None)

    def _one_more_blank(self, blank: int) -> int:
        self._go_on()
        limits.current().check_blank(self.name, blank + 1)
        return blank + 1

    def _go_on(self) -> None:
        limits.current().go_on()
        self.on_line()

    def _parquet_rows(self) -> Iterator[SourceLine]:
        self._raw = self.opened()
        n_bytes = 0
        groups, first = (None, 1) if self.part is None else (self.part.groups, self.part.line)
        with self._raw:
            only, first = (None, first) if self.only is None else (self.only - first, self.only)
            for number, data in enumerate(parquet.rows(self._raw, self.name, self.size, groups, only), start=first):
                self._go_on()
                n_bytes += len(data or b"")
                limits.current().check_parquet_growth(self.name, n_bytes, self.size)
                yield _checked(number, data)

    def _pieces(self, first: bytes, stream: IO[bytes]) -> Iterator[bytes]:
        piece = first
        while piece:
            yield piece
            self._go_on()
            piece = self._read(stream.read, 1 << 20)

    def _read(self, read: Callable[[int], bytes], limit: int) -> bytes:
        try:
            return read(limit)
        except DAMAGE as error:
            raise FileRefused(f"{self.name} is damaged or cut off: {error}.") from error


def _refuse_binary(head: bytes, name: str) -> None:
    """Raises :class:`FileRefused` when a file begins like a kind that is never read."""
    if head[:1] == b"\x80" and head[1:2] in (b"\x02", b"\x03", b"\x04", b"\x05"):
        raise FileRefused(f"{name} is a pickle. {CONVERT}")
    if head.startswith(b"PK\x03\x04"):
        what = "a PyTorch file (a pickle inside a zip)" if b".pkl" in head or b"/data" in head else "a zip archive"
        raise FileRefused(f"{name} is {what}. " + (CONVERT if "PyTorch" in what else "Unpack it first."))
    if head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise FileRefused(f"{name} is UTF-16 text. Save it as UTF-8.")
    if head.startswith((b"\x93NUMPY", b"\x89HDF")) or b"\0" in head:
        raise FileRefused(f"{name} is a binary file of no format that can be read.")


def _checked(number: int, data: bytes | None) -> SourceLine:
    """A line as it may be read. ``data``: None for a line that was too long to be held."""
    reading = limits.current()
    problem = reading.too_long() if data is None else reading.check_line(data)
    return SourceLine(number, None if problem else data, problem)


class _Bounded(io.RawIOBase):
    """A decompressing stream that stops at a zip bomb."""

    def __init__(self, stream: Any, raw: BinaryIO, name: str) -> None:
        self._stream, self._file, self._name = stream, raw, name
        self._n = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray | memoryview) -> int:  # type: ignore[override]
        data = self._stream.read(min(len(buffer), 1 << 20))
        self._n += len(data)
        limits.current().check_growth(self._name, self._n, self._file.tell())
        buffer[: len(data)] = data
        return len(data)

    def close(self) -> None:
        if not self.closed:
            self._stream.close()
            self._file.close()
        super().close()
