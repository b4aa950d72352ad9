"""A teacher's log-probabilities beside a row, as trainers of on-policy distillation and engines write them.

Facts: slime's page on on-policy distillation; verl ``teacher_ids`` and ``teacher_logprobs`` of an agent
loop; vLLM ``SamplingParams.prompt_logprob_token_ids`` and the scores ``prompt_token_id_logprobs`` of an answer.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np

from rollout_inspector.formats import shapes
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Floats, Ids

OWN, BEST = "teacher_logprobs", "teacher_best_logprobs"
"""The column of the row's own tokens, and of the likeliest id of each place."""
_VALUES = {
    "teacher_logprobs": "teacher_ids", "teacher_log_probs": "teacher_ids",
    "teacher_topk_log_probs": "teacher_topk_ids", "teacher_topk_logprobs": "teacher_topk_indices",
    "prompt_token_id_logprobs": "prompt_logprob_token_ids",
}
"""The field with values -> the field with the ids that they are of, where each place has several."""
FIELDS = (*_VALUES, *dict.fromkeys(_VALUES.values()))


def teacher_columns(value: Mapping[str, Any], ids: Ids) -> dict[str, Floats]:
    """The columns ``[T]`` of a row with these ids, NaN = no value. A field holds a number for each token of the row, or
    of its last part; or for each a list, of the ids in the field beside. What fits nowhere is noted and left out."""
    columns: dict[str, Floats] = {}
    for name, of in _VALUES.items():
        if value.get(name) is not None:
            for column, values in (shapes.spare(partial(_read, ids, value.get(of)), value[name], name) or {}).items():
                columns.setdefault(column, values)
    return columns


def _read(ids: Ids, beside: Any, value: Any, where: str) -> dict[str, Floats]:
    items = shapes.sequence(value, where)
    if len(items) > len(ids):
        raise BadLine(f"{where} has {len(items)} elements for {len(ids)} tokens.")
    start = len(ids) - len(items)
    if not any(isinstance(item, list) for item in items):
        return {OWN: _after(start, shapes.floats(items, where))}
    places = [shapes.floats(item or [], f"{where}[{n}]") for n, item in enumerate(items)]
    if beside is None:
        if any(len(place) > 1 for place in places):
            raise BadLine(f"{where} has several values for a token, and no field names their ids.")
        return {OWN: _after(start, [place[0] if len(place) else np.nan for place in places])}
    items = shapes.sequence(beside, where)
    ids_of_places = [shapes.ids(item or [], f"ids of {where}[{n}]") for n, item in enumerate(items)]
    if [*map(len, ids_of_places)] != [*map(len, places)]:
        raise BadLine(f"{where} and the ids of its values differ in shape.")
    own = [place[names == token] for place, names, token in zip(places, ids_of_places, ids[start:], strict=True)]
    best = [np.max(place, initial=-np.inf, where=~np.isnan(place)) for place in places]
    return {
        OWN: _after(start, [values[0] if len(values) else np.nan for values in own]),
        BEST: _after(start, [number if np.isfinite(number) else np.nan for number in best]),
    }


def _after(start: int, values: Any) -> Floats:
    return np.concatenate([np.full(start, np.nan, np.float32), np.asarray(values, np.float32)])
