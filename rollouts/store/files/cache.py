"""Copies of files of the storage on this machine's own disk: fetched once, used whole, bounded in bytes.

An entry is a folder with the files of one key. Each entry has a lock file; its time says when the entry was used last.
A process that uses the entry holds the lock shared. A process that fetches or removes the entry holds it alone. The
kernel frees the locks of a killed process.
"""

import fcntl
import hashlib
import os
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from django.conf import settings

from rollouts.store.files.values import StorageDown, StoredFile

Wanted = Callable[[], list[StoredFile]]
Fetch = Callable[[str, Path], None]

_held: dict[Path, int] = {}
_holding = threading.Lock()
_failed: dict[Path, tuple[float, str]] = {}  # Entry -> when its last fetch failed, by the monotonic clock, and why.


def folder() -> Path:
    """Where the entries are."""
    return Path(settings.INSPECTOR_DATA) / "cache"


def held(key: str, wanted: Wanted, top: str, fetch: Fetch) -> Path:
    """The entry of a key, fetched if it is not there; it stays while this process lives."""
    entry = folder() / hashlib.sha256(key.encode()).hexdigest()[:32]
    with _holding:
        if entry in _held and not entry.is_dir():  # somebody emptied the cache by hand
            os.close(_held.pop(entry))
        is_held = entry in _held
    if not is_held:
        lock = _locked(entry, wanted, top, fetch)
        with _holding:
            if _held.setdefault(entry, lock) != lock:
                os.close(lock)
    return entry


def _locked(entry: Path, wanted: Wanted, top: str, fetch: Fetch) -> int:
    """The descriptor of a shared lock on an entry that is whole."""
    folder().mkdir(parents=True, exist_ok=True, mode=0o700)
    began = time.monotonic()
    while True:
        lock = _lock(entry, fcntl.LOCK_SH)
        if entry.is_dir():
            os.utime(lock)
            return lock
        os.close(lock)
        lock = _lock(entry, fcntl.LOCK_EX)
        try:
            if not entry.is_dir():  # else another process has fetched it meanwhile
                failed_at, why = _failed.get(entry, (began, ""))
                if failed_at > began:  # else threads that wait for a bucket without an answer ask it one by one
                    raise StorageDown(why)
                _fill(entry, wanted(), top, fetch)
        except StorageDown as error:
            _failed[entry] = time.monotonic(), str(error)
            raise
        finally:
            os.close(lock)


def _lock(entry: Path, how: int) -> int:
    """The descriptor of a lock; closing it frees the lock. Raises ``BlockingIOError``."""
    path = entry.with_suffix(".lock")
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(lock, how)
            if os.path.exists(path) and os.path.samestat(os.fstat(lock), os.stat(path)):
                return lock
        except FileNotFoundError:
            pass
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)  # who removed the entry removed this lock file as well


def _fill(entry: Path, wanted: list[StoredFile], top: str, fetch: Fetch) -> None:
    """Fetch the files of an entry. The caller holds the lock alone."""
    draft = entry.with_suffix(".draft")
    shutil.rmtree(draft, ignore_errors=True)  # of a process that was killed
    make_room(sum(file.size for file in wanted))
    try:
        for file in wanted:
            target = draft / file.key.removeprefix(f"{top}/")
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            fetch(file.key, target)
        draft.rename(entry)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def make_room(n_bytes: int) -> None:
    """Remove the entries that were used longest ago until so many bytes fit. Entries in use stay."""
    entries = []
    for lock in folder().glob("*.lock"):
        with suppress(OSError):
            entries.append((lock.stat().st_mtime, lock.with_suffix("")))
    sizes = {entry: _size(entry) for _, entry in entries}
    excess = sum(sizes.values()) + n_bytes - settings.CACHE_BYTES
    for _, entry in sorted(entries):
        if excess <= 0:
            return
        if sizes[entry] and _remove(entry):
            excess -= sizes[entry]


def _remove(entry: Path) -> bool:
    """Remove an entry, unless a process uses it. Returns whether it is gone."""
    try:
        lock = _lock(entry, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    try:
        draft = entry.with_suffix(".draft")
        shutil.rmtree(draft, ignore_errors=True)
        with suppress(FileNotFoundError):
            entry.rename(draft)  # so that nobody meets half of it
        shutil.rmtree(draft, ignore_errors=True)
        entry.with_suffix(".lock").unlink(missing_ok=True)
    finally:
        os.close(lock)
    return True


def _size(entry: Path) -> int:
    n_bytes = 0
    for place in (entry, entry.with_suffix(".draft")):
        for path in place.rglob("*"):
            with suppress(OSError):
                n_bytes += path.stat().st_size if path.is_file() else 0
    return n_bytes


def _forget() -> None:
    global _holding
    _holding = threading.Lock()


os.register_at_fork(after_in_child=_forget)
