"""Checks what a row's mask covers: headers, separators, stop tokens, observations.

With an origin for each token the checks read the origins. Without origins the marks of the template tell the turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rollout_inspector.diagnose.finding import Fault, Severity
from rollout_inspector.diagnose.row_checks import LAGS, nonzero, shift_fault
from rollout_inspector.streams.snippets import counted
from rollout_inspector.streams.token_origins import mask_runs
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Mask, Origin, Row


@dataclass(frozen=True, eq=False)
class TurnBoundaries:
    """What marks the turns in a row."""

    special: Mask
    """``[T]``: which tokens are control tokens."""
    blank: Mask
    """``[T]``: which tokens are white space alone."""
    headers: tuple[Ids, ...]
    """The ids that open the assistant's turn (generation prompt), after a user and after a tool. Empty = not known."""
    by_template: bool
    """Whether the template told the headers. Without it they follow from the mask of the row."""
    stop_ids: frozenset[int]
    """The control tokens that end the assistant's turn."""
    known_stops: frozenset[int]
    """Those of them that the tokenizer or the template tells. The others follow from the mask of the row."""


def places_of(needle: Ids, ids: Ids) -> list[int]:
    """The offsets at which a short stretch of ids occurs."""
    n = len(needle)
    if not n or n > len(ids):
        return []
    hits = ids[: len(ids) - n + 1] == needle[0]
    for offset in range(1, n):
        hits &= ids[offset : len(ids) - n + 1 + offset] == needle[offset]
    places: list[int] = np.flatnonzero(hits).tolist()
    return places


def header_places(marks: TurnBoundaries, ids: Ids) -> list[tuple[int, int]]:
    """Where the assistant's turns open: ``[start, stop)``, in order. Of two headers that overlap, the longer one."""
    places: list[tuple[int, int]] = []
    for header in sorted(marks.headers, key=len, reverse=True):
        for start in places_of(header, ids):
            stop = start + len(header)
            if not any(first < stop and start < last for first, last in places):
                places.append((start, stop))
    return sorted(places)


def written_by_assistant(row: Row, marks: TurnBoundaries) -> Mask | None:
    """``[T]``: the tokens that the assistant wrote, by origins, else from each header through its stop token.

    None when neither tells it.
    """
    if row.origin is not None and len(row.origin) == len(row.ids):
        return np.asarray(row.origin == Origin.SAMPLED)
    headers = header_places(marks, row.ids)
    if not headers:
        return None
    written: Mask = np.zeros(len(row.ids), dtype=np.bool_)
    for (_, start), (stop, _) in zip(headers, [*headers[1:], (len(row.ids), 0)], strict=True):
        ends = np.flatnonzero(np.isin(row.ids[start:stop], list(marks.stop_ids)))
        written[start : start + int(ends[0]) + 1 if ends.size else stop] = True
    return written


def derived_header(ids: Ids, mask: Mask, special: Mask) -> Ids:
    """The header without a template: the ids between the turn before and a trained stretch, as in most stretches."""
    stops = derived_stops(ids, mask, special)
    starts = [start for start, _ in mask_runs(mask)][:16]
    headers: list[Ids] = []
    for start in starts:
        low = max(0, start - 16)
        before = ids[low:start]
        ends = np.flatnonzero(np.isin(before, list(stops))) + 1
        marks = np.flatnonzero(special[low:start])
        behind = marks[marks >= ends[-1]] if ends.size else marks[-1:]
        if behind.size:
            headers.append(before[int(behind[0]) :])
    best, most = NO_IDS, 0
    for header in headers:
        places = places_of(header, ids)
        fits = sum(any(place <= start <= place + len(header) for place in places) for start in starts)
        if fits > most:
            best, most = header, fits
    # Of several stretches one alone tells nothing about the others.
    return best if most > 1 or len(starts) == 1 else NO_IDS


def derived_stops(ids: Ids, mask: Mask, special: Mask, known: frozenset[int] = frozenset()) -> frozenset[int]:
    """Control tokens at the ends of trained stretches, except those that a ``known`` stop token follows."""
    ends = [stop for _, stop in mask_runs(mask) if special[stop - 1]]
    return frozenset(int(ids[stop - 1]) for stop in ends if stop == len(ids) or int(ids[stop]) not in known)


def mask_shifted(row: Row, marks_of: Callable[[Row], TurnBoundaries]) -> Fault | None:
    """The mask fits the turns at one lag other than 0, at both ends of every stretch. Its columns moved with it."""
    runs, n = mask_runs(row.loss_mask), len(row.ids)
    marks = marks_of(row)
    opens, ends = _turn_edges(row, marks, marks.known_stops)
    opened = all(start in opens for start, _ in runs)
    for lag in LAGS:
        whole = [stop for _, stop in runs if lag < 0 or stop < n]  # a shift may push the last stretch over the end
        if not whole or any(stop in ends for stop in whole):
            continue
        if opened and (lag < 0 or marks.blank[whole[0] - 1]):
            continue  # the header may follow from the mask, and then it moved with it
        back = np.roll(row.loss_mask, -lag)
        back[n - lag if lag > 0 else 0 : n if lag > 0 else -lag] = False
        there = marks_of(replace(row, loss_mask=back))
        starts, stops = _turn_edges(row, there, there.stop_ids if there.by_template else there.known_stops)
        if all(start - lag in starts for start, _ in runs) and all(stop - lag in stops for stop in whole):
            return shift_fault(row, back, "The mask stands", lag)
    return None


def _turn_edges(row: Row, marks: TurnBoundaries, stop_ids: frozenset[int]) -> tuple[frozenset[int], frozenset[int]]:
    """Where the assistant's tokens may start, and where they may stop."""
    if (sampled := _sampled(row)) is not None:
        runs = mask_runs(sampled)
        return frozenset(start for start, _ in runs), frozenset(stop for _, stop in runs)
    stops = np.flatnonzero(np.isin(row.ids, list(stop_ids))) + 1
    return frozenset(stop for _, stop in header_places(marks, row.ids)), frozenset(stops.tolist())


def _sampled(row: Row) -> Mask | None:
    """Which tokens were sampled. None when no origin says it."""
    if row.origin is None or len(row.origin) != len(row.ids):
        return None
    sampled: Mask = row.origin == Origin.SAMPLED
    return sampled if sampled.any() else None


def mask_faults(row: Row, marks: TurnBoundaries) -> Iterator[Fault]:
    """Every place where the mask covers tokens that were not sampled, or leaves out sampled tokens."""
    if overrun := _to_the_end(row, marks):
        yield overrun
    elif row.origin is not None and len(row.origin) == len(row.ids):
        yield from _by_origin(row, marks)
    else:
        yield from _by_marks(row, marks)


# -- with the origin of each token


def _by_origin(row: Row, marks: TurnBoundaries) -> Iterator[Fault]:
    origin = row.origin
    assert origin is not None
    sampled = origin == Origin.SAMPLED
    for start, stop in mask_runs(row.loss_mask & ~sampled):
        if not _is_encoded_again(row, start, stop):
            yield _named(row, marks, start, stop)
    masked = mask_runs(sampled & ~row.loss_mask)
    if not row.loss_mask.any():
        return  # mask_overrun reports it
    for start, stop in masked:
        yield _masked(row, marks, start, stop, bool(stop == len(sampled) or not sampled[stop]))


def _is_encoded_again(row: Row, start: int, stop: int) -> bool:
    """Whether a strategy encoded an assistant's text again. Then the mask is right; the steps decide about the ids."""
    assert row.origin is not None
    is_inserted = bool((row.origin[start:stop] == Origin.INSERTED).all()) and bool(row.step_indices)
    return is_inserted and (stop - start > 2 or stop < len(row.ids)) and not bool((row.origin == Origin.SAMPLED).any())


def _named(row: Row, marks: TurnBoundaries, start: int, stop: int) -> Fault:
    """The fault of trained tokens that were not sampled, named by who wrote them."""
    origin, n = row.origin, stop - start
    assert origin is not None
    if stop == len(row.ids) and n <= 2 and (origin[start] == Origin.INSERTED or _is_stop(row, marks, start)):
        return _appended(row, start, stop)
    written = set(np.unique(origin[start:stop]).tolist())
    behind_sample = start > 0 and origin[start - 1] == Origin.SAMPLED
    if written <= {Origin.TEMPLATE, Origin.INSERTED} and behind_sample and marks.blank[start:stop].all():
        return _separator(start, stop)
    before_sample = stop < len(row.ids) and origin[stop] == Origin.SAMPLED
    if before_sample and written <= {Origin.TEMPLATE, Origin.PROMPT, Origin.INSERTED} and n <= 16:
        return _header(start, stop)
    return _observation(start, stop)


def _masked(row: Row, marks: TurnBoundaries, start: int, stop: int, ends_turn: bool) -> Fault:
    if stop - start == 1 and ends_turn and _is_stop(row, marks, start) and start > 0 and row.loss_mask[start - 1]:
        return _stop_untrained(row, start)
    return Fault(
        "sampled_masked", f"Masked: {counted(stop - start, 'sampled token')} from offset {start} on.", start, stop,
        lost=stop - start,
    )


# -- with ids, mask and marks only


def _by_marks(row: Row, marks: TurnBoundaries) -> Iterator[Fault]:
    for start, stop in mask_runs(row.loss_mask):
        yield from _run_faults(row, marks, start, stop)


def _to_the_end(row: Row, marks: TurnBoundaries) -> Fault | None:
    """One trained stretch that reaches the row's end and holds whole turns of others."""
    runs = mask_runs(row.loss_mask)
    if len(runs) != 1 or runs[0][1] != len(row.ids):
        return None
    start = runs[0][0]
    if (sampled := _sampled(row)) is not None:
        n_others = sum(stop > start for _, stop in mask_runs(sampled)) - 1
        wrong = int(np.count_nonzero(row.loss_mask & ~sampled))
    else:
        n_others, since = 0, start
        for first, last in header_places(marks, row.ids):
            if first > start + last - first:
                n_others += not _goes_on(row, marks, since, first)
                since = last
        wrong = len(row.ids) - start
    if n_others < 1 or not wrong:
        return None
    return Fault(
        "mask_overrun",
        f"The mask runs from offset {start} to the end of the row, over {counted(n_others, 'turn')} of others.",
        start, len(row.ids),
        wrong=wrong,
    )


def _run_faults(row: Row, marks: TurnBoundaries, start: int, stop: int) -> Iterator[Fault]:
    """Checks one trained stretch: it should start after the header and end with the stop token."""
    headers = header_places(marks, row.ids)
    opens = [last for _, last in headers]
    inside = [(first, last) for first, last in headers if first < stop and start < last]
    if headers and not inside and _outside_turn(row, marks, start, opens):
        yield _observation(start, stop)
        return
    for first, last in inside:
        if last < stop and not _outside_turn(row, marks, start, opens) and _goes_on(row, marks, start, first):
            start = last
            continue
        yield _header(max(first, start), min(last, stop))
        behind = start if _outside_turn(row, marks, start, opens) else _behind_stop(row, marks, start, first)
        if behind < first - 1:
            yield _observation(behind, first)
        start = last
    end = stop
    while end > start and marks.blank[end - 1] and not marks.special[end - 1]:
        end -= 1
    if end > start and end < stop and int(row.ids[end - 1]) in marks.stop_ids:
        yield _separator(end, stop)
    elif stop == len(row.ids) and stop - start > 1 and _zero_alone(row, marks, stop - 1):
        yield _appended(row, stop - 1, stop)
    elif stop < len(row.ids) and _left_stop_out(row, marks, stop):
        yield _stop_untrained(row, stop)


def _goes_on(row: Row, marks: TurnBoundaries, start: int, first: int) -> bool:
    """Whether the model ended a message right before a header, and so began its next message itself."""
    alone = start < first and int(row.ids[first]) not in row.ids[start:first]
    return alone and _behind_stop(row, marks, start, first) == first


def _left_stop_out(row: Row, marks: TurnBoundaries, stop: int) -> bool:
    return _is_stop(row, marks, stop) and not _is_stop(row, marks, stop - 1) and _was_sampled(row, stop)


def _outside_turn(row: Row, marks: TurnBoundaries, start: int, opens: list[int]) -> bool:
    """Whether the assistant's last turn before an offset had ended, or none had begun."""
    before = [place for place in opens if place <= start]
    if not before:
        return True
    between = row.ids[before[-1] : start]
    return bool(np.isin(between, list(marks.stop_ids)).any())


def _behind_stop(row: Row, marks: TurnBoundaries, start: int, stop: int) -> int:
    """Where the assistant's turn ended before ``stop``; ``start`` when it did not end."""
    ends = np.flatnonzero(np.isin(row.ids[start:stop], list(marks.stop_ids)))
    return start + int(ends[0]) + 1 if ends.size else start


def _was_sampled(row: Row, place: int) -> bool:
    """Whether a token has a logprob, if masked tokens have none. Without logprobs a stop token counts as sampled."""
    if row.logprobs is None or len(row.logprobs) != len(row.ids):
        return True
    says = nonzero(row.logprobs)
    masked = ~row.loss_mask
    if says[masked].mean() > 0.5:
        return True  # logprobs on all tokens decide nothing
    return bool(says[place])


def _zero_alone(row: Row, marks: TurnBoundaries, place: int) -> bool:
    """Whether a trained stop token has a logprob of exactly 0 and every other trained token has another value."""
    values: Floats | None = row.logprobs
    if values is None or len(values) != len(row.ids) or not _is_stop(row, marks, place):
        return False
    trained = np.flatnonzero(row.loss_mask)
    return bool(values[place] == 0 and np.count_nonzero(values[trained] == 0) == 1)


def _is_stop(row: Row, marks: TurnBoundaries, place: int) -> bool:
    return int(row.ids[place]) in marks.stop_ids


# -- the faults with their sentences


def _header(start: int, stop: int) -> Fault:
    return Fault(
        "generation_prompt_trained",
        f"The assistant header at {start} to {stop} is under the gradient, but was not sampled.",
        start, stop,
        wrong=stop - start,
    )


def _separator(start: int, stop: int) -> Fault:
    return Fault(
        "separator_trained", f"The white space after the stop token at {start} is under the gradient.", start, stop,
        wrong=stop - start,
    )


def _observation(start: int, stop: int) -> Fault:
    return Fault(
        "observation_trained",
        f"Under the gradient, but not the assistant's: {counted(stop - start, 'token')} from offset {start} on.",
        start, stop,
        wrong=stop - start,
    )


def _appended(row: Row, start: int, stop: int) -> Fault:
    return Fault(
        "appended_eos_trained",
        f"The last token (id {int(row.ids[stop - 1])}) was appended, not sampled, and is under the gradient.",
        start, stop,
        wrong=stop - start, severity=None if row.origin is not None else Severity.WARNING,
    )


def _stop_untrained(row: Row, place: int) -> Fault:
    return Fault(
        "stop_token_untrained",
        f"The stop token that was sampled at offset {place} (id {int(row.ids[place])}) is masked.",
        place, place + 1,
        lost=1,
    )
