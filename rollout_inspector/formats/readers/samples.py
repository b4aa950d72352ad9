"""What trainers hold in memory, written as JSON: ``Sample.to_dict()`` of slime and miles, OpenRLHF's ``Experience``.
Facts: slime ``slime/utils/types.py`` (``Sample``); OpenRLHF ``openrlhf/trainer/ppo_utils/experience.py``."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.policy_versions import of_row
from rollout_inspector.formats.readers.datasets import attended
from rollout_inspector.formats.registry import ROWS_ALONE, batch_format, has_keys, having
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.formats.teacher_columns import FIELDS, teacher_columns
from rollout_inspector.streams.trajectory import Floats, Row, Trajectory

# -- slime and miles

_SAMPLE = (
    "tokens", "response_length", "loss_mask", "rollout_log_probs", "reward", "status",
    "group_index", "index", "weight_versions", *FIELDS,
)
_ENDS = {"truncated": "length"}


def _samples(value: Any, number: int) -> list[Trajectory]:
    """The samples of a line: one, or the list ``samples`` of a dump."""
    value = shapes.mapping(value, "The line")
    if "samples" not in value:
        return [_sample(value, f"line-{number}")]
    items = shapes.sequence(value["samples"], "samples")
    shared = shapes.rest(value, ("samples",))
    limits.current().check_repeated(shared, len(items), "samples")
    return [
        _sample({**shared, **shapes.mapping(item, f"samples[{n}]")}, f"line-{number}-{n}")
        for n, item in enumerate(items)
    ]


def _sample(value: Mapping[str, Any], name: str) -> Trajectory:
    ids = shapes.ids(value.get("tokens"), "tokens")
    length = shapes.whole(value.get("response_length"), "response_length", least=0) or 0
    if length > len(ids):
        raise BadLine(f"response_length is {length}, but there are {len(ids)} tokens.")
    at = len(ids) - length
    mask = value.get("loss_mask")
    trained = np.ones(length, dtype=np.bool_) if mask is None else shapes.mask(mask, "loss_mask")
    if value.get("remove_sample") is True:
        trained = np.zeros_like(trained)
    loss_mask = np.concatenate([np.zeros(at, dtype=np.bool_), trained])
    versions = value.get("weight_versions")
    row = Row(
        ids=ids, loss_mask=loss_mask,
        logprobs=shapes.after(at, shapes.optional_floats(value.get("rollout_log_probs"), "rollout_log_probs")),
        columns=teacher_columns(value, ids),
        extra={"prompt_length": at, **of_row(versions, loss_mask)},
    )
    reward, parts = value.get("reward"), {}
    if isinstance(reward, dict):
        numbers = {key: item for key, item in reward.items() if isinstance(item, int | float)}
        parts = shapes.numbers_by_name(numbers, "reward")
        reward = next(iter(parts.values())) if len(parts) == 1 else parts.get("score", parts.get("reward"))
    status = shapes.text(value.get("status"), "status", 60)
    index, group = (shapes.text(value.get(key), key, 90) for key in ("index", "group_index"))
    metadata = value.get("metadata")
    why = metadata.get("error") if isinstance(metadata, dict) else None
    return Trajectory(
        "-".join(part for part in (group, index) if part) if index else name, rows=(row,) if len(ids) else (),
        reward=shapes.number(reward, "reward"), reward_parts=parts, group=group,
        stop_reason=_ENDS.get(status, status),
        error=shapes.error_text(why or "The sample failed.") if status == "failed" else "",
        extra={
            key: item for key, item in shapes.rest(value, _SAMPLE).items() if item not in (None, {}, [], "", False)
        } | ({"status": status} if status else {}) | ({} if not versions else {"weight_versions": versions}),
    )


def _detect_samples(values: Sequence[Any]) -> bool:
    record = values[0]
    if has_keys(record, "samples") and isinstance(record["samples"], list):
        record = next(iter(record["samples"]), None)
    is_sample = has_keys(record, "tokens", "response_length") and "sample_index" not in record
    return is_sample and not {"loss_mask", "rollout_log_probs", "status", "weight_versions"}.isdisjoint(record)


# -- OpenRLHF


_COLUMNS = {
    "action_log_probs": "trainer_logprobs", "base_action_log_probs": "reference_logprobs", "values": "values",
    "returns": "returns", "advantages": "advantages", "kl": "kl",
}
"""What an experience has for each action, and our name of it."""
_EXPERIENCE = ("sequences", "attention_mask", "action_mask", "rollout_log_probs", *_COLUMNS)
_OUTCOMES = ("rewards", "truncated")


def _experience(value: Any, number: int) -> list[Trajectory]:
    """The sequences of an experience, a batch or one. The values of actions stand at the end of a sequence. An action
    mask is as long as the response, or one shorter than the sequence: both end where the sequence ends."""
    rows = shapes.rows_of_batch(value, number, "sequences", _EXPERIENCE, _OUTCOMES)
    return [_sequence(fields, name, extra) for name, fields, extra in rows]


def _sequence(value: Mapping[str, Any], name: str, extra: dict[str, Any]) -> Trajectory:
    ids = shapes.ids(value.get("sequences"), "sequences")
    attention = value.get("attention_mask")
    is_token = attended(attention, ids, "attention_mask", "ids of the sequence")
    mask = shapes.mask(value.get("action_mask"), "action_mask")
    if len(mask) > len(ids):
        raise BadLine(f"action_mask has {len(mask)} elements for a sequence of {len(ids)}.")

    def column(key: str) -> Floats | None:
        values = shapes.optional_floats(value.get(key), key)
        if values is not None and len(values) != len(mask):
            raise BadLine(f"{key} has {len(values)} elements for {len(mask)} actions.")
        placed = shapes.after(len(ids) - len(mask), values)
        return None if placed is None else placed[is_token]

    columns = {ours: array for theirs, ours in _COLUMNS.items() if (array := column(theirs)) is not None}
    loss_mask = np.concatenate([np.zeros(len(ids) - len(mask), dtype=np.bool_), mask])[is_token]
    is_cut = value.get("truncated")
    row = Row(ids=ids[is_token], loss_mask=loss_mask, logprobs=column("rollout_log_probs"), columns=columns)
    return Trajectory(
        name, rows=(row,),
        reward=shapes.number(value.get("rewards"), "rewards"), stop_reason="length" if is_cut in (True, 1) else "",
        extra=extra,
    )


FORMATS = (
    batch_format("slime_samples", "slime and miles samples (Sample.to_dict)", _detect_samples, _samples, ROWS_ALONE),
    batch_format(
        "openrlhf_experience", "OpenRLHF Experience", having("action_mask", sequences=list), _experience, ROWS_ALONE
    ),
)
