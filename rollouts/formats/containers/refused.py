"""The refusal of a whole file."""

from __future__ import annotations


class FileRefused(ValueError):
    """The file as a whole is not read; the message is a sentence for the user."""
