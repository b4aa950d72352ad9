"""This project's own JSONL: one trajectory a line, lossless. Prompts and messages stand as what each step adds."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import IO, Any

import msgspec
import numpy as np

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.containers.cutting import parts_of
from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.formats.registry import Format, Rejected, each_line, has_keys, join_lines
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams import alternatives
from rollout_inspector.streams.coding import REQUEST_FIELDS, STEP_FIELDS, CodedStep, StepCodec, StepField
from rollout_inspector.streams.prefix import links_of
from rollout_inspector.streams.trajectory import Floats, Origin, Origins, Request, Row, Step, Trajectory

NAME = "rollout-inspector"
VERSION = 1
Reader = Callable[[Any, str], Any]


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
    codec = StepCodec(canonical_json)
    decoded = limits.Decoded()
    for n, item in enumerate(shapes.sequence(value.get("steps", []), "steps")):
        _take_step(codec, shapes.mapping(item, f"steps[{n}]"), f"steps[{n}]")
        step = codec.steps[-1]
        decoded.add(f"steps[{n}]", len(step.prompt_ids), len(step.request.messages) if step.request else 0)
    rows = [
        _row(shapes.mapping(item, f"rows[{n}]"), len(codec.steps), f"rows[{n}]")
        for n, item in enumerate(shapes.sequence(value.get("rows", []), "rows"))
    ]
    return Trajectory(
        external_id, tuple(codec.steps), tuple(rows), reward=shapes.number(value.get("reward"), "reward"),
        reward_parts=shapes.numbers_by_name(value.get("reward_parts"), "reward_parts"),
        stop_reason=shapes.text(value.get("stop_reason"), "stop_reason", 60),
        error=shapes.error_text(value.get("error")),
        group=shapes.text(value.get("group"), "group", 200),
        tokenizer=shapes.text(value.get("tokenizer"), "tokenizer", 200),
        training_step=shapes.whole(value.get("training_step"), "training_step", least=0),
        extra=shapes.optional_mapping(value.get("extra"), "extra"),
    )


def _take_step(codec: StepCodec, value: Mapping[str, Any], where: str) -> None:
    delta = shapes.ids(value.get("delta_ids"), f"{where}.delta_ids")
    parent = shapes.whole(value.get("parent"), f"{where}.parent", least=0)
    shared = shapes.whole(value.get("shared_length", 0), f"{where}.shared_length", least=0) or 0
    if parent is not None and parent >= len(codec.steps):
        raise BadLine(f"{where}.parent is {parent}, but a parent comes before its step.")
    if parent is None and shared:
        raise BadLine(f"{where} has a shared_length and no parent.")
    try:
        prompt = codec.prompt_ids(parent, shared, delta)
    except ValueError as error:
        raise BadLine(f"{where}.{error}") from None
    fields = _fields(_READ_STEP, value, where)
    request = _request(codec, parent, value.get("request"), f"{where}.request")
    origin = _origins(value.get("delta_origin"), len(delta), f"{where}.delta_origin")
    step = Step(prompt_ids=prompt, delta_origin=origin, request=request, **fields)
    if problem := alternatives.problem(step):
        raise BadLine(f"{where}: {problem}")
    codec.steps.append(step)


def _request(codec: StepCodec, parent: int | None, value: Any, where: str) -> Request | None:
    if value is None:
        return None
    value = shapes.mapping(value, where)
    shared = shapes.whole(value.get("messages_shared", 0), f"{where}.messages_shared", least=0) or 0
    new = shapes.messages(value.get("messages_new", []), f"{where}.messages_new")
    try:
        messages = codec.messages(parent, shared, new)
    except ValueError as error:
        raise BadLine(f"{where}.{error}") from None
    return Request(messages, **_fields(_READ_REQUEST, value, where))


def _fields(readers: Iterable[tuple[str, Reader]], value: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The fields that the codec leaves alone, each checked as what it holds."""
    return {name: read(value.get(name), f"{where}.{name}") for name, read in readers}


def _row(value: Mapping[str, Any], n_steps: int, where: str) -> Row:
    ids = shapes.ids(value.get("ids"), f"{where}.ids")
    indices = shapes.sequence(value.get("step_indices", []), f"{where}.step_indices")
    if any(type(index) is not int or not 0 <= index < n_steps for index in indices):
        raise BadLine(f"{where}.step_indices names a step that is not there.")
    columns = shapes.optional_mapping(value.get("columns"), f"{where}.columns")
    return Row(
        ids=ids,
        loss_mask=shapes.mask(value.get("loss_mask"), f"{where}.loss_mask"),
        logprobs=shapes.optional_floats(value.get("logprobs"), f"{where}.logprobs"),
        origin=_origins(value.get("origin"), None, f"{where}.origin"),
        columns={
            shapes.text(name, f"a name in {where}.columns", 60): shapes.floats(column, f"{where}.columns")
            for name, column in columns.items()
        },
        step_indices=tuple(indices),
        extra=shapes.optional_mapping(value.get("extra"), f"{where}.extra"),
    )


def _readers(fields: Iterable[StepField]) -> list[tuple[str, Reader]]:
    """For each field its name and what reads and checks its value."""
    by_kind: Mapping[str, Reader] = {
        "number": shapes.number,
        "whole": shapes.whole,
        "ids": shapes.ids,
        "optional_ids": lambda value, where: None if value is None else shapes.ids(value, where),
        "floats": shapes.optional_floats,
        "any_text": shapes.optional_string,
        "object": lambda value, where: None if value is None else shapes.mapping(value, where),
        "mapping": shapes.optional_mapping,
        "tools": shapes.optional_tools,
    }
    return [
        (field.name, partial(shapes.text, limit=field.limit) if field.kind == "text" else by_kind[field.kind])
        for field in fields
        if field.kind != "request"
    ]


_READ_STEP, _READ_REQUEST = _readers(STEP_FIELDS), _readers(REQUEST_FIELDS)


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
    """Writes one line each. Returns how many."""
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
    codec = StepCodec(canonical_json)
    value = {
        "format": NAME,
        "version": VERSION,
        "external_id": trajectory.external_id,
        "tokenizer": trajectory.tokenizer,
        "group": trajectory.group,
        "reward": trajectory.reward,
        "reward_parts": dict(trajectory.reward_parts),
        "stop_reason": trajectory.stop_reason,
        "error": trajectory.error,
        "training_step": trajectory.training_step,
        "steps": [
            _step_value(step, codec.encode(step, link))
            for step, link in zip(trajectory.steps, links_of(trajectory), strict=True)
        ],
        "rows": [_row_value(row) for row in trajectory.rows],
        "extra": dict(trajectory.extra),
    }
    return _without_empty(value)


def _step_value(step: Step, coded: CodedStep) -> dict[str, Any]:
    link, delta_ids, delta_origin, messages_shared, messages_new = coded
    value: dict[str, Any] = {} if link.parent is None else {"parent": link.parent}
    value |= {"shared_length": link.shared_length, "delta_ids": delta_ids.tolist()}
    if delta_origin is not None:
        value["delta_origin"] = delta_origin.tolist()
    fields = vars(step)
    if step.request is not None:
        request = {"messages_shared": messages_shared, "messages_new": messages_new}
        _add_fields(request, REQUEST_FIELDS, vars(step.request))
        fields = fields | {"request": request}
    _add_fields(value, STEP_FIELDS, fields)
    return value


def _add_fields(value: dict[str, Any], fields: Iterable[StepField], held: Mapping[str, Any]) -> None:
    """Add the fields that say something, as JSON has them."""
    for name, kind, _, _ in fields:
        array = held[name]
        if array is None:
            continue
        if kind in ("ids", "optional_ids"):
            value[name] = array.tolist()
        elif kind == "floats":
            value[name] = _plain_floats(array)
        elif kind == "mapping":
            if array:
                value[name] = dict(array)
        elif array or kind != "text":
            value[name] = array


def _without_empty(value: dict[str, Any]) -> dict[str, Any]:
    """Leave out what says nothing: None, and an empty text or object. An empty array is a fact."""
    return {key: item for key, item in value.items() if item is not None and (item or not isinstance(item, str | dict))}


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
    return _without_empty(value)


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


FORMAT = Format(
    "own_jsonl", "Rollout Inspector JSONL (lossless)", detect, read, write=write, join=join_lines, cut=parts_of,
    is_lossless=True,
)
