"""verifiers v1 / prime-rl ``traces.jsonl``: one episode a line, each trace a tree of nodes that store what they add.

A sampled node holds the generation prompt (mask False) and its completion (mask True). Its prompt is what its path
holds before that. Each sampled node is a step; more than one leaf shows as a branch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from rollouts.formats import shapes
from rollouts.formats.registry import PART_OF_REQUESTS, Format, each_batch, has_keys
from rollouts.formats.shapes import BadLine
from rollouts.tito.trajectory import NO_IDS, Ids, Step, Trajectory

_NODE = ("parent", "message", "sampled", "token_ids", "mask", "logprobs", "finish_reason", "is_content")


def _episode(value: Any, number: int) -> list[Trajectory]:
    """The trajectories of a line, one for each trace."""
    value = shapes.mapping(value, "The line")
    traces = shapes.sequence(value.get("traces", [value]), "traces")
    if not traces:
        raise BadLine("traces is empty: the episode ended before a model was called.")
    episode = shapes.text(value.get("id") or value.get("episode_id"), "id", 180)
    extra = shapes.rest(value, ("traces", "nodes", "calls", "rewards", "reward", "group_id"))
    found = []
    for n, item in enumerate(traces):
        where = f"traces[{n}]"
        trace = shapes.mapping(item, where)
        reward, parts = _reward(trace, value)
        name = episode or shapes.text(trace.get("id"), f"{where}.id", 180) or f"line-{number}"
        found.append(
            Trajectory(
                f"{name}-{n}" if len(traces) > 1 else name,
                _steps(trace, where),
                reward=reward,
                reward_parts=parts,
                stop_reason=shapes.text(trace.get("stop_condition"), f"{where}.stop_condition", 60),
                group=_group(trace, value),
                extra=extra | shapes.rest(trace, ("nodes", "calls", "rewards", "reward", "stop_condition")),
            )
        )
    return found


def _group(trace: Mapping[str, Any], episode: Mapping[str, Any]) -> str:
    """What the trainer grouped by, else the task that the trace solves."""
    group, task = episode.get("group"), trace.get("task")
    named = group.get("id") if isinstance(group, dict) else None
    if isinstance(task, dict):
        named = named or task.get("key") or task.get("hash")
    return shapes.text(episode.get("group_id") or named, "group", 200)


def _score(value: Any, where: str) -> float | None:
    """A reward: a number, or a score with its weight."""
    if isinstance(value, dict):
        score, weight = (shapes.number(value.get(key), f"{where}.{key}") for key in ("score", "weight"))
        value = score if score is None or weight is None else score * weight
    return shapes.number(value, where)


def _reward(trace: Mapping[str, Any], episode: Mapping[str, Any]) -> tuple[float | None, dict[str, float]]:
    """``rewards`` is a number, or rewards by name whose sum is the reward; null ones were not scored."""
    for holder in (trace, episode):
        if holder.get("reward") is not None:
            return shapes.number(holder["reward"], "reward"), {}
        rewards = holder.get("rewards")
        if isinstance(rewards, dict):
            parts = shapes.numbers_by_name(rewards, "rewards", _score)
            return _sum(parts.values()), parts
        if isinstance(rewards, list):
            return _sum(score for item in rewards if (score := _score(item, "rewards")) is not None), {}
        if rewards is not None:
            return shapes.number(rewards, "rewards"), {}
    return None, {}


def _sum(numbers: Iterable[float]) -> float | None:
    found = list(numbers)
    return shapes.number(sum(found), "The sum of rewards") if found else None


def _steps(trace: Mapping[str, Any], where: str) -> tuple[Step, ...]:
    nodes = [
        shapes.mapping(node, f"{where}.nodes[{n}]")
        for n, node in enumerate(shapes.sequence(trace.get("nodes"), f"{where}.nodes"))
    ]
    calls: dict[int, Mapping[str, Any]] = {}
    for n, item in enumerate(shapes.sequence(trace.get("calls") or [], f"{where}.calls")):
        call = shapes.mapping(item, f"{where}.calls[{n}]")
        made = shapes.whole(call.get("node"), f"{where}.calls[{n}].node", least=0)
        if made is not None:
            calls[made] = call
    streams: list[Ids] = []
    said: list[tuple[Any, ...]] = []
    """Messages since the last sampled one."""
    steps = []
    for n, node in enumerate(nodes):
        place = f"{where}.nodes[{n}]"
        parent = shapes.whole(node.get("parent"), f"{place}.parent", least=0)
        if parent is not None and parent >= n:
            raise BadLine(f"{place}.parent is {parent}, but a parent comes before its node.")
        before = NO_IDS if parent is None else streams[parent]
        heard = () if parent is None else said[parent]
        ids = shapes.optional_ids(node.get("token_ids"), f"{place}.token_ids")
        message = shapes.mapping(node.get("message"), f"{place}.message")
        streams.append(np.concatenate([before, ids]))
        said.append(() if node.get("sampled") else (*heard, message))
        if node.get("sampled") or n in calls:
            steps.append(_step(node, calls.get(n, {}), ids, before, heard, message, place))
    return tuple(steps)


def _step(
    node: Mapping[str, Any], call: Mapping[str, Any], ids: Ids, before: Ids, heard: tuple[Any, ...],
    message: Mapping[str, Any], where: str,
) -> Step:  # fmt: skip
    mask = shapes.mask(node.get("mask") or [], f"{where}.mask")
    if len(mask) != len(ids):
        raise BadLine(f"{where}.mask has {len(mask)} elements for {len(ids)} token_ids.")
    trained = np.flatnonzero(mask)
    start, stop = (int(trained[0]), int(trained[-1]) + 1) if len(trained) else (len(ids), len(ids))
    logprobs = shapes.optional_floats(node.get("logprobs") or None, f"{where}.logprobs")
    extra = shapes.rest(node, _NODE)
    if len(trained) != stop - start:
        extra["mask"] = mask[start:stop].astype(int).tolist()
        if logprobs is not None and len(logprobs) == len(trained):
            spread = np.full(stop - start, np.nan, dtype=np.float32)
            spread[trained - start] = logprobs
            logprobs = spread
    if heard:
        # Kept, but not as a request: the tools that were rendered with the messages are not in the file.
        extra["new_messages"] = list(heard)
    if call:
        extra["call"] = shapes.rest(call, ("node", "finish_reason"))
    sampling = call.get("sampling")
    temperature = sampling.get("temperature") if isinstance(sampling, dict) else None
    return Step(
        prompt_ids=np.concatenate([before, ids[:start]]),
        completion_ids=ids[start:stop],
        logprobs=logprobs,
        finish_reason=shapes.text(call.get("finish_reason") or node.get("finish_reason"), f"{where}.finish_reason", 30),
        temperature=shapes.number(temperature, f"{where}: the call's temperature"),
        reply=message,
        extra=extra,
    )


def detect(values: Sequence[Any]) -> bool:
    one = values[0]
    if has_keys(one, "traces") and isinstance(one["traces"], list):
        return all(has_keys(trace, "nodes") for trace in one["traces"])
    return has_keys(one, "nodes") and isinstance(one["nodes"], list)


FORMAT = Format(
    "verifiers_traces", "verifiers v1 and prime-rl traces", detect, partial(each_batch, read_batch=_episode),
    PART_OF_REQUESTS,
)  # fmt: skip
