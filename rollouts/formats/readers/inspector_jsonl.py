"""This project's own JSONL: one trajectory a line, lossless. Prompts and messages stand as what each step adds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import IO, Any

import msgspec
import numpy as np

from rollouts.formats import shapes
from rollouts.formats.containers.json_text import canonical_json
from rollouts.formats.containers.source import Source
from rollouts.formats.registry import Format, Rejected, each_line, has_keys
from rollouts.formats.shapes import BadLine
from rollouts.tito.prefix import delta_of, link_steps
from rollouts.tito.trajectory import Floats, Origin, Origins, Request, Row, Step, Trajectory

NAME = "rollout-inspector"
VERSION = 1
_NOT_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


# -- reading


def read(source: Source) -> Iterator[Trajectory | Rejected]:
    return each_line(source, _trajectory)


def read_records(source: Source) -> Iterator[Trajectory | Rejected]:
    """Rows that hold such a line as text in ``record``."""

    def trajectory(value: Any, number: int) -> Trajectory:
        text = shapes.optional_string(shapes.mapping(value, "The row").get("record"), "record")
        return _trajectory(shapes.decode((text or "").encode()), number)

    return each_line(source, trajectory)


def _trajectory(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    if value.get("format") != NAME:
        raise BadLine(f"format must be {NAME!r}.")
    version = shapes.whole(value.get("version"), "version", least=1)
    if version is None or version > VERSION:
        raise BadLine(f"The line is of version {version}; this program reads version {VERSION}. Update the program.")
    external_id = shapes.text(value.get("external_id"), "external_id", 200)
    if not external_id:
        raise BadLine("external_id is missing.")
    steps: list[Step] = []
    for n, item in enumerate(shapes.sequence(value.get("steps", []), "steps")):
        steps.append(_step(shapes.mapping(item, f"steps[{n}]"), steps, f"steps[{n}]"))
    rows = [
        _row(shapes.mapping(item, f"rows[{n}]"), len(steps), f"rows[{n}]")
        for n, item in enumerate(shapes.sequence(value.get("rows", []), "rows"))
    ]
    return Trajectory(
        external_id,
        tuple(steps),
        tuple(rows),
        reward=shapes.number(value.get("reward"), "reward"),
        reward_parts=shapes.numbers_by_name(value.get("reward_parts"), "reward_parts"),
        stop_reason=shapes.text(value.get("stop_reason"), "stop_reason", 60),
        group=shapes.text(value.get("group"), "group", 200),
        tokenizer=shapes.text(value.get("tokenizer"), "tokenizer", 200),
        extra=shapes.optional_mapping(value.get("extra"), "extra"),
    )


def _step(value: Mapping[str, Any], earlier: Sequence[Step], where: str) -> Step:
    delta = shapes.ids(value.get("delta_ids"), f"{where}.delta_ids")
    parent = shapes.whole(value.get("parent"), f"{where}.parent", least=0)
    shared = shapes.whole(value.get("shared_length", 0), f"{where}.shared_length", least=0) or 0
    prompt = delta
    said: tuple[Any, ...] = ()
    if parent is not None:
        if parent >= len(earlier):
            raise BadLine(f"{where}.parent is {parent}, but a parent comes before its step.")
        stream = earlier[parent].stream
        if shared > len(stream):
            raise BadLine(f"{where}.shared_length is {shared}, but the parent's stream has {len(stream)} ids.")
        prompt = np.concatenate([stream[:shared], delta])
        request = earlier[parent].request
        said = request.messages if request else ()
    elif shared:
        raise BadLine(f"{where} has a shared_length and no parent.")
    return Step(
        prompt_ids=prompt,
        completion_ids=shapes.ids(value.get("completion_ids"), f"{where}.completion_ids"),
        logprobs=_floats(value.get("logprobs"), f"{where}.logprobs"),
        logprobs_mode=shapes.text(value.get("logprobs_mode"), f"{where}.logprobs_mode", 20),
        finish_reason=shapes.text(value.get("finish_reason"), f"{where}.finish_reason", 30),
        stop_reason=shapes.text(value.get("stop_reason"), f"{where}.stop_reason", 100),
        request=_request(value.get("request"), said, f"{where}.request"),
        reply=None if value.get("reply") is None else shapes.mapping(value["reply"], f"{where}.reply"),
        text=shapes.optional_string(value.get("text"), f"{where}.text"),
        chat_template_sha256=shapes.text(value.get("chat_template_sha256"), f"{where}.chat_template_sha256", 64),
        temperature=shapes.number(value.get("temperature"), f"{where}.temperature"),
        top_p=shapes.number(value.get("top_p"), f"{where}.top_p"),
        top_k=shapes.whole(value.get("top_k"), f"{where}.top_k"),
        engine=shapes.text(value.get("engine"), f"{where}.engine", 60),
        policy_version=shapes.text(value.get("policy_version"), f"{where}.policy_version", 100),
        delta_origin=_origins(value.get("delta_origin"), len(delta), f"{where}.delta_origin"),
        extra=shapes.optional_mapping(value.get("extra"), f"{where}.extra"),
    )


def _request(value: Any, said: tuple[Any, ...], where: str) -> Request | None:
    if value is None:
        return None
    value = shapes.mapping(value, where)
    shared = shapes.whole(value.get("messages_shared", 0), f"{where}.messages_shared", least=0) or 0
    if shared > len(said):
        raise BadLine(f"{where}.messages_shared is {shared}, but the parent's request has {len(said)} messages.")
    return Request(
        (*said[:shared], *shapes.messages(value.get("messages_new", []), f"{where}.messages_new")),
        shapes.optional_tools(value.get("tools"), f"{where}.tools"),
        shapes.optional_mapping(value.get("chat_template_kwargs"), f"{where}.chat_template_kwargs"),
    )


def _row(value: Mapping[str, Any], n_steps: int, where: str) -> Row:
    ids = shapes.ids(value.get("ids"), f"{where}.ids")
    indices = shapes.sequence(value.get("step_indices", []), f"{where}.step_indices")
    if any(type(index) is not int or not 0 <= index < n_steps for index in indices):
        raise BadLine(f"{where}.step_indices names a step that is not there.")
    columns = shapes.optional_mapping(value.get("columns"), f"{where}.columns")
    return Row(
        ids=ids,
        loss_mask=shapes.mask(value.get("loss_mask"), f"{where}.loss_mask"),
        logprobs=_floats(value.get("logprobs"), f"{where}.logprobs"),
        origin=_origins(value.get("origin"), None, f"{where}.origin"),
        columns={
            shapes.text(name, f"a name in {where}.columns", 60): _required_floats(column, f"{where}.columns")
            for name, column in columns.items()
        },
        step_indices=tuple(indices),
        extra=shapes.optional_mapping(value.get("extra"), f"{where}.extra"),
    )


def _floats(value: Any, where: str) -> Floats | None:
    return None if value is None else _required_floats(value, where)


def _required_floats(value: Any, where: str) -> Floats:
    """Numbers; what JSON has no number for is a text: NaN, Infinity, -Infinity."""
    if isinstance(value, list) and str in set(map(type, value)):
        plain = [0.0 if isinstance(item, str) and item in _NOT_FINITE else item for item in value]
        found = shapes.floats(plain, where)
        for n, item in enumerate(value):
            if isinstance(item, str):
                found[n] = _NOT_FINITE[item]
        return found
    return shapes.floats(value, where)


def _origins(value: Any, length: int | None, where: str) -> Origins | None:
    if value is None:
        return None
    codes = shapes.ids(value, where)
    if codes.size and int(codes.max()) > max(Origin):
        raise BadLine(f"{where} holds a code that is no origin.")
    if length is not None and len(codes) != length:
        raise BadLine(f"{where} has {len(codes)} elements for {length} ids.")
    return codes.astype(np.uint8)


def detect(values: Sequence[Any]) -> bool:
    return has_keys(values[0], "format", "version") and values[0]["format"] == NAME


# -- writing


def write(trajectories: Iterable[Trajectory], file: IO[bytes]) -> int:
    """One line each; gives how many."""
    n = 0
    for trajectory in trajectories:
        file.write(encode(trajectory) + b"\n")
        n += 1
    return n


def encode(trajectory: Trajectory) -> bytes:
    """A trajectory as one line, without the line's end."""
    value = _trajectory_value(trajectory)
    try:
        return msgspec.json.encode(value)
    except (UnicodeEncodeError, TypeError):
        return canonical_json(value).encode()


def _trajectory_value(trajectory: Trajectory) -> dict[str, Any]:
    links = link_steps(trajectory.steps)
    steps = []
    for step, link in zip(trajectory.steps, links, strict=True):
        before = trajectory.steps[link.parent].request if link.parent is not None else None
        delta = delta_of(step, link)
        origin = step.delta_origin
        steps.append(
            _without_empty(
                {
                    "parent": link.parent,
                    "shared_length": link.shared_length,
                    "delta_ids": delta.tolist(),
                    "delta_origin": origin.tolist() if origin is not None and len(origin) == len(delta) else None,
                    "completion_ids": step.completion_ids.tolist(),
                    "logprobs": _plain_floats(step.logprobs),
                    "logprobs_mode": step.logprobs_mode,
                    "finish_reason": step.finish_reason,
                    "stop_reason": step.stop_reason,
                    "request": _request_value(step.request, before),
                    "reply": step.reply,
                    "text": step.text,
                    "chat_template_sha256": step.chat_template_sha256,
                    "temperature": step.temperature,
                    "top_p": step.top_p,
                    "top_k": step.top_k,
                    "engine": step.engine,
                    "policy_version": step.policy_version,
                    "extra": dict(step.extra),
                },
                keep=("reply", "text"),
            )
        )
    value = {
        "format": NAME,
        "version": VERSION,
        "external_id": trajectory.external_id,
        "tokenizer": trajectory.tokenizer,
        "group": trajectory.group,
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "stop_reason": trajectory.stop_reason,
        "steps": steps,
        "rows": [_row_value(row) for row in trajectory.rows],
        "extra": dict(trajectory.extra),
    }
    return _without_empty(value, keep=())


def _without_empty(value: dict[str, Any], keep: Sequence[str]) -> dict[str, Any]:
    """Leave out what says nothing: None, and an empty text or object unless kept. An empty array is a fact."""
    return {
        key: item
        for key, item in value.items()
        if item is not None and (key in keep or not (isinstance(item, str | dict) and not item))
    }


def _request_value(request: Request | None, before: Request | None) -> dict[str, Any] | None:
    if request is None:
        return None
    shared = 0
    if before is not None:
        pairs = zip(before.messages, request.messages, strict=False)
        for old, new in pairs:
            # As text, because 1 == 1.0 == True in Python and not in JSON.
            if old is not new and canonical_json(old) != canonical_json(new):
                break
            shared += 1
    value: dict[str, Any] = {"messages_shared": shared, "messages_new": list(request.messages[shared:])}
    if request.tools is not None:
        value["tools"] = list(request.tools)
    if request.chat_template_kwargs:
        value["chat_template_kwargs"] = dict(request.chat_template_kwargs)
    return value


def _row_value(row: Row) -> dict[str, Any]:
    value = {
        "ids": row.ids.tolist(),
        "loss_mask": row.loss_mask.astype(np.uint8).tolist(),
        "logprobs": _plain_floats(row.logprobs),
        "origin": None if row.origin is None else row.origin.tolist(),
        "columns": {name: _plain_floats(column) for name, column in row.columns.items()},
        "step_indices": list(row.step_indices),
        "extra": dict(row.extra),
    }
    return _without_empty(value, keep=())


def _plain_floats(values: Floats | None) -> list[Any] | None:
    """Nine digits tell every float32 apart, and are shorter than the same value as a float64."""
    if values is None:
        return None
    if not values.size:
        return []
    plain: list[Any] = np.char.mod("%.9g", values.astype(np.float64)).astype(np.float64).tolist()
    for n in np.flatnonzero(~np.isfinite(values)).tolist():
        plain[n] = "NaN" if math.isnan(values[n]) else "Infinity" if values[n] > 0 else "-Infinity"
    return plain


FORMAT = Format("own_jsonl", "Rollout Inspector JSONL (lossless)", detect, read, write=write)
