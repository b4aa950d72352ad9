"""A folder as the file storage: each file is written whole or not at all, and only its owner can read it."""

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.files import File
from django.core.files.storage import FileSystemStorage

from rollout_inspector.outputs import draft_file
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
        if path := getattr(content, "path", None):
            with suppress(OSError):  # it lies on another disk
                os.chmod(path, 0o600)
                _make(target.parent)
                os.replace(path, target)
                return name
        _make(drafts)
        with draft_file(drafts, "draft") as file:
            os.fchmod(file.fileno(), 0o600)
            shutil.copyfileobj(content, file, 1 << 20)
            file.flush()
            os.fsync(file.fileno())  # before a row of the database names it
            for attempt in range(3):
                _make(target.parent)
                try:
                    os.replace(file.name, target)
                    break
                except FileNotFoundError:  # somebody removed the folder because it was empty
                    if attempt == 2:
                        raise
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
