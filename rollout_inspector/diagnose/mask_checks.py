"""Checks what a row's mask covers: headers, separators, stop tokens, observations. With an origin for each token the
checks read the origins. Without origins the marks of the template tell the turns."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np

from rollout_inspector.diagnose.finding import Fault, Severity
from rollout_inspector.diagnose.row_checks import LAGS, recorded, shift_fault
from rollout_inspector.streams.snippets import counted
from rollout_inspector.streams.token_origins import mask_runs
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Mask, Origin, Row

_SHORT = 8
"""A mask that is late or early misses a few tokens. More of them may be left out on purpose: a prefill, reasoning."""


@dataclass(frozen=True, eq=False)
class TurnBoundaries:
    """What marks the turns in a row."""

    special: Mask  # ``[T]``: which tokens are control tokens.
    blank: Mask  # ``[T]``: which tokens are white space alone.
    tag: Mask  # ``[T]``: control tokens, and tokens that begin or end a tag in plain text.
    headers: tuple[Ids, ...]
    """The ids that open the assistant's turn (generation prompt), after a user and after a tool. Empty = not known."""
    by_template: bool  # Whether the template told the headers. Without it they follow from the mask of the row.
    stop_ids: frozenset[int]  # The control tokens that end the assistant's turn.
    known_stops: frozenset[int]
    """Those of them that the tokenizer or the template tells. The others follow from the mask of the row."""
    written: frozenset[int] = frozenset()
    """The control tokens that the template writes in small conversations. Empty = not known."""
    bos_id: int | None = None


def places_of(needle: Ids, ids: Ids) -> list[int]:
    """The offsets at which a short stretch of ids occurs."""
    n = len(needle)
    if not n or n > len(ids):
        return []
    hits = ids[: len(ids) - n + 1] == needle[0]
    for offset in range(1, n):
        hits &= ids[offset : len(ids) - n + 1 + offset] == needle[offset]
    return np.flatnonzero(hits).tolist()


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
    """``[T]``: the tokens that the assistant wrote, by origins, else from each header through its stop token. None when
    neither tells it."""
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
    """The mask fits the turns at one lag other than 0, at both ends of every stretch. It marks every wrong token."""
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
            if len(whole) < len(runs):  # the end of the last stretch was pushed over the end
                back[n - lag : next((stop for stop in range(n - lag, n) if stop in stops), n)] = True
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
    if over := _over_turns(row, marks):
        yield over
    elif row.origin is not None and len(row.origin) == len(row.ids):
        yield from _by_origin(row, marks)
    else:  # with ids, mask and marks only
        for start, stop in mask_runs(row.loss_mask):
            yield from _run_faults(row, marks, start, stop)
        if marks.by_template:
            yield from _left_out_of_turns(row, marks)


# -- with the origin of each token


def _by_origin(row: Row, marks: TurnBoundaries) -> Iterator[Fault]:
    origin = row.origin
    assert origin is not None
    sampled = origin == Origin.SAMPLED
    for start, stop in mask_runs(row.loss_mask & ~sampled):
        if not _is_encoded_again(row, start, stop):
            yield _named(row, marks, start, stop)
    for start, stop in mask_runs(sampled & ~row.loss_mask) if row.loss_mask.any() else ():  # mask_overrun reports none
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
        return _trained("separator_trained", start, stop)
    before_sample = stop < len(row.ids) and origin[stop] == Origin.SAMPLED
    if before_sample and written <= {Origin.TEMPLATE, Origin.PROMPT, Origin.INSERTED} and n <= 16:
        return _trained("generation_prompt_trained", start, stop)
    return _trained("observation_trained", start, stop)


def _masked(row: Row, marks: TurnBoundaries, start: int, stop: int, ends_turn: bool) -> Fault:
    if stop - start == 1 and ends_turn and _is_stop(row, marks, start) and start > 0 and row.loss_mask[start - 1]:
        return _stop_untrained(row, start)
    return Fault(
        "sampled_masked", f"Masked: {counted(stop - start, 'sampled token')} from offset {start} on.", start, stop,
        lost=stop - start,
    )


# -- with ids, mask and marks only


def _left_out_of_turns(row: Row, marks: TurnBoundaries) -> Iterator[Fault]:
    """Untrained tokens of turns that are trained. A turn without a trained token may be left out on purpose."""
    headers, n = header_places(marks, row.ids), len(row.ids)
    all_trained = True
    for (_, start), (limit, _) in zip(headers, [*headers[1:], (n, 0)], strict=True):
        ends = np.flatnonzero(np.isin(row.ids[start:limit], list(marks.known_stops)))
        stop = start + int(ends[0]) if ends.size else limit
        if isinstance(n_prompt := row.extra.get("prompt_length"), int):
            start = min(max(start, n_prompt), stop)
        trained = np.flatnonzero(row.loss_mask[start:stop]) + start
        if trained.size:
            for first, last in mask_runs(~row.loss_mask[start:stop]):
                if fault := _gap(row, marks, start + first, start + last, (start, stop)):
                    yield fault
            if fault := _without_stop(row, marks, int(trained[-1]) + 1, stop):
                yield fault
        elif ends.size and row.loss_mask[stop] and not marks.blank[start:stop].all() and _was_sampled(row, stop - 1):
            yield _masked(row, marks, start, stop, False)
        elif limit == n == stop and len(headers) > 1 and all_trained and not marks.blank[start:].all():
            yield Fault(
                "sampled_masked", f"The last turn, from offset {start} on, is cut and masked; the others are trained.",
                start, n, lost=n - start, severity=None if row.logprobs is None else Severity.INFO,
            )
        all_trained &= bool(trained.size)


def _gap(row: Row, marks: TurnBoundaries, start: int, stop: int, turn: tuple[int, int]) -> Fault | None:
    """A masked stretch of a trained turn. What tags enclose is left out on purpose: reasoning, results of a search."""
    text = np.flatnonzero(~marks.blank[start:stop]) + start
    at_edge = start == turn[0] or stop == turn[1]
    edges = [*text[-1:], *([] if stop == turn[1] else [stop])] if start == turn[0] else [start - 1, *text[:1]]
    if not text.size or marks.tag[edges].any() or (stop == turn[1] and stop == len(row.ids)):
        return None
    if (sampled := _recorded(row)) is None:
        if stop - start > (_SHORT if at_edge else _SHORT // 2):
            return None
    elif np.count_nonzero(sampled[text]) * 2 < len(text):
        return None
    return _masked(row, marks, start, stop, False)


def _without_stop(row: Row, marks: TurnBoundaries, end: int, stop: int) -> Fault | None:
    """A trained turn ends with a token that the template does not write, or the row ends without a stop token."""
    token = int(row.ids[end - 1])
    if stop < len(row.ids) and row.loss_mask[stop]:
        end, token = stop + 1, int(row.ids[stop])
    if token in marks.stop_ids:
        alien = marks.written and token not in marks.written
        if alien and _recorded(row) is None and not np.isin(row.ids[end:], list(marks.written)).any():
            return Fault(
                "stop_token_untrained",
                f"The turn ends with id {token} at offset {end - 1}, which the chat template does not write; the stop "
                "token that it writes is not trained.",
                end - 1, end, wrong=1,
            )
        return None
    padding = row.ids[end:]
    closed_later = stop < len(row.ids) and _is_stop(row, marks, stop) and not _was_sampled(row, stop)
    if end != stop or _left_stop_out(row, marks, stop) or not (closed_later or (padding == padding[:1]).all()):
        return None
    return Fault(
        "stop_token_untrained",
        f"The row trains no stop token behind offset {end - 1}: a limit cut the turn, or the stop token was lost.",
        end - 1, end, severity=Severity.INFO,
    )


def _over_turns(row: Row, marks: TurnBoundaries) -> Fault | None:
    """The only trained stretch holds whole turns of others: the response as a whole is trained."""
    runs = mask_runs(row.loss_mask)
    if len(runs) != 1:
        return None
    start, stop = runs[0]
    sampled = _sampled(row)
    if sampled is not None:
        n_others = sum(last > start for _, last in mask_runs(sampled)) - 1
    else:
        n_others, since = 0, start
        for first, last in header_places(marks, row.ids):
            if start + last - first < first < stop:
                n_others += not _goes_on(row, marks, since, first)
                since = last
        sampled = written_by_assistant(row, marks)
    others = mask_runs(row.loss_mask & ~sampled) if sampled is not None else []
    if n_others < 1 or not others or (stop < len(row.ids) and len(others) == 1 and _sampled(row) is not None):
        return None
    return Fault(
        "observation_trained",
        f"The mask runs from offset {start} to {stop}, over {counted(n_others, 'turn')} of others.",
        *others[0], wrong=sum(last - first for first, last in others), places=tuple(others),
    )


def _run_faults(row: Row, marks: TurnBoundaries, start: int, stop: int) -> Iterator[Fault]:
    """Checks one trained stretch: it should start after the header and end with the stop token."""
    headers = header_places(marks, row.ids)
    opens = [last for _, last in headers]
    inside = [(first, last) for first, last in headers if first < stop and start < last]
    if headers and not inside and _outside_turn(row, marks, start, opens):
        yield _trained("observation_trained", start, stop)
        return
    for first, last in inside:
        if last < stop and not _outside_turn(row, marks, start, opens) and _goes_on(row, marks, start, first):
            start = last
            continue
        yield _trained("generation_prompt_trained", max(first, start), min(last, stop))
        behind = start if _outside_turn(row, marks, start, opens) else _behind_stop(row, marks, start, first)
        if behind < first - 1:
            yield _trained("observation_trained", behind, first)
        start = last
    ends = np.isin(row.ids[start:stop], list(marks.known_stops))
    behind_stop = np.flatnonzero(ends[:-1]) + start + 1
    opened = behind_stop[(row.ids[behind_stop] == marks.bos_id) & (marks.bos_id not in marks.known_stops)]
    behind_stop = behind_stop if opens and not opened.size else behind_stop[:0]
    if behind_stop.size and (marks.special[start:stop] & ~ends)[behind_stop[0] - start :].any():
        yield _trained("observation_trained", int(behind_stop[0]), stop)
        return
    tail = slice(behind_stop[-1] if behind_stop.size else stop, stop)  # may be words without a header
    if opened.size or not (marks.special[tail].any() or marks.blank[tail].all()):
        yield _trained("separator_trained", int(opened[0] if opened.size else tail.start), stop)
        return
    end = stop
    while end > start and marks.blank[end - 1] and not marks.special[end - 1]:
        end -= 1
    while end - 1 > start and _is_stop(row, marks, end - 1) and row.ids[end - 2] == row.ids[end - 1]:
        end -= 1  # closed again
    if end > start and end < stop and _is_stop(row, marks, end - 1):
        yield _trained("separator_trained", end, stop)
    elif stop == len(row.ids) and stop - start > 1 and _zero_alone(row, marks, stop - 1):
        yield _appended(row, stop - 1, stop)
    elif _left_stop_out(row, marks, stop):
        yield _stop_untrained(row, stop)


def _goes_on(row: Row, marks: TurnBoundaries, start: int, first: int) -> bool:
    """Whether the model ended a message right before a header, and so began its next message itself."""
    alone = start < first and int(row.ids[first]) not in row.ids[start:first]
    return alone and _behind_stop(row, marks, start, first) == first


def _left_stop_out(row: Row, marks: TurnBoundaries, stop: int) -> bool:
    is_closed = stop < len(row.ids) and _is_stop(row, marks, stop) and not _is_stop(row, marks, stop - 1)
    return is_closed and _was_sampled(row, stop)


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
    sampled = _recorded(row)
    return sampled is None or bool(sampled[place])


def _recorded(row: Row) -> Mask | None:
    """``[T]``: which tokens have a logprob. None without logprobs, and with logprobs on all tokens."""
    if row.logprobs is None or len(row.logprobs) != len(row.ids):
        return None
    says = recorded(row.logprobs)
    return None if says[~row.loss_mask].mean() > 0.5 else says


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


_TRAINED = {
    "generation_prompt_trained":
        "The assistant header at {start} to {stop} is under the gradient, but was not sampled.",
    "separator_trained": "Under the gradient behind the stop token: {tokens} from offset {start} on.",
    "observation_trained": "Under the gradient, but not the assistant's: {tokens} from offset {start} on.",
}


def _trained(kind: str, start: int, stop: int) -> Fault:
    sentence = _TRAINED[kind].format(start=start, stop=stop, tokens=counted(stop - start, "token"))
    return Fault(kind, sentence, start, stop, wrong=stop - start)


def _appended(row: Row, start: int, stop: int) -> Fault:
    token = int(row.ids[stop - 1])
    return Fault(
        "appended_eos_trained",
        f"The last token (id {token}) was appended, not sampled, and is under the gradient." if row.origin is not None
        else f"The last token (id {token}) may be appended: it alone has the logprob 0, as certain tokens may.",
        start, stop, wrong=stop - start, severity=None if row.origin is not None else Severity.INFO,
    )


def _stop_untrained(row: Row, place: int) -> Fault:
    return Fault(
        "stop_token_untrained",
        f"The stop token that was sampled at offset {place} (id {int(row.ids[place])}) is masked.",
        place, place + 1, lost=1,
    )
