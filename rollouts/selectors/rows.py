"""What the page of a row reads: its spans, and a window of its tokens from the arrays that overlap the window."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from django.db.models import BooleanField, Case, Q, Value, When

from rollouts import models
from rollouts.selectors.streams import step_extents
from rollouts.tito.coding import stream_pieces
from rollouts.tito.trajectory import Floats, Ids, Mask, Origin, Origins
from rollouts.token_store.reading import columns_of_rows, rows_with_tokens, steps_with_tokens


@dataclass(frozen=True)
class Span:
    """A stretch ``[start, stop)`` of a row with one writer."""

    start: int
    stop: int
    step_index: int | None
    """The step that read it (prompt, delta) or sampled it (completion); None for a row without steps."""
    part: str
    """``prompt``, ``delta``, ``completion``, or ``row`` for a row that has its own arrays."""
    origin_known: bool = True
    """False: nobody recorded which tokens are template and which observation. All are shown as observation."""


@dataclass(frozen=True, eq=False)
class Window:
    """Tokens ``[start, stop)`` of a row; all arrays ``[stop - start]``."""

    start: int
    stop: int
    n_tokens: int
    """Tokens of the whole row."""
    ids: Ids
    origin: Origins
    loss_mask: Mask
    logprobs: Floats | None
    """NaN for a token that was not sampled, or beyond the end of the recorded values; None: nothing was recorded."""
    step_index: np.ndarray
    """int32; -1 when the step is not known."""
    origin_known: bool = True
    """False: nobody recorded the origins, and ``origin`` is guessed from the loss mask, only for colours."""


def get_row(trajectory: models.StoredTrajectory, row: int | models.StoredRow) -> models.StoredRow:
    """A row by its index. Raises ``Row.DoesNotExist``."""
    if isinstance(row, models.StoredRow):
        return row
    return models.StoredRow.objects.select_related("last_step").get(trajectory=trajectory, index=row)


def row_spans(trajectory: models.StoredTrajectory, row: int | models.StoredRow) -> list[Span]:
    """The spans of a row in order, without empty ones. Reads no array."""
    record = get_row(trajectory, row)
    if record.last_step_id is None:
        return [Span(0, record.n_tokens, None, "row")] if record.n_tokens else []
    has_origin = Q(has_origin=True) | Q(tokens__delta_origin__isnull=False)
    known = Case(When(has_origin, then=Value(True)), default=False, output_field=BooleanField())
    steps = models.StoredStep.objects.filter(trajectory=trajectory, index__in=record.step_indices).order_by("index")
    spans: list[Span] = []
    end = 0
    for index, prompt_length, completion_length, origin_known in steps.annotate(origin_known=known).values_list(
        "index", "prompt_length", "completion_length", "origin_known"
    ):
        first = not spans
        if prompt_length > end:
            spans.append(Span(end, prompt_length, index, "prompt" if first else "delta", first or origin_known))
        end = prompt_length + completion_length
        if completion_length:
            spans.append(Span(prompt_length, end, index, "completion"))
    return spans


def row_window(trajectory: models.StoredTrajectory, row: int | models.StoredRow, start: int, stop: int) -> Window:
    """The tokens ``[start, stop)``, clipped to the row. Reads only arrays that overlap; at most 3 queries."""
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
    keys, extents = step_extents(trajectory.pk)
    chain = record.step_indices
    pieces = [piece for piece in stream_pieces(extents, chain[-1]) if piece.start < stop and piece.stop > start]
    needed = {piece.step_index for piece in pieces}
    # A branch that starts alike: a step of the chain owns no piece of the window, but owns logprobs in it.
    needed |= {
        index for index in chain
        if extents[index].prompt_length < stop
        and extents[index].prompt_length + extents[index].completion_length > start
    }  # fmt: skip
    held = models.StoredStep.objects.filter(pk__in=[keys[index] for index in needed])
    tokens = {step.index: step.tokens for step in steps_with_tokens(held)}
    for piece in pieces:
        array = getattr(tokens[piece.step_index], piece.array)
        a, b = max(piece.start, start), min(piece.stop, stop)
        ids[a - start : b - start] = array[a - piece.start : b - piece.start]
    end = 0
    for index in chain:
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
    known = any(held.logprobs is not None for held in tokens.values())
    return Window(start, stop, record.n_tokens, ids, origin, loss_mask, logprobs if known else None, step_index)


def _stored_window(record: models.StoredRow, start: int, stop: int) -> Window:
    """The window of a row that has its own arrays. Short arrays are padded; the diagnosis reports them."""
    (held,) = rows_with_tokens(models.StoredRow.objects.filter(pk=record.pk))
    tokens = held.tokens

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
    ids, known = tokens.ids[start:stop], tokens.origin is not None
    return Window(start, stop, record.n_tokens, ids, origin, mask, logprobs, steps, known)


def row_columns(record: models.StoredRow, start: int, stop: int) -> dict[str, Floats]:
    """Name -> values ``[start, stop)`` of each trainer's column. A column may be shorter than the row."""
    columns = columns_of_rows(models.StoredRow.objects.filter(pk=record.pk))
    return {name: values[start:stop] for name, values in columns.get(record.pk, {}).items()}
