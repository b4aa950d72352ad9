"""Fragments: files of JSON lines in a folder, which wait there until the server has taken them."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import secrets
import shutil
import socket
import time
from pathlib import Path
from typing import IO, Any

from rollout_inspector.outputs import HAS_LOCKS, lock, open_no_link, whole_file

_SUFFIX = ".jsonl.gz"


class FragmentFolder:
    """The folder of one process in the folder of fragments. A lock on it tells that the process lives."""

    def __init__(self, path: Path, about: dict[str, Any], lock: IO[bytes] | None) -> None:
        self.path, self.about, self._lock = path, about, lock
        self.faults: dict[str, int] = {}
        self.is_forbidden = False  # Whether the token may not push its fragments.
        self._next = 0

    @classmethod
    def create(cls, folder: Path, about: dict[str, Any]) -> FragmentFolder:
        now = time.strftime("%Y%m%d-%H%M%S")
        path = folder / f"{now}-{socket.gethostname()[:40]}-{os.getpid()}-{secrets.token_hex(3)}"
        path.mkdir(parents=True, mode=0o700)
        fragments = cls(path, about, locked_file(path / "lock"))
        fragments.note()
        return fragments

    @classmethod
    def take_over(cls, path: Path) -> FragmentFolder | None:
        """The folder that an ended process left, locked. None = its process lives, or it is no such folder."""
        try:
            about = json.loads((path / "stream.json").read_bytes())
        except (OSError, ValueError):
            return None
        if not HAS_LOCKS or not isinstance(about, dict) or not {"url", "run", "name", "tokenizer"} <= about.keys():
            return None
        lock = locked_file(path / "lock")
        return cls(path, about, lock) if lock is not None else None

    @property
    def refused(self) -> Path:
        return self.path / "refused"

    def note(self, **more: Any) -> None:
        """Keep what is known about the run, whole or not at all."""
        self.about.update(more)
        with whole_file(self.path / "stream.json") as file:
            file.write(json.dumps(self.about).encode())

    def add(self, head: dict[str, Any], lines: list[bytes]) -> None:
        """Write one fragment. It appears under its name when it is whole."""
        self._next += 1
        with (
            whole_file(self.path / f"{self._next:09d}{_SUFFIX}") as fragment,
            gzip.open(fragment, "wb", compresslevel=1) as file,
        ):
            file.write(json.dumps(head).encode() + b"\n")
            for line in lines:
                file.write(line + b"\n")

    def waiting(self) -> list[Path]:
        """The fragments that wait, oldest first."""
        try:
            return sorted(path for path in self.path.iterdir() if path.name.endswith(_SUFFIX))
        except OSError:
            return []

    def set_aside(self, fragment: Path, reason: str) -> int:
        """Move a fragment that will never be taken beside its reason. Returns how many records it holds."""
        n = 0
        with contextlib.suppress(Exception), gzip.open(fragment, "rb") as file:
            n = int(json.loads(file.readline())["n"])
        with contextlib.suppress(OSError):
            self.refused.mkdir(exist_ok=True)
            with whole_file(self.refused / f"{fragment.name}.reason.txt") as text:
                text.write(reason.encode("utf-8", "backslashreplace") + b"\n")
            fragment.replace(self.refused / fragment.name)
        fragment.unlink(missing_ok=True)
        return max(n, 1)

    def unlock(self) -> None:
        """Let another process send what is here."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def remove(self) -> None:
        """Delete the folder if nothing waits in it and nothing was refused."""
        self.unlock()
        if not self.waiting() and not self.refused.exists():
            shutil.rmtree(self.path, ignore_errors=True)


def folders_left(folder: Path, url: str, mine: FragmentFolder | None) -> list[FragmentFolder]:
    """The folders of ended processes that spoke to the server at ``url`` and left fragments."""
    left_over = []
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        if (mine is not None and path == mine.path) or not any(path.glob(f"*{_SUFFIX}")):
            continue
        with contextlib.suppress(OSError):  # the folder of another user
            fragments = FragmentFolder.take_over(path)
            if fragments is not None and fragments.about["url"] == url:
                left_over.append(fragments)
            elif fragments is not None:
                fragments.unlock()
    return left_over


def locked_file(path: Path) -> IO[bytes] | None:
    """The open lock file; None where another process holds it."""
    file = os.fdopen(open_no_link(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), "ab")
    if HAS_LOCKS and not lock(file):
        file.close()
        return None
    return file


def bytes_of_fragments(folder: Path) -> int:
    """The bytes of all fragments of all processes, refused ones included."""
    size = 0
    for path in (*folder.glob(f"*/*{_SUFFIX}"), *folder.glob(f"*/refused/*{_SUFFIX}")):
        with contextlib.suppress(FileNotFoundError):  # it was just sent
            size += path.stat().st_size
    return size
