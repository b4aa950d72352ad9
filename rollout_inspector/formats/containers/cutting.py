"""Cuts a file into parts, which workers read side by side."""

from typing import IO, NamedTuple

from rollout_inspector.formats import limits
from rollout_inspector.formats.containers import parquet
from rollout_inspector.formats.containers.compression import DAMAGE, pieces
from rollout_inspector.formats.containers.file_part import FilePart
from rollout_inspector.formats.containers.json_array import ARRAY
from rollout_inspector.formats.containers.refusals import FileRefused
from rollout_inspector.formats.containers.source import Source


def parts_of(source: Source, n_bytes: int) -> list[FilePart]:
    """Parts of about so many bytes, where no line needs another. Empty if it cannot be cut, or is too small to be.

    A packed file is cut where it has frames, as ``bgzip``, ``pzstd`` and those write who append. What is packed in one
    cannot be cut, nor can one JSON array, nor objects over several lines. The file is read once, to count its lines.
    Raises :class:`FileRefused`.
    """
    if source.size < 2 * n_bytes or source.is_document:
        return []
    parts: list[FilePart] = []
    if source.kind() == "parquet":
        parts = _group_parts(source, n_bytes)
    elif holds_lines(source):
        parts = _line_parts(source, n_bytes) if source.kind() == "plain" else _packed_parts(source, n_bytes)
    return parts if len(parts) > 1 else []


def holds_lines(source: Source) -> bool:
    """Whether a file, packed or not, holds a value on each line. Raises :class:`FileRefused`."""
    if source.is_document or source.kind() == "parquet":
        return False
    with source.open() as raw:
        return not ARRAY.match(_first_line(raw))


def _line_parts(source: Source, n_bytes: int) -> list[FilePart]:
    parts: list[FilePart] = []
    start, line = 0, 1
    with source.open() as raw:
        while start < source.size:
            n_lines = size = 0
            while size < n_bytes and (piece := raw.read(min(n_bytes - size, 1 << 20))):
                size, n_lines = size + len(piece), n_lines + piece.count(b"\n")
            while piece and not piece.endswith(b"\n"):
                piece = raw.readline(1 << 20)
                size, n_lines = size + len(piece), n_lines + piece.count(b"\n")
            if not size:
                break  # the file has become shorter
            parts.append(FilePart(start, size, line))
            start, line = start + size, line + n_lines
    return parts


class _Cut(NamedTuple):
    frame: int
    skip: int
    at: int  # Unpacked bytes of the file before the cut.
    line: int


def _packed_parts(source: Source, n_bytes: int) -> list[FilePart]:
    kind = source.kind()
    assert kind in ("gzip", "zstd")
    cuts, at, line = [_Cut(0, 0, 0, 1)], 0, 1
    frame, frame_at, is_open, ends_line = 0, 0, False, True
    read_frame, read_at = 0, 0
    try:
        with source.opened() as raw:
            for piece in pieces(raw, kind):
                if piece.frame != read_frame:
                    read_frame, read_at = piece.frame, at  # a frame may come in several pieces
                if not is_open and piece.frame >= cuts[-1].frame + n_bytes:
                    is_open, frame, frame_at = True, read_frame, read_at
                if len(cuts) == 1 and not is_open and piece.frame == 0 and piece.stop > 2 * n_bytes:
                    return []  # it is packed in one, or begins so
                if is_open and piece.data:
                    skip = 0 if ends_line else piece.data.find(b"\n") + 1
                    if ends_line or skip:
                        cuts.append(_Cut(frame, at + skip - frame_at, at + skip, line + (skip > 0)))
                        is_open = False
                if piece.data:
                    at, line = at + len(piece.data), line + piece.data.count(b"\n")
                    ends_line = piece.data.endswith(b"\n")
                    limits.current().check_growth(source.name, at, piece.stop)
    except DAMAGE as error:
        raise FileRefused(f"{source.name} is damaged or cut off: {error}.") from error
    ends = [*cuts[1:], _Cut(source.size, 0, at, line)]
    return [
        FilePart(cut.frame, stop.frame - cut.frame, cut.line, packed=(kind, cut.skip, stop.at - cut.at))
        for cut, stop in zip(cuts, ends, strict=True)
        if stop.at > cut.at
    ]


def _first_line(raw: IO[bytes]) -> bytes:
    line = b"\n"
    while line and not line.removeprefix(b"\xef\xbb\xbf").strip():
        line = raw.readline(1 << 20)
    return line


def _group_parts(source: Source, n_bytes: int) -> list[FilePart]:
    with source.opened() as raw:
        try:
            groups = parquet.group_sizes(raw)
        except (ValueError, ImportError):
            return []  # who reads it says why
    parts: list[FilePart] = []
    first, start, size, line, n_rows = 0, 4, 0, 1, 0
    for n, (rows, in_file) in enumerate(groups, start=1):
        size, n_rows = size + in_file, n_rows + rows
        if size >= n_bytes or n == len(groups):
            parts.append(FilePart(start, size, line, range(first, n)))
            first, start, size, line, n_rows = n, start + size, 0, line + n_rows, 0
    return parts
