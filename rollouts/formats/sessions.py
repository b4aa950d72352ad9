"""Files of calls: many lines make one trajectory, and trajectories may interleave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rollouts.formats import shapes
from rollouts.formats.registry import Rejected
from rollouts.formats.shapes import BadLine
from rollouts.formats.source import Source
from rollouts.tito.prefix import shared_with_stream
from rollouts.tito.trajectory import Ids, Step, Trajectory


@dataclass
class Session:
    """A trajectory under way. Prompts are kept as what they add, so that it grows with new tokens only."""

    external_id: str
    steps: list[tuple[int, Step]] = field(default_factory=list)
    """(ids shared with the stream before, step with the rest of its prompt)."""
    last: Step | None = None
    names: list[str] = field(default_factory=list)
    """The source's name of each step, empty where it has none."""
    tokenizer: str = ""
    reward: float | None = None
    group: str = ""
    stop_reason: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    rejected: Rejected | None = None

    def append(self, step: Step, name: str = "") -> None:
        shared = 0
        if self.last is not None:
            shared = shared_with_stream(step.prompt_ids, self.last)
            step = _share_messages(step, self.last)
        self.steps.append((shared, replace(step, prompt_ids=step.prompt_ids[shared:].copy())))
        self.names.append(name)
        self.last = step

    def stream(self, name: str) -> Ids | None:
        """Prompt and completion of an earlier step; None when there is none of that name."""
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
    """The conversation so far is repeated in every request; equal messages become one object."""
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


def read_sessions(
    source: Source,
    session_id: Callable[[dict[str, Any], int], str],
    add_line: Callable[[Session, dict[str, Any]], None],
    by_length: bool = False,
) -> Iterator[Trajectory | Rejected]:
    """Trajectories in the order in which they began, after the last line.

    A line that cannot be read rejects its whole session. ``by_length`` orders steps by prompt length, not by line.
    """
    sessions: dict[str, Session] = {}
    for line in source.lines():
        name = ""
        try:
            value = shapes.mapping(shapes.decode(line.data), "The line")
            name = session_id(value, line.number)
            session = sessions.setdefault(name, Session(name))
            if not session.rejected:
                add_line(session, value)
        except BadLine as error:
            rejected = Rejected(line.number, str(error))
            if name:
                # The session is not stored by halves; what it held is given back.
                sessions[name] = Session(name, rejected=rejected)
            else:
                yield rejected
    while sessions:
        session = sessions.pop(next(iter(sessions)))
        if session.rejected:
            reason = f"{session.rejected.reason} Session {session.external_id!r} is left out whole."
            yield Rejected(session.rejected.line, reason)
        else:
            yield session.trajectory(by_length)
