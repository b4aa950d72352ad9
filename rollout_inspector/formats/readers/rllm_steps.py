"""rLLM's own values as JSON: ``Episode.to_dict()``, ``Trajectory.to_dict()`` or ``Step.to_dict()``, one a line."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.call_fields import other_fields, rows_with_columns
from rollout_inspector.formats.registry import PART_OF_REQUESTS, batch_format, has_keys
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Floats, Step, Trajectory

_STEP = ("prompt_ids", "response_ids", "logprobs", "chat_completions", "model_output", "advantage", "weight_version")
_OUTPUT = ("prompt_ids", "completion_ids", "logprobs", "prompt_logprobs", "finish_reason", "weight_version", "text")
_TRAJECTORY = ("uid", "steps", "reward")
_EPISODE = ("id", "trajectories", "termination_reason")


def _batch(value: Any, number: int) -> list[Trajectory]:
    """The trajectories of a line. A step alone is a trajectory: it does not say which one it belongs to."""
    value = shapes.mapping(value, "The line")
    if "trajectories" not in value:
        return [_trajectory(value if "steps" in value else {"steps": [value]}, f"line-{number}", "steps")]
    trajectories = shapes.sequence(value["trajectories"], "trajectories")
    if not trajectories:
        raise BadLine("trajectories is empty: the episode ended before a model was called.")
    shared = {name: item for name, item in shapes.rest(value, _EPISODE).items() if item not in (None, {}, [])}
    limits.current().check_repeated(shared, len(trajectories), "trajectories")
    name = shapes.text(value.get("id"), "id", 180) or f"line-{number}"
    group = name.rpartition(":")[0]
    stop = shapes.text(value.get("termination_reason"), "termination_reason", 60)
    return [
        _trajectory(
            shapes.mapping(item, f"trajectories[{n}]"), f"{name}-{n}" if len(trajectories) > 1 else name,
            f"trajectories[{n}].steps", shared, group, stop,
        )
        for n, item in enumerate(trajectories)
    ]


def _trajectory(
    value: Mapping[str, Any], name: str, where: str, shared: Mapping[str, Any] | None = None, group: str = "",
    stop_reason: str = "",
) -> Trajectory:
    items = shapes.sequence(value.get("steps"), where)
    if not items:
        raise BadLine(f"{where} is empty: the trajectory made no call.")
    decoded = limits.Decoded()
    steps, columns = [], []
    for n, item in enumerate(items):
        step, own = _step(shapes.mapping(item, f"{where}[{n}]"), f"{where}[{n}]")
        decoded.add(f"{where}[{n}]", len(step.prompt_ids) + len(step.completion_ids))
        steps.append(step)
        columns.append(own)
    extra = {key: item for key, item in shapes.rest(value, _TRAJECTORY).items() if item not in (None, {}, [])}
    uid = value.get("uid")
    return Trajectory(
        name if shared is not None or uid is None else shapes.text(uid, "uid", 200) or name, tuple(steps),
        rows_with_columns(steps, columns, ("advantages",)), reward=shapes.number(value.get("reward"), "reward"),
        group=group, stop_reason=stop_reason, extra={**(shared or {}), **extra},
    )


def _step(value: Mapping[str, Any], where: str) -> tuple[Step, dict[str, Floats]]:
    output = shapes.optional_mapping(value.get("model_output"), f"{where}.model_output")
    ids = shapes.ids(value.get("response_ids"), f"{where}.response_ids")
    prompt_ids = shapes.ids(value.get("prompt_ids"), f"{where}.prompt_ids")
    conversation = shapes.sequence(value.get("chat_completions") or [], f"{where}.chat_completions")
    messages = [shapes.mapping(message, f"{where}.chat_completions[{n}]") for n, message in enumerate(conversation)]
    reply = messages.pop() if messages and messages[-1].get("role") == "assistant" else None
    version = value.get("weight_version")
    version = output.get("weight_version") if version is None else version
    extra_fields = {
        **shapes.rest(value, _STEP),
        **other_fields(
            prompt_ids, ids, {}, {"model_output.prompt_ids": output.get("prompt_ids")},
            {"model_output.completion_ids": output.get("completion_ids")},
        ),
        # The tools that were rendered with the messages are not in the file, so they are no whole request.
        "messages": messages,
        "model_output": shapes.rest(output, _OUTPUT),
    }
    step = Step(
        prompt_ids=prompt_ids, completion_ids=ids,
        logprobs=shapes.optional_floats(value.get("logprobs") or None, f"{where}.logprobs"),
        finish_reason=shapes.text(output.get("finish_reason"), f"{where}.model_output.finish_reason", 30),
        policy_version=shapes.text(version, f"{where}.weight_version", 100), reply=reply,
        text=shapes.optional_string(output.get("text"), f"{where}.model_output.text"),
        extra={name: item for name, item in extra_fields.items() if item not in (None, {}, [], "")},
    )
    return step, _advantages(value.get("advantage"), len(ids), f"{where}.advantage")


def _advantages(value: Any, n: int, where: str) -> dict[str, Floats]:
    """The advantage of a call: a number for all its tokens, or one for each."""
    if value is None:
        return {}
    if not isinstance(value, list):
        return {"advantages": np.full(n, shapes.number(value, where), dtype=np.float32)}
    advantages = shapes.floats(value, where)
    if len(advantages) != n:
        raise BadLine(f"{where} has {len(advantages)} elements for {n} response_ids.")
    return {"advantages": advantages}


def detect(values: Sequence[Any]) -> bool:
    record = values[0]
    if has_keys(record, "trajectories") and isinstance(record["trajectories"], list):
        record = next(iter(record["trajectories"]), None)
    if has_keys(record, "steps") and isinstance(record["steps"], list):
        record = next(iter(record["steps"]), None)
    return has_keys(record, "prompt_ids", "response_ids", "chat_completions")


FORMAT = batch_format("rllm_steps", "rLLM episodes, trajectories and steps", detect, _batch, PART_OF_REQUESTS)
