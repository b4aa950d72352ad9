"""What a trainer holds, as trajectories: rows and engine calls as values, dicts, or a batch of arrays or tensors. Only
the rows that are looked at are converted. No tensor library is imported: a tensor is asked for its array."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Floats, Mask, Request, Row, Step, Trajectory, ids_array

IDS = ("ids", "input_ids", "token_ids", "tokens")
PROMPTS = ("prompt_ids", "prompt_token_ids", "prompts")
COMPLETIONS = ("completion_ids", "response_ids", "completion_token_ids", "responses")
MASKS = ("loss_mask", "response_mask", "completion_mask", "action_mask", "env_mask", "mask")
LOGPROBS = (
    "logprobs", "rollout_log_probs", "rollout_logprobs", "sampling_per_token_logps", "response_logprobs",
    "generation_logprobs", "inference_logprobs",
)
_OF_THEIR_NAME = ("advantages", "trainer_logprobs", "prev_logprobs", "old_log_probs", "policy_logprobs")
COLUMNS = {**dict(zip(_OF_THEIR_NAME, _OF_THEIR_NAME, strict=True)), "old_per_token_logps": "old_log_probs"}
"""Field of a batch -> the column of a row."""
_IGNORED = -100
MAX_KEYS_TOLD = 12


@dataclass(frozen=True)
class GuardedItems:
    """The rows or trajectories of one call."""

    n: int
    trajectory: Callable[[int], Trajectory]  # Makes the trajectory of an item. Raises :class:`Refusal`.
    n_tokens: Callable[[int], int]  # Tokens of an item, without making it.
    kept: Callable[[Sequence[int]], Any]  # The same kind of batch with these items alone.


def items_of_rows(rows: Any, name: str = "rows") -> GuardedItems:
    """The rows of a list, or of a batch by name of field. Raises :class:`Refusal`. An item of a list is a ``Row``, a
    ``Trajectory`` or a dict. A batch holds lists, arrays or tensors ``[B, ...]``."""
    if isinstance(rows, Mapping) or hasattr(rows, "keys"):
        return _batch({str(key): rows[key] for key in rows.keys()}, name)  # noqa: SIM118
    items = _listed(rows, "rows")

    def trajectory(index: int) -> Trajectory:
        item = items[index]
        if isinstance(item, Trajectory):
            return item
        row = item if isinstance(item, Row) else row_of(_fields(item))
        return Trajectory(f"{name}-{index}", rows=(row,))

    return GuardedItems(
        len(items), trajectory, lambda index: _size(items[index]), lambda kept: [items[n] for n in kept]
    )


def items_of_steps(steps: Any, name: str = "steps") -> GuardedItems:
    """The trajectories of a list, or one trajectory as the list of its steps. Raises :class:`Refusal`."""
    items = _listed(steps, "steps")
    if not items or isinstance(items[0], Step | Mapping):
        return GuardedItems(
            min(len(items), 1), lambda _: _episode(items, f"{name}-0"), lambda _: sum(map(_size, items)),
            lambda indices: items if len(indices) else [],
        )

    def trajectory(index: int) -> Trajectory:
        item = items[index]
        return item if isinstance(item, Trajectory) else _episode(_listed(item, "steps"), f"{name}-{index}")

    def n_tokens(index: int) -> int:
        item = items[index]
        return sum(map(_size, item)) if isinstance(item, list | tuple) else _size(item)

    return GuardedItems(len(items), trajectory, n_tokens, lambda kept: [items[n] for n in kept])


def _listed(value: Any, what: str) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise Refusal(f"The {what} must be a list or a batch of arrays, not {type(value).__name__}.")
    return list(value)


def _fields(item: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping):
        return item
    raise Refusal(f"A row must be a Row, a Trajectory or a dict, not {type(item).__name__}.")


def _episode(steps: Sequence[Any], name: str) -> Trajectory:
    return Trajectory(name, tuple(step if isinstance(step, Step) else step_of(_fields(step)) for step in steps))


def _size(item: Any) -> int:
    """Tokens of an item; 0 = not known."""
    if isinstance(item, Row):
        return len(item.ids)
    if isinstance(item, Step):
        return len(item.completion_ids)
    if isinstance(item, Trajectory):
        return sum(map(_size, item.steps)) or sum(map(_size, item.rows))
    if not isinstance(item, Mapping):
        return 0
    return next((_length(item[name]) for name in (*COMPLETIONS, *IDS) if name in item), 0)


def _length(value: Any) -> int:
    try:
        return len(value)
    except TypeError:
        return 0


# -- a batch of arrays


def _batch(fields: Mapping[str, Any], name: str) -> GuardedItems:
    first = next((key for key in (*IDS, *COMPLETIONS) if key in fields), None)
    if first is None:
        raise Refusal(_unknown(fields))
    n = _length(fields[first])
    columns = {key: value for key, value in fields.items() if _length(value) == n and not isinstance(value, str)}

    def row(index: int) -> Trajectory:
        return Trajectory(f"{name}-{index}", rows=(row_of({key: value[index] for key, value in columns.items()}),))

    def kept(indices: Sequence[int]) -> dict[str, Any]:
        return {key: _chosen(value, indices) if key in columns else value for key, value in fields.items()}

    return GuardedItems(n, row, lambda index: _length(fields[first][index]), kept)


def _chosen(value: Any, indices: Sequence[int]) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(value[n] for n in indices)
    return value[list(indices)]


def _unknown(fields: Mapping[str, Any]) -> str:
    keys = ", ".join(str(key)[:40] for key in list(fields)[:MAX_KEYS_TOLD]) or "none"
    return (
        f"The batch has no token ids: its fields are {keys}. Known are {', '.join(IDS)}, or {', '.join(PROMPTS)} with "
        f"{', '.join(COMPLETIONS)}."
    )


def array_of(value: Any) -> NDArray[Any]:
    """A list, an array or a tensor as an array. A tensor is copied from its device."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        value = value.float() if "bfloat16" in str(value.dtype) else value
    return np.asarray(value)


def row_of(fields: Mapping[str, Any]) -> Row:
    """A row of its fields by name, each ``[T]``, or ``[R]`` of the response alone. Padding is cut off. A column of
    ``[T-1]`` stands at the place that predicts its token. Raises :class:`Refusal`."""
    try:
        return _row(fields)
    except (TypeError, ValueError, OverflowError) as error:
        if isinstance(error, Refusal):
            raise
        raise Refusal(f"A row cannot be read: {error}.") from error


def _row(fields: Mapping[str, Any]) -> Row:
    whole, prompt, completion = (_first(fields, names) for names in (IDS, PROMPTS, COMPLETIONS))
    if whole is None and completion is None:
        raise Refusal(_unknown(fields))
    prompt_ids = ids_array(array_of(prompt)) if whole is None and prompt is not None else ids_array([])
    response_ids = ids_array(array_of(completion)) if completion is not None else ids_array([])
    ids = ids_array(array_of(whole)) if whole is not None else np.concatenate([prompt_ids, response_ids])
    n, n_response = len(ids), len(response_ids)
    mask = _mask(fields, n, n_response)
    columns = {
        name: _column(fields[key], n, n_response, mask, 0.0 if name == "advantages" else np.nan)
        for key, name in COLUMNS.items()
        if fields.get(key) is not None
    }
    logprobs = _first(fields, LOGPROBS)
    row = Row(ids, mask, None if logprobs is None else _column(logprobs, n, n_response, mask), columns=columns)
    return _without_padding(row, _attention(fields, n, len(prompt_ids), n_response))


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> Any:
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def _mask(fields: Mapping[str, Any], n: int, n_response: int) -> Mask:
    values = _first(fields, MASKS)
    if values is None and fields.get("labels") is not None:
        return array_of(fields["labels"]) != _IGNORED
    if values is None and not n_response:
        raise Refusal(f"A row has no loss mask. Known are {', '.join(MASKS)}, labels.")
    if values is None:
        mask = np.zeros(n, dtype=np.bool_)
        mask[n - n_response :] = True
        return mask
    mask = array_of(values).astype(np.bool_)
    if fields.get("completion_mask") is not None and fields.get("tool_mask") is not None:
        mask = mask & array_of(fields["tool_mask"]).astype(np.bool_)
    return _placed(mask, n, n_response, False)


def _placed(values: NDArray[Any], n: int, n_response: int, fill: Any) -> NDArray[Any]:
    """A column of the response, or of the places that predict, as a column of the row. Others stay as they are."""
    if len(values) != n and len(values) in {n_response, n - 1}:
        return np.concatenate([np.full(n - len(values), fill, dtype=values.dtype), values])
    return values


def _column(value: Any, n: int, n_response: int, mask: Mask, fill: float = np.nan) -> Floats:
    """One number counts for each trained token. ``fill``: what tokens outside of the column have."""
    values = array_of(value).astype(np.float32)
    if values.ndim == 0 and len(mask) == n:
        return np.where(mask, values, np.float32(0)).astype(np.float32)
    return _placed(values, n, n_response, np.float32(fill))


def _attention(fields: Mapping[str, Any], n: int, n_prompt: int, n_response: int) -> Mask | None:
    """Which tokens of the row are no padding; None = all, as far as the fields say."""
    attention = fields.get("attention_mask")
    if attention is not None and _length(attention) == n:
        return array_of(attention).astype(np.bool_)
    is_real = np.ones(n, dtype=np.bool_)
    for name, start, length in (("prompt_mask", 0, n_prompt), ("completion_mask", n_prompt, n_response)):
        if fields.get(name) is not None and _length(fields[name]) == length and n == n_prompt + n_response:
            is_real[start : start + length] = array_of(fields[name]).astype(np.bool_)
    return is_real


def _without_padding(row: Row, kept: Mask | None) -> Row:
    """Only padding before the first and behind the last real token is cut."""
    if kept is None or kept.all() or not kept.any():
        return row
    places = np.flatnonzero(kept)
    is_between = len(row.loss_mask) == len(kept) and not np.any(row.loss_mask & ~kept)  # prompt and response
    cut = kept if is_between else slice(int(places[0]), int(places[-1]) + 1)
    n = len(row.ids)

    def column(values: NDArray[Any]) -> NDArray[Any]:
        return values[cut] if len(values) == n else values

    return Row(
        row.ids[cut], column(row.loss_mask), None if row.logprobs is None else column(row.logprobs),
        columns={name: column(values) for name, values in row.columns.items()},
    )


def step_of(fields: Mapping[str, Any]) -> Step:
    """One engine call of its fields by name. Raises :class:`Refusal`."""
    prompt, completion = _first(fields, PROMPTS), _first(fields, (*COMPLETIONS, "token_ids"))
    if prompt is None or completion is None:
        keys = ", ".join(map(str, fields))[:300]
        raise Refusal(f"A step needs the token ids of its prompt and its completion; its fields are {keys}.")
    messages, tools = fields.get("messages"), fields.get("tools")
    logprobs = _first(fields, LOGPROBS)
    try:
        return Step(
            ids_array(array_of(prompt)), ids_array(array_of(completion)),
            None if logprobs is None else array_of(logprobs).astype(np.float32),
            finish_reason=str(fields.get("finish_reason") or ""),
            request=None if messages is None else Request(tuple(messages), None if tools is None else tuple(tools)),
            reply=fields.get("reply"), text=fields.get("text"), policy_version=str(fields.get("policy_version") or ""),
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise Refusal(f"A step cannot be read: {error}.") from error
