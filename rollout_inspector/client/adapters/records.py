"""Writes what trainers hold as lines of the project's JSONL (``own_jsonl``), from plain lists, arrays or tensors."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MAX_ID = 200  # Characters of an id on the server, its prefix included.


def plain(values: Any) -> list[Any] | None:
    """A flat list of Python numbers from a list, an array or a tensor; None stays None."""
    if values is None:
        return None
    items: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return items


def number(value: Any) -> float | None:
    """A Python number from a number, an array or a tensor of one; None for what is not finite or no number."""
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return float(value) if isinstance(value, bool) else None
    return value if value - value == 0 else None


def row(
    prompt_ids: Any, response_ids: Any, mask: Any, logprobs: Any = None, columns: Mapping[str, Any] | None = None,
    step_indices: Sequence[int] = (), extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One training row: a prompt that is not trained, and a response ``[R]``. ``mask``, ``logprobs`` and ``columns``
    are ``[R]``. Another length is kept, and the diagnosis reports it."""
    prompt, response = plain(prompt_ids) or [], plain(response_ids) or []
    n = len(prompt)
    record: dict[str, Any] = {
        "ids": prompt + response,
        "loss_mask": [0] * n + [int(bit) for bit in plain(mask) or []],
        "logprobs": None if logprobs is None else [None] * n + (plain(logprobs) or []),
        "columns": {name: [0.0] * n + (plain(values) or []) for name, values in (columns or {}).items()},
        "step_indices": list(step_indices),
        "extra": dict(extra or {}),
    }
    return {key: value for key, value in record.items() if value not in (None, {}, []) or key in ("ids", "loss_mask")}


def calls_of(
    prompt_ids: Any, response_ids: Any, sampled: Any, logprobs: Any = None, **fields: Any
) -> list[dict[str, Any]]:
    """The engine calls behind a response ``[R]`` that was never encoded again: each run of ``sampled`` is one. Each
    call's prompt is all that stands before it. ``fields`` are those of every step, such as ``policy_version``."""
    prompt, response = plain(prompt_ids) or [], plain(response_ids) or []
    mask, values = plain(sampled) or [], plain(logprobs)
    calls: list[dict[str, Any]] = []
    start = before = 0
    while start < len(mask):
        if not mask[start]:
            start += 1
            continue
        end = start
        while end < len(mask) and mask[end]:
            end += 1
        step: dict[str, Any] = {
            "delta_ids": prompt + response[:start] if not calls else response[before:start],
            "completion_ids": response[start:end],
        }
        if calls:
            step |= {"parent": len(calls) - 1, "shared_length": len(prompt) + before}
        if values is not None and len(values) == len(response):
            step["logprobs"] = values[start:end]
        calls.append(step | {name: value for name, value in fields.items() if value not in (None, "")})
        start = before = end
    return calls


def calls_with_prompts(calls: Iterable[tuple[Any, Any, Any]], **fields: Any) -> list[dict[str, Any]]:
    """Engine calls whose whole prompts are known: ``(prompt_ids, completion_ids, log-probabilities or None)``. A prompt
    that begins with the stream of the call before is written as what it adds."""
    steps: list[dict[str, Any]] = []
    stream: list[Any] = []
    for prompt_ids, completion_ids, logprobs in calls:
        prompt, completion = plain(prompt_ids) or [], plain(completion_ids) or []
        step: dict[str, Any] = {"delta_ids": prompt, "completion_ids": completion}
        if steps and prompt[: len(stream)] == stream:
            step |= {"parent": len(steps) - 1, "shared_length": len(stream), "delta_ids": prompt[len(stream) :]}
        if logprobs is not None:
            step["logprobs"] = plain(logprobs)
        steps.append(step | {name: value for name, value in fields.items() if value not in (None, "")})
        stream = prompt + completion
    return steps


def trajectory(
    external_id: str, *, rows: Sequence[Mapping[str, Any]] = (), steps: Sequence[Mapping[str, Any]] = (),
    reward: Any = None, reward_parts: Mapping[str, Any] | None = None, group: str = "", stop_reason: str = "",
    training_step: int | None = None, extra: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """One line: a trajectory with the rows that the trainer holds, and the engine calls where they are known."""
    parts = {name: number(value) for name, value in (reward_parts or {}).items()}
    record: dict[str, Any] = {
        "format": "rollout-inspector",
        "version": 1,
        "external_id": external_id[:MAX_ID],
        "group": group[:MAX_ID],
        "reward": number(reward),
        "reward_parts": {name: value for name, value in parts.items() if value is not None},
        "stop_reason": stop_reason[:60],
        "training_step": training_step,
        "steps": list(steps),
        "rows": list(rows),
        "extra": dict(extra or {}),
    }
    return {key: value for key, value in record.items() if value not in (None, "", {}, [])}
