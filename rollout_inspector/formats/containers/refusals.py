"""The refusals of a reader: of one line, and of a whole file."""

from rollout_inspector.refusal import Refusal


class BadLine(ValueError):
    """A line that cannot be read; the message is a sentence for the user."""


class FileRefused(Refusal):
    """The file as a whole is not read; the message is a sentence for the user."""


class TooLarge(FileRefused):
    """The file, or what it becomes when it is read, is beyond a limit."""
