"""Expert routing in files: each array is summarised when it is read, and the array itself is not stored.

An array of a long trajectory is larger than all else of it. ``routing`` takes its place in the same ``extra``.
"""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollouts.formats.registry import Rejected
from rollouts.tito.routing import summary
from rollouts.tito.trajectory import Row, Step, Trajectory

ARRAYS = ("routed_experts", "rollout_expert_indices", "rollout_routed_experts", "routing_matrices")
"""Names of arrays of expert routing: vLLM, SGLang, NeMo and verifiers; SkyRL; slime and miles; rLLM."""
KEY = "routing"
"""The name that the summary has in ``extra``."""
_INSIDE = ("choice", "response", "meta_info", "model_output", "rollout", "line")
"""Objects of an ``extra`` that are looked into."""
_TOUCHED = frozenset((*ARRAYS, *_INSIDE))
_DTYPES = {"u1": "<u1", "u2": "<u2", "i2": "<i2", "u4": "<u4", "i4": "<i4", "i8": "<i8", "uint8": "<u1",
           "uint16": "<u2", "int16": "<i2", "int32": "<i4", "int64": "<i8"}


def with_routing(items: Iterator[Trajectory | Rejected]) -> Iterator[Trajectory | Rejected]:
    """The items, each array of expert routing replaced by its summary."""
    for item in items:
        yield item if isinstance(item, Rejected) else summarised(item)


def summarised(trajectory: Trajectory) -> Trajectory:
    """The trajectory without arrays of routing.

    A row without an array takes the summary of its last call, if that fits. An only row takes that of its trajectory.
    """
    steps = tuple(_of_step(step) for step in trajectory.steps)
    rows = tuple(_of_row(row, steps) for row in trajectory.rows)
    extra = without_arrays(trajectory.extra, len(rows[0].ids) if len(rows) == 1 else None)
    if extra is not trajectory.extra and len(rows) == 1 and KEY not in rows[0].extra:
        rows = (replace(rows[0], extra={**rows[0].extra, KEY: extra[KEY]}),)
        extra = {key: value for key, value in extra.items() if key != KEY}
    if extra is trajectory.extra and all(a is b for a, b in zip(steps, trajectory.steps, strict=True)) and all(
        a is b for a, b in zip(rows, trajectory.rows, strict=True)
    ):
        return trajectory
    return replace(trajectory, steps=steps, rows=rows, extra=extra)


def _of_step(step: Step) -> Step:
    extra = without_arrays(step.extra, len(step.prompt_ids) + len(step.completion_ids))
    return step if extra is step.extra else replace(step, extra=extra)


def _of_row(row: Row, steps: Sequence[Step]) -> Row:
    extra = without_arrays(row.extra, len(row.ids))
    if KEY not in extra and row.step_indices and row.step_indices[-1] < len(steps):
        # Each call records its prompt again, so the array of the last call is that of the row.
        last = steps[row.step_indices[-1]].extra.get(KEY)
        if isinstance(last, dict) and last.get("length") in (len(row.ids) - 1, len(row.ids)):
            extra = {**extra, KEY: last}
    return row if extra is row.extra else replace(row, extra=extra)


def without_arrays(extra: Mapping[str, Any], n_tokens: int | None = None) -> Mapping[str, Any]:
    """The fields with :data:`KEY` in place of an array of routing, the same object where there is none.

    ``n_tokens``: how many tokens the fields belong to, which tells the rows of an array without a shape.
    """
    if _TOUCHED.isdisjoint(extra):
        return extra
    holders = [("", extra), *((name, extra[name]) for name in _INSIDE if isinstance(extra.get(name), Mapping))]
    found: dict[str, Any] | None = None
    cut: dict[str, Any] = {}
    for name, fields in holders:
        arrays = [key for key in ARRAYS if fields.get(key) is not None]
        if not arrays:
            continue
        found = found or summary_of(fields[arrays[0]], n_tokens)
        rest = {key: value for key, value in fields.items() if key not in arrays}
        if name:
            cut[name] = rest
        else:
            cut |= rest
    if found is None:
        return extra
    kept = {**{key: value for key, value in extra.items() if key not in ARRAYS}, **cut}
    return {**{key: value for key, value in kept.items() if key not in _INSIDE or value != {}}, KEY: found}


def summary_of(value: Any, n_tokens: int | None = None) -> dict[str, Any]:
    """The summary of an array in a form that engines write: nested lists, or a text with the array in base64.

    Only the length is known where the rows cannot be read, and nothing where the array has no shape either.
    """
    length = rows_of(value)
    try:
        found = summary(_array(value, n_tokens))
        if isinstance(value, Mapping) and type(start := value.get("start")) is int and 0 <= start < 2**31:
            found["length"] += start  # the rows of the tokens before are not repeated
        return found
    except (ValueError, TypeError, LookupError, OverflowError, binascii.Error, SyntaxError, MemoryError):
        return {} if length is None else {"length": length}


def rows_of(value: Any) -> int | None:
    """How many rows an array has. None when the value does not tell."""
    if isinstance(value, list):
        return len(value)
    if isinstance(value, np.ndarray):
        return len(value) if value.ndim else None
    if isinstance(value, str) and value.startswith("nrlre1:"):  # nrlre1:<dtype>:<rows>x<layers>x<experts>:<base64>
        parts = value.split(":", 3)
        rows = parts[2].split("x")[0] if len(parts) > 2 else ""
        return int(rows) if rows.isascii() and rows.isdigit() and len(rows) < 10 else None
    return None


def _array(value: Any, n_tokens: int | None) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        return _from_text(value, n_tokens)
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        rows = [np.frombuffer(base64.b64decode(one, validate=True), np.uint8) for one in value]
        return np.stack(rows)
    if isinstance(value, Mapping) and isinstance(value.get("data"), str):
        shape, dtype = value.get("shape"), _DTYPES.get(str(value.get("dtype")), "")
        flat = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype or "<i4")
        return flat.reshape([int(one) for one in shape]) if isinstance(shape, list) else _by_rows(flat, n_tokens)
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise ValueError("routing holds numbers")
    return array


def _from_text(text: str, n_tokens: int | None) -> NDArray[Any]:
    if text.startswith("nrlre1:"):
        _, dtype, shape, data = text.split(":", 3)
        flat = np.frombuffer(base64.b64decode(data, validate=True), _DTYPES[dtype])
        return flat.reshape([int(one) for one in shape.split("x")])
    raw = base64.b64decode(text, validate=True)
    if raw.startswith(b"\x93NUMPY"):
        return _from_npy(raw)
    return _by_rows(np.frombuffer(raw, "<i4"), n_tokens)  # SGLang: int32 without a shape


def _from_npy(raw: bytes) -> NDArray[Any]:
    """The array of a ``.npy`` file. ``numpy.load`` would first make room for as much as the header says."""
    file = io.BytesIO(raw)
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, is_fortran, dtype = read(file)
    if dtype.kind not in "iu":
        raise ValueError("routing holds whole numbers")
    flat = np.frombuffer(raw, dtype, offset=file.tell())
    return flat.reshape(shape, order="F" if is_fortran else "C")


def _by_rows(flat: NDArray[Any], n_tokens: int | None) -> NDArray[Any]:
    """Values without a shape as ``[rows, values]``: an engine records no row for the last token, or one for each."""
    for n in (n_tokens - 1, n_tokens) if n_tokens else ():
        if n > 0 and len(flat) and len(flat) % n == 0:
            return flat.reshape(n, -1)
    raise ValueError("the array has no shape")
