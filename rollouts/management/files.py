"""Files that are named on the command line."""

from __future__ import annotations

from pathlib import Path

from django.core.management.base import CommandError


def read_text(path: str | Path, what: str) -> str:
    """The text of a file; ``what`` it should be begins the sentence of the :class:`CommandError` that may be raised."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{what} {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise CommandError(f"{what} {path} is not UTF-8 text (byte {error.start}). Name another file.") from error
