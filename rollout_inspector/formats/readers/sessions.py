"""Reads files of calls: many lines make one trajectory, and trajectories may interleave."""

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.containers.cutting import holds_lines
from rollout_inspector.formats.containers.file_part import FilePart
from rollout_inspector.formats.containers.source import Source, SourceLine
from rollout_inspector.formats.registry import Detect, Format, Rejected
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.prefix import shared_with_stream
from rollout_inspector.streams.trajectory import Ids, Mask, Step, Trajectory

MAX_GAP = 1 << 20  # Bytes between two lines of a part of :func:`session_parts` that are read rather than jumped over.

MAX_READS = 8  # How often the parts of :func:`session_parts` together read the file at most.


@dataclass
class Session:
    """A trajectory whose lines are being read. It keeps of each prompt what the prompt adds."""

    external_id: str
    steps: list[tuple[int, Step]] = field(default_factory=list)
    """(number of ids shared with the stream before, step with the rest of its prompt)."""
    last: Step | None = None
    names: list[str] = field(default_factory=list)  # The source's name of each step, empty where it has none.
    tokenizer: str = ""
    reward: float | None = None
    group: str = ""
    stop_reason: str = ""
    error: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    rejected: Rejected | None = None
    decoded: limits.Decoded = field(default_factory=limits.Decoded)

    def append(self, step: Step, name: str = "") -> None:
        """Add a step. Raises :class:`BadLine` when the session grows beyond a limit."""
        n_messages = len(step.request.messages) if step.request else 0
        n_ids = len(step.prompt_ids) + len(step.completion_ids)
        self.decoded.add(f"call {len(self.steps)} of the session", n_ids, n_messages)
        shared = 0
        if self.last is not None:
            shared = shared_with_stream(step.prompt_ids, self.last)
            step = _share_messages(step, self.last)
        self.steps.append((shared, replace(step, prompt_ids=step.prompt_ids[shared:].copy())))
        self.names.append(name)
        self.last = step

    def note(self, notes: Mapping[str, str]) -> None:
        """Keep what a line says of fields that were left out, up to a number."""
        if notes and len(self.extra.get("left_out", ())) < shapes.MAX_NOTES:
            self.extra = dict(shapes.with_notes(self.extra, notes))

    def stream(self, name: str) -> Ids | None:
        """Prompt and completion of the earlier step of a name; None = there is no such step."""
        if not name or name not in self.names:
            return None
        if self.last is not None and self.names[-1] == name:
            return self.last.stream
        at = len(self.names) - 1 - self.names[::-1].index(name)
        return self._whole(at + 1)[at].stream

    def trajectory(self, by_length: bool = False) -> Trajectory:
        steps = self._whole(len(self.steps))
        if by_length:
            steps.sort(key=lambda step: len(step.prompt_ids))
        return Trajectory(
            self.external_id, tuple(steps), reward=self.reward, tokenizer=self.tokenizer, group=self.group,
            stop_reason=self.stop_reason, error=self.error, extra=self.extra,
        )

    def _whole(self, n: int) -> list[Step]:
        """The first ``n`` steps with their prompts put together."""
        steps: list[Step] = []
        for shared, step in self.steps[:n]:
            if shared:
                step = replace(step, prompt_ids=np.concatenate([steps[-1].stream[:shared], step.prompt_ids]))
            steps.append(step)
        return steps


def _share_messages(step: Step, before: Step) -> Step:
    """Every request repeats the conversation so far. Messages equal to those before become the same objects."""
    if step.request is None or before.request is None:
        return step
    old, new = before.request.messages, step.request.messages
    n = 0
    while n < min(len(old), len(new)) and shapes.same(old[n], new[n]):
        n += 1
    request = replace(step.request, messages=(*old[:n], *new[n:]))
    if shapes.same(before.request.tools, request.tools):
        request = replace(request, tools=before.request.tools)
    return replace(step, request=request)


SessionId = Callable[[Mapping[str, Any], int], str]


AddLine = Callable[[Session, dict[str, Any]], None]


def session_format(
    name: str, title: str, detect: Detect, session_id: SessionId, add_line: AddLine, lacks: str = "",
    by_length: bool = False,
) -> Format:
    """A format whose files hold one call a line. ``session_id``: the session of a line. ``add_line`` adds the line to
    it. ``by_length`` orders steps by prompt length, not by line."""
    read = partial(read_sessions, session_id=session_id, add_line=add_line, by_length=by_length)
    return Format(name, title, detect, read, lacks, cut=partial(session_parts, session_id=session_id), by_line=False)


def read_sessions(
    source: Source, session_id: SessionId, add_line: AddLine, by_length: bool = False
) -> Iterator[Trajectory | Rejected]:
    """Yields trajectories in the order in which they end. The file is read twice, first for session ids alone, so only
    unfinished trajectories are in memory. Of a part of :func:`session_parts` the first reading is done. A line that
    cannot be read rejects its whole session."""
    sessions_of_part = source.part and source.part.sessions
    is_last = sessions_of_part[2] if sessions_of_part else _last_of_each(_sessions_of_lines(source, session_id))
    sessions: dict[str, Session] = {}
    for n, line in enumerate(source.lines()):
        name = ""
        try:
            value = shapes.mapping(shapes.decode(line.checked()), "The line")
            with shapes.noting() as notes:
                name = session_id(value, line.number)
                session = sessions.setdefault(name, Session(name))
                if not session.rejected:
                    add_line(session, value)
                    session.note(notes)
        except BadLine as error:
            rejected = Rejected(line.number, str(error))
            name = name or _name_of(line, session_id) or ""
            if name:
                # No part of the session is stored, so its memory is freed.
                sessions[name] = Session(name, rejected=rejected)
            else:
                yield rejected
        if name and is_last[n]:
            yield _ended(sessions.pop(name), by_length)
    for session in sessions.values():
        yield _ended(session, by_length)


def _ended(session: Session, by_length: bool) -> Trajectory | Rejected:
    if session.rejected is None and not session.steps and not session.error:
        return Rejected(None, f"Session {session.external_id!r} holds no call of the model.")
    if session.rejected is None:
        trajectory = session.trajectory(by_length)
        limits.current().count(trajectory)
        return trajectory
    reason = f"{session.rejected.reason} Session {session.external_id!r} is left out whole."
    return Rejected(session.rejected.line, reason)


def session_parts(source: Source, n_bytes: int, session_id: SessionId) -> list[FilePart]:
    """Parts of about so many bytes, whole sessions each, in the order in which the sessions end.

    The file is read once, for session ids alone. Parts are larger where sessions lie so mixed that all parts together
    would read the file more than ``MAX_READS`` times. Empty if it is too small, packed, Parquet or one JSON array.
    Raises :class:`FileRefused`.
    """
    if source.size < 2 * n_bytes or source.kind() != "plain" or not holds_lines(source):
        return []
    index = _Index(source, session_id)
    while source.size >= 2 * n_bytes:
        parts = index.cut(n_bytes)
        if sum(index.n_read(spans) for spans in parts) <= MAX_READS * index.n_read([index.all]):
            return [index.part(spans) for spans in parts] if len(parts) > 1 else []
        n_bytes *= 2
    return []


Spans = list[NDArray[np.int64]]  # The places of the lines of a part, in stretches that are read whole.


class _Index:
    """Where each line of a file lies, and which session it belongs to."""

    def __init__(self, source: Source, session_id: SessionId) -> None:
        numbers, stops = array("q"), array("q")

        def note(line: SourceLine) -> None:
            numbers.append(line.number)
            stops.append(source.position)

        self.of_line = _sessions_of_lines(source, session_id, note)
        self.is_last = _last_of_each(self.of_line)
        self.all = np.arange(len(numbers))
        self.stops, last = np.frombuffer(stops, np.int64), np.frombuffer(numbers, np.int64)
        self.starts = np.append(0, self.stops[:-1])[: len(numbers)]
        # Blank lines belong to the line behind them.
        self.firsts, self.lasts = np.append(0, last[:-1])[: len(numbers)] + 1, last

    def cut(self, n_bytes: int) -> list[Spans]:
        """Parts of about so many bytes."""
        if not len(self.all):
            return []
        sizes = np.bincount(self.of_line, self.stops - self.starts)
        order = self.of_line[self.is_last]
        part_of = np.empty(len(sizes), np.int64)
        part_of[order] = (np.cumsum(sizes[order]) - sizes[order]) // n_bytes
        of_line = part_of[self.of_line]
        lines = np.argsort(of_line, kind="stable")
        return [self._spans(own) for own in np.split(lines, np.flatnonzero(np.diff(of_line[lines])) + 1)]

    def _spans(self, own: NDArray[np.int64]) -> Spans:
        return np.split(own, np.flatnonzero(self.starts[own[1:]] - self.stops[own[:-1]] >= MAX_GAP) + 1)

    def n_read(self, spans: Spans) -> int:
        """Lines that are read for a part."""
        return sum(int(self.lasts[span[-1]] - self.firsts[span[0]]) + 1 for span in spans if len(span))

    def part(self, spans: Spans) -> FilePart:
        masks, places = [], []
        for span in spans:
            first = int(self.firsts[span[0]])
            mask = np.zeros(self.n_read([span]), np.bool_)
            mask[self.lasts[span] - first] = True
            masks.append(mask)
            places.append((int(self.starts[span[0]]), first, len(mask)))
        own = np.concatenate(spans)
        lines = tuple(places), np.concatenate(masks), self.is_last[own]
        return FilePart(places[0][0], int((self.stops - self.starts)[own].sum()), places[0][1], sessions=lines)


def _sessions_of_lines(
    source: Source, session_id: SessionId, note: Callable[[SourceLine], object] = lambda _: None
) -> NDArray[np.int64]:
    """``[lines]``: a number for the session of each line. A line that names none is a session by itself. Memory holds
    one hash for each line. ``note`` is called with each line."""
    keys, nameless = array("q"), array("q")
    for line in source.lines():
        note(line)
        name = _name_of(line, session_id)
        if name is None:
            nameless.append(len(keys))
        keys.append(0 if name is None else hash(name))
    values, session_index = np.unique(np.frombuffer(keys, np.int64), return_inverse=True)
    of_line: NDArray[np.int64] = session_index.astype(np.int64)
    of_line[np.frombuffer(nameless, np.int64)] = len(values) + np.arange(len(nameless))
    return np.unique(of_line, return_inverse=True)[1].astype(np.int64)


def _last_of_each(of_line: NDArray[np.int64]) -> Mask:
    """A mask ``[lines]`` of the lines that are the last of their session."""
    is_last: Mask = np.zeros(len(of_line), dtype=np.bool_)
    is_last[len(of_line) - 1 - np.unique(of_line[::-1], return_index=True)[1]] = True
    return is_last


def _name_of(line: SourceLine, session_id: SessionId) -> str | None:
    """None = the line cannot be read."""
    try:
        return session_id(_names(line.checked()), line.number)
    except BadLine:
        return None


class _Answer(msgspec.Struct):
    id: Any = msgspec.UNSET
    request_id: Any = msgspec.UNSET


_NAMES = (
    "session_id", "custom_id", "rollout_id", "trace_id", "attempt_id", "split", "iteration", "group_idx", "traj_idx",
    "run_attempt",
)
"""The fields that may name the session of a line, beside those of an answer. No other field is decoded."""
_FIELDS = dict.fromkeys(_NAMES, Any) | dict.fromkeys(("meta_info", "response"), _Answer | msgspec.UnsetType | None)
_Line = msgspec.defstruct("_Line", [(*field, msgspec.UNSET) for field in _FIELDS.items()], bases=(_Answer,))
_decode_names = msgspec.json.Decoder(_Line).decode


def _names(data: bytes) -> dict[str, Any]:
    try:
        names: dict[str, Any] = msgspec.to_builtins(_decode_names(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return shapes.mapping(shapes.decode(data), "The line")
    return names
