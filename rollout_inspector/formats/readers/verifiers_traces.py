"""verifiers v1 / prime-rl ``traces.jsonl``: one episode a line, each trace a tree of nodes that store what they add. A
sampled node holds the generation prompt (mask False) and its completion (mask True). Its prompt is what its path holds
before that. Each sampled node is a step; more than one leaf shows as a branch."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.call_fields import rows_with_columns
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.formats.engine_fields import KEY, without_arrays
from rollout_inspector.formats.registry import Format, Rejected, each_batch, has_keys
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.formats.trace_updates import Annotations, beside
from rollout_inspector.formats.training_step import as_step
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Request, Row, Step, Trajectory


def read(source: Source) -> Iterator[Trajectory | Rejected]:
    added = beside(source)
    if added is not None:
        yield from added.problems(source)
    yield from each_batch(source, partial(_episode, added=added))


def _episode(value: Any, number: int, added: Annotations | None = None) -> list[Trajectory]:
    """The trajectories of a line, one for each trace. ``added``: what a trainer added to the traces later."""
    value = shapes.mapping(value, "The line")
    traces = shapes.sequence(value.get("traces", [value]), "traces")
    if not traces:
        raise BadLine("traces is empty: the episode ended before a model was called.")
    episode = shapes.text(value.get("id") or value.get("episode_id"), "id", 180)
    extra = shapes.rest(value, ("traces", "nodes", "calls", "rewards", "reward", "group_id"))
    limits.current().check_repeated(extra, len(traces), "traces")
    decoded = limits.Decoded()
    work = _work(value)
    trajectories = []
    for n, item in enumerate(traces):
        where = f"traces[{n}]"
        trace = shapes.mapping(item, where)
        if added is not None:
            trace = added.fold(trace)
        reward, parts = _reward(trace, value)
        steps, rows = _steps_and_rows(trace, where, decoded, _policy(work))
        name = episode or shapes.text(trace.get("id"), f"{where}.id", 180) or f"line-{number}"
        calls = [call for call in trace.get("calls") or () if call.get("node") is None]  # they failed, and made no node
        trajectories.append(Trajectory(
            f"{name}-{n}" if len(traces) > 1 else name, steps, rows, reward=reward, reward_parts=parts,
            stop_reason=shapes.text(trace.get("stop_condition"), f"{where}.stop_condition", 60),
            error=shapes.error_text(trace.get("errors") or trace.get("error") or value.get("errors")),
            group=_group(trace, value), training_step=_training_step(trace, work),
            extra=extra | shapes.rest(trace, ("nodes", "calls", "rewards", "reward", "stop_condition"))
            | ({"calls": calls} if calls else {}),
        ))
    return trajectories


def _group(trace: Mapping[str, Any], episode: Mapping[str, Any]) -> str:
    """What the trainer grouped by, else the task that the trace solves. A hash counts where nothing names the task."""
    group, task = episode.get("group"), trace.get("task")
    ids = [episode.get("group_id"), group.get("id") if isinstance(group, dict) else None]
    if isinstance(task, dict):
        inner = task.get("data")
        for holder in (task, inner if isinstance(inner, dict) else {}):
            ids += [holder.get(name) for name in ("key", "name", "id", "idx", "hash")]
    texts = [shapes.text(group_id, "group", 200) for group_id in ids if isinstance(group_id, str | int)]
    texts = [text for text in texts if text]
    return next((text for text in texts if not _HASH.fullmatch(text)), texts[0] if texts else "")


_HASH = re.compile(r"[0-9a-f]{32,}")


def _work(episode: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the episode is to the training run that made it; empty where it says nothing."""
    run = episode.get("run")
    work = run.get("work") if isinstance(run, dict) else None
    return work if isinstance(work, dict) else {}


def _policy(work: Mapping[str, Any]) -> str:
    """The policy version that sampled an episode; empty where it changed meanwhile, or is not recorded."""
    policy = work.get("policy")
    is_flat = isinstance(policy, dict) and not any(isinstance(item, dict | list) for item in policy.values())
    versions = {policy.get("start"), policy.get("end")} if policy and is_flat else set()
    return shapes.text(versions.pop(), "run.work.policy", 100) if len(versions) == 1 else ""


def _training_step(trace: Mapping[str, Any], work: Mapping[str, Any]) -> int | None:
    """The step that a trace was trained at, else the one that it was shipped with or sampled for."""
    info = trace.get("info")
    info = info if isinstance(info, dict) else {}
    for holder, name in (("train", "trained_at_step"), ("ship", "step"), ("train", "logged_at_step")):
        fields = info.get(holder)
        if isinstance(fields, dict) and (step := as_step(fields.get(name))) is not None:
            return step
    return as_step(work.get("step")) if work.get("type") == "train" else None


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
    terms = list(numbers)
    return shapes.number(sum(terms), "The sum of rewards") if terms else None


_COLUMNS = ("advantages", "reference_logprobs", "trainer_logprobs", "entropies", "is_masked")
"""What a trainer writes on a sampled node: one value for each True of its mask, like ``logprobs``."""
_NODE = (
    "parent", "message", "sampled", "token_ids", "mask", "logprobs", "finish_reason", "is_content", "tools", *_COLUMNS
)


_Path = tuple[Ids, tuple[Any, ...], tuple[Any, ...], Any]
"""What the nodes from the root to one node hold: ids, messages, those since the last sampled one, the root's tools."""


def _steps_and_rows(
    trace: Mapping[str, Any], where: str, decoded: limits.Decoded, policy_version: str
) -> tuple[tuple[Step, ...], tuple[Row, ...]]:
    """The model calls of a trace. Rows follow from them, unless a trainer wrote columns on the nodes."""
    nodes = [
        shapes.mapping(node, f"{where}.nodes[{n}]")
        for n, node in enumerate(shapes.sequence(trace.get("nodes"), f"{where}.nodes"))
    ]
    calls: dict[int, Mapping[str, Any]] = {}
    for n, item in enumerate(shapes.sequence(trace.get("calls") or [], f"{where}.calls")):
        call = shapes.mapping(item, f"{where}.calls[{n}]")
        node_index = shapes.whole(call.get("node"), f"{where}.calls[{n}].node", least=0)
        if node_index is not None:
            calls[node_index] = call
    is_whole = _is_whole(trace)
    paths: list[_Path] = []
    steps: list[Step] = []
    columns: list[dict[str, Floats]] = []
    for n, node in enumerate(nodes):
        place = f"{where}.nodes[{n}]"
        parent = shapes.whole(node.get("parent"), f"{place}.parent", least=0)
        if parent is not None and parent >= n:
            raise BadLine(f"{place}.parent is {parent}, but a parent comes before its node.")
        before = (NO_IDS, (), (), node.get("tools")) if parent is None else paths[parent]
        stream, messages, new, tools = before
        ids = shapes.optional_ids(node.get("token_ids"), f"{place}.token_ids")
        message = _message(shapes.mapping(node.get("message"), f"{place}.message"))
        decoded.add(place, len(stream) + len(ids), len(messages))
        paths.append(
            (np.concatenate([stream, ids]), (*messages, message), () if node.get("sampled") else (*new, message), tools)
        )
        if node.get("sampled") or n in calls:
            step, values = _step(node, calls.get(n, {}), ids, before, message, is_whole, place)
            steps.append(replace(step, policy_version=policy_version))
            columns.append(values)
    return tuple(steps), rows_with_columns(steps, columns, _COLUMNS)


def _message(value: dict[str, Any]) -> dict[str, Any]:
    """The message as it went to the chat template. verifiers stores calls flat, and leaves null fields out."""
    calls = value.get("tool_calls")
    if value.get("role") != "assistant":
        return value
    if not isinstance(calls, list) or not calls:
        return {**value, "content": ""} if value.get("content") is None else value
    wire = []
    for call in calls:
        if isinstance(call, dict) and "name" in call:
            kind = "custom" if call.get("type") == "custom" else "function"
            function = {key: call[key] for key in ("name", "namespace") if call.get(key) is not None}
            function["input" if kind == "custom" else "arguments"] = call.get("arguments")
            call = {"id": call.get("id"), "type": kind, kind: function}
        wire.append(call)
    return {**value, "content": value.get("content"), "tool_calls": wire}


def _request(messages: Sequence[Any], root_tools: Any, sampling: Any, where: str) -> Request:
    tools = [
        {"type": "function", "function": shapes.rest(tool, ("type",))} if "name" in tool else tool
        for tool in shapes.optional_tools(root_tools, f"{where}: tools") or ()
    ]
    kwargs = sampling.get("chat_template_kwargs") if isinstance(sampling, dict) else None
    return Request(
        shapes.messages(list(messages), f"{where}: messages"),
        tuple(tools) or None,
        shapes.optional_mapping(kwargs, f"{where}: chat_template_kwargs"),
    )


def _step(
    node: Mapping[str, Any], call: Mapping[str, Any], ids: Ids, before: _Path, reply: Mapping[str, Any],
    is_whole: bool, where: str,
) -> tuple[Step, dict[str, Floats]]:
    """The call that made a node, and the trainer's columns of its completion."""
    stream, messages, new, tools = before
    mask = shapes.mask(node.get("mask") or [], f"{where}.mask")
    if len(mask) != len(ids):
        raise BadLine(f"{where}.mask has {len(mask)} elements for {len(ids)} token_ids.")
    trained = np.flatnonzero(mask)
    start, stop = (int(trained[0]), int(trained[-1]) + 1) if len(trained) else (len(ids), len(ids))

    def spread(values: Floats) -> Floats:
        """One value for each id of the completion: the mask may have holes."""
        if len(values) != len(trained):
            return values
        column = np.full(stop - start, np.nan, dtype=np.float32)
        column[trained - start] = values
        return column

    logprobs = shapes.optional_floats(node.get("logprobs") or None, f"{where}.logprobs")
    columns = {}
    for name in _COLUMNS:
        values = shapes.optional_floats(node.get(name) or None, f"{where}.{name}")
        if values is not None and len(values) != len(trained):
            raise BadLine(f"{where}.{name} has {len(values)} elements for {len(trained)} sampled tokens.")
        if values is not None:
            columns[name] = spread(values)
    extra = dict(without_arrays(shapes.rest(node, _NODE), len(ids)))
    routing = extra.get(KEY)
    if isinstance(routing, dict) and routing.get("length") in (len(ids) - 1, len(ids)):
        routing["length"] += len(stream)  # a node holds the rows of its own tokens
    if len(trained) != stop - start:
        extra["mask"] = mask[start:stop].astype(int).tolist()
    sampling = call.get("sampling")
    if new and not is_whole:
        extra["new_messages"] = list(new)
    if call:
        extra["call"] = shapes.rest(call, ("node", "finish_reason"))
    temperature = sampling.get("temperature") if isinstance(sampling, dict) else None
    step = Step(
        prompt_ids=np.concatenate([stream, ids[:start]]), completion_ids=ids[start:stop],
        logprobs=None if logprobs is None else spread(logprobs),
        finish_reason=shapes.text(call.get("finish_reason") or node.get("finish_reason"), f"{where}.finish_reason", 30),
        temperature=shapes.spare(shapes.number, temperature, f"{where}: the call's temperature"),
        request=_request(messages, tools, sampling, where) if is_whole else None, reply=reply, extra=extra,
    )
    return step, columns


def _is_whole(trace: Mapping[str, Any]) -> bool:
    """Whether a root has the tools of its calls, as since 0.4. Before, a trace has those of its last call, or none."""
    nodes = trace["nodes"] if isinstance(trace["nodes"], list) else []
    return "tools" in trace and (not trace["tools"] or any(has_keys(node, "tools") for node in nodes))


def _detect_whole(values: Sequence[Any]) -> bool:
    traces = values[0].get("traces", [values[0]]) if detect(values) else []
    return any(_is_whole(trace) for trace in traces[:1])


def detect(values: Sequence[Any]) -> bool:
    record = values[0]
    if has_keys(record, "traces") and isinstance(record["traces"], list):
        return all(has_keys(trace, "nodes") for trace in record["traces"])
    return has_keys(record, "nodes") and isinstance(record["nodes"], list)


FORMATS = (
    Format("verifiers_traces", "verifiers v1 and prime-rl traces", _detect_whole, read, reads_alone=True),
    Format(
        "verifiers_traces_0_3", "verifiers v1 and prime-rl traces before verifiers 0.4", detect, read,
        "Before verifiers 0.4 a file does not tell the tools of each call, so what follows from a message or a "
        "template is not decidable.",
        reads_alone=True,
    ),
)
