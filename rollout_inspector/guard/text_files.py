"""Text in and out: files that a user names, and what files, paths and models say, fit for a terminal and a report."""

from __future__ import annotations

import os
import re
from pathlib import Path

from rollout_inspector.refusal import Refusal

MAX_BYTES = 64 << 20
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def read_text(path: str | Path, what: str, max_bytes: int = MAX_BYTES) -> str:
    """The text of a file. ``what`` the file is begins the sentence of :class:`Refusal`."""
    try:
        with open(path, "rb") as file:
            data = file.read(max_bytes + 1)
    except OSError as error:
        raise Refusal(f"{what} {path} cannot be read: {error.strerror}.") from error
    if len(data) > max_bytes:
        raise Refusal(f"{what} {path} is larger than {max_bytes >> 20} MB. Name another file.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"{what} {path} is not UTF-8 text (byte {error.start}). Name another file.") from error


def check_place(path: str | Path, what: str) -> None:
    """Raises :class:`Refusal` for a path that no file can be written to."""
    if Path(path).is_dir():
        raise Refusal(f"{what} {path} is a folder. Name a file.")
    if not Path(os.path.realpath(path)).parent.is_dir():
        raise Refusal(f"{what} {path}: there is no such folder.")


def write_whole(path: str | Path, data: bytes, what: str) -> None:
    """Write a file that appears when it is whole. A pipe or a device, as ``/dev/stdout``, is written to as it is.

    Raises :class:`Refusal`.
    """
    check_place(path, what)
    place = Path(os.path.realpath(path))
    is_file = place.is_file() or not place.exists()
    draft = place.with_name(f"{place.name}.part") if is_file else place
    try:
        try:
            draft.write_bytes(data)
            if is_file:
                draft.replace(place)
        finally:
            if is_file:
                draft.unlink(missing_ok=True)
    except OSError as error:
        raise Refusal(f"{what} {path} cannot be written: {error.strerror}.") from error


def plain(text: str) -> str:
    """Text without what moves a cursor, turns the direction of writing or breaks XML: each becomes ``\\x1b``."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def line_of(text: str) -> str:
    """The same on one line."""
    return plain(text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t"))
