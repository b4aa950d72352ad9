"""Expert routing is summarised where it is read, in each form that engines and trainers write."""

import base64
import io
from typing import Any

import numpy as np
import pytest

from rollout_inspector.formats.routing import summary_of, without_arrays
from rollout_inspector.streams.routing import summary
from tests.samples.formats import GYM, changed, jsonl, read
from tests.samples.trainer_formats import TRACE_04

# 4 tokens, 3 layers, 2 experts. Layer 1 was not recorded. Token 2 repeats token 1 in layer 0, token 3 in layer 2.
ARRAY = np.array(
    [[[1, 2], [0, 0], [3, 4]], [[5, 6], [0, 0], [3, 5]], [[5, 6], [0, 0], [6, 7]], [[6, 5], [0, 0], [6, 7]]], np.int32
)
FIGURES = {"repeats": 2 / 6, "zero_layers": 1, "length": 4}


def npy(array: Any) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()


def text(array: Any) -> str:
    return base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()


def test_the_figures() -> None:
    assert summary(ARRAY) == FIGURES
    assert summary(ARRAY[:1]) == {"repeats": 0.0, "zero_layers": 1, "length": 1}
    assert summary(np.repeat(ARRAY[:1], 5, axis=0)) == {"repeats": 1.0, "zero_layers": 1, "length": 5}
    assert summary(np.zeros((3, 2, 2))) == {"repeats": 0.0, "zero_layers": 2, "length": 3}
    assert summary(np.zeros((0, 2, 2))) == {"repeats": 0.0, "zero_layers": 0, "length": 0}
    with pytest.raises(ValueError, match="not 1 dimensions"):
        summary(np.zeros(3))


@pytest.mark.parametrize(
    "value",
    [
        ARRAY.tolist(), npy(ARRAY), npy(np.asfortranarray(ARRAY.astype(np.int16))),
        f"nrlre1:u1:4x3x2:{text(ARRAY.astype(np.uint8))}",
        {"data": text(ARRAY.astype(np.uint8)), "shape": [4, 3, 2], "dtype": "uint8"},
    ],
)
def test_every_form_of_an_array_has_the_same_figures(value: Any) -> None:
    assert summary_of(value) == FIGURES


def test_rows_of_an_array_without_a_shape_follow_from_the_tokens() -> None:
    assert summary_of(text(ARRAY), n_tokens=5) == {"repeats": 0.0, "zero_layers": 0, "length": 4}
    twice = np.repeat(ARRAY, 2, axis=0)
    assert summary_of(text(twice), n_tokens=9)["repeats"] == 4 / 7
    assert summary_of([text(row) for row in ARRAY])["length"] == 4
    assert summary_of({"data": text(ARRAY), "shape": [4, 3, 2], "dtype": "int32", "start": 6})["length"] == 10


@pytest.mark.parametrize(
    ("value", "length"),
    [
        ("no base64", None), (text(ARRAY), None), ([[1], [1, 2]], 2), ("nrlre1:u1:3x2x8:AAAA", 3), ([["a"]], 1),
        (npy(np.array(["a"])), None), ("nrlre1:zz:4x3x2:AAAA", 4), ("nrlre1:u1", None), ({"data": 5}, None),
        (base64.b64encode(b"\x93NUMPY\x01\x00\x10\x00{'descr': '<i4'").decode(), None),
        (base64.b64encode(base64.b64decode(npy(ARRAY)).replace(b"(4, 3, 2)", b"(4000,3,)")).decode(), None),
    ],
)
def test_an_array_that_cannot_be_read_is_left_out(value: Any, length: int | None) -> None:
    assert summary_of(value) == ({} if length is None else {"length": length})
    assert without_arrays({"routed_experts": value, "a": 1}) == {"a": 1, "routing": summary_of(value)}


def test_arrays_inside_of_an_answer_are_found_and_nothing_else_changes() -> None:
    extra = {"choice": {"routed_experts": npy(ARRAY), "index": 1}, "response": {"id": "r"}}
    assert without_arrays(extra) == {"choice": {"index": 1}, "response": {"id": "r"}, "routing": FIGURES}
    plain = {"choice": {"index": 1}, "routed": 5}
    assert without_arrays(plain) is plain


def test_an_import_keeps_the_figures_in_place_of_the_array() -> None:
    gym = changed(GYM, "response", "output", 1, "routed_experts", to=[[[1]], [[1]], [[2]], [[3]]])
    step = read(jsonl(gym))[1][0].steps[0]
    assert step.extra["routing"] == {"repeats": 1 / 3, "zero_layers": 0, "length": 4}
    assert "routed_experts" not in step.extra


def test_a_row_has_the_figures_of_its_last_call() -> None:
    trace = changed(TRACE_04, "traces", 0, "nodes", 3, "routed_experts", to=[[[1]], [[1]], [[2]]])
    (found,) = read(jsonl(trace))[1]
    assert found.steps[-1].extra["routing"] == {"repeats": 0.5, "zero_layers": 0, "length": 8}
    assert found.rows[0].extra["routing"] == found.steps[-1].extra["routing"]
