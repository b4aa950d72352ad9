"""Follows the folder that a trainer writes to, and pushes each file when it is complete. A state file says what was
pushed. It is replaced after each push that the server took, so that a restart goes on where the last one ended. A push
that was taken just before a crash is sent again, and the server knows its ids."""

import errno
import fnmatch
import hashlib
import json
import os
import re
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from stat import S_ISREG
from typing import IO, Any

from rollout_inspector.client.adapters.fragments import locked_file
from rollout_inspector.client.adapters.pushed_files import (
    GROWING, MAX_PART_BYTES, REFUSED, answer_text, count_answer, end_of_lines, is_trajectory, lines_between, prefix_of,
    shown, step_of
)
from rollout_inspector.client.client import Client, PushError, ServerError
from rollout_inspector.outputs import open_no_link, whole_file
from rollout_inspector.refusal import Refusal

ENDINGS = (".jsonl", ".json", ".ndjson", ".parquet", ".gz", ".zst")  # Endings of the names of files that are pushed.
PICKLES = (".pt", ".pkl", ".pickle")
MARKERS = ("_SUCCESS", "STABLE", "DONE", ".done")
"""Files that say that all files beside them are complete. ``NAME.done`` says it of one file."""
STATE_NAME = ".rollout-inspector-watch.json"
MAX_FILES = 20_000
HEAD_BYTES = 4096


@dataclass
class FileState:
    """What is known about one file."""

    size: int = 0
    mtime_ns: int = 0
    sent: int = 0  # Bytes that the server took; all of the file where it is not of lines.
    head: str = ""  # Hash of the first bytes that were sent. Another one means another file of the same name.
    refused: str = ""  # Why the server will never take the file as it is.


@dataclass
class FolderWatch:
    """Pushes the files of ``folder`` to the run of ``client``; without one, a run called ``name`` is created. ``only``:
    patterns of paths inside the folder, such as ``rollouts/*``. ``find_step``: the training step that a path inside the
    folder tells. ``convert`` turns a pickle into a file that can be pushed. Raises :class:`Refusal`."""

    folder: Path
    client: Client
    state_path: Path
    name: str = ""
    tokenizer: str | None = None
    steady_seconds: float = 10.0
    only: tuple[str, ...] = ()
    has_prefix: bool = True
    find_step: Callable[[str], int | None] = step_of
    convert: Callable[[Path], Path] | None = None
    say: Callable[[str], None] = print
    counts: Counter[str] = field(default_factory=Counter)
    """``pushes``, ``trajectories``, ``known``, ``rejected``, ``refused`` of all passes; ``waiting``: files that are not
    complete yet, after the last pass."""
    is_away: bool = False  # Whether the server did not answer at the last pass.

    def __post_init__(self) -> None:
        self._files: dict[str, FileState] = {}
        self._seen: dict[str, tuple[int, int, float]] = {}
        self._told: set[str] = set()
        self._away = ""
        self._why = ""
        self._lock: IO[bytes] | None = self._locked()
        self._load()

    # -- one pass

    def once(self) -> Counter[str]:
        """Push what is complete now. Returns the counts of all passes so far."""
        self.counts["waiting"], self.is_away = 0, False
        for path in self._paths():
            try:
                self._take(path)
            except FileNotFoundError:
                continue  # the trainer removed it
            except OSError as error:
                self._tell(f"{shown(self._key(path))} cannot be read: {error.strerror or error}.")
            except ServerError as error:
                if error.status in (401, 403, 404, 409, 410):
                    raise Refusal(str(error)) from error
                self.is_away = True
                if str(error) != self._away:
                    self.say(f"{shown(str(error))} Files wait, and are sent later.")
                self._away = str(error)
                return self.counts
        self._away = ""
        return self.counts

    def follow(self, every: float = 5.0, until: Callable[[], bool] = lambda: False) -> Counter[str]:
        """Pass over the folder again and again, with a pause of ``every`` seconds."""
        while not until():
            self.once()
            time.sleep(every)
        return self.counts

    def close(self) -> None:
        """Let another process watch the folder."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def _take(self, path: Path) -> None:
        key, stat = self._key(path), path.stat()
        state = self._files.get(key, FileState())
        if (state.size, state.mtime_ns) == (stat.st_size, stat.st_mtime_ns) or not stat.st_size:
            return
        is_complete = self._is_complete(path, key, stat)
        self.counts["waiting"] += not is_complete
        if path.suffix.lower() in GROWING:
            self._push_lines(path, key, stat, state, is_complete)
            return
        if not is_complete:
            return
        if path.suffix.lower() in PICKLES:
            if self.convert is None:
                return
            self._push_converted(path, key, stat)
        else:
            with _opened(path) as file:
                self._push(key, file)
            self._keep(key, stat, sent=stat.st_size, refused=self._why)

    def _push_lines(self, path: Path, key: str, stat: os.stat_result, known: FileState, is_complete: bool) -> None:
        """Push the whole lines that are new. A file that shrank or begins otherwise is another file. Of a file that is
        not complete, only lines that are trajectories by themselves are pushed."""
        with _opened(path) as file:
            start = known.sent
            if start > stat.st_size or (start and _head(file, start) != known.head):
                start = 0
            file.seek(start)
            is_alone = is_trajectory(file.readline(MAX_PART_BYTES))
            file.seek(start)
            if not (is_alone or is_complete):
                return
            while start < stat.st_size:
                most = MAX_PART_BYTES if is_alone else stat.st_size
                try:
                    end = end_of_lines(file, start, stat.st_size, most, is_complete)
                except PushError as error:
                    self._refuse(key, str(error))
                    self._keep(key, stat, sent=start, head=_head(file, start), refused=str(error))
                    return
                if end == start:  # the last line is not whole
                    break
                if not self._push(key, file, (start, end)):
                    self._keep(key, stat, sent=end, head=_head(file, end), refused=self._why)
                    return
                start = end
                self._keep(key, None, sent=start, head=_head(file, start))
        if is_complete:
            self._keep(key, stat, sent=start)

    def _push_converted(self, path: Path, key: str, stat: os.stat_result) -> None:
        assert self.convert is not None
        try:
            converted = self.convert(path)
        except ValueError as error:
            self._refuse(key, str(error))
            self._keep(key, stat, refused=str(error))
            return
        try:
            with converted.open("rb") as file:
                self._push(key, file)
        finally:
            converted.unlink(missing_ok=True)
        self._keep(key, stat, sent=stat.st_size, refused=self._why)

    def _push(self, key: str, file: IO[bytes], part: tuple[int, int] | None = None) -> bool:
        """Push a file, or the lines between two places of it. Whether the server took it; what it will never take is
        told and counted."""
        self._why = ""
        if self.client.run is None:
            try:
                self.client.create_run(self.name or f"watched {self.folder.name}", self.tokenizer)
            except ServerError as error:
                if error.status not in REFUSED:
                    raise
                raise Refusal(str(error)) from error  # such as a tokenizer that is not registered
            self._save()
        try:
            prefix, step = prefix_of(key) if self.has_prefix else "", self.find_step(key)
            if part is None:
                answer = self.client.push_file(file, prefix, step)
            else:
                answer = self.client.push(lines_between(file, *part), prefix, step)
        except ServerError as error:
            if error.status not in REFUSED:
                raise
            self._why = str(error)
            self._refuse(key, self._why)
            return False
        self.counts["pushes"] += 1
        count_answer(self.counts, answer)
        self.say(answer_text(key, answer, None if part is None else file, part[0] if part else 0))
        return True

    def _refuse(self, key: str, why: str) -> None:
        self.counts["refused"] += 1
        self.say(f"{shown(key)} is refused: {shown(why)}")

    def _tell(self, sentence: str) -> None:
        """Say a sentence once in a row."""
        if sentence not in self._told:
            self._told.add(sentence)
            self.say(sentence)

    # -- files

    def _paths(self) -> list[Path]:
        """The files that may be pushed, ``step_9`` before ``step_10``. Hidden files and links are left out."""
        paths: list[Path] = []
        pickles = 0
        for folder, folders, names in os.walk(self.folder):
            folders[:] = [] if "stream.json" in names else [name for name in folders if not name.startswith(".")]
            if "stream.json" in names:  # the fragments of a stream, which sends them itself
                continue
            for name in names:
                path = Path(folder, name)
                ending = path.suffix.lower()
                if name.startswith(".") or ending not in (*ENDINGS, *PICKLES) or path.is_symlink():
                    continue
                if self.only and not any(fnmatch.fnmatch(self._key(path), pattern) for pattern in self.only):
                    continue
                if ending in PICKLES and self.convert is None:
                    pickles += 1
                else:
                    paths.append(path)
            if len(paths) > MAX_FILES:
                raise Refusal(f"{self.folder} holds more than {MAX_FILES:,} files. Say which.", field="only")
        if pickles:
            self._tell("Files that end in .pt or .pkl are left alone. They can be converted; only do that with files "
                       "that you trust.")
        return sorted(paths, key=lambda path: _in_order(self._key(path)))

    def _key(self, path: Path) -> str:
        return path.relative_to(self.folder).as_posix()

    def _is_complete(self, path: Path, key: str, stat: os.stat_result) -> bool:
        """Whether a marker says so, or size and time of change stayed the same for long enough."""
        if path.with_name(path.name + ".done").exists() or any((path.parent / name).exists() for name in MARKERS):
            return True
        now = time.monotonic()
        before = self._seen.get(key)
        if before is None or before[:2] != (stat.st_size, stat.st_mtime_ns):
            before = self._seen[key] = (stat.st_size, stat.st_mtime_ns, now)
        return now - before[2] >= self.steady_seconds or time.time() - stat.st_mtime >= self.steady_seconds

    # -- the state file

    def _keep(self, key: str, stat: os.stat_result | None, **fields: Any) -> None:
        """Note what became of a file. Without ``stat`` there is more of it to push."""
        state = self._files.setdefault(key, FileState())
        if stat is not None:
            state.size, state.mtime_ns = stat.st_size, stat.st_mtime_ns
        state.refused = ""
        for name, value in fields.items():
            setattr(state, name, value)
        self._save()

    def _save(self) -> None:
        value = {
            "version": 1, "url": self.client.url, "run": self.client.run,
            "files": {key: vars(state) for key, state in self._files.items()},
        }
        try:
            with whole_file(self.state_path) as file:
                file.write(json.dumps(value).encode())
        except OSError as error:
            raise Refusal(
                f"{self.state_path} cannot be written: {error.strerror}. Name another place.", field="state"
            ) from error

    def _load(self) -> None:
        try:
            with _opened(self.state_path) as file:
                value = json.loads(file.read())
        except FileNotFoundError:
            return
        except (OSError, ValueError, RecursionError) as error:
            raise Refusal(f"{self.state_path} cannot be read as a state file: {error}. Move it away.") from error
        try:
            if value["version"] != 1:
                raise Refusal(f"{self.state_path} is of version {value['version']}. Move it away.")
            url, run = str(value["url"]), value["run"] and str(value["run"])
            files = {key: _file_state(saved) for key, saved in value["files"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise Refusal(f"{self.state_path} is no state file of this command. Move it away.") from error
        if url != self.client.url or (run and self.client.run and run != self.client.run):
            raise Refusal(f"{self.state_path} is about the run {run} on {url}. Name another state file.", field="state")
        self.client.run, self._files = self.client.run or run, files

    def _locked(self) -> IO[bytes]:
        path = self.state_path.with_name(self.state_path.name + ".lock")
        try:
            file = locked_file(path)
        except OSError as error:
            raise Refusal(f"{path} cannot be written: {error.strerror}. Name another place.", field="state") from error
        if file is None:
            raise Refusal(f"Another process watches with {self.state_path} already.")
        return file


def _file_state(held: dict[str, Any]) -> FileState:
    return FileState(
        int(held["size"]), int(held["mtime_ns"]), int(held["sent"]), str(held["head"]), str(held["refused"])
    )


def _opened(path: Path) -> IO[bytes]:
    """A file to read. Raises ``OSError`` for a link, a pipe or a device: a folder of others may hold any."""
    file = os.fdopen(open_no_link(path, os.O_RDONLY), "rb")
    if not S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "It is no regular file")
    return file


def _head(file: IO[bytes], sent: int) -> str:
    """A hash of the first bytes that were sent."""
    file.seek(0)
    return hashlib.sha256(file.read(min(sent, HEAD_BYTES))).hexdigest()


def _in_order(key: str) -> list[tuple[int, str]]:
    """Sorts the numbers in a path as numbers."""
    return [(int(part) if part.isdecimal() else -1, part) for part in re.split(r"(\d{1,15})", key)]
