"""What an engine tells twice of one call: counts, ids and texts of tokens beside the ids that are read."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rollout_inspector.streams.messages import media_parts
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import OTHER_FIELDS, Floats, Ids, Row, Step

_MEDIA = re.compile(r"image|video|audio|multi_?modal|modalities")
MAX_COUNT = 2**31


def other_fields(
    prompt_ids: Ids, completion_ids: Ids, request: Mapping[str, Any], prompt: Mapping[str, Any],
    completion: Mapping[str, Any],
) -> dict[str, Any]:
    """``OTHER_FIELDS`` for the ``extra`` of a step; empty where all fields agree with its ids.

    ``prompt``, ``completion``: name of a field -> a count of tokens, or a list of ids; in ``completion`` also of texts.
    Values of other types are left out, and so is a part without ids. Engines put several tokens in the place of an
    image, so that a prompt with media may be counted otherwise.
    """
    prompt = {
        name: value for name, value in prompt.items()
        if not (isinstance(value, list) and any(isinstance(token, str) for token in value))
    }
    parts = {}
    for part, ids, fields in (("prompt", prompt_ids, prompt), ("completion", completion_ids, completion)):
        others = {name: _differing(value, ids) for name, value in fields.items() if len(ids)}
        if others := {name: value for name, value in others.items() if value is not None}:
            parts[part] = others
    if "prompt" in parts and _has_media(request):
        del parts["prompt"]
    return {OTHER_FIELDS: parts} if parts else {}


def _has_media(request: Mapping[str, Any]) -> bool:
    in_fields = any(value and _MEDIA.search(name) for name, value in request.items())
    return in_fields or next(media_parts(request.get("messages")), None) is not None


def _differing(value: Any, ids: Ids) -> int | list[int | str | None] | None:
    if type(value) is int:
        return value if 0 <= value < MAX_COUNT and value != len(ids) else None
    if not isinstance(value, list):
        return None
    tokens = [token if isinstance(token, str) or type(token) is int else None for token in value]
    return None if all(token is None for token in tokens) or tokens == ids.tolist() else tokens


def rows_with_columns(
    steps: Sequence[Step], columns: Sequence[Mapping[str, Floats]], names: Iterable[str]
) -> tuple[Row, ...]:
    """The rows that follow from the steps, with columns ``[T]``; empty where no step has a column. ``columns``: for
    each step the columns ``[C]`` of its completion. A token under the mask whose step has no such column has NaN. A
    token that nobody sampled has 0."""
    used = [name for name in names if any(name in row_columns for row_columns in columns)]
    rows = []
    for row in merged_rows(steps) if used else ():
        columns_of_row = {name: np.where(row.loss_mask, np.nan, 0.0).astype(np.float32) for name in used}
        for index in row.step_indices:
            start = len(steps[index].prompt_ids)
            for name, values in columns[index].items():
                columns_of_row[name][start : start + len(values)] = values
        rows.append(replace(row, columns=columns_of_row))
    return tuple(rows)
