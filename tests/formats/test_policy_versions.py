"""Policy versions of a row, in the forms in which slime, miles and SGLang record them."""

from typing import Any

import numpy as np
import pytest

from rollout_inspector.formats.policy_versions import of_row
from tests.samples.formats import changed, jsonl, read
from tests.samples.reader_shapes import SGLANG

MASK = np.array([0, 0, 1, 1, 0, 1, 0], np.bool_)


def span(version: str, start: int, stop: int) -> dict[str, Any]:
    return {"version": version, "abs_start": start, "abs_end": stop}


@pytest.mark.parametrize(
    ("value", "fields"),
    [
        (["3", "3", "3"], {"policy_version": "3"}), ([7], {"policy_version": "7"}),
        # Two calls, two trained stretches: the tool's token counts with the call that reads it.
        (["3", "4"], {"version_rle": [["3", 4], ["4", 3]]}),
        (["3", "4", "5"], {}), ([], {}), (None, {}), ("3", {}), ([True], {}), ([""], {}), ([None], {}),
        ([[span("3", 2, 4)], [span("3", 5, 6)]], {"policy_version": "3"}),
        ([[span("3", 2, 3), span("4", 3, 4)], [], [span("4", 5, 6)]], {"version_rle": [["3", 3], ["4", 4]]}),
        ([{"spans": [span("3", 2, 3)]}, {"spans": [span("4", 3, 6)]}], {"version_rle": [["3", 3], ["4", 4]]}),
        ([[span("3", 2, 9)]], {}), ([[span("4", 3, 6)], [span("3", 2, 3)]], {}), ([[span("", 2, 6)]], {}),
        ([[{"version": "3"}]], {}), ([["3"]], {}),
    ],
)
def test_versions_of_a_row(value: Any, fields: dict[str, Any]) -> None:
    assert of_row(value, MASK) == fields
    assert sum(n for _, n in fields.get("version_rle", [])) in (0, len(MASK))


def test_weights_that_change_during_an_answer_of_sglang_are_told() -> None:
    spans = [{"version": "11", "start": 0, "end": 1}, {"version": "12", "start": 1, "end": 2}]
    meta = {**SGLANG["response"]["meta_info"], "weight_versions": spans}
    step = read(jsonl(changed(SGLANG, "response", "meta_info", to=meta)))[1][0].steps[0]
    assert step.policy_version == "12" and step.extra["policy_versions"] == [["11", 1], ["12", 1]]
    assert "weight_versions" not in step.extra["meta_info"]
    without = {**meta, "weight_version": None, "weight_versions": spans[:1]}
    step = read(jsonl(changed(SGLANG, "response", "meta_info", to=without)))[1][0].steps[0]
    assert step.policy_version == "11" and "policy_versions" not in step.extra
    bad = read(jsonl(changed(SGLANG, "response", "meta_info", to={**meta, "weight_versions": [5]})))[2]
    assert "weight_versions[0] must be a JSON object" in bad[0].reason
