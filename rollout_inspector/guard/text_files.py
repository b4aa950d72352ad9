"""Files of text that a user names, read and written."""

import json
from pathlib import Path
from typing import Any

from rollout_inspector.outputs import whole_file
from rollout_inspector.refusal import Refusal

MAX_BYTES = 64 << 20


def read_text(path: str | Path, what: str) -> str:
    """The text of a file. ``what`` the file is begins the sentence of :class:`Refusal`."""
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise Refusal(f"{what} {path} cannot be read: {error.strerror}.") from error
    if len(data) > MAX_BYTES:
        raise Refusal(f"{what} {path} is larger than {MAX_BYTES >> 20} MB. Name another file.")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise Refusal(f"{what} {path} is not UTF-8 text (byte {error.start}). Name another file.") from error


def read_json(path: str | Path, what: str, remedy: str) -> Any:
    """The JSON value of a file. ``what`` the file is begins the sentence of :class:`Refusal`, ``remedy`` ends it."""
    try:
        return json.loads(read_text(path, what))
    except Refusal as error:
        raise Refusal(f"{error} {remedy}") from error
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{what} {path} is not JSON. {remedy}") from error


def check_place(path: str | Path, what: str) -> None:
    """Raises :class:`Refusal` for a path that no file can be written to."""
    if Path(path).is_dir():
        raise Refusal(f"{what} {path} is a folder. Name a file.")
    if not Path(path).resolve().parent.is_dir():
        raise Refusal(f"{what} {path}: there is no such folder.")


def write_whole(path: str | Path, data: bytes, what: str) -> None:
    """Write a file that appears when it is whole. A pipe or a device, as ``/dev/stdout``, is written to as it is. A
    link that the user names is followed; one that lies beside it is not. Raises :class:`Refusal`."""
    check_place(path, what)
    place = Path(path).resolve()
    try:
        if place.exists() and not place.is_file():
            place.write_bytes(data)
        else:
            with whole_file(place) as file:
                file.write(data)
    except OSError as error:
        raise Refusal(f"{what} {path} cannot be written: {error.strerror}.") from error
