"""Reads files of calls: many lines make one trajectory, and trajectories may interleave."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec
import numpy as np

from rollouts.formats import limits, shapes
from rollouts.formats.containers.source import Source
from rollouts.formats.registry import Rejected
from rollouts.formats.shapes import BadLine
from rollouts.tito.prefix import shared_with_stream
from rollouts.tito.trajectory import Ids, Mask, Step, Trajectory


@dataclass
class Session:
    """A trajectory whose lines are being read. It keeps of each prompt what the prompt adds."""

    external_id: str
    steps: list[tuple[int, Step]] = field(default_factory=list)
    """(number of ids shared with the stream before, step with the rest of its prompt)."""
    last: Step | None = None
    names: list[str] = field(default_factory=list)
    """The source's name of each step, empty where it has none."""
    tokenizer: str = ""
    reward: float | None = None
    group: str = ""
    stop_reason: str = ""
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
            stop_reason=self.stop_reason, extra=self.extra,
        )  # fmt: skip

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


def read_sessions(
    source: Source,
    session_id: SessionId,
    add_line: Callable[[Session, dict[str, Any]], None],
    by_length: bool = False,
) -> Iterator[Trajectory | Rejected]:
    """Yields trajectories in the order in which they end. The file is read twice, first for session ids alone, so only
    unfinished trajectories are in memory.

    A line that cannot be read rejects its whole session. ``by_length`` orders steps by prompt length, not by line.
    """
    is_last = _last_lines(source, session_id)
    sessions: dict[str, Session] = {}
    for n, line in enumerate(source.lines()):
        name = ""
        try:
            value = shapes.mapping(shapes.decode(line.checked()), "The line")
            name = session_id(value, line.number)
            session = sessions.setdefault(name, Session(name))
            if not session.rejected:
                add_line(session, value)
        except BadLine as error:
            rejected = Rejected(line.number, str(error))
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
    if session.rejected is None:
        trajectory = session.trajectory(by_length)
        limits.current().count(trajectory)
        return trajectory
    reason = f"{session.rejected.reason} Session {session.external_id!r} is left out whole."
    return Rejected(session.rejected.line, reason)


def _last_lines(source: Source, session_id: SessionId) -> Mask:
    """A mask ``[lines]`` of the lines that are the last of their session. Memory holds one hash for each line."""
    keys = array("q")
    with source.looked_over():
        for line in source.lines():
            try:
                keys.append(hash(session_id(_names(line.checked()), line.number)))
            except BadLine:
                keys.append(0)  # of no session, as the second reading will say
    found = np.frombuffer(keys, np.int64)
    is_last: Mask = np.zeros(len(found), dtype=np.bool_)
    is_last[len(found) - 1 - np.unique(found[::-1], return_index=True)[1]] = True
    return is_last


class _Answer(msgspec.Struct):
    id: Any = msgspec.UNSET
    request_id: Any = msgspec.UNSET


class _Line(_Answer):
    """The fields that may name the session of a line. No other field is decoded."""

    session_id: Any = msgspec.UNSET
    rollout_id: Any = msgspec.UNSET
    trace_id: Any = msgspec.UNSET
    response: _Answer | msgspec.UnsetType | None = msgspec.UNSET


_decode_names = msgspec.json.Decoder(_Line).decode


def _names(data: bytes) -> dict[str, Any]:
    try:
        names: dict[str, Any] = msgspec.to_builtins(_decode_names(data))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return shapes.mapping(shapes.decode(data), "The line")
    return names
