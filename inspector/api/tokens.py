"""Token columns: a window of a row or of a step's stream, as JSON or as an Arrow IPC stream."""

import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
from django.http import HttpRequest, HttpResponse
from ninja import Schema
from pydantic import ConfigDict

from inspector.api.answers import TokenColumns
from inspector.web.twins import jsonable
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Floats, Origin, Row, Tokens
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
TRAINER = "column."  # Prefix of a trainer's column in an Arrow stream, so that its name hides none of ours.


class TokensAsked(Schema):
    """Which tokens, and which of their columns."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    start: Count = 0
    """Offset of the first token."""
    stop: Count | None = None
    """Offset behind the last token; the end by default. One answer holds 65,536 tokens of JSON, 1,048,576 of Arrow."""
    columns: Text = ""
    """Names with commas between them: ids, loss_mask, logprobs, origin, step, those of a trainer and of an engine:
    entropy, kept_set, entropy_at_least, behind_likeliest. Empty = all."""


def wants_arrow(request: HttpRequest) -> bool:
    """Whether the caller prefers an Arrow stream to JSON."""
    return request.accepts(ARROW) and request.get_preferred_type(["application/json", ARROW]) == ARROW


def window_of(asked: TokensAsked, n_tokens: int, is_arrow: bool) -> tuple[int, int]:
    """``[start, stop)`` of an answer, clipped to the row and to what one answer may hold."""
    start = min(asked.start, n_tokens)
    stop = n_tokens if asked.stop is None else min(asked.stop, n_tokens)
    return start, max(start, min(stop, start + (MAX_ARROW_TOKENS if is_arrow else MAX_JSON_TOKENS)))


def of_window(
    request: HttpRequest, trajectory: StoredTrajectory, row: RowSummary, steps: Sequence[StepSummary],
    asked: TokensAsked,
) -> Tokens:
    """A window of a row, stored or not; ``steps``: all of the trajectory. At most two queries."""
    start, stop = window_of(asked, row.n_tokens, wants_arrow(request))
    columns = engine_columns.columns_of_window(row, steps, start, stop, _names(asked) or None)
    return replace(row_window(trajectory, row.handle, start, stop, steps), columns=columns)


def of_row(request: HttpRequest, row: Row, asked: TokensAsked) -> Tokens:
    """A window of a row that is in memory."""
    has_origin, n_tokens = row.origin is not None, len(row.ids)
    origin = np.zeros(n_tokens, np.uint8) if row.origin is None else row.origin
    whole = Tokens(0, row.ids, origin, row.loss_mask, n_tokens=n_tokens, origin_known=has_origin)
    return whole.slice(*window_of(asked, n_tokens, wants_arrow(request)))


def of_step(request: HttpRequest, trajectory: StoredTrajectory, index: int, asked: TokensAsked) -> Tokens:
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
    steps = np.where(sampled, index, -1).astype(np.int32)
    whole = Tokens(0, ids, origin, sampled, logprobs, steps, len(ids))
    return whole.slice(*window_of(asked, len(ids), wants_arrow(request)))


def columns_answer(request: HttpRequest, code: str, tokens: Tokens, asked: TokensAsked) -> HttpResponse:
    """A window of the trajectory ``code`` in the form that the caller prefers.

    Raises :class:`Refusal` for a name that is not there.
    """
    names = _names(asked) or [*PLAIN, *tokens.columns]
    unknown = [name for name in names if name not in (*PLAIN, *tokens.columns)]
    if unknown:
        known_names = ", ".join((*PLAIN, *tokens.columns))
        raise Refusal(f"There is no column {unknown[0][:60]!r} here. Known: {known_names}.", field="columns")
    arrays = {
        "ids": tokens.ids, "loss_mask": tokens.loss_mask, "logprobs": tokens.logprobs,
        "origin": tokens.origin if tokens.origin_known else None, "step": tokens.step_index,
    }
    plain = {name: array for name, array in arrays.items() if name in names and array is not None}
    columns = {name: values for name, values in tokens.columns.items() if name in names}
    place = {"trajectory": code, "start": tokens.start, "stop": tokens.stop, "n_tokens": tokens.n_tokens}
    if wants_arrow(request):
        return HttpResponse(_arrow(place, plain, columns), content_type=ARROW)
    return HttpResponse(msgspec.json.encode(_json(place, plain, columns)), content_type="application/json")


def _names(asked: TokensAsked) -> list[str]:
    return [name.strip() for name in asked.columns.split(",") if name.strip()]


def _json(place: dict[str, Any], plain: dict[str, np.ndarray], columns: dict[str, Floats]) -> TokenColumns:
    lists: dict[str, Any] = dict.fromkeys(PLAIN) | {name: array.tolist() for name, array in plain.items()}
    slugs = [origin.slug for origin in Origin]
    origin, step = lists.pop("origin"), lists.pop("step")
    return TokenColumns(
        **place, **lists, next=place["stop"] if place["stop"] < place["n_tokens"] else None,
        origin=None if origin is None else [slugs[value] for value in origin],
        step=None if step is None else [None if value < 0 else value for value in step],
        columns={name: values.tolist() for name, values in columns.items()},
    )


def _arrow(place: dict[str, Any], plain: dict[str, np.ndarray], columns: dict[str, Floats]) -> bytes:
    """An Arrow IPC stream of one batch; start, stop and length of the row are in the metadata of its schema."""
    import pyarrow as pa

    def floats(values: Floats) -> Any:
        return pa.array(values, pa.float32(), mask=~np.isfinite(values))

    arrays: dict[str, Any] = {}
    for name, values in plain.items():
        if name == "origin":
            slugs = pa.array([origin.slug for origin in Origin])
            arrays[name] = pa.DictionaryArray.from_arrays(pa.array(values.astype(np.int8)), slugs)
        elif name == "logprobs":
            arrays[name] = floats(values)
        elif name == "step":
            arrays[name] = pa.array(values, pa.int32(), mask=values < 0)
        else:
            arrays[name] = pa.array(values)
    arrays |= {f"{TRAINER}{name}": floats(column) for name, column in columns.items()}
    metadata = {name: str(value) for name, value in place.items()}
    return _stream(pa.table(arrays).replace_schema_metadata(metadata))


def _stream(table: Any) -> bytes:
    import pyarrow as pa

    out = io.BytesIO()
    with pa.ipc.new_stream(out, table.schema) as writer:
        writer.write_table(table)
    return out.getvalue()


def lines_as_arrow(lines: Sequence[Any], following: str | None) -> HttpResponse:
    """Lines of a list as an Arrow IPC stream: the fields of an object are columns such as ``reward_parts.NAME``."""
    import pyarrow as pa

    flat = [
        {name: value for field, item in jsonable(line).items()
         for name, value in ({f"{field}.{key}": part for key, part in item.items()}.items()
                             if isinstance(item, dict) else ((field, item),))}
        for line in lines
    ]
    names = list(dict.fromkeys(name for line in flat for name in line))
    table = pa.table({name: pa.array([line.get(name) for line in flat]) for name in names})
    return HttpResponse(_stream(table.replace_schema_metadata({"next": following or ""})), content_type=ARROW)
