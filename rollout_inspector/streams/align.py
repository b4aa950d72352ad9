"""Aligns two token streams: groups say which tokens on the left stand against which tokens on the right."""

import difflib
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.token_origins import byte_offsets
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Mask, Row, Step

# A gap is compared id by id up to this many pairs; a larger gap is shown whole.
MAX_PAIRS = 1_000_000
MAX_WORK = 2_000_000  # Pairs of equal lines or ids that one comparison looks at: half a second.
_GRAM = 8


class BoundedMatcher(difflib.SequenceMatcher[Any]):
    """A comparison that takes bounded work: without a bound, equal lines in many places take time cubic in the lines.
    When the work is used up, what is left counts as differing."""

    a: Sequence[Any]
    b: Sequence[Any]
    b2j: dict[Any, list[int]]

    def __init__(self, left: Sequence[Any], right: Sequence[Any], work: int = MAX_WORK, autojunk: bool = False) -> None:
        self.left_work = work  # The work that is left; below 0 the comparison is rough.
        super().__init__(None, left, right, autojunk)
        counts = (1 + len(self.b2j.get(item, ())) for item in left)
        self._costs = list(accumulate(counts, initial=1))

    def find_longest_match(self, alo: int = 0, ahi: int | None = None, blo: int = 0, bhi: int | None = None) -> Any:
        """As the library's, within the work."""
        cost = self._costs[len(self.a) if ahi is None else ahi] - self._costs[alo]
        if self.left_work >= cost:
            self.left_work -= cost
            return super().find_longest_match(alo, ahi, blo, bhi)
        self.left_work = -1
        return difflib.Match(alo, blo, 0)


@dataclass(frozen=True)
class AlignedGroup:
    """Tokens ``[left_start, left_stop)`` stand against ``[right_start, right_stop)``."""

    left_start: int
    left_stop: int
    right_start: int
    right_stop: int
    equal: bool  # Both stretches hold the same tokens, and so equally many.
    is_folded: bool = False  # A page hides these equal tokens.


def align_same_bytes(
    left_bytes: Sequence[bytes], right_bytes: Sequence[bytes], left_ids: Ids, right_ids: Ids
) -> list[AlignedGroup]:
    """Group two tokenizations of the same bytes at the byte offsets where both have a cut. Linear time. Two tokens are
    equal when their ids are equal. Raises ``ValueError`` when the bytes differ."""
    if b"".join(left_bytes) != b"".join(right_bytes):
        raise ValueError("left and right do not hold the same bytes; use align_ids")
    left_offsets, right_offsets = byte_offsets(left_bytes), byte_offsets(right_bytes)
    cuts = np.intersect1d(left_offsets, right_offsets)
    # A token without bytes (an id outside the vocabulary) joins the token after it; at the end, the one before it.
    left_cuts, right_cuts = np.searchsorted(left_offsets, cuts), np.searchsorted(right_offsets, cuts)
    left_cuts[-1:], right_cuts[-1:] = len(left_ids), len(right_ids)
    if len(cuts) == 1 and (len(left_ids) or len(right_ids)):
        left_cuts, right_cuts = np.array([0, len(left_ids)]), np.array([0, len(right_ids)])
    single = (np.diff(left_cuts) == 1) & (np.diff(right_cuts) == 1)
    equal = np.zeros(len(single), dtype=np.bool_)
    equal[single] = left_ids[left_cuts[:-1][single]] == right_ids[right_cuts[:-1][single]]
    return _joined(left_cuts, right_cuts, equal)


def _joined(
    left_cuts: NDArray[np.int64], right_cuts: NDArray[np.int64], equal: NDArray[np.bool_]
) -> list[AlignedGroup]:
    """Join neighbouring equal pairs into one group. Each differing pair stays a group."""
    if not len(equal):
        return []
    opens = np.ones(len(equal), dtype=np.bool_)
    opens[1:] = ~(equal[1:] & equal[:-1])
    starts = np.flatnonzero(opens)
    stops = np.append(starts[1:], len(equal))
    columns = (left_cuts[starts], left_cuts[stops], right_cuts[starts], right_cuts[stops], equal[starts])
    return [AlignedGroup(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def align_ids(left: Ids, right: Ids) -> list[AlignedGroup]:
    """Group two streams whose bytes differ. First the common ends are grouped, then stretches that occur once in each
    stream. The rest is compared id by id. A gap of more than ``MAX_PAIRS`` pairs stays one differing group."""
    return _groups(_common_blocks(left, right, 0, len(left), 0, len(right)), len(left), len(right))


def _common_blocks(left: Ids, right: Ids, a: int, b: int, c: int, d: int) -> list[tuple[int, int, int]]:
    """Equal stretches ``(left_start, right_start, length)`` of ``left[a:b]`` and ``right[c:d]``, in order."""
    head = common_prefix(left[a:b], right[c:d])
    tail = common_prefix(left[a + head : b][::-1], right[c + head : d][::-1])
    inside = _inner_blocks(left, right, a + head, b - tail, c + head, d - tail)
    return [(a, c, head), *inside, (b - tail, d - tail, tail)]


def _inner_blocks(left: Ids, right: Ids, a: int, b: int, c: int, d: int) -> list[tuple[int, int, int]]:
    """:func:`_common_blocks` of stretches whose first tokens differ, and whose last tokens differ."""
    if a == b or c == d:
        return []
    if (b - a) * (d - c) <= MAX_PAIRS:
        matcher = BoundedMatcher(left[a:b].tolist(), right[c:d].tolist(), MAX_PAIRS)
        return [(a + m.a, c + m.b, m.size) for m in matcher.get_matching_blocks() if m.size]
    anchors = _anchors(left[a:b], right[c:d])
    blocks: list[tuple[int, int, int]] = []
    at_left, at_right = a, c
    for l_start, r_start, length in anchors:
        l_at, r_at = a + l_start, c + r_start
        if l_at < at_left or r_at < at_right:
            continue
        if (l_at - at_left) * (r_at - at_right) <= MAX_PAIRS:
            blocks += _common_blocks(left, right, at_left, l_at, at_right, r_at)
        blocks.append((l_at, r_at, length))
        at_left, at_right = l_at + length, r_at + length
    if anchors and (b - at_left) * (d - at_right) <= MAX_PAIRS:
        blocks += _common_blocks(left, right, at_left, b, at_right, d)
    return blocks


def _anchors(left: Ids, right: Ids) -> list[tuple[int, int, int]]:
    """Runs of eight or more ids that occur once in each stream, in the same order in both."""
    if min(len(left), len(right)) < _GRAM:
        return []
    (left_grams, left_at), (right_grams, right_at) = _unique_grams(left), _unique_grams(right)
    if not len(left_grams) or not len(right_grams):
        return []
    place = np.minimum(np.searchsorted(right_grams, left_grams), len(right_grams) - 1)
    both = right_grams[place] == left_grams
    opposite = np.full(len(left), -1, dtype=np.int64)
    opposite[left_at[both]] = right_at[place[both]]
    a = np.flatnonzero(opposite >= 0)
    b = opposite[a]
    if not len(a):
        return []
    opens = np.ones(len(a), dtype=np.bool_)
    opens[1:] = (np.diff(a) != 1) | (np.diff(b) != 1)
    starts = np.flatnonzero(opens)
    stops = np.append(starts[1:], len(a)) - 1
    blocks = [(int(a[s]), int(b[s]), int(a[e] - a[s]) + _GRAM) for s, e in zip(starts, stops, strict=True)]
    return [(at, to, n) for at, to, n in _increasing(blocks) if np.array_equal(left[at : at + n], right[to : to + n])]


def _unique_grams(ids: Ids) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """The hashes of eight ids each that occur once, sorted, and where they begin."""
    # A polynomial hash that wraps. A collision is found when the stretches themselves are compared.
    grams, factor, size = ids.astype(np.uint64), np.uint64(0x9E3779B97F4A7C15), 1
    with np.errstate(over="ignore"):
        while size < _GRAM:
            grams = grams[:-size] * factor + grams[size:]
            factor, size = factor * factor, 2 * size
    order = np.argsort(grams)  # faster than np.unique, whose sort is stable
    grams = grams[order]
    new = np.ones(len(grams) + 1, dtype=np.bool_)
    new[1:-1] = grams[1:] != grams[:-1]
    once = new[1:] & new[:-1]
    return grams[once], order[once]


def _increasing(blocks: Sequence[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """The longest chain of blocks that is in order on the right too."""
    ends: list[int] = []
    last: list[int] = []
    before = [-1] * len(blocks)
    for index, (_, right, _) in enumerate(blocks):
        place = bisect_left(ends, right)
        before[index] = last[place - 1] if place else -1
        if place == len(ends):
            ends.append(right)
            last.append(index)
        else:
            ends[place], last[place] = right, index
    chain: list[tuple[int, int, int]] = []
    index = last[-1] if last else -1
    while index >= 0:
        chain.append(blocks[index])
        index = before[index]
    return chain[::-1]


def _groups(blocks: Sequence[tuple[int, int, int]], n_left: int, n_right: int) -> list[AlignedGroup]:
    groups: list[AlignedGroup] = []
    left_at = right_at = 0
    for a, b, length in [*blocks, (n_left, n_right, 0)]:
        if a > left_at or b > right_at:
            groups.append(AlignedGroup(left_at, a, right_at, b, False))
        if length:
            if groups and groups[-1].equal:
                last = groups.pop()
                groups.append(AlignedGroup(last.left_start, a + length, last.right_start, b + length, True))
            else:
                groups.append(AlignedGroup(a, a + length, b, b + length, True))
        left_at, right_at = a + length, b + length
    return groups


def fold(groups: Sequence[AlignedGroup], context: int = 8, least: int = 1) -> list[AlignedGroup]:
    """Hide the inside of equal groups; ``context`` tokens next to a difference stay visible. ``least``: a group stays
    whole when no more than so many tokens would be hidden."""
    folded: list[AlignedGroup] = []
    for index, group in enumerate(groups):
        length = group.left_stop - group.left_start
        head = context if index else 0
        tail = context if index + 1 < len(groups) else 0
        if not group.equal or length <= head + tail + least:
            folded.append(group)
            continue
        a, b = group.left_start, group.right_start
        for n, (first, last) in enumerate(pairwise((0, head, length - tail, length))):
            if first < last or n == 1:
                folded.append(AlignedGroup(a + first, a + last, b + first, b + last, True, n == 1))
    return folded


def sampled_places(steps: Sequence[Step], row: Row) -> list[tuple[int, int, int]] | None:
    """Where each step's completion stands in the row: ``(start, stop, step)``. None when a completion is not there."""
    places = []
    cursor = 0
    for index in row.step_indices:
        if index >= len(steps):
            return None
        step = steps[index]
        start, n = len(step.prompt_ids), len(step.completion_ids)
        if start < cursor or not np.array_equal(row.ids[start : start + n], step.completion_ids):
            place = row.ids[cursor:].tobytes().find(step.completion_ids.tobytes())
            while place >= 0 and place % row.ids.itemsize:
                place = row.ids[cursor:].tobytes().find(step.completion_ids.tobytes(), place + 1)
            if place < 0:
                return None
            start = cursor + place // row.ids.itemsize
        places.append((start, start + n, index))
        cursor = start + n
    return places


@dataclass(frozen=True, eq=False)
class TrainedTokens:
    """What the rows of a trajectory train, compared with what its steps sampled."""

    times: list[NDArray[np.int32]]  # For each step ``[C]``: how many rows train the token as it was sampled.
    foreign: list[Mask | None]
    """For each row ``[T]``: trained tokens that were not sampled as they stand. None = its steps are not known."""
    verbatim: list[bool]  # For each row, whether it holds the completions of its steps whole.

    @property
    def n_lost(self) -> int | None:
        """Sampled tokens that no row trains as they were sampled. None = not known."""
        if not self.times or any(foreign is None for foreign in self.foreign):
            return None
        return sum(int(np.count_nonzero(times == 0)) for times in self.times)


def trained_tokens(steps: Sequence[Step], rows: Sequence[Row]) -> TrainedTokens:
    """Compare rows with their steps. Without rows each completion is trained once, in the row that follows. Completions
    that a row does not hold whole, between those that it holds, are aligned with its trained ids there."""
    times = [np.full(len(step.completion_ids), not rows, dtype=np.int32) for step in steps]
    foreign: list[Mask | None] = []
    verbatim: list[bool] = []
    for row in rows:
        step_indices = row.step_indices
        if not step_indices or max(step_indices) >= len(steps) or len(row.loss_mask) != len(row.ids):
            foreign.append(None)
            verbatim.append(False)
            continue
        places = sampled_places(steps, row)
        verbatim.append(places is not None)
        mask = row.loss_mask.copy()
        for index, offsets, is_trained in _same_tokens(steps, row, places):
            times[index][offsets] += row.loss_mask[is_trained]
            mask[is_trained] = False
        foreign.append(mask)
    return TrainedTokens(times, foreign, verbatim)


SameTokens = Iterator[tuple[int, NDArray[np.int64], NDArray[np.int64]]]
"""A step, offsets in its completion, and the offsets of the same tokens in a row."""


def _same_tokens(steps: Sequence[Step], row: Row, places: Sequence[tuple[int, int, int]] | None) -> SameTokens:
    if places is not None:
        yield from ((index, np.arange(stop - start), np.arange(start, stop)) for start, stop, index in places)
        return
    waiting: list[int] = []
    cursor = 0
    for index in row.step_indices:
        start = len(steps[index].prompt_ids)
        stop = start + len(steps[index].completion_ids)
        if start < cursor or not np.array_equal(row.ids[start:stop], steps[index].completion_ids):
            waiting.append(index)
            continue
        yield from _aligned(steps, waiting, row, cursor, start)
        yield index, np.arange(stop - start), np.arange(start, stop)
        waiting, cursor = [], stop
    yield from _aligned(steps, waiting, row, cursor, len(row.ids))


def _aligned(steps: Sequence[Step], indices: Sequence[int], row: Row, start: int, stop: int) -> SameTokens:
    """The completions of some steps against the trained ids of ``row[start:stop]``."""
    trained = start + np.flatnonzero(row.loss_mask[start:stop])
    sampled = np.concatenate([NO_IDS, *(steps[index].completion_ids for index in indices)])
    equal = [group for group in align_ids(sampled, row.ids[trained]) if group.equal]
    left_places = np.concatenate([np.arange(0), *(np.arange(group.left_start, group.left_stop) for group in equal)])
    is_trained = np.concatenate([np.arange(0), *(trained[group.right_start : group.right_stop] for group in equal)])
    first = 0
    for index in indices:
        last = first + len(steps[index].completion_ids)
        here = (left_places >= first) & (left_places < last)
        yield index, left_places[here] - first, is_trained[here]
        first = last


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
        left_places = np.arange(group.left_start, group.left_stop)
        is_trained = trained[group.right_start : group.right_stop]
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
            last = group.right_stop
            if group.equal:
                last = group.right_start + min(stop, group.left_stop) - group.left_start
    return first, max(first, last)
