"""What leaves the program: text for terminals and the logs of others, and files. Needs the standard library alone. Each
text of a command, of the pytest plugin and of the client goes through :func:`plain`. What is written out stays valid
inside a string of JSON, so that reports of programs go through it too."""

import os
import re
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]
HAS_LOCKS = fcntl is not None

_DRAFT = re.compile(r"\.(.+)\.[0-9a-f]{16}\.part", re.DOTALL)
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


@contextmanager
def draft_file(folder: Path, name: str) -> Iterator[IO[bytes]]:
    """A new file, ``file.name``, that is gone after the block unless the block renames it. Nobody can have guessed its
    name, and so has put no link there. Its lock says that its writer lives; what dead writers of the same ``name`` left
    goes first. Raises ``OSError``."""
    remove_dead_drafts(folder, name)
    for is_last in (False, False, True):
        path = folder / f".{name[:80]}.{secrets.token_hex(8)}.part"
        with path.open("x+b") as file:
            try:
                if (lock(file) and path.exists()) or is_last:  # else somebody took it for a dead writer's before
                    yield file
                    return
            finally:
                path.unlink(missing_ok=True)


def dead_drafts(folder: Path, name: str = "") -> Iterator[Path]:
    """The drafts in a folder whose writers are dead: those of a name, or all. A lock is on each until the next one. A
    writer on another machine lives as far as the file system tells its locks to this one."""
    for entry in os.listdir(folder) if os.access(folder, os.R_OK) else ():
        if (match := _DRAFT.fullmatch(entry)) and match[1] == (name[:80] or match[1]):
            path = folder / entry
            with suppress(OSError), open(open_no_link(path, os.O_RDWR), "r+b", 0) as file:
                if lock(file) and path.exists():
                    yield path


def remove_dead_drafts(folder: Path, name: str = "") -> None:
    """Remove the drafts in a folder whose writers are dead: those of a name, or all."""
    for path in dead_drafts(folder, name):
        with suppress(OSError):
            path.unlink()


def lock(file: IO[bytes]) -> bool:
    """Lock an open file until it is closed. False = another process has it, or there are no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (OSError, AttributeError):
        return False
    return True


@contextmanager
def whole_file(path: str | Path) -> Iterator[IO[bytes]]:
    """A file to write, which appears when the block has ended without an error. A link is replaced, not followed.
    Raises ``OSError``."""
    place = Path(path)
    with draft_file(place.parent, place.name) as file:
        yield file
        (file.flush if HAS_LOCKS else file.close)()  # Windows renames no open file
        os.replace(file.name, place)


def open_no_link(path: Path, flags: int) -> int:
    """Opens what is no link, and waits for no writer of a pipe. Raises ``OSError``."""
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0), 0o666)
