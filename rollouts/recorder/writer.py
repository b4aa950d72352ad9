"""The thread that stores the recorded calls. No request waits for the database, and no call that was taken is lost."""

import logging
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

import msgspec
from django.db import DatabaseError, close_old_connections, connection
from django.utils import timezone

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.formats import FORMATS, Rejected, Source
from rollout_inspector.formats.engine_fields import summarised
from rollout_inspector.streams.trajectory import Step
from rollouts.jobs.diagnosis import diagnosis_for
from rollouts.recorder import wire
from rollouts.recorder.sessions import Conversations
from rollouts.recorder.wire import Dialect
from rollouts.store.chat_templates.tokenizers import byte_table_of
from rollouts.store.models import Run
from rollouts.store.runs.imports import add_rejections
from rollouts.store.runs.runs import beat, end_run, find_run, note_error
from rollouts.store.trajectories.recorded_trajectories import append_steps, settle_trajectory
from rollouts.store.trajectories.retokenized import keep_retokenized
from rollouts.store.trajectories.trajectories import find_by_external_id, load_trajectory

log = logging.getLogger(__name__)

MAX_AT_ONCE = 100
POLL_SECONDS = 0.25
BEAT_SECONDS = 2.0
FIRST_WAIT_SECONDS = 0.2
MAX_WAIT_SECONDS = 5.0
AT_END_SECONDS = 60.0
"""How long the recorder, at its end, tries a database that does not answer. Then the calls go to a file."""
MAX_MISSED = 50  # Addresses whose calls are counted each by itself; the others are counted together.
SOURCE = "recorder"


@dataclass
class Call:
    """One call as it goes over the wire. It grows while the answer passes."""

    session: str  # The trajectory that the client named; empty = the conversation decides.
    request: bytes
    dialect: Dialect
    agent: str = ""  # The sub-agent that called; empty = none is named.
    answer: bytes | list[bytes] = b""  # A body, or the payloads of a stream's events.
    broken_off: bool = False  # The stream ended without the server's end mark.
    created_at: str = field(default_factory=lambda: timezone.now().isoformat())
    problem: str = ""  # Why the answer cannot be read, when that is already known.
    size: int = 0  # Bytes of the answer so far.

    @property
    def n_bytes(self) -> int:
        """Of the request and the answer."""
        return len(self.request) + self.size

    def keeps(self, n_bytes: int) -> bool:
        """Whether the answer is still recorded when so many bytes are added. One that is too long is let go."""
        self.size += n_bytes
        if self.size > wire.MAX_KEPT_BYTES:
            self.answer, self.problem = b"", f"its answer is larger than {wire.MAX_KEPT_BYTES >> 20} MB."
        return not self.problem


class Writer:
    """Takes calls from any thread and stores them in batches in a separate thread."""

    def __init__(
        self,
        run: Run,
        folder: Path,
        upstream: str = "",
        engine: str = "",
        idle_s: float = 60.0,
        stored: Callable[[int, int], None] = lambda n_calls, n_bytes: None,
    ) -> None:
        self.run, self.upstream, self.engine, self.idle_s = run, upstream, engine, idle_s
        self.counts: Counter[str] = Counter()
        self.not_recorded: Counter[str] = Counter()  # Address -> calls that passed and are not recorded.
        self._by_nature: Counter[str] = Counter()  # Title of a dialect in which no server tells ids -> its calls.
        self.cancelled = threading.Event()
        self.rescue_file = folder / f"{run.code}.calls.jsonl"
        self._stored = stored
        self._queue: SimpleQueue[Call | TrajectoryEnd] = SimpleQueue()
        self._conversations = Conversations()
        self._open: dict[str, float] = {}  # The trajectories under way, with the time of their last call.
        self._ends: dict[str, TrajectoryEnd] = {}
        self._closing = threading.Event()
        self._give_up_at = float("inf")
        self._reported = ""
        self._n_begun = 0
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=False)

    def start(self) -> None:
        self._thread.start()

    def take(self, item: Call | TrajectoryEnd) -> None:
        """Never waits. The proxy limits how many calls may lie here unwritten."""
        if isinstance(item, Call):
            self.counts["calls"] += 1
        self._queue.put(item)

    def missed(self, path: str) -> None:
        """Count a call that passed and is not recorded."""
        path = path[:100] if path in self.not_recorded or len(self.not_recorded) < MAX_MISSED else "other addresses"
        if not self.not_recorded[path]:
            log.warning("calls of %s pass and are not recorded run=%s", path, self.run.code)
        self.not_recorded[path] += 1

    def state(self) -> dict[str, Any]:
        """How many calls came, were stored, had no ids, could not be read, had to be kept in a file, or only passed."""
        counts = {name: self.counts[name] for name in ("calls", "stored", "without_ids", "unread", "rescued")}
        return {**counts, "not_recorded": dict(self.not_recorded)}

    def close(self) -> None:
        """Store everything that was taken, close every trajectory, end the run."""
        self._give_up_at = time.monotonic() + AT_END_SECONDS
        self._closing.set()
        self._thread.join()

    # -- the thread ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        table = None
        with suppress(DatabaseError):
            table = byte_table_of(self.run)  # it tells template tokens from observations
        beat_at = 0.0
        try:
            while True:
                batch: list[Call | TrajectoryEnd] = []
                with suppress(Empty):
                    batch.append(self._queue.get(timeout=0 if self._closing.is_set() else POLL_SECONDS))
                    while len(batch) < MAX_AT_ONCE:
                        batch.append(self._queue.get_nowait())
                calls = [item for item in batch if isinstance(item, Call)]
                if calls and self.cancelled.is_set():
                    self._let_go(calls)
                elif calls:
                    self._store(calls, table)
                self._ends |= {item.key: item for item in batch if isinstance(item, TrajectoryEnd)}
                ending = self._closing.is_set() and not batch
                self._settle(everything=ending)
                if ending:
                    break
                if time.monotonic() > beat_at and not self._closing.is_set():
                    beat_at = time.monotonic() + BEAT_SECONDS
                    self._beat()
                    self._report()
            self._report()  # with the calls that came meanwhile
            self._again(self._end_run)
        finally:
            # The connection belongs to this thread and would stay open when the thread ends.
            connection.close()

    def _again(self, work: Callable[[], None]) -> bool:
        """Repeat the work until the database accepts it. False if that can never happen or was given up at the end."""
        wait = FIRST_WAIT_SECONDS
        while True:
            try:
                work()
                return True
            except DatabaseError as error:
                log.warning("not stored, tried again run=%s: %s", self.run.code, error)
                if time.monotonic() > self._give_up_at:
                    return False
                with suppress(DatabaseError):
                    close_old_connections()
                time.sleep(wait)
                wait = min(wait * 2, MAX_WAIT_SECONDS)
            except Exception:
                log.exception("not stored run=%s", self.run.code)
                return False

    def _store(self, calls: Sequence[Call], table: Any) -> None:
        steps: dict[str, list[Step]] = defaultdict(list)
        lines: list[bytes] = []
        rejected: list[Rejected] = []
        for call in calls:
            try:
                name, line, read = self._read(call)
            except Exception as error:  # no call ends the thread that stores all of them
                reason = str(error) if isinstance(error, ValueError) else repr(error)
                rejected.append(Rejected(None, f"A call could not be recorded: {reason}"))
                continue
            steps[name] += read
            lines.append(line)
            # A client that left before the first token has no completion; none is missing.
            if any(not len(s.prompt_ids) or (not len(s.completion_ids) and s.finish_reason != "abort") for s in read):
                self.counts["without_ids"] += 1
                self._by_nature[call.dialect.title] += call.dialect.has_ids is False
        self.counts["unread"] += len(rejected)
        if steps and not self._again(lambda: self._append(steps, table)):
            self._rescue(lines)
        if rejected:
            self._again(lambda: add_rejections(self.run, SOURCE, rejected))
        self._report()
        self.counts["stored"] += len(calls) - len(rejected)
        self._let_go(calls)

    def _let_go(self, calls: Sequence[Call]) -> None:
        self._stored(len(calls), sum(call.n_bytes for call in calls))

    def _append(self, steps: dict[str, list[Step]], table: Any) -> None:
        append_steps(self.run, steps, table)
        now = time.monotonic()
        self._open |= dict.fromkeys(steps, now)

    def _read(self, call: Call) -> tuple[str, bytes, list[Step]]:
        """The trajectory's name, the call as lines, and its steps. Raises ``ValueError`` with a sentence."""
        if call.problem:
            raise ValueError(call.problem)
        try:
            lines = wire.recorded_lines(
                call.dialect, call.session or "?", call.request, call.answer, call.created_at, call.broken_off,
                call.agent,
            )
        except (msgspec.MsgspecError, ValueError, RecursionError, TypeError, AttributeError, LookupError) as error:
            raise ValueError(f"its answer is not what a server of {call.dialect.title} sends ({error}).") from error
        items = FORMATS["recorded_calls"].read(Source.of_bytes(lines))
        recorded = next(items, Rejected(None, "it is empty."))
        if isinstance(recorded, Rejected):
            raise ValueError(recorded.reason)
        steps = [replace(step, engine=self.engine) for step in summarised(recorded).steps]
        name = call.session
        if not name:
            name = self._conversations.name(steps[0], f"conversation-{timezone.now():%Y%m%d-%H%M%S}-{self._n_begun}")
            self._n_begun += 1
            lines = lines.replace(b'"session_id":"?"', b'"session_id":' + msgspec.json.encode(name))
        return name, lines, steps

    def _rescue(self, lines: Sequence[bytes]) -> None:
        """Write calls that the database did not accept to a file that import_rollouts reads."""
        self.counts["stored"] -= len(lines)
        try:
            self.rescue_file.parent.mkdir(parents=True, exist_ok=True)
            with self.rescue_file.open("ab") as file:
                file.writelines(lines)
        except OSError as error:
            log.error("%d calls lost, database and disk take nothing run=%s: %s", len(lines), self.run.code, error)
            return
        self.counts["rescued"] += len(lines)
        log.error("%d calls not stored, kept in %s run=%s", len(lines), self.rescue_file, self.run.code)

    def _settle(self, everything: bool) -> None:
        """Diagnose and close the trajectories that have ended: by a session's end, a long silence, or the run's end."""
        before = time.monotonic() - self.idle_s
        silent = [name for name, last in self._open.items() if everything or last < before]
        for name in dict.fromkeys([*self._ends, *silent]):
            if not everything and not self._queue.empty() and name not in self._ends:
                return  # the calls are stored first
            end = self._ends.pop(name, TrajectoryEnd(name))
            self._open.pop(name, None)
            self._again(lambda end=end: self._settle_one(end))  # type: ignore[misc]

    def _settle_one(self, end: TrajectoryEnd) -> None:
        record = find_by_external_id(self.run, end.key)
        if record is None:
            if not self.cancelled.is_set():
                reason = f"The end of session {end.key!r} came without any call of it."
                add_rejections(self.run, SOURCE, [Rejected(None, reason)])
            return
        diagnosis = diagnosis_for(load_trajectory(record), self.run)
        settle_trajectory(self.run, replace(end, findings=diagnosis.findings, checks=diagnosis.checks))
        keep_retokenized(self.run, [(record.pk, diagnosis.again)])

    def _report(self) -> None:
        """Say on the page of the run what lacks ids and what is not recorded, when it has changed."""
        sentences = " ".join(self._sentences())
        if sentences != self._reported and self._again(lambda: note_error(self.run, sentences)):
            self._reported = sentences

    def _sentences(self) -> Iterator[str]:
        calls = self.counts["calls"]
        n = self.counts["without_ids"] - sum(self._by_nature.values())
        if n:
            yield (
                f"{n} of {calls} recorded calls came back from {self.upstream or 'the server'} without token ids, so "
                "their tokens cannot be inspected. vLLM supports return_token_ids since 0.10.2: upgrade the server, or "
                "see whether another proxy between it and the recorder drops the field."
            )
        for title, n in self._by_nature.items():
            if n:
                yield (
                    f"{n} of {calls} recorded calls are of the dialect {title}, in which no server tells token ids: "
                    "they are kept as text. Let the harness speak Chat Completions or Responses to have their tokens."
                )
        if self.not_recorded:
            # Without the stroke: a path that begins with one is taken for a file's and cut where runs end.
            counts = ", ".join(f"{path.lstrip('/')} ({n})" for path, n in sorted(self.not_recorded.items()))
            yield f"Calls of these addresses passed and are not recorded: {counts}."

    def _beat(self) -> None:
        with suppress(DatabaseError):
            if beat(self.run) and not self.cancelled.is_set():
                log.warning("recording was cancelled, calls still pass run=%s", self.run.code)
                self.cancelled.set()

    def _end_run(self) -> None:
        run = find_run(pk=self.run.pk)
        if run is not None:
            status = Run.Status.CANCELLED if run.cancel_requested else Run.Status.DONE
            end_run(run, status, run.error)
