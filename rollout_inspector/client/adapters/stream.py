"""Sends rollouts from inside a trainer, without making a training step wait.

:meth:`RolloutStream.send` puts records into a bounded queue and returns. One thread writes them to *fragments*, files
of JSON lines in a folder. Another thread pushes the fragments, oldest first, and deletes each one that the server took.
While the server is away the fragments stay. The next process that uses the folder sends what an ended one left there.
The server knows what it has by its id, so a fragment that is sent twice is stored once.
"""

from __future__ import annotations

import atexit
import contextlib
import gzip
import json
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from rollout_inspector.client.adapters.fragments import FragmentFolder, bytes_of_fragments, folders_left
from rollout_inspector.client.client import Client, ServerError, line_of

LOG = logging.getLogger("rollout_inspector")

MAX_QUEUED_VALUES = 16_000_000
"""Numbers that wait in memory, about 0.5 GB as Python lists. Further records are dropped and counted."""
MAX_FRAGMENT_BYTES = 16 << 20  # JSON in one fragment, unless one record alone is longer.
MAX_FOLDER_BYTES = 4 << 30
"""Bytes of all fragments in the folder, refused ones included. Further records are dropped and counted."""
MAX_FAULTS = 10  # How often the server may fail at the same fragment with status 500 before it is set aside.
FIRST_WAIT_SECONDS = 1.0
MAX_WAIT_SECONDS = 60.0
PUSH_SECONDS = 150.0
CLOSE_SECONDS = 20.0

_REFUSED = (400, 404, 409, 410, 411, 413, 415)  # Answers that stay the same however often a fragment is sent.


@dataclass
class StreamCounts:
    """What became of the records of one stream, and of those that it found in its folder."""

    taken: int = 0  # Records that :meth:`RolloutStream.send` took.
    dropped_queue_full: int = 0
    dropped_folder_full: int = 0
    dropped_unwritable: int = 0  # Records that JSON cannot hold, or that the disk did not take.
    dropped_unreadable: int = 0  # Batches that could not be read, such as objects that the adapter does not know.
    stored: int = 0  # Trajectories that the server stored.
    known: int = 0  # Trajectories that the server had already.
    rejected: int = 0  # Records that the server could not read.
    refused: int = 0  # Records of fragments that the server refused; they lie in ``refused/`` beside their reason.

    @property
    def dropped(self) -> int:
        """Records and unreadable batches that were lost here, for whatever reason."""
        return self.dropped_queue_full + self.dropped_folder_full + self.dropped_unwritable + self.dropped_unreadable


_Batch = tuple[list[Any], str, int | None, int]  # Records, prefix, step, weight.


class RolloutStream:
    """A queue before a folder of fragments, and their sender. Safe to use from many threads, and after a fork.

    What is not named is read from ``ROLLOUT_INSPECTOR_URL``, ``_TOKEN``, ``_RUN``, ``_NAME``, ``_TOKENIZER`` and
    ``_FOLDER``. Without a run, the first fragment that the server takes creates one, called ``name``; else as W&B,
    MLflow or trackio call theirs; else ``own_name``. Its address is printed, and linked in those trackers. Raises
    ``ValueError`` without an address or a token. After that nothing raises: a failure is logged and counted.
    """

    def __init__(
        self, url: str | None = None, token: str | None = None, run: str | None = None, *, name: str = "",
        own_name: str = "", tokenizer: str | None = None, folder: str | Path | None = None,
        max_queued_values: int = MAX_QUEUED_VALUES, max_folder_bytes: int = MAX_FOLDER_BYTES,
        wait_seconds: float = FIRST_WAIT_SECONDS,
    ) -> None:
        self.url = (url or _environment("URL")).rstrip("/")
        self.token = token or _environment("TOKEN")
        for value, what in ((self.url, "URL"), (self.token, "TOKEN")):
            if not value:
                raise ValueError(
                    f"Rollout Inspector needs {what.lower()}=... or the environment variable ROLLOUT_INSPECTOR_{what}. "
                    "The server makes a token at /tokens."
                )
        self.run = run or _environment("RUN") or None
        self.name, self._own_name = name or _environment("NAME"), own_name
        self.tokenizer = tokenizer or _environment("TOKENIZER") or None
        self.folder = Path(folder or _environment("FOLDER") or "rollout-inspector-fragments").absolute()
        self.max_queued_values, self.max_folder_bytes = max_queued_values, max_folder_bytes
        self.wait_seconds = wait_seconds
        self.counts = StreamCounts()
        self._begin()
        atexit.register(self.close)

    def _begin(self) -> None:
        """All that belongs to one process; a forked child begins again."""
        self._pid = os.getpid()
        self._queue: deque[_Batch] = deque()
        self._queued_values = 0
        self._is_busy = {"write": False, "send": False}
        self._is_away = False
        self._changed = threading.Condition()
        self._ending = False
        self._threads: list[threading.Thread] = []
        self._fragments: FragmentFolder | None = None
        self._warned: dict[str, float] = {}
        self._is_printed = self._is_linked = False

    # -- from the trainer

    def send(self, records: Iterable[Any] | Mapping[str, Any], prefix: str = "", step: int | None = None) -> bool:
        """Take records, and return at once. False = the queue was full, and they were dropped and counted. ``records``,
        ``prefix`` and ``step`` are those of :meth:`push`. Lists in them must not be changed afterwards."""
        return self.send_made(lambda: records, prefix, step)

    def _take(self, records: Iterable[Any] | Mapping[str, Any], prefix: str, step: int | None) -> bool:
        if os.getpid() != self._pid:
            self.counts = StreamCounts()
            self._begin()
        batch = [records] if isinstance(records, (Mapping, str, bytes)) else list(records)
        if not batch:
            return True
        self.name = self.name or link_run("") or self._own_name or time.strftime("streamed %Y-%m-%d %H:%M")
        self._link()
        weight = sum(map(_weight, batch))
        with self._changed:
            if self._ending or (self._queue and self._queued_values + weight > self.max_queued_values):
                self.counts.dropped_queue_full += len(batch)
                full = True
            else:
                full = False
                self.counts.taken += len(batch)
                self._queue.append((batch, prefix, step, weight))
                self._queued_values += weight
                self._start()
                self._changed.notify_all()
        if full:
            why = "the stream is closed" if self._ending else f"they come faster than {self.folder} can be written"
            self._warn("queue", f"{self.counts.dropped_queue_full:,} records were dropped so far: {why}.")
        return not full

    def send_made(
        self, make: Callable[[], Iterable[Any] | Mapping[str, Any]], prefix: str = "", step: int | None = None
    ) -> bool:
        """Send the records that ``make`` returns. Where it raises, the failure is logged and counted. Adapters read the
        objects of a framework this way, so that a shape they do not know stops no training."""
        try:
            return self._take(make(), prefix, step)
        except Exception as error:
            self.counts.dropped_unreadable += 1
            self._warn("make", f"{self.counts.dropped_unreadable:,} batches could not be read, the last one because of "
                       f"{type(error).__name__}: {error}")
            LOG.debug("A batch could not be read.", exc_info=True)
            return False

    def flush(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Wait until all is written and sent. False = some of it still waits, in the queue or in the folder."""
        return self._wait(seconds, self._is_sent)

    def _link(self) -> None:
        """Link the run in the trackers, once, as soon as the server has taken something."""
        if self._is_printed and not self._is_linked:
            self._is_linked = True
            link_run(f"{self.url}/runs/{self.run}")

    def settle(self, seconds: float = CLOSE_SECONDS) -> bool:
        """Like :meth:`flush`, but without waiting for a server that just failed to answer."""
        return self._wait(seconds, lambda: self._is_sent() or (self._is_away and self._is_written()))

    def close(self, seconds: float = CLOSE_SECONDS) -> StreamCounts:
        """Write what is queued, send what can be sent within ``seconds``, and end. The folder keeps the rest."""
        if os.getpid() != self._pid or self._ending:
            return self.counts
        self.settle(seconds)
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(1.0)
        n_waiting, fragments = len(self.waiting()), self._fragments
        if n_waiting:
            LOG.warning("%d fragments wait in %s. The next stream with this folder sends them.", n_waiting, self.folder)
        if self.counts.dropped or self.counts.refused or self.counts.rejected:
            LOG.warning("Not all records arrived: %s.", asdict(self.counts))
        if fragments is not None and not n_waiting:
            fragments.remove()
        elif fragments is not None:
            fragments.unlock()
        atexit.unregister(self.close)
        return self.counts

    def send_left_over(self) -> bool:
        """Send what ended processes left in the folder, in this thread. False = some of it still waits."""
        left_over = folders_left(self.folder, self.url, self._fragments)
        try:
            for fragments in left_over:
                while fragments.waiting():
                    if not self._send_one(fragments):
                        if not fragments.is_forbidden:
                            return False
                        break
                else:
                    fragments.remove()
        finally:
            for fragments in left_over:
                fragments.unlock()
        return not any(fragments.waiting() for fragments in left_over)

    def waiting(self) -> list[Path]:
        """The fragments of this process that are not sent yet, oldest first."""
        return self._fragments.waiting() if self._fragments is not None else []

    def __enter__(self) -> RolloutStream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_written(self) -> bool:
        return not self._queue and not self._is_busy["write"]

    def _is_sent(self) -> bool:
        return self._is_written() and not self._is_busy["send"] and not self.waiting()

    def _wait(self, seconds: float, is_done: Callable[[], bool]) -> bool:
        end = time.monotonic() + seconds
        with self._changed:
            while not is_done():
                seconds_left = end - time.monotonic()
                if seconds_left <= 0 or not self._threads:
                    break
                self._changed.wait(min(seconds_left, 0.2))
            is_all = is_done()
        self._link()
        return is_all

    def _start(self) -> None:
        if not self._threads:
            for work in (self._write_all, self._send_all):
                thread = threading.Thread(target=work, name=f"rollout-inspector{work.__name__}", daemon=True)
                self._threads.append(thread)
                thread.start()

    def _warn(self, about: str, sentence: str) -> None:
        """Log a warning, at most once a minute about the same thing."""
        now = time.monotonic()
        if now - self._warned.get(about, -60.0) >= 60.0:
            self._warned[about] = now
            LOG.warning("%s", sentence)

    # -- the thread that writes fragments

    def _write_all(self) -> None:
        while True:
            with self._changed:
                while not self._queue:
                    if self._ending:
                        return
                    self._changed.wait()
                batch = self._queue.popleft()
                self._queued_values -= batch[3]
                self._is_busy["write"] = True
            try:
                self._write(*batch[:3])
            finally:
                with self._changed:
                    self._is_busy["write"] = False
                    self._changed.notify_all()

    def _write(self, records: list[Any], prefix: str, step: int | None) -> None:
        lines: list[bytes] = []
        size = 0
        for record in records:
            try:
                line = line_of(record)
            except Exception as error:
                self.counts.dropped_unwritable += 1
                self._warn("line", f"A record cannot be written as JSON and was dropped: {error}")
                continue
            if lines and size + len(line) > MAX_FRAGMENT_BYTES:
                self._keep(lines, prefix, step)
                lines, size = [], 0
            lines.append(line)
            size += len(line)
        if lines:
            self._keep(lines, prefix, step)

    def _keep(self, lines: list[bytes], prefix: str, step: int | None) -> None:
        """Write one fragment, or count what it would have held."""
        try:
            if self._fragments is None or not self._fragments.path.is_dir():  # somebody may have cleaned up
                about = {"url": self.url, "run": self.run, "name": self.name, "tokenizer": self.tokenizer}
                self._fragments = FragmentFolder.create(self.folder, about)
            if bytes_of_fragments(self.folder) + sum(map(len, lines)) // 4 > self.max_folder_bytes:
                self.counts.dropped_folder_full += len(lines)
                self._warn("folder", f"{self.counts.dropped_folder_full:,} records were dropped so far: {self.folder} "
                           f"holds {self.max_folder_bytes >> 20} MB of fragments that were not sent.")
                return
            self._fragments.add({"prefix": prefix, "step": step, "n": len(lines)}, lines)
        except OSError as error:
            self.counts.dropped_unwritable += len(lines)
            self._warn("disk", f"{self.counts.dropped_unwritable:,} records were dropped so far: {self.folder} cannot "
                       f"be written: {error.strerror or error}.")

    # -- the thread that sends them

    def _send_all(self) -> None:
        left_over: list[FragmentFolder] | None = None
        waits = 0
        while True:
            own = self._fragments
            if left_over is None and own is not None:
                left_over = folders_left(self.folder, self.url, own)
            candidates = (*(left_over or ()), own)
            sending = next(
                (fragments for fragments in candidates if fragments is not None and fragments.waiting()), None
            )
            if sending is None:
                for fragments in left_over or ():
                    fragments.remove()
                left_over = left_over and []
                with self._changed:
                    if self._ending:
                        return
                    self._changed.notify_all()
                    self._changed.wait(0.1)
                continue
            self._is_busy["send"] = True
            is_sent = self._send_one(sending)
            if not is_sent and sending is not own and sending.is_forbidden:
                # The token of this process may not push where another process did. Its fragments stay.
                sending.unlock()
                left_over = [fragments for fragments in left_over or () if fragments is not sending]
                is_sent = True
            waits = 0 if is_sent else waits + 1
            with self._changed:
                self._is_busy["send"], self._is_away = False, not is_sent
                self._changed.notify_all()
                pause = min(self.wait_seconds * 2 ** min(waits - 1, 16), MAX_WAIT_SECONDS) if waits else 0.0
                end = time.monotonic() + pause
                while not self._ending and time.monotonic() < end:
                    self._changed.wait(max(end - time.monotonic(), 0.0))
                if self._ending:
                    for fragments in left_over or ():
                        fragments.unlock()
                    return

    def _send_one(self, fragments: FragmentFolder) -> bool:
        """Send the oldest fragment. False = it is to be sent again later."""
        fragment = fragments.waiting()[0]
        try:
            answer = send_fragment(fragments, fragment, self.url, self.token)
        except ServerError as error:
            fragments.faults[fragment.name] = fragments.faults.get(fragment.name, 0) + (error.status == 500)
            if error.status in _REFUSED or fragments.faults[fragment.name] >= MAX_FAULTS:
                self.counts.refused += fragments.set_aside(fragment, str(error))
                self._warn("refused", f"The server refused a fragment, which now lies in {fragments.refused}: {error}")
                return True
            self._warn("away", f"Rollouts wait in {self.folder}: {error}")
            fragments.is_forbidden = error.status in (401, 403)
            return False
        except Exception as error:  # a fragment that a power failure cut, a disk that went away
            self.counts.refused += fragments.set_aside(fragment, f"It cannot be read: {error!r}")
            self._warn("refused", f"A fragment cannot be read and now lies in {fragments.refused}: {error!r}")
            return True
        if fragments is self._fragments:
            self.run = answer["run"]
            if not self._is_printed:
                self._is_printed = True
                print(f"Rollout Inspector: {self.url}/runs/{self.run}", flush=True)
        self.counts.stored += answer.get("trajectories", 0)
        self.counts.known += answer.get("known", 0)
        if answer.get("n_rejected"):
            self.counts.rejected += answer["n_rejected"]
            self._warn("rejected", f"The server could not read {answer['n_rejected']} records: {answer['rejected'][0]}")
        return True


def send_fragment(fragments: FragmentFolder, fragment: Path, url: str, token: str) -> dict[str, Any]:
    """Push one fragment to the run of its folder, delete it, and return what the server answered. Raises
    :class:`ServerError` when the server did not take it, and ``OSError`` or ``ValueError`` when it is damaged."""
    client = Client(url, token, fragments.about["run"], tries=1, timeout=PUSH_SECONDS)
    if client.run is None:
        try:
            client.create_run(fragments.about["name"], fragments.about["tokenizer"])
        except ServerError as error:  # such as a tokenizer that somebody still has to register: the fragment waits
            raise ServerError(str(error), 403 if error.status in _REFUSED else error.status) from error
        fragments.note(run=client.run)
    with gzip.open(fragment, "rb") as file:
        head = json.loads(file.readline())
        answer = client.push(_lines(file), head["prefix"], head["step"])
    fragment.unlink(missing_ok=True)
    return answer


def _lines(file: Iterable[bytes]) -> Iterator[bytes]:
    yield from file


def _environment(name: str) -> str:
    return os.environ.get(f"ROLLOUT_INSPECTOR_{name}", "").strip()


def _weight(value: Any) -> int:
    """About how many numbers a record holds; lists of numbers are not walked through."""
    if isinstance(value, Mapping):
        return 8 + sum(map(_weight, value.values()))
    if isinstance(value, (str, bytes)):
        return 1 + len(value) // 8
    if isinstance(value, (list, tuple)):
        if value and isinstance(value[0], (Mapping, list, tuple)):
            return sum(map(_weight, value))
        return len(value)
    n = value.numel() if callable(getattr(value, "numel", None)) else getattr(value, "size", 1)
    return max(n, 1) if isinstance(n, int) else 1


_shared: RolloutStream | None = None
_sharing = threading.Lock()


def shared_stream(own_name: str = "") -> RolloutStream:
    """The stream that the environment variables describe, the same for all of this process."""
    global _shared
    with _sharing:
        if _shared is None or _shared._ending:
            _shared = RolloutStream(own_name=own_name)
        return _shared


LINK_KEY = "rollout_inspector"
"""The name of the link: a value of the config in W&B, a tag in MLflow, a logged text in trackio."""


class Tracker(NamedTuple):
    """How a tracker is asked. ``module``: of its name in ``sys.modules``."""

    module: str
    run: Callable[[Any], Any]
    name: Callable[[Any], Any]
    link: Callable[[Any, Any, str], Any]  # Of module, run and address.


TRACKERS = (
    Tracker("wandb", lambda module: module.run, lambda run: run.name,
            lambda _, run, url: run.config.update({LINK_KEY: url}, allow_val_change=True)),
    Tracker("mlflow", lambda module: module.active_run(), lambda run: run.info.run_name,
            lambda module, _, url: module.set_tag(LINK_KEY, url)),
    Tracker("trackio.context_vars", lambda module: module.current_run.get(), lambda run: run.name,
            lambda _, run, url: run.log({LINK_KEY: url}, step=0)),  # a step of its own would shift those of the trainer
)


def link_run(url: str) -> str:
    """Write the address of our run into that of each tracker; empty = only look. What the first one calls its run.
    The thread of the trainer asks, because MLflow and trackio know a run by thread or context; nothing is imported."""
    names = []
    for tracker in TRACKERS:
        with contextlib.suppress(Exception):  # a tracker that fails is left out
            module = sys.modules[tracker.module]
            if (run := tracker.run(module)) is not None:
                names.append(str(tracker.name(run) or "").strip()[:200])
                _ = url and tracker.link(module, run, url)
    return next(filter(None, names), "")
