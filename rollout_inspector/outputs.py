"""What leaves the program: text for terminals and the logs of others, and files. Needs the standard library alone. Each
text of a command, of the pytest plugin and of the client goes through :func:`plain`. What is written out stays valid
inside a string of JSON, so that reports of programs go through it too."""

import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_FOREIGN = re.compile(r"[^\x20-\x7e\n\t]")
_INNER_COMMAND = re.compile(r"##(?=\w*\[)")
_COMMAND = re.compile(r"^([ \t]*):(?=:)", re.MULTILINE)


def plain(text: str) -> str:
    r"""Text that a terminal and the runner of a CI only show.

    Characters that move a cursor, turn the direction of writing or cannot be seen become ``\x1b`` or ``\u202e``. So
    do the marks that begin commands: ``::`` of GitHub at the start of a line, ``##[``, ``##vso[`` and their like
    anywhere in it (actions/runner, ActionCommand.cs).
    """
    text = _FOREIGN.sub(lambda found: found[0] if found[0].isprintable() else ascii(found[0])[1:-1], text)
    return _COMMAND.sub(r"\1\\u003a", _INNER_COMMAND.sub(r"#\\u0023", text))


def line_of(text: str) -> str:
    """The same on one line."""
    return plain(text.replace("\r", "\\r").replace("\n", "\\n").replace("\t", "\\t"))


class PlainStream:
    """A stream of text whose text is plain. ``inner`` takes what only this program wrote, as a workflow command."""

    def __init__(self, inner: IO[str]) -> None:
        self.inner = inner

    def write(self, text: str) -> int:
        """As of a stream."""
        self.inner.write(plain(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def unfiltered(stream: Any) -> Any:
    """The stream that is behind a :class:`PlainStream`."""
    return stream.inner if isinstance(stream, PlainStream) else stream


def show_progress(text: str, end: str = "") -> None:
    """Write a line to the terminal of the user over the line that stands there."""
    stream = unfiltered(sys.stderr)
    stream.write(f"\r{line_of(text):<78}{end}")
    stream.flush()


def draft_beside(place: Path) -> Path:
    """A name beside a file that nobody can have guessed, and so has put no link there."""
    return place.with_name(f".{place.name[:80]}.{secrets.token_hex(8)}.part")


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write, which appears when the block has ended without an error. A link is replaced, not followed.
    Raises ``OSError``."""
    place = Path(path)
    draft = draft_beside(place)
    try:
        with draft.open("xb") as file:
            yield file
        draft.replace(place)
    finally:
        draft.unlink(missing_ok=True)


def open_no_link(path: Path, flags: int) -> int:
    """Opens what is no link, and waits for no writer of a pipe. Raises ``OSError``."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
