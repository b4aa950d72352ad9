"""NeMo Gym rollouts, one a line: the long form, and the short form of ``response`` and ``reward`` alone.

``response.output`` is a list of items. The item that ends a model call carries ``prompt_token_ids``,
``generation_token_ids`` and ``generation_log_probs``, all three or none; items of the same call before it carry none.
Agents of aviary write a list of transitions instead, each the items of the whole conversation so far.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_inspector.formats import prompts, shapes
from rollout_inspector.formats.containers.cutting import parts_of
from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.formats.registry import NO_REQUESTS, Format, Rejected, each_line, has_keys
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import NO_IDS, Message, Step, Trajectory

IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
TOLD = ("routed_experts", "sampling_mask", "weight_versions")  # What an engine tells beside the ids of a call.
_OTHERS = {IDS[1]: prompts.parse_ids, IDS[2]: prompts.parse_floats}
_OBSERVED = ("function_call_output", "computer_call_output", "custom_tool_call_output")
_KNOWN = ("response", "reward", "_ng_task_index", "_ng_rollout_index", "reward_parts")


def read(source: Source) -> Iterator[Trajectory | Rejected]:
    return each_line(source, _trajectory, decode=lambda data: prompts.decode(data, _calls, _OTHERS))


def _calls(value: Any) -> Iterator[dict[str, Any]]:
    """The items that hold a prompt."""
    for outputs in value["response"]["output"]:
        for item in outputs if isinstance(outputs, list) else (outputs,):
            if not _is_observed(item):
                yield item


def _trajectory(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    response = shapes.mapping(value.get("response"), "response")
    items = _flat(shapes.sequence(response.get("output"), "response.output"))
    task = shapes.spare(shapes.whole, value.get("_ng_task_index"), "_ng_task_index")
    rollout = shapes.spare(shapes.whole, value.get("_ng_rollout_index"), "_ng_rollout_index")
    if task is not None and rollout is not None:
        external_id = f"{task}-{rollout}"
    else:
        external_id = shapes.text(value.get("id"), "id", 200) or f"line-{number}"
    extra = shapes.rest(value, _KNOWN)
    extra_fields = shapes.rest(response, ("output",))
    if extra_fields:
        extra["response"] = extra_fields
    steps, tail = output_steps(items)
    if tail:
        extra["output_after_last_call"] = tail
    if steps and (reason := _incomplete(response)):
        steps = (*steps[:-1], replace(steps[-1], finish_reason=reason))
    return Trajectory(
        external_id, steps,
        error=shapes.error_text(response.get("error") or (None if steps else value.get("error"))),
        reward=shapes.number(value.get("reward"), "reward"),
        reward_parts=shapes.numbers_by_name(value.get("reward_parts"), "reward_parts"),
        group="" if task is None else str(task), tokenizer=shapes.text(response.get("model"), "response.model", 200),
        extra=extra,
    )


def _flat(outputs: list[Any]) -> list[Any]:
    """The items one after the other. A transition repeats the conversation before it, which counts once."""
    items: list[Any] = []
    before: Counter[str] = Counter()
    for n, output in enumerate(outputs):
        if not isinstance(output, list):
            items.append(output)
            continue
        keys = [
            canonical_json(shapes.rest(shapes.mapping(item, f"response.output[{n}]"), (*IDS, *TOLD)))
            for item in output
        ]
        repeated = Counter(before)
        before = Counter(keys)
        for item, key in zip(output, keys, strict=True):
            repeated[key] -= 1
            if repeated[key] < 0:
                items.append(item)
    return items


def _incomplete(response: Mapping[str, Any]) -> str:
    """Why the last call was cut, in vLLM's words; empty = it was not."""
    details = response.get("incomplete_details")
    reason = details.get("reason") if isinstance(details, dict) else None
    return "length" if reason == "max_output_tokens" else shapes.text(reason, "incomplete_details.reason", 30)


def output_steps(items: Sequence[Any]) -> tuple[tuple[Step, ...], list[Any]]:
    """The model calls, and the items after them. Items of the environment belong to the call that reads them."""
    steps: list[Step] = []
    before: list[Any] = []
    mine: list[dict[str, Any]] = []

    def close(item: Mapping[str, Any] | None, where: str) -> None:
        nonlocal before, mine
        extra: dict[str, Any] = {"items": [shapes.rest(output, (*IDS, *TOLD)) for output in mine]}
        if before:
            extra["items_before"] = before
        extra |= {name: item[name] for name in TOLD if item.get(name) is not None} if item else {}
        steps.append(Step(
            prompt_ids=NO_IDS if item is None else shapes.ids(item[IDS[0]], f"{where}.{IDS[0]}"),
            completion_ids=NO_IDS if item is None else shapes.ids(item[IDS[1]], f"{where}.{IDS[1]}"),
            logprobs=None if item is None else shapes.floats(item[IDS[2]], f"{where}.{IDS[2]}"),
            reply=assistant_message(mine),
            extra=extra,
        ))
        before, mine = [], []

    for n, item in enumerate(items):
        where = f"response.output[{n}]"
        item = shapes.mapping(item, where)
        present = [name for name in IDS if item.get(name) is not None]
        if all(len(item[name]) == 0 for name in present if hasattr(item[name], "__len__")):
            present = []  # a vendor's model tells no ids: what it wrote is text
        if present and len(present) < 3:
            missing = ", ".join(name for name in IDS if name not in present)
            raise BadLine(f"{where} has {', '.join(present)} but not {missing}; all three must be there, or none.")
        if _is_observed(item):
            if mine:
                close(None, where)  # a call whose ids are missing is a step without ids, and a finding
            before.append(item)
            continue
        mine.append(item)
        if present:
            close(item, where)
    if mine:
        close(None, "")
    return tuple(steps), before


def _is_observed(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in _OBSERVED or (kind == "message" and item.get("role", "assistant") != "assistant")


def assistant_message(items: Sequence[Mapping[str, Any]]) -> Message:
    """Output items of one call as one chat message."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls = []
    for item in items:
        kind = item.get("type", "message")
        if kind == "function_call":
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            calls.append({"id": item.get("call_id"), "type": "function", "function": function})
        elif kind == "reasoning":
            text = _plain(item.get("content")) or _plain(item.get("summary"))
            message["reasoning_content"] = message.get("reasoning_content", "") + text
        else:
            message["content"] += _plain(item.get("content"))
    if calls:
        message["tool_calls"] = calls
    return message


def _plain(content: Any) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return ""


def detect(values: Sequence[Any]) -> bool:
    return has_keys(values[0], "response") and has_keys(values[0]["response"], "output")


FORMAT = Format("nemo_gym", "NeMo Gym rollouts", detect, read, NO_REQUESTS, cut=parts_of)
