"""miles ``dashboard_columns/rollout_{N}.parquet``: a row for each sample, with what the engine sampled. Conversations,
rewards and groups stand in ``trajectory/{N}.jsonl`` beside that folder, for the samples that have a conversation, in
the same order. Both files are read together where the folder is at hand."""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.formats.registry import ROWS_ALONE, Format, Rejected, having
from rollout_inspector.formats.shapes import BadLine, decode
from rollout_inspector.streams.trajectory import Row, Trajectory

FOLDER = "dashboard_columns"
CONVERSATIONS = "trajectory"
_NAME = re.compile(r"(?:^|/)rollout_(eval_)?(\d{1,9})\.[\w.]+$")
_KNOWN = ("sample_index", "response_length", "total_length", "tokens", "loss_mask", "rollout_log_probs")
_SAID = ("sample_index", "sample_occurrence", "group_index", "status", "reward")
Key = tuple[int, int]  # The index of a sample, and how many samples of that index stand before it.


def read(source: Source) -> Iterator[Trajectory | Rejected]:
    file_name = _NAME.search(source.path)
    conversations = _Conversations(source, f"{file_name.group(1) or ''}{file_name.group(2)}" if file_name else "")
    counts: Counter[int] = Counter()
    for line in source.lines():
        try:
            value = shapes.mapping(decode(line.checked()), "The row")
            index = _index(value)
            key = (index, counts[index])
            counts[index] += 1
            with shapes.noting() as notes:
                trajectory = _trajectory(value, key, conversations.take(key), file_name)
        except BadLine as error:
            yield Rejected(line.number, str(error))
        else:
            limits.current().count(trajectory)
            yield replace(trajectory, extra=shapes.with_notes(trajectory.extra, notes))
        yield from conversations.rejected()
    yield from conversations.left()


def _index(value: Mapping[str, Any]) -> int:
    if (index := shapes.whole(value.get("sample_index"), "sample_index", least=0)) is None:
        raise BadLine("sample_index is missing.")
    return index


def _trajectory(value: Mapping[str, Any], key: Key, said: Mapping[str, Any], named: re.Match[str] | None) -> Trajectory:
    ids = shapes.ids(value.get("tokens"), "tokens")
    length = shapes.whole(value.get("response_length"), "response_length", least=0) or 0
    total = shapes.whole(value.get("total_length"), "total_length", least=0)
    if length > len(ids) or total not in (None, len(ids)):
        raise BadLine(f"response_length is {length} and total_length {total}, but there are {len(ids)} tokens.")
    at = len(ids) - length
    mask = value.get("loss_mask")
    trained = np.ones(length, dtype=np.bool_) if mask is None else shapes.mask(mask, "loss_mask")
    row = Row(
        ids=ids,
        loss_mask=np.concatenate([np.zeros(at, dtype=np.bool_), trained]),
        logprobs=shapes.after(at, shapes.optional_floats(value.get("rollout_log_probs"), "rollout_log_probs")),
        extra={"prompt_length": at},
    )
    group = said.get("group_index")
    more = shapes.rest(value, _KNOWN) | shapes.rest(said, _SAID)
    if named and named.group(1):
        more["evaluation"] = True
    name = f"{named.group(1) or ''}{int(named.group(2))}-{key[0]}" if named else f"sample-{key[0]}"
    return Trajectory(
        f"{name}-{key[1]}" if key[1] else name, rows=(row,), reward=shapes.number(said.get("reward"), "reward"),
        stop_reason=shapes.text(said.get("status"), "status", 60),
        group="" if group is None else shapes.text(group, "group_index", 200),
        training_step=int(named.group(2)) if named else None, extra=more,
    )


class _Conversations:
    """The conversations of a rollout, one after the other, as its samples are read."""

    def __init__(self, source: Source, stem: str) -> None:
        beside = source.neighbour("..", CONVERSATIONS, f"{stem}.jsonl") if stem else None
        self._name = f"{CONVERSATIONS}/{stem}.jsonl"
        self._problems: list[Rejected] = []
        self._rows = iter(()) if beside is None else self._read(beside)
        self._next = next(self._rows, None)

    def _read(self, source: Source) -> Iterator[tuple[Key, dict[str, Any]]]:
        counts: Counter[int] = Counter()
        for line in source.lines():
            try:
                value = shapes.mapping(decode(line.checked()), "The line")
                index = _index(value)
                place = shapes.whole(value.get("sample_occurrence"), "sample_occurrence", least=0)
            except BadLine as error:
                self._problems.append(Rejected(None, f"{self._name}, line {line.number}: {error}"))
                continue
            yield (index, counts[index] if place is None else place), value
            counts[index] += 1

    def take(self, key: Key) -> dict[str, Any]:
        """What is said of a sample; empty where nothing is."""
        if self._next is None or self._next[0] != key:
            return {}
        conversation = self._next[1]
        self._next = next(self._rows, None)
        return conversation

    def rejected(self) -> Iterator[Rejected]:
        """The lines that could not be read since the last call."""
        problems, self._problems = self._problems, []
        yield from problems

    def left(self) -> Iterator[Rejected]:
        """A sentence where a conversation belongs to none of the samples in their order."""
        yield from self.rejected()
        if self._next is not None:
            index, place = self._next[0]
            yield Rejected(
                None,
                f"{self._name} from sample {index} (occurrence {place}) on belongs to no sample of this file in their "
                "order, so rewards and conversations of later samples are missing.",
            )


FORMAT = Format(
    "miles_columns", "miles dashboard columns", having("sample_index", "tokens", "response_length"), read, ROWS_ALONE,
    suffix=".parquet",
)
