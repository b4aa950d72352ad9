"""prime-rl token export ``token_exports/step_{N}/rank_{r}.jsonl``: flat training rows with trainer-side columns."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_inspector.formats import shapes
from rollout_inspector.formats.registry import ROWS_ALONE, has_keys, line_format
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Floats, Row, Trajectory

NEWEST = 1
_KNOWN = ("token_ids", "loss_mask", "inference_logprobs", "schema_version", "reward", "rollout_id", "group_id")


def _trajectory(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    version = shapes.spare(shapes.whole, value.get("schema_version"), "schema_version")
    if version is not None and version > NEWEST:
        raise BadLine(f"schema_version is {version}; this program reads version {NEWEST}.")
    ids = shapes.ids(value.get("token_ids"), "token_ids")
    columns: dict[str, Floats] = {}
    extra: dict[str, Any] = {}
    for name, item in shapes.rest(value, _KNOWN).items():
        types = set(map(type, item)) if isinstance(item, list) else set()
        if types == {type(None)}:
            continue  # a column of nulls stands where this loss has no such value
        if types and types <= {int, float, bool, type(None)}:
            plain = [float(flag) if isinstance(flag, bool) else flag for flag in item]
            columns[shapes.text(name, "a column's name", 60)] = shapes.floats(plain, name[:60])
        else:
            extra[name] = item
    row = Row(
        ids=ids, loss_mask=shapes.mask(value.get("loss_mask"), "loss_mask"),
        logprobs=shapes.optional_floats(value.get("inference_logprobs"), "inference_logprobs"), columns=columns,
        extra=extra,
    )
    group = value.get("group_id")
    return Trajectory(
        shapes.text(value.get("rollout_id"), "rollout_id", 200) or f"line-{number}",
        rows=(row,),
        reward=_reward(value, columns),
        group=shapes.text(group, "group_id", 200) if isinstance(group, str | int) else "",
    )


def _reward(value: Mapping[str, Any], columns: Mapping[str, Floats]) -> float | None:
    """The reward of the sequence. The trainer may write it beside each token."""
    reward, by_token = value.get("reward"), columns.get("rewards")
    if reward is None and by_token is not None and (by_token == by_token[0]).all():
        return float(by_token[0])
    return shapes.number(reward, "reward")


def detect(values: Sequence[Any]) -> bool:
    return has_keys(values[0], "token_ids", "loss_mask") and not has_keys(values[0], "labels")


FORMAT = line_format("prime_rl_export", "prime-rl token export", detect, _trajectory, ROWS_ALONE)
