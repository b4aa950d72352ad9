"""What engines tell in arrays, wherever a record holds it: expert routing, kept sets, spans of policy versions. Arrays
of routing are larger than all else of a trajectory. So they are not stored: ``routing`` takes their place in the same
``extra``. The sizes of kept sets are ``kept_set`` of a step or a column of a row. A step has the ids of small ones."""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.row_checks import routing_rows
from rollout_inspector.formats import shapes
from rollout_inspector.formats.sglang_meta import versions
from rollout_inspector.streams.alternatives import MAX_KEPT, n_kept
from rollout_inspector.streams.trajectory import Floats, Ids, Mask, Row, Step, Trajectory, ids_array

ARRAYS = ("routed_experts", "rollout_expert_indices", "rollout_routed_experts", "routing_matrices")
"""Names of arrays of expert routing: vLLM, SGLang, NeMo and verifiers; SkyRL; slime and miles; rLLM."""
KEY = "routing"  # The name that the summary has in ``extra``.
MASK, SPANS = "sampling_mask", "weight_versions"
"""The tokens that sampling could draw from at each place (vLLM, verifiers); which weights sampled which tokens."""
_INSIDE = ("choice", "response", "meta_info", "metrics", "model_output", "rollout", "line", "call", "tokens")
"""Objects of an ``extra`` that are looked into."""
_TOUCHED = frozenset((*ARRAYS, MASK, SPANS, *_INSIDE))
_DTYPES = {"u1": "<u1", "u2": "<u2", "i2": "<i2", "u4": "<u4", "i4": "<i4", "i8": "<i8", "uint8": "<u1",
           "uint16": "<u2", "int16": "<i2", "int32": "<i4", "int64": "<i8"}
_UNREADABLE = (ValueError, TypeError, LookupError, OverflowError, binascii.Error)


def summarised(trajectory: Trajectory) -> Trajectory:
    """The trajectory without arrays of routing and kept sets. A row without routing takes the summary of its last call,
    if that fits. An only row takes what its trajectory has."""
    steps = tuple(without_arrays_of(step) for step in trajectory.steps)
    rows = tuple(_of_row(row, steps) for row in trajectory.rows)
    extra = without_arrays(trajectory.extra, len(rows[0].ids) if len(rows) == 1 else None)
    if extra is not trajectory.extra and len(rows) == 1 and KEY not in rows[0].extra:
        rows = (replace(rows[0], extra={**rows[0].extra, KEY: extra[KEY]}),)
        extra = {key: value for key, value in extra.items() if key != KEY}
    if len(rows) == 1 and MASK in extra:
        rows = (_of_row(replace(rows[0], extra={**rows[0].extra, MASK: extra[MASK]}), steps),)
        extra = shapes.rest(extra, (MASK,))
    if extra is trajectory.extra and all(a is b for a, b in zip(steps, trajectory.steps, strict=True)) and all(
        a is b for a, b in zip(rows, trajectory.rows, strict=True)
    ):
        return trajectory
    return replace(trajectory, steps=steps, rows=rows, extra=extra)


def without_arrays_of(step: Step) -> Step:
    """The step, what its engine told in arrays replaced by what is kept of it."""
    n = len(step.completion_ids)
    extra = without_arrays(step.extra, len(step.prompt_ids) + n)
    values, extra = taken(extra, (MASK, SPANS))
    with shapes.noting() as notes:
        replaced: dict[str, Any] = {}
        if MASK in values and step.kept_set is None:
            sets = shapes.spare(kept_sets, values[MASK], MASK, mask=np.ones(n, np.bool_)) or (None, None)
            replaced["kept_set"], replaced["kept_ids"] = sets
        if SPANS in values:
            try:
                version, runs = versions(values, "The call")
            except shapes.BadLine:  # such as one version for each call
                version, runs = "", {SPANS: values[SPANS]}
            replaced["policy_version"], extra = step.policy_version or version, {**runs, **extra}
    return step if extra is step.extra else replace(step, extra=shapes.with_notes(extra, notes), **replaced)


def kept_sets(value: Any, where: str, mask: Mask) -> tuple[Floats, Ids | None]:
    """How many tokens sampling could draw from at each place ``[n]``; NaN where ``mask`` ``[n]`` is not set. Then their
    ids, one set after the other; None where they are not told, or are too many to be stored.

    ``value``: a list of ids for each set place (vLLM), or an object with ``counts`` and ``ids`` (verifiers), with
    ``offsets`` of one flat list, or with the lists under ``token_ids``. The sampled token is always kept, so 0 tells
    nothing. Raises :class:`BadLine` for another length or form.
    """
    fields = value if isinstance(value, Mapping) else {"token_ids": value}
    try:
        ids = fields.get("token_ids", fields.get("ids"))
        if "counts" in fields:
            counts = _array(fields["counts"], len(mask)).reshape(-1)
        elif "offsets" in fields:
            counts = np.diff(_array(fields["offsets"], len(mask)).reshape(-1))
        else:
            sets = [shapes.sequence(members, where) for members in shapes.sequence(ids, where)]
            counts = np.array([len(members) for members in sets])
            ids = [n for members in sets for n in members] if counts.sum() <= MAX_KEPT * len(sets) else None
        places = [offsets for offsets in (np.arange(len(mask)), np.flatnonzero(mask)) if len(offsets) == len(counts)]
        sizes = np.full(len(mask), np.nan, np.float32)
        sizes[places[0]] = np.where(counts > 0, counts, np.nan)
        return sizes, _kept_ids(ids, n_kept(sizes), len(counts))
    except _UNREADABLE as error:
        raise shapes.BadLine(f"{where} does not tell a set for each of {int(mask.sum())} sampled tokens.") from error


def _kept_ids(ids: Any, n: int, n_sets: int) -> Ids | None:
    if ids is None or not 0 < n <= MAX_KEPT * n_sets:
        return None
    with suppress(*_UNREADABLE):
        flat = _array(ids, n).reshape(-1)
        return ids_array(flat) if len(flat) == n and flat.dtype.kind in "iu" and flat.min() >= 0 else None
    return None


def _of_row(row: Row, steps: Sequence[Step]) -> Row:
    extra = without_arrays(row.extra, len(row.ids))
    values, extra = taken(extra, (MASK,))
    if values and len(row.loss_mask) == len(row.ids):
        with shapes.noting() as notes:
            sets = shapes.spare(kept_sets, values[MASK], MASK, mask=row.loss_mask)
        columns = row.columns if sets is None else {"kept_set": sets[0], **row.columns}
        row = replace(row, columns=columns, extra=shapes.with_notes(extra, notes))
        extra = row.extra
    if KEY not in extra and row.step_indices and row.step_indices[-1] < len(steps):
        # Each call records its prompt again, so the array of the last call is that of the row.
        last = steps[row.step_indices[-1]].extra.get(KEY)
        if isinstance(last, dict) and last.get("length") in (len(row.ids) - 1, len(row.ids)):
            extra = {**extra, KEY: last}
    return row if extra is row.extra else replace(row, extra=extra)


def without_arrays(extra: Mapping[str, Any], n_tokens: int | None = None) -> Mapping[str, Any]:
    """The fields with :data:`KEY` in place of an array of routing, the same object where there is none. ``n_tokens``:
    how many tokens the fields belong to, which tells the rows of an array without a shape."""
    values, others = taken(extra, ARRAYS)
    return {**others, KEY: summary_of(next(iter(values.values())), n_tokens)} if values else extra


def taken(extra: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], Mapping[str, Any]]:
    """The first value of each of the names in the fields or in an object of them, and the fields without these. They
    are the same object where no value is there."""
    values: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name in () if _TOUCHED.isdisjoint(extra) else ("", *_INSIDE):
        fields = extra.get(name) if name else extra
        present = [key for key in names if fields.get(key) is not None] if isinstance(fields, Mapping) else []
        if present and isinstance(fields, Mapping):
            values |= {key: fields[key] for key in present if key not in values}
            fields_left = shapes.rest(fields, present)
            others |= {name: fields_left} if name else fields_left
    if not values:
        return {}, extra
    others = {**shapes.rest(extra, names), **others}
    return values, {key: value for key, value in others.items() if key not in _INSIDE or value != {}}


def summary_of(value: Any, n_tokens: int | None = None) -> dict[str, Any]:
    """The summary of an array in a form that engines write: nested lists, or a text with the array in base64. Only the
    length is known where the rows cannot be read, and nothing where the array has no shape either."""
    length = None if isinstance(value, Mapping) else routing_rows(value)
    try:
        description = summary(_array(value, n_tokens))
        if isinstance(value, Mapping) and type(start := value.get("start")) is int and 0 <= start < 2**31:
            description["length"] += start  # the rows of the tokens before are not repeated
        return description
    except (*_UNREADABLE, SyntaxError, MemoryError):
        return {} if length is None else {"length": length}


def _array(value: Any, n_tokens: int | None) -> NDArray[Any]:
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, str):
        return _from_text(value, n_tokens)
    if isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        rows = [np.frombuffer(base64.b64decode(part, validate=True), np.uint8) for part in value]
        return np.stack(rows)
    if isinstance(value, Mapping) and isinstance(value.get("data"), str):
        shape, dtype = value.get("shape"), _DTYPES.get(str(value.get("dtype")), "")
        flat = np.frombuffer(base64.b64decode(value["data"], validate=True), dtype or "<i4")
        return flat.reshape([int(part) for part in shape]) if isinstance(shape, list) else _by_rows(flat, n_tokens)
    array = np.asarray(value)
    if array.dtype.kind not in "iuf":
        raise ValueError("routing holds numbers")
    return array


def _from_text(text: str, n_tokens: int | None) -> NDArray[Any]:
    if text.startswith("nrlre1:"):
        _, dtype, shape, data = text.split(":", 3)
        flat = np.frombuffer(base64.b64decode(data, validate=True), _DTYPES[dtype])
        return flat.reshape([int(size) for size in shape.split("x")])
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


def summary(array: NDArray[Any]) -> dict[str, Any]:
    """The figures of expert routing ``[tokens, layers, experts]``; ``[tokens, values]`` counts as one layer.

    ``length``: tokens. ``zero_layers``: layers whose experts are 0 at every token, so nothing was recorded there.
    ``repeats``: a share of the choices of the other layers from the second token on; 0.0 where there are none. They
    equal, in the same order, what the same layer chose for the token before. Raises ``ValueError`` for another shape.
    """
    if array.ndim == 2:
        array = array[:, np.newaxis, :]
    if array.ndim != 3:
        raise ValueError(f"expert routing has the shape [tokens, layers, experts], not {array.ndim} dimensions")
    n_tokens, n_layers = array.shape[:2]
    has_values = array.any(axis=(0, 2)) if n_tokens else np.ones(n_layers, dtype=np.bool_)
    layers = array[:, has_values]
    same = (layers[1:] == layers[:-1]).all(axis=2)
    return {
        "repeats": float(same.mean()) if same.size and array.shape[2] else 0.0,
        "zero_layers": int(n_layers - np.count_nonzero(has_values)),
        "length": int(n_tokens),
    }
