"""The files that all machines share: the only door to Django's default storage, which is a folder or a bucket. A key
names a file, such as ``exports/abc/run.jsonl``. What a key names never changes: it is put once, or again with the same
content. So a copy on a machine's own disk is as good as the original."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.core.files import File
from django.core.files.storage import default_storage

from rollout_inspector.outputs import dead_drafts
from rollouts.store.files import cache
from rollouts.store.files.folder import DRAFTS
from rollouts.store.files.values import PutFile, StorageDown, StoredFile

_PART = re.compile(r"[\w+=@-][\w+=@. -]{0,199}")
_storage: Any = default_storage  # with the methods that Django's storages lack
MAX_KEY = 600  # Characters. S3 takes 1,024 bytes, the prefix of the bucket included.


def checked(key: str) -> str:
    """The key. Raises ``ValueError`` for one that could leave its folder, or that a storage would refuse."""
    parts = key.split("/")
    if len(key) > MAX_KEY or not all(_PART.fullmatch(part) and len(part.encode()) < 256 for part in parts):
        raise ValueError(f"{key[:80]!r} cannot name a file: parts of letters, digits and ._-+=@ go between slashes.")
    return key


def put(key: str, source: Path | IO[bytes] | File, *, move: bool = False) -> None:
    """Store a file from its first byte on, whole or not at all. ``move``: the storage may take the source away. Raises
    :class:`StorageDown`, or ``OSError`` when a disk is full."""
    checked(key)
    with _talking():
        if isinstance(source, Path):
            with source.open("rb") as opened:
                _save(key, opened, str(source) if move else None)
            if move:
                source.unlink(missing_ok=True)
        else:
            temporary = getattr(source, "temporary_file_path", None)
            _save(key, source, temporary() if move and temporary else None)


def _save(key: str, source: Any, path: str | None) -> None:
    content = PutFile(getattr(source, "file", source))
    content.path = path
    content.seek(0)
    _storage.save(key, content)


def open_file(key: str) -> IO[bytes]:
    """The file as a seekable stream of bytes; of a bucket only what is read travels. The caller closes it. Raises
    ``FileNotFoundError`` or :class:`StorageDown`, here or while it is read."""
    with _talking():
        opened: IO[bytes] = _storage.reader(checked(key))
        return opened


def read_range(key: str, start: int, stop: int) -> bytes:
    """The bytes [start, stop) of a file; fewer where the file ends earlier. Raises ``FileNotFoundError`` or
    :class:`StorageDown`."""
    if stop <= start:
        return b""
    with _talking():
        data: bytes = _storage.read_range(checked(key), start, stop)
        return data


def size(key: str) -> int:
    """Bytes. Raises ``FileNotFoundError`` or :class:`StorageDown`."""
    with _talking():
        return int(_storage.size(checked(key)))


def exists(key: str) -> bool:
    """Raises :class:`StorageDown`."""
    with _talking():
        return bool(_storage.exists(checked(key)))


def delete(key: str) -> None:
    """Remove a file; one that is not there is fine. Raises :class:`StorageDown`."""
    with _talking():
        _storage.delete(checked(key))


def delete_all(prefix: str) -> None:
    """Remove every file below a folder such as ``uploads/abc/``. Raises :class:`StorageDown`."""
    _checked_prefix(prefix)
    with _talking():
        _storage.delete_all(prefix)


def listed(prefix: str) -> Iterator[StoredFile]:
    """The files below a folder such as ``uploads/abc/``, or all with ``""``, in the order of their keys. Raises
    :class:`StorageDown`."""
    if prefix:
        _checked_prefix(prefix)
    with _talking():
        yield from _storage.stored(prefix)


def local_folder(prefix: str, last: str) -> Path:
    """The files of a folder such as ``tokenizers/abc/`` on this machine; they stay there while this process lives.
    ``last``: the name of the file that is put last, so that the folder is whole where it is there. Raises
    ``FileNotFoundError`` if it is not, :class:`StorageDown`, or ``OSError`` when the disk is full."""
    _checked_prefix(prefix)
    if (folder := _storage.folder) is not None:
        if not Path(folder, prefix, last).is_file():
            raise FileNotFoundError(f"The file storage holds no {prefix}{last}.")
        return Path(folder, prefix)

    def wanted() -> list[StoredFile]:
        entries = list(listed(prefix))
        if not any(entry.key == prefix + last for entry in entries):
            raise FileNotFoundError(f"The file storage holds no {prefix}{last}.")
        return entries

    return cache.held(prefix, wanted, prefix.rstrip("/"), _fetch)


def scratch_folder() -> Path:
    """Where this machine writes what is not whole yet, in the data folder."""
    folder = Path(settings.INSPECTOR_DATA) / "tmp"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder


def left_drafts() -> Iterator[Path]:
    """What processes that are gone left half-written in our folders. A bucket keeps no such thing."""
    yield from dead_drafts(scratch_folder())
    if (folder := _storage.folder) is not None:
        yield from dead_drafts(Path(folder, DRAFTS))


def _fetch(key: str, target: Path) -> None:
    with _talking():
        _storage.fetch(key, target)


def _checked_prefix(prefix: str) -> None:
    if not prefix.endswith("/"):
        raise ValueError(f"{prefix!r} does not end with a slash.")
    checked(prefix[:-1])


@contextmanager
def _talking() -> Iterator[None]:
    """Turns what a storage raises into the errors that this module promises."""
    try:
        yield
    except Exception as error:
        if (promised := _storage.meant(error)) is error:
            raise
        raise promised from error
