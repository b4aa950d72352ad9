"""What the page of a row reads: its spans, and a window of its tokens from the arrays that overlap the window."""

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from django.db.models import Count, QuerySet, Sum

from rollout_inspector.streams.coding import StepExtent, stream_pieces
from rollout_inspector.streams.trajectory import Floats, Origin, Tokens
from rollouts.store import models
from rollouts.store.token_arrays.reading import columns_of_rows, rows_with_tokens, step_extents, steps_with_tokens
from rollouts.store.trajectories.trajectory_parts import StepSummary


@dataclass(frozen=True)
class Span:
    """A stretch ``[start, stop)`` of a row with one writer."""

    start: int
    stop: int
    step_index: int | None
    """The step that read it (prompt, delta) or sampled it (completion); None for a row without steps."""
    part: str
    """``prompt``, ``delta``, ``completion``, or ``row`` for a row that has its own arrays. When role headers divide
    such a row, it is ``prompt`` before the first header, ``reply`` after a header of the assistant, and ``message``
    after any other header."""
    roles: tuple[str, ...] = ()  # The roles that the headers name, where they divide the row.


def get_row(trajectory: models.StoredTrajectory, row: int | models.StoredRow) -> models.StoredRow:
    """A row by its index. Raises ``Row.DoesNotExist``."""
    if isinstance(row, models.StoredRow):
        return row
    return models.StoredRow.objects.get(trajectory=trajectory, index=row)


def row_spans(row: models.StoredRow, steps: Iterable[StepSummary]) -> list[Span]:
    """The spans of a row in order, without empty ones. ``steps``: all of its trajectory, in order. No query."""
    if row.last_step_id is None:
        return [Span(0, row.n_tokens, None, "row")] if row.n_tokens else []
    spans: list[Span] = []
    chain = set(row.step_indices)
    end = 0
    for step in steps:
        if step.index not in chain:
            continue
        if step.prompt_length > end:
            spans.append(Span(end, step.prompt_length, step.index, "delta" if spans else "prompt"))
        end = step.prompt_length + step.completion_length
        if step.completion_length:
            spans.append(Span(step.prompt_length, end, step.index, "completion"))
    return spans


def row_window(
    trajectory: models.StoredTrajectory,
    row: int | models.StoredRow,
    start: int,
    stop: int,
    steps: Sequence[StepSummary] | None = None,
) -> Tokens:
    """The tokens ``[start, stop)``, clipped to the row. Reads only arrays that overlap. ``steps``: all steps of the
    trajectory, where they are known. One query then for a row that is known; else 3."""
    record = get_row(trajectory, row)
    start = max(0, min(start, record.n_tokens))
    stop = max(start, min(stop, record.n_tokens))
    if record.last_step_id is None:
        return _stored_window(record, start, stop)
    n = stop - start
    ids = np.zeros(n, dtype=np.int32)
    origin = np.full(n, Origin.PROMPT, dtype=np.uint8)
    loss_mask = np.zeros(n, dtype=np.bool_)
    logprobs = np.full(n, np.nan, dtype=np.float32)
    step_index = np.full(n, -1, dtype=np.int32)
    if steps is None:
        keys, extents = step_extents(trajectory.pk)
    else:
        keys = [step.pk for step in steps]
        extents = [
            StepExtent(step.parent, step.shared_length, step.prompt_length, step.completion_length) for step in steps
        ]
    chain = record.step_indices
    pieces = [piece for piece in stream_pieces(extents, chain[-1]) if piece.start < stop and piece.stop > start]
    needed = {piece.step_index for piece in pieces}
    # The steps of the chain that add a token of the window. Each ends behind the one before it.
    ends = [extents[index].prompt_length + extents[index].completion_length for index in chain]
    first = bisect_right(ends, start)
    here = chain[first : bisect_left(ends, stop) + 1]
    # A branch that starts alike: a step of the chain owns no piece of the window, but owns logprobs in it.
    needed |= {index for index in here if extents[index].prompt_length < stop}
    steps_read = models.StoredStep.objects.filter(pk__in=[keys[index] for index in needed])
    tokens = {step.index: step.tokens for step in steps_with_tokens(steps_read)}
    for piece in pieces:
        array = getattr(tokens[piece.step_index], piece.array)
        a, b = max(piece.start, start), min(piece.stop, stop)
        ids[a - start : b - start] = array[a - piece.start : b - piece.start]
    end = ends[first - 1] if first else 0
    for index in here:
        _, shared_length, prompt_length, completion_length = extents[index]
        a, b = max(end, start), min(prompt_length, stop)
        if b > a:
            step_index[a - start : b - start] = index
            if index != chain[0]:
                origin[a - start : b - start] = Origin.OBSERVATION
                own = tokens.get(index)
                if own is not None and own.delta_origin is not None:
                    # It starts at shared_length: the end of the chain's stream, or later when a sibling shares more.
                    a = max(a, shared_length)
                    part = own.delta_origin[a - shared_length : max(b - shared_length, 0)]
                    origin[a - start : a - start + len(part)] = part
        end = prompt_length + completion_length
        a, b = max(prompt_length, start), min(end, stop)
        if b > a:
            step_index[a - start : b - start] = index
            origin[a - start : b - start] = Origin.SAMPLED
            loss_mask[a - start : b - start] = True
            sampled = tokens[index].logprobs
            if sampled is not None:
                part = sampled[a - prompt_length : b - prompt_length]
                logprobs[a - start : a - start + len(part)] = part
    has_logprobs = any(steps_read.logprobs is not None for steps_read in tokens.values())
    return Tokens(start, ids, origin, loss_mask, logprobs if has_logprobs else None, step_index, record.n_tokens)


def _stored_window(record: models.StoredRow, start: int, stop: int) -> Tokens:
    """The window of a row that has its own arrays. Short arrays are padded; the diagnosis reports them."""
    (stored,) = rows_with_tokens(models.StoredRow.objects.filter(pk=record.pk))
    tokens = stored.tokens

    def padded(values: np.ndarray, fill: float) -> np.ndarray:
        whole, part = np.full(stop - start, fill, dtype=values.dtype), values[start:stop]
        whole[: len(part)] = part
        return whole

    mask = padded(tokens.loss_mask, False)
    logprobs = None if tokens.logprobs is None else padded(tokens.logprobs, np.nan)
    origin = padded(np.zeros(0, np.uint8) if tokens.origin is None else tokens.origin, Origin.PROMPT)
    if tokens.origin is None:
        # Nobody recorded the origins: prompt before the first trained token, then as the loss mask says.
        trained = np.flatnonzero(tokens.loss_mask)
        first = int(trained[0]) if len(trained) else record.n_tokens
        origin[max(first - start, 0) :] = Origin.OBSERVATION
        origin[mask] = Origin.SAMPLED
    steps = np.full(stop - start, -1, dtype=np.int32)
    ids, has_origin = tokens.ids[start:stop], tokens.origin is not None
    return Tokens(start, ids, origin, mask, logprobs, steps, record.n_tokens, has_origin)


def row_columns(
    record: models.StoredRow, start: int, stop: int, names: Collection[str] | None = None
) -> dict[str, Floats]:
    """Name -> values ``[start, stop)`` of a trainer's columns, which may be shorter; ``names``: only these."""
    columns = columns_of_rows(models.StoredRow.objects.filter(pk=record.pk), names)
    return {name: values[start:stop] for name, values in columns.get(record.pk, {}).items()}


def row_totals(trajectories: QuerySet[models.StoredTrajectory]) -> dict[str, int]:
    """``rows``, ``tokens`` and ``trained`` tokens of the rows of a query's trajectories. One query."""
    rows = models.StoredRow.objects.filter(trajectory__in=trajectories.order_by().values("pk"))
    sums = {"tokens": Sum("n_tokens", default=0), "trained": Sum("n_trained", default=0)}
    return dict(rows.aggregate(rows=Count("pk"), **sums))
