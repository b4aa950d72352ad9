"""Where a row stands against what its steps sampled, when it does not hold the sampled tokens as they are."""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from rollout_inspector.streams.align import AlignedGroup, align_ids
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Mask, Row, Step


def sampled_instead(steps: Sequence[Step], row: Row, start: int, stop: int) -> Ids:
    """The sampled ids in whose place the trained tokens ``[start, stop)`` of a row stand. Empty: it is not clear."""
    groups = _trained_groups(steps, row)
    if groups is None:
        return NO_IDS
    sampled, trained, aligned = groups
    first, last = np.searchsorted(trained, (start, stop)).tolist()
    here = next((g for g in aligned if not g.equal and (g.right_start, g.right_stop) == (first, last)), None)
    return NO_IDS if here is None else sampled[here.left_start : here.left_stop]


def place_in_row(steps: Sequence[Step], row: Row, step: int, start: int, stop: int) -> tuple[int, int] | None:
    """The tokens of a row that stand in the place ``[start, stop)`` of a step's stream. None when the row does not
    train the step, or ends before the place. An empty place lies before a token."""
    if step not in row.step_indices or not len(row.ids):
        return None
    n_prompt = len(steps[step].prompt_ids)
    if start < n_prompt:
        aligned = align_ids(steps[step].stream[: max(stop, start + 1)], row.ids)
        place = _opposite(aligned, start, stop)
    else:
        groups = _trained_groups(steps, row)
        if groups is None:
            return None
        _, trained, aligned = groups
        index = row.step_indices.index(step)
        before = sum(len(steps[earlier].completion_ids) for earlier in row.step_indices[:index]) - n_prompt
        first, last = _opposite(aligned, before + start, before + stop)
        if first >= len(trained):
            return None
        low = int(trained[first])
        place = low, int(trained[last - 1]) + 1 if last > first else low
    return None if place[0] >= len(row.ids) else place


def sampled_in_row(steps: Sequence[Step], row: Row) -> list[tuple[int, int, int, int]]:
    """Where trained tokens of a row stand as its steps sampled them. Row offset, step, offset in its completion, number
    of tokens; rising by row offset. Empty when the row names no step, or its loss mask has another length."""
    groups = _trained_groups(steps, row)
    if groups is None:
        return []
    _, trained, aligned = groups
    edges = np.cumsum([0, *(len(steps[index].completion_ids) for index in row.step_indices)])
    places = []
    for group in aligned:
        if not group.equal:
            continue
        left_places, is_trained = (
            np.arange(group.left_start, group.left_stop),
            trained[group.right_start : group.right_stop],
        )
        step = np.searchsorted(edges, left_places, side="right") - 1
        cuts = np.flatnonzero((np.diff(is_trained) != 1) | (np.diff(step) != 0)) + 1
        for a, b in pairwise([0, *cuts.tolist(), len(left_places)]):
            places.append((int(is_trained[a]), row.step_indices[step[a]], int(left_places[a] - edges[step[a]]), b - a))
    return places


def sampled_stream(steps: Sequence[Step], row: Row) -> tuple[Ids, Mask] | None:
    """The stream of the row's steps with each completion as it was sampled: ids and which are sampled, ``[n]``. The
    first prompt, then by step its completion and the tokens that the next prompt adds. A prompt that does not start
    with the stream before it is aligned with it, and only what follows is added. None: the row has no steps."""
    if not row.step_indices or max(row.step_indices) >= len(steps):
        return None
    pieces: list[Ids] = []
    sampled: list[Mask] = []
    before = NO_IDS
    for index in row.step_indices:
        step = steps[index]
        added = step.prompt_ids[_held_of(before, step.prompt_ids) :]
        pieces += [added, step.completion_ids]
        sampled += [np.zeros(len(added), np.bool_), np.ones(len(step.completion_ids), np.bool_)]
        before = step.stream
    return np.concatenate(pieces), np.concatenate(sampled)


def _held_of(before: Ids, prompt: Ids) -> int:
    """How many leading tokens of a prompt stand for the stream before it."""
    if common_prefix(before, prompt) == len(before):
        return len(before)
    groups = align_ids(before, prompt)
    last = groups[-1]
    if last.equal:
        return len(prompt)
    if last.left_start == last.left_stop:
        return last.right_start
    return min(last.right_start + last.left_stop - last.left_start, last.right_stop)


def _trained_groups(steps: Sequence[Step], row: Row) -> tuple[Ids, np.ndarray, list[AlignedGroup]] | None:
    """What the row's steps sampled, the offsets of the trained tokens of the row, and their alignment."""
    step_indices = row.step_indices
    if not step_indices or max(step_indices) >= len(steps) or len(row.loss_mask) != len(row.ids):
        return None
    sampled = np.concatenate([NO_IDS, *(steps[index].completion_ids for index in step_indices)])
    trained = np.flatnonzero(row.loss_mask)
    return sampled, trained, align_ids(sampled, row.ids[trained])


def _opposite(groups: Sequence[AlignedGroup], start: int, stop: int) -> tuple[int, int]:
    """The stretch on the right that stands against ``[start, stop)`` on the left."""
    first = last = groups[-1].right_stop if groups else 0
    for group in reversed(groups):
        if group.left_stop > start or (group.left_stop == group.left_start == start):
            first = group.right_start + (max(start - group.left_start, 0) if group.equal else 0)
    for group in groups:
        if group.left_start < stop:
            last = (
                group.right_start + min(stop, group.left_stop) - group.left_start if group.equal else group.right_stop
            )
    return first, max(first, last)
