"""Streams of steps put together from what each step adds."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rollouts import models
from rollouts.formats.containers.json_text import canonical_json
from rollouts.tito.trajectory import NO_IDS, Ids, Link, Step


@dataclass(frozen=True)
class StreamPiece:
    """Part of a stream, as it lies in one stored array: ``[start, stop)`` of the stream is where the array begins."""

    start: int
    stop: int
    step_index: int
    part: str
    """``delta`` or ``completion``: the array it lies in."""


def stream_pieces(steps: Sequence[models.StoredStep], index: int, whole: bool = True) -> list[StreamPiece]:
    """Where the ids of a step's stream lie, in order; ``whole=False`` leaves its completion out. Columns only."""
    by_key = {step.pk: step for step in steps}
    step: models.StoredStep | None = steps[index]
    assert step is not None
    pieces = []
    limit = step.prompt_length + (step.completion_length if whole else 0)
    while step is not None and limit > 0:
        if limit > step.prompt_length:
            pieces.append(StreamPiece(step.prompt_length, limit, step.index, "completion"))
            limit = step.prompt_length
        if limit > step.shared_length:
            pieces.append(StreamPiece(step.shared_length, limit, step.index, "delta"))
            limit = step.shared_length
        step = by_key.get(step.parent_id) if step.parent_id else None
    return pieces[::-1]


def join(pieces: Sequence[StreamPiece], arrays: dict[int, tuple[Any, Any]]) -> Ids:
    """The ids of consecutive pieces. ``arrays``: step index -> (delta_ids, completion_ids)."""
    found = []
    for piece in pieces:
        array = arrays[piece.step_index][piece.part == "completion"]
        found.append(array[: piece.stop - piece.start])
    return np.concatenate(found) if found else NO_IDS


@dataclass
class Streams:
    """The steps of one trajectory, as far as they are stored: ids, links and messages."""

    keys: list[int] = field(default_factory=list)
    values: list[Step] = field(default_factory=list)
    """Ids alone; every other field is empty."""
    links: list[Link] = field(default_factory=list)
    _messages: list[list[str] | None] = field(default_factory=list)
    _coded: list[tuple[int | None, int, str | None]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    def append(self, key: int, step: Step, texts: list[str]) -> None:
        self.keys.append(key)
        self.values.append(Step(prompt_ids=step.prompt_ids, completion_ids=step.completion_ids))
        self._messages.append(texts)
        self._coded.append((None, 0, None))

    def message_texts(self, index: int) -> list[str]:
        """Each message of a step's request as JSON text."""
        held = self._messages[index]
        if held is None:
            parent, shared, body = self._coded[index]
            held = [*(self.message_texts(parent)[:shared] if parent is not None else [])]
            if body is not None:
                held += [canonical_json(message) for message in json.loads(body)]
            self._messages[index] = held
        return held


def stored_streams(keys: Collection[int]) -> dict[int, Streams]:
    """The steps of some trajectories with their ids: one query. A trajectory without steps has empty ones."""
    found: dict[int, Streams] = {key: Streams() for key in keys}
    positions: dict[int, int] = {}
    rows = (
        models.StoredStep.objects.filter(trajectory__in=keys)
        .order_by("trajectory_id", "index")
        .values_list(
            "pk", "trajectory_id", "parent_id", "shared_length", "parent_length", "messages_shared",
            "messages_new__body", "tokens__delta_ids", "tokens__completion_ids",
        )
    )  # fmt: skip
    for key, trajectory, parent_key, shared, parent_length, messages_shared, body, delta, completion in rows:
        streams = found[trajectory]
        parent = None if parent_key is None else positions[parent_key]
        positions[key] = len(streams)
        prompt = delta
        if parent is not None and shared:
            earlier = streams.values[parent]
            head = [earlier.prompt_ids[:shared], earlier.completion_ids[: max(shared - len(earlier.prompt_ids), 0)]]
            prompt = np.concatenate([*head, delta])
        streams.keys.append(key)
        streams.values.append(Step(prompt_ids=prompt, completion_ids=completion))
        streams.links.append(Link(parent, shared, parent_length))
        streams._messages.append(None)
        streams._coded.append((parent, messages_shared, body))
    return found
