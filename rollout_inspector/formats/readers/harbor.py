"""harbor trials: ``result.json`` of a trial, or its ``rollout_details`` alone. A detail is a chat history with three
lists, one element for each turn: prompt ids, completion ids, log-probabilities. The first detail is the main agent;
others are sub-agents, summaries and other branches."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.registry import NO_REQUESTS, has_keys, line_format
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Step, Trajectory

_DETAIL = ("prompt_token_ids", "completion_token_ids", "logprobs", "extra")
_TRIAL = ("trial_name", "agent_result", "verifier_result", "rollout_details", "reward", *_DETAIL[:3])


def _trial(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    agent = shapes.optional_mapping(value.get("agent_result"), "agent_result")
    details = agent.get("rollout_details") if "agent_result" in value else value.get("rollout_details")
    if has_keys(value, *_DETAIL[:2]):
        details = [value]
    if not details:
        raise BadLine("The trial has no rollout_details. Run its agent with collect_rollout_details.")
    details = shapes.sequence(details, "rollout_details")
    steps: list[Step] = []
    decoded = limits.Decoded()
    for n, item in enumerate(details):
        where = f"rollout_details[{n}]"
        steps += _steps(shapes.mapping(item, where), where, n if len(details) > 1 else None, decoded)
    if not steps:
        raise BadLine("rollout_details holds no turns: the agent made no call.")
    reward, parts = _reward(value)
    failure = shapes.spare(shapes.optional_mapping, value.get("exception_info"), "exception_info") or {}
    config = (shapes.spare(shapes.optional_mapping, value.get("agent_info"), "agent_info") or {}).get("model_info")
    name = value.get("trial_name") or value.get("id")
    extra = {**shapes.rest(value, (*_TRIAL, "extra")), "agent_result": shapes.rest(agent, ("rollout_details",))}
    return Trajectory(
        shapes.text(name, "trial_name", 200) or f"line-{number}", tuple(steps), reward=reward, reward_parts=parts,
        group=shapes.text(value.get("task_name"), "task_name", 200),
        stop_reason=shapes.text(failure.get("exception_type"), "exception_info.exception_type", 60),
        tokenizer=shapes.text(config.get("name"), "model_info.name", 200) if isinstance(config, dict) else "",
        extra={key: item for key, item in extra.items() if item not in (None, {}, [])},
    )


def _reward(value: Mapping[str, Any]) -> tuple[float | None, dict[str, float]]:
    """The reward, and the verifier's rewards by name. One of another name alone counts as the reward."""
    verifier = shapes.optional_mapping(value.get("verifier_result"), "verifier_result")
    parts = shapes.numbers_by_name(verifier.get("rewards"), "verifier_result.rewards")
    if value.get("reward") is not None:
        return shapes.number(value["reward"], "reward"), parts
    return parts.get("reward", next(iter(parts.values())) if len(parts) == 1 else None), parts


def _steps(value: Mapping[str, Any], where: str, detail: int | None, decoded: limits.Decoded) -> list[Step]:
    prompts, completions = (
        shapes.sequence(value.get(name), f"{where}.{name}") for name in ("prompt_token_ids", "completion_token_ids")
    )
    logprobs = value.get("logprobs")
    logprobs = None if logprobs is None else shapes.sequence(logprobs, f"{where}.logprobs")
    for name, items in (("prompt_token_ids", prompts), ("logprobs", logprobs)):
        if items is not None and len(items) != len(completions):
            raise BadLine(f"{where}.{name} has {len(items)} turns for {len(completions)} completion_token_ids.")
    further = shapes.spare(shapes.optional_mapping, value.get("extra"), f"{where}.extra") or {}
    steps = []
    for n, completion in enumerate(completions):
        extra = {
            key: item[n]
            for key, item in further.items()
            if isinstance(item, list) and len(item) == len(completions) and item[n] is not None
        }
        step = Step(
            prompt_ids=shapes.ids(prompts[n], f"{where}.prompt_token_ids[{n}]"),
            completion_ids=shapes.ids(completion, f"{where}.completion_token_ids[{n}]"),
            logprobs=None if logprobs is None else shapes.optional_floats(logprobs[n], f"{where}.logprobs[{n}]"),
            extra=extra if detail is None else {**extra, "rollout_detail": detail},
        )
        decoded.add(f"{where}, turn {n}", len(step.prompt_ids) + len(step.completion_ids))
        steps.append(step)
    return steps


def detect(values: Sequence[Any]) -> bool:
    record = values[0]
    if has_keys(record, "agent_result", "verifier_result") or has_keys(record, "rollout_details"):
        return True
    lists = [record[name] for name in _DETAIL[:2]] if has_keys(record, *_DETAIL[:2]) else [None]
    return all(isinstance(item, list) and (not item or isinstance(item[0], list)) for item in lists)


FORMAT = line_format("harbor", "harbor trials (rollout_details)", detect, _trial, NO_REQUESTS)
