"""Files of imports: uploads in the file storage, and files that a command reads where they lie. A job names both by a
key. What a command reads in place has a link in the data folder of its machine under that key."""

import logging
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from django.conf import settings
from django.core.files.uploadedfile import UploadedFile

from rollout_inspector.formats import FileRefused, Source
from rollouts.store import files, models
from rollouts.store.files import StorageDown
from rollouts.store.text import tidy_name

log = logging.getLogger(__name__)


def prefix_of(run: models.Run) -> str:
    """Begins the keys of a run's files, until they are read."""
    return f"uploads/{run.code}/"


def keep_files(uploads: Sequence[UploadedFile], run: models.Run) -> list[str]:
    """Put uploads into the storage under their own names, made safe. A second file of the same name gets a number."""
    keys = []
    for name, upload in zip(_names(upload.name or "" for upload in uploads), uploads, strict=True):
        files.put(prefix_of(run) + name, upload, move=True)
        keys.append(prefix_of(run) + name)
    return keys


def read_in_place(paths: Sequence[Path], run: models.Run) -> list[str]:
    """The keys under which the workers on this data folder find files where they lie. Nothing is copied."""
    keys = []
    for name, path in zip(_names(path.name for path in paths), paths, strict=True):
        link = _links() / run.code / name
        link.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        link.symlink_to(path.resolve())
        keys.append(prefix_of(run) + name)
    return keys


def file_of(key: str) -> Path | Source:
    """The file of a key: a path of this machine, or a source that reads the storage. Raises :class:`StorageDown`.
    Reading a source whose file is gone raises :class:`FileRefused`."""
    if (link := _link(key)).is_symlink():
        return link.readlink()
    name = key.rpartition("/")[2]

    def opened() -> BinaryIO:
        try:
            return cast(BinaryIO, files.open_file(key))
        except FileNotFoundError:
            raise FileRefused(
                f"{name} is neither in the file storage nor on this machine. Import it where it lies."
            ) from None

    return Source(name, opened, files.size(key) if files.exists(key) else 0)


def is_there(key: str) -> bool:
    """Whether the file of a key can be read here. Raises :class:`StorageDown`."""
    link = _link(key)
    return link.is_file() if link.is_symlink() else files.exists(key)


def drop_uploads(code: str) -> None:
    """Remove the files that were kept for the run with this code. During an outage the sweep does it later."""
    shutil.rmtree(_links() / code, ignore_errors=True)
    try:
        files.delete_all(f"uploads/{code}/")
    except StorageDown as error:
        log.warning("uploads stay until the next sweep run=%s: %s", code, error)


def kept_codes() -> set[str]:
    """The codes of the runs for which files are kept. Raises :class:`StorageDown`."""
    links = {path.name for path in _links().iterdir()} if _links().is_dir() else set()
    return links | {file.key.split("/")[1] for file in files.listed("uploads/")}


def _links() -> Path:
    return Path(settings.INSPECTOR_DATA) / "in_place"


def _link(key: str) -> Path:
    return _links() / files.checked(key).removeprefix("uploads/")


def _names(named: Iterator[str]) -> list[str]:
    names: list[str] = []
    for name in map(tidy_file, named):
        numbers = (f"{number}-{name}" for number in range(2, len(names) + 3))
        names.append(name if name not in names else next(numbered for numbered in numbers if numbered not in names))
    return names


def tidy_file(name: str) -> str:
    """A file's name with its suffixes, without characters that are unsafe in a key, in at most 240 bytes."""
    plain = Path(name.replace("\\", "/")).name
    suffixes = "".join(Path(plain).suffixes[-3:])[:40] if plain else ""
    stem = plain.removesuffix(suffixes) if suffixes else plain
    ending = "".join(letter for letter in suffixes if letter.isalnum() or letter in "._-")
    return _cut(tidy_name(stem), 200) + _cut(ending, 40)


def _cut(text: str, n_bytes: int) -> str:
    return text.encode("utf-8", "replace")[:n_bytes].decode(errors="ignore")
