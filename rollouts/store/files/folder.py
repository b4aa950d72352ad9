"""A folder as the file storage: each file is written whole or not at all, and only its owner can read it."""

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.files import File
from django.core.files.storage import FileSystemStorage

from rollouts.store.files.values import StorageDown, StoredFile

DRAFTS = ".drafts"  # Below the folder, so that a draft becomes its file by a rename.
_FULL = (errno.ENOSPC, errno.EDQUOT)
_PASSED_ON = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError)


class FolderStorage(FileSystemStorage):
    """Files below ``location``; without one, in the folder ``files`` of the data folder."""

    @property
    def base_location(self) -> Any:
        return getattr(self, "_location", None) or Path(settings.INSPECTOR_DATA) / "files"

    @property
    def location(self) -> str:
        return os.path.abspath(self.base_location)

    @property
    def folder(self) -> Path:
        """Where the files lie."""
        return Path(self.location)

    def exists(self, name: str) -> bool:
        return os.path.isfile(self.path(name))

    def get_available_name(self, name: str, max_length: int | None = None) -> str:
        """The name itself: a file that is there is replaced."""
        return name

    def _save(self, name: str, content: File) -> str:
        target, drafts = Path(self.path(name)), self.folder / DRAFTS
        _make(drafts)
        draft = Path(tempfile.mktemp(prefix="draft-", dir=drafts))
        try:
            if not _linked(content, draft):
                with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                    shutil.copyfileobj(content, file, 1 << 20)
                    file.flush()
                    os.fsync(file.fileno())  # before a row of the database names it
            for attempt in range(3):
                _make(target.parent)
                try:
                    draft.replace(target)
                    break
                except FileNotFoundError:  # somebody removed the folder because it was empty
                    if attempt == 2:
                        raise
        finally:
            draft.unlink(missing_ok=True)
        return name

    def reader(self, name: str) -> IO[bytes]:
        return open(self.path(name), "rb", 1 << 20)

    def read_range(self, name: str, start: int, stop: int) -> bytes:
        with open(self.path(name), "rb", 0) as file:
            file.seek(start)
            return file.read(stop - start)

    def stored(self, prefix: str) -> Iterator[StoredFile]:
        top = self.folder / prefix
        stored_files = []
        for folder, folders, names in os.walk(top):
            folders[:] = [name for name in folders if name != DRAFTS]
            for name in names:
                path = Path(folder, name)
                with suppress(FileNotFoundError):  # it was removed meanwhile
                    stat = path.stat()
                    key = prefix + path.relative_to(top).as_posix()
                    stored_files.append(StoredFile(key, stat.st_size, datetime.fromtimestamp(stat.st_mtime, UTC)))
        yield from sorted(stored_files)

    def delete_all(self, prefix: str) -> None:
        with suppress(FileNotFoundError):
            shutil.rmtree(self.folder / prefix)

    def meant(self, error: Exception) -> Exception:
        """The error that :mod:`rollouts.store.files` promises for an error of the file system."""
        if not isinstance(error, OSError) or isinstance(error, _PASSED_ON) or error.errno in _FULL:
            return error
        return StorageDown(f"The file storage cannot be used ({type(error).__name__}: {error.strerror}).")


def _make(folder: Path) -> None:
    """Make a folder and what is missing above it; only their owner can enter."""
    if not folder.is_dir():
        _make(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _linked(content: Any, draft: Path) -> bool:
    """Whether the file of a draft was taken over as it lies, which needs the same disk."""
    if not (path := getattr(content, "path", None)):
        return False
    try:
        os.link(path, draft)
    except OSError:
        return False
    os.chmod(draft, 0o600)
    return True


def remove_drafts(folder: Path, seconds: float) -> None:
    """Remove drafts that nobody has written to for so long."""
    for draft in (folder / DRAFTS).glob("draft-*"):
        with suppress(FileNotFoundError):
            if time.time() - draft.stat().st_mtime > seconds:
                draft.unlink()
