"""Token columns: a window of a row or of a step's stream, as JSON or as an Arrow IPC stream."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
from django.http import HttpRequest, HttpResponse
from ninja import Schema
from pydantic import ConfigDict

from inspector.api.trajectory_values import TokenColumns
from inspector.web.problems import ApiProblem
from rollout_inspector.streams.trajectory import Floats, Ids, Mask, Origin, Origins, Row
from rollouts.store.models import StoredTrajectory
from rollouts.store.parameters import Count, Text
from rollouts.store.trajectories import engine_columns, trajectory_parts
from rollouts.store.trajectories.rows import row_window
from rollouts.store.trajectories.trajectories import load_step_prompt
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

ARROW = "application/vnd.apache.arrow.stream"
ARROW_ANSWER: dict[int, Any] = {200: {"content": {ARROW: {"schema": {"type": "string", "format": "binary"}}}}}
MAX_JSON_TOKENS = 65_536
MAX_ARROW_TOKENS = 1_048_576
PLAIN = ("ids", "loss_mask", "logprobs", "origin", "step")
TRAINER = "column."
"""Prefix of a trainer's column in an Arrow stream, so that its name hides none of ours."""


class TokensAsked(Schema):
    """Which tokens, and which of their columns."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    start: Count = 0
    """Offset of the first token."""
    stop: Count | None = None
    """Offset behind the last token; the end by default. One answer holds 65,536 tokens of JSON, 1,048,576 of Arrow."""
    columns: Text = ""
    """Names with commas between them: ids, loss_mask, logprobs, origin, step, those of a trainer and of an engine:
    entropy, entropy_at_least, behind_likeliest. Empty = all."""


@dataclass(eq=False)
class Columns:
    """The arrays of a window, each ``[stop - start]``; None = the source has none."""

    trajectory: str
    start: int
    stop: int
    n_tokens: int
    ids: Ids
    loss_mask: Mask | None
    logprobs: Floats | None
    origin: Origins | None
    step: np.ndarray | None
    """int32; -1 = not known."""
    of_trainer: dict[str, Floats] = field(default_factory=dict)


def wants_arrow(request: HttpRequest) -> bool:
    """Whether the caller prefers an Arrow stream to JSON."""
    return request.accepts(ARROW) and request.get_preferred_type(["application/json", ARROW]) == ARROW


def window_of(asked: TokensAsked, n_tokens: int, is_arrow: bool) -> tuple[int, int]:
    """``[start, stop)`` of an answer, clipped to the row and to what one answer may hold."""
    start = min(asked.start, n_tokens)
    stop = n_tokens if asked.stop is None else min(asked.stop, n_tokens)
    return start, max(start, min(stop, start + (MAX_ARROW_TOKENS if is_arrow else MAX_JSON_TOKENS)))


def of_window(
    request: HttpRequest,
    trajectory: StoredTrajectory,
    row: RowSummary,
    steps: Sequence[StepSummary],
    asked: TokensAsked,
) -> Columns:
    """A window of a row, stored or not; ``steps``: all of the trajectory. At most three queries."""
    start, stop = window_of(asked, row.n_tokens, wants_arrow(request))
    window = row_window(trajectory, row.handle, start, stop, steps)
    if row.follows_steps:
        names = _wanted(asked, engine_columns.names_beside([row], steps).get(row.index, []))
        held = engine_columns.columns_beside(row, steps, names, start, stop) if names else {}
    else:
        names = _wanted(asked, trajectory_parts.column_names(trajectory).get(row.index, []))
        whole = trajectory_parts.column_values(trajectory, row.index, names)
        held = {name: _padded(values[start:stop], stop - start) for name, values in whole.items()}
    return Columns(
        trajectory.code, window.start, window.stop, window.n_tokens, window.ids, window.loss_mask, window.logprobs,
        window.origin if window.origin_known else None, window.step_index, held,
    )


def _wanted(asked: TokensAsked, names: Sequence[str]) -> list[str]:
    return [name for name in names if not asked.columns or name in _names(asked)]


def of_row(request: HttpRequest, trajectory: StoredTrajectory, row: Row, asked: TokensAsked) -> Columns:
    """A window of a row that is in memory."""
    start, stop = window_of(asked, len(row.ids), wants_arrow(request))
    part = slice(start, stop)
    origin = None if row.origin is None else row.origin[part]
    return Columns(trajectory.code, start, stop, len(row.ids), row.ids[part], row.loss_mask[part], None, origin, None)


def of_step(request: HttpRequest, trajectory: StoredTrajectory, index: int, asked: TokensAsked) -> Columns:
    """A window of the stream of a step. Four queries."""
    step = trajectory_parts.steps_with_tokens(trajectory, [index])[index]
    tokens = step.tokens
    prompt = load_step_prompt(step)
    ids = np.concatenate([prompt, tokens.completion_ids])
    n_prompt = len(prompt)
    sampled = np.arange(len(ids)) >= n_prompt
    logprobs = None
    if tokens.logprobs is not None:
        logprobs = np.full(len(ids), np.nan, np.float32)
        logprobs[n_prompt : n_prompt + len(tokens.logprobs)] = tokens.logprobs[: len(ids) - n_prompt]
    origin = np.where(sampled, np.uint8(Origin.SAMPLED), np.uint8(Origin.PROMPT))
    start, stop = window_of(asked, len(ids), wants_arrow(request))
    part = slice(start, stop)
    return Columns(
        trajectory.code, start, stop, len(ids), ids[part], sampled[part], None if logprobs is None else logprobs[part],
        origin[part], np.where(sampled, index, -1).astype(np.int32)[part],
    )


def columns_answer(request: HttpRequest, columns: Columns, asked: TokensAsked) -> HttpResponse:
    """The window in the form that the caller prefers. Raises :class:`ApiProblem` 422 for a name that is not there."""
    wanted = _names(asked) or [*PLAIN, *columns.of_trainer]
    unknown = [name for name in wanted if name not in (*PLAIN, *columns.of_trainer)]
    if unknown:
        known = ", ".join((*PLAIN, *columns.of_trainer))
        sentence = f"There is no column {unknown[0][:60]!r} here. Known: {known}."
        raise ApiProblem(422, sentence, {"columns": [sentence]})
    if wants_arrow(request):
        return HttpResponse(_arrow(columns, wanted), content_type=ARROW)
    return HttpResponse(msgspec.json.encode(_plain(columns, wanted)), content_type="application/json")


def _names(asked: TokensAsked) -> list[str]:
    return [name.strip() for name in asked.columns.split(",") if name.strip()]


def _plain(columns: Columns, wanted: list[str]) -> TokenColumns:
    def listed(name: str) -> Any:
        array = getattr(columns, name) if name in wanted else None
        return None if array is None else array.tolist()

    slugs = [origin.slug for origin in Origin]
    origin, step = listed("origin"), listed("step")
    return TokenColumns(
        trajectory=columns.trajectory,
        start=columns.start,
        stop=columns.stop,
        n_tokens=columns.n_tokens,
        next=columns.stop if columns.stop < columns.n_tokens else None,
        ids=listed("ids"),
        loss_mask=listed("loss_mask"),
        logprobs=listed("logprobs"),
        origin=None if origin is None else [slugs[one] for one in origin],
        step=None if step is None else [None if one < 0 else one for one in step],
        columns={name: values.tolist() for name, values in columns.of_trainer.items() if name in wanted},
    )


def _arrow(columns: Columns, wanted: list[str]) -> bytes:
    """An Arrow IPC stream of one batch; start, stop and length of the row are in the metadata of its schema."""
    import pyarrow as pa

    def floats(values: Floats) -> Any:
        return pa.array(values, pa.float32(), mask=~np.isfinite(values))

    arrays: dict[str, Any] = {}
    for name in PLAIN:
        values = getattr(columns, name) if name in wanted else None
        if values is None:
            continue
        if name == "origin":
            slugs = pa.array([origin.slug for origin in Origin])
            arrays[name] = pa.DictionaryArray.from_arrays(pa.array(values.astype(np.int8)), slugs)
        elif name == "logprobs":
            arrays[name] = floats(values)
        elif name == "step":
            arrays[name] = pa.array(values, pa.int32(), mask=values < 0)
        else:
            arrays[name] = pa.array(values)
    arrays |= {f"{TRAINER}{name}": floats(held) for name, held in columns.of_trainer.items() if name in wanted}
    said = {name: str(getattr(columns, name)) for name in ("trajectory", "start", "stop", "n_tokens")}
    batch = pa.record_batch(arrays).replace_schema_metadata(said)
    out = io.BytesIO()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return out.getvalue()


def _padded(values: Floats, n: int) -> Floats:
    """A trainer's column may be shorter than its row."""
    whole = np.full(n, np.nan, np.float32)
    whole[: len(values)] = values[:n]
    return whole
