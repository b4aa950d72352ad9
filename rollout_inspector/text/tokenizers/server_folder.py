"""Copies a tokenizer's files out of a folder of this machine that a user names, without leaving the folders allowed.
Each part of the path and each file is opened by itself, and a link is never followed. So nobody can put another file in
its place between the check and the read."""

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rollout_inspector.text.tokenizers.files import WANTED, TokenizerUnusable, size_limit

_FOLDER = getattr(os, "O_PATH", os.O_RDONLY) | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # a pipe must not wait for its writer
NOT_READ = (
    "This server reads no tokenizer.json there. Name a folder that lies below one of INSPECTOR_TOKENIZER_FOLDERS, "
    "or upload the files."
)
"""One sentence for all folders outside, so that nobody learns which of them exist."""


def copy_from_server(named: str | Path, roots: Sequence[Path], kept_out: Path, target: Path) -> Path:
    """Copy the wanted files of the folder ``named`` to a new folder ``target`` / its name, and return that.

    The folder must lie below one of ``roots`` and outside of ``kept_out`` when all links in its path are resolved. A
    file in it may be a link to the blobs of the same model, as in the cache of the Hugging Face hub, and no other link.
    Raises :class:`TokenizerUnusable`. What the files hold is not checked yet; registering them does that.
    """
    try:
        folder = Path(named).resolve(strict=True)
        allowed = [root.resolve() for root in roots]
        root = next((root for root in allowed if folder.is_relative_to(root)), None)
        if root is None or folder.is_relative_to(kept_out.resolve()):
            raise TokenizerUnusable(NOT_READ)
        copy = target / folder.name
        copy.mkdir(parents=True)
        with _opened(root, folder.relative_to(root).parts) as folders:
            for name in WANTED:
                _copy_file(folders, name, copy / name)
    except (OSError, ValueError, RuntimeError) as error:  # RuntimeError: links in a circle, before Python 3.13
        if isinstance(error, TokenizerUnusable):
            raise
        raise TokenizerUnusable(NOT_READ) from error
    if not (copy / "tokenizer.json").is_file():
        raise TokenizerUnusable(NOT_READ)
    return copy


@contextmanager
def _opened(root: Path, parts: Sequence[str]) -> Iterator[list[int]]:
    """Descriptors of the root and of each folder below it on the way to the last part."""
    opened = [os.open(root, _FOLDER)]
    try:
        for part in parts:
            opened.append(os.open(part, _FOLDER, dir_fd=opened[-1]))
        yield opened
    finally:
        for descriptor in opened:
            os.close(descriptor)


def _copy_file(folders: list[int], name: str, copy: Path) -> None:
    """Copy one file if it is there. ``folders``: the descriptors of the folder and of those above it, last the own."""
    try:
        if not stat.S_ISLNK(os.stat(name, dir_fd=folders[-1], follow_symlinks=False).st_mode):
            source = os.open(name, _FILE, dir_fd=folders[-1])
        else:
            source = _open_blob(folders, os.readlink(name, dir_fd=folders[-1]), name)
    except FileNotFoundError:
        return
    with open(source, "rb") as file:
        status = os.fstat(source)
        if not stat.S_ISREG(status.st_mode):
            raise TokenizerUnusable(f"{name} is not a plain file.")
        if status.st_nlink > 1:
            raise TokenizerUnusable(f"{name} has a second name on its disk (a hard link). Upload the files instead.")
        data = file.read(size_limit(name) + 1)
    if len(data) > size_limit(name):
        raise TokenizerUnusable(f"{name} is larger than {size_limit(name) // 1_000_000} MB.")
    copy.write_bytes(data)


def _open_blob(folders: list[int], link: str, name: str) -> int:
    """The file behind a link ``../../blobs/HASH`` of the hub's cache. Every other link is refused."""
    up, _, blob = link.rpartition("/")
    if up != "../../blobs" or blob in ("", ".", "..") or len(folders) < 3:
        raise TokenizerUnusable(f"{name} is a link to another place. Put the file itself there, or upload the files.")
    blobs = os.open("blobs", _FOLDER, dir_fd=folders[-3])
    try:
        return os.open(blob, _FILE, dir_fd=blobs)
    finally:
        os.close(blobs)
