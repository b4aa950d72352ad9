"""The objects of a bucket, fetched into a folder where they are read as files. The bucket is only read. An object that
is not fetched yet is an empty file there, so that the order of all files is known from the start."""

import errno
import hashlib
import json
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from rollout_inspector.formats.folders import READ, files_of
from rollout_inspector.opened.bucket import SCHEME, Bucket, answer_of, meaning, read_address
from rollout_inspector.outputs import draft_file
from rollout_inspector.refusal import Refusal

MAX_FILES = 500_000
RIGHTS = "list the bucket and read its objects"
_PIECE_BYTES = 1 << 20
_OF_ONE = ("AccessDenied", "InvalidObjectState", "NoSuchKey", "PreconditionFailed")
"""What S3 refuses of one object: another may be fetched."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


class BucketMirror(Bucket):
    """What lies below the address of a bucket, or the one object that it names. One thread fetches."""

    def __init__(self, address: str) -> None:
        """Nobody is asked yet. Raises :class:`Refusal` for an address that cannot be read."""
        options = read_address(address, "The address of the bucket")
        super().__init__(**options)
        self.top = options["location"]  # The names of objects are what follows, from the slash on.
        self.name = f"{SCHEME}{self.bucket_name}/{self.top}"
        self._folder = cache_folder(self.name, options.get("endpoint_url"))
        self.path, self.problem = self._folder / self.bucket_name / self.top, ""
        """The problem says why not all was fetched at the last try."""
        self.pending, self._listed = dict[str, str](), dict[str, str]()  # name -> ETag, in the order of fetching
        self.notes = dict[str, str]()
        """Name -> why this object is not there."""
        self._fetched = sqlite3.connect(self._folder / "objects.sqlite3", 20, 0, None, check_same_thread=False)
        self._fetched.execute("CREATE TABLE IF NOT EXISTS object (name TEXT PRIMARY KEY, etag TEXT)")

    def work(self) -> Iterator[bool]:
        """Fetch what is new, in pieces. Tells with each piece whether an object has ended."""
        problem, place = "", self.name
        try:
            self._look()
            for name, etag in list(self.pending.items()):
                place = self.name + name
                try:
                    yield from self._fetch(name, etag)
                except Exception as error:
                    sentence = meaning(error, place, RIGHTS)
                    if answer_of(error)[1] not in _OF_ONE and (sentence or getattr(error, "errno", 0) in _FULL):
                        raise
                    self.notes[name] = sentence or f"It cannot lie in the cache ({error})."
                yield True
        except Exception as error:
            way_out = "Free some space, or name another folder in ROLLOUT_INSPECTOR_CACHE."
            problem = meaning(error, place, RIGHTS) or f"{place} was not fetched, nor what follows ({error}). {way_out}"
        self.problem = problem

    def _look(self) -> None:
        """Compare what the bucket holds with what was fetched."""
        listed = dict[str, str]()
        for name, entry in self.objects("" if not self.top or self.top.lower().endswith(READ) else "/"):
            parts = name.split("/")[bool(self.top) :]
            is_below = not self.top or name[:1] in ("", "/")
            if not is_below or not entry["Size"] or not (self.top + name).lower().endswith(READ):
                continue
            if not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
                self.notes[name] = "Its key would leave the folder, so it is not fetched."
            elif not any(part.startswith(".") for part in parts):
                listed[name] = entry["ETag"]
            if len(listed) > MAX_FILES:
                raise Refusal(f"{self.name} holds more than {MAX_FILES:,} objects. Name a longer prefix.")
        if not listed and not self._listed:
            raise Refusal(f"{self.name} holds no objects that end in {', '.join(READ)}.")
        fetched = dict(self._fetched.execute("SELECT name, etag FROM object"))
        for name in (fetched.keys() | self._listed.keys()) - listed.keys():
            with suppress(OSError):
                self._path(name).unlink()
            self._fetched.execute("DELETE FROM object WHERE name = ?", [name])
            self.notes[name] = "It is no longer in the bucket."
        for name in sorted(listed.keys() - self._listed.keys()):
            with suppress(OSError):  # whoever fetches it meets the same error
                self._path(name).parent.mkdir(parents=True, exist_ok=True)
                with self._path(name).open("ab") as file:
                    if not file.tell():  # somebody emptied the cache by hand
                        fetched.pop(name, None)
        pending = {name: etag for name, etag in listed.items() if fetched.get(name) != etag}
        order = {path: n for n, path in enumerate(files_of(self.path, MAX_FILES))} if pending else {}
        # What is read together with another file comes before it.
        names = sorted(pending, key=lambda name: order.get(self._path(name), -1))
        self._listed, self.pending = listed, {name: pending[name] for name in names}

    def _path(self, name: str) -> Path:
        return Path(f"{self.path}{name}") if self.top else self.path / name

    def _fetch(self, name: str, etag: str) -> Iterator[bool]:
        answer = self.client.get_object(**self.place(name), IfMatch=etag)
        with closing(answer["Body"]) as body, draft_file(self._folder, "object") as draft:
            if shutil.disk_usage(self._folder).free < answer["ContentLength"]:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            for piece in body.iter_chunks(_PIECE_BYTES):
                draft.write(piece)
                yield False
            draft.flush()
            os.replace(draft.name, self._path(name))
        self._fetched.execute("INSERT OR REPLACE INTO object VALUES (?, ?)", [name, etag])
        del self.pending[name]
        self.notes.pop(name, None)


def cache_folder(*names: Any) -> Path:
    """The private folder of these names in the user's cache; a temporary one where the cache cannot be written."""
    key = hashlib.sha256(json.dumps(names).encode("utf-8", "backslashreplace")).hexdigest()[:24]
    home = os.environ.get("ROLLOUT_INSPECTOR_CACHE") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    folder = Path(home, "rollout-inspector", key).expanduser().absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="rollout-inspector-"))
