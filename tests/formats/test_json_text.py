"""Stored JSON text: one spelling, whichever of the two encoders writes it."""

import json
from typing import Any

import numpy as np
import pytest

from rollouts.formats.containers.json_text import canonical_json


@pytest.mark.parametrize(
    "value",
    [
        {"b": 1, "a": [True, 2.5, "x"]}, {"a": None}, "nullable", "null", ["a, null", "b:null]", None],
        None, "é\u2028\x7f\t\"\\/", "\0", {"n": 2**70}, {"n": -0.0},
        [], {}, [{"a": {}}], {"deep": [[[[1]]]]}, 12345678901234567890,
    ],
)
def test_it_is_what_json_writes(value: Any) -> None:
    text = canonical_json(value)
    assert text == json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    assert json.loads(text) == value


def test_what_json_cannot_hold() -> None:
    assert canonical_json({"a": float("nan")}) == '{"a":NaN}'
    assert canonical_json(["null", float("nan")]) == '["null",NaN]' and canonical_json(float("inf")) == "Infinity"
    assert canonical_json({"a": "\ud800"}) == '{"a":"\\ud800"}'
    assert canonical_json({"a": np.array([1, 2])}) == '{"a":[1,2]}'
    assert canonical_json({"a": np.float32(0.5)}) == '{"a":0.5}'
    with pytest.raises(TypeError):
        canonical_json({"a": object()})
