"""Cuts a file into parts, which workers read side by side."""

from __future__ import annotations

from typing import IO

from rollouts.formats.containers import parquet
from rollouts.formats.containers.file_part import FilePart
from rollouts.formats.containers.json_array import ARRAY
from rollouts.formats.containers.source import Source


def parts_of(source: Source, n_bytes: int) -> list[FilePart]:
    """Parts of about so many bytes. Empty if the file cannot be cut, or is too small to be.

    What is packed as a whole cannot be cut, nor can one JSON array, nor objects over several lines. Plain text is read
    once, to count its lines. Raises :class:`FileRefused`.
    """
    if source.size < 2 * n_bytes or source.is_document:
        return []
    kind = source.kind()
    if kind == "parquet":
        parts = _group_parts(source, n_bytes)
    elif kind == "plain":
        parts = _line_parts(source, n_bytes)
    else:
        parts = []
    return parts if len(parts) > 1 else []


def _line_parts(source: Source, n_bytes: int) -> list[FilePart]:
    parts: list[FilePart] = []
    start, line = 0, 1
    with source.open() as raw:
        if ARRAY.match(_first_line(raw)):
            return []
        raw.seek(0)
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
