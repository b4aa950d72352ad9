"""verifiers ``results.jsonl`` saved with ``state_columns=["trajectory"]``: steps with their tokens."""

from collections.abc import Sequence
from typing import Any

from rollout_inspector.formats import shapes
from rollout_inspector.formats.registry import PART_OF_REQUESTS, has_keys, line_format
from rollout_inspector.streams.trajectory import Step, Trajectory

_TOKENS = ("prompt_ids", "completion_ids", "completion_logprobs")


def _trajectory(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    steps = [
        _step(shapes.mapping(item, f"trajectory[{n}]"), f"trajectory[{n}]")
        for n, item in enumerate(shapes.sequence(value.get("trajectory"), "trajectory"))
    ]
    example = value.get("example_id")
    group = shapes.text(example, "example_id", 200) if isinstance(example, str | int) else ""
    return Trajectory(
        f"line-{number}", tuple(steps), reward=shapes.number(value.get("reward"), "reward"),
        stop_reason=shapes.text(value.get("stop_condition"), "stop_condition", 60), group=group,
        error=shapes.error_text(value.get("error")),
        extra=shapes.rest(value, ("trajectory", "reward", "stop_condition", "example_id")),
    )


def _step(value: dict[str, Any], where: str) -> Step:
    tokens = shapes.optional_mapping(value.get("tokens"), f"{where}.tokens")
    completion = value.get("completion")
    reply = completion[-1] if isinstance(completion, list) and completion else None
    # The messages are kept, but not as a request: the tools that were rendered with them are not in the file.
    extra = shapes.rest(value, ("tokens", "completion"))
    extra_fields = shapes.rest(tokens, (*_TOKENS, "prompt_mask", "completion_mask"))
    if extra_fields:
        extra["tokens"] = extra_fields
    mask = tokens.get("completion_mask")
    if mask is not None and not shapes.mask(mask, f"{where}.completion_mask").all():
        extra["completion_mask"] = mask
    return Step(
        prompt_ids=shapes.optional_ids(tokens.get("prompt_ids"), f"{where}.prompt_ids"),
        completion_ids=shapes.optional_ids(tokens.get("completion_ids"), f"{where}.completion_ids"),
        logprobs=shapes.optional_floats(tokens.get("completion_logprobs"), f"{where}.completion_logprobs"),
        finish_reason="length" if tokens.get("is_truncated") is True else "",
        reply=shapes.mapping(reply, f"{where}.completion") if reply is not None else None,
        extra=extra,
    )


def detect(values: Sequence[Any]) -> bool:
    steps = values[0].get("trajectory") if isinstance(values[0], dict) else None
    return isinstance(steps, list) and bool(steps) and has_keys(steps[0], "tokens")


FORMAT = line_format("verifiers_legacy", "verifiers results with trajectories", detect, _trajectory, PART_OF_REQUESTS)
