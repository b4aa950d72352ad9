"""What engines tell in arrays is read in each form that engines and trainers write, at every door."""

import base64
import io
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import diagnose
from rollout_inspector.formats.engine_fields import summary, summary_of, without_arrays
from rollout_inspector.streams.alternatives import MAX_KEPT, kept_at
from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from tests.samples.formats import CALL, GYM, changed, jsonl, own_line, read
from tests.samples.reader_shapes import EVENT, HARBOR, RLLM_EPISODE, SGLANG
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


KEPT_IDS = [10, 4, 7, 11]
KEPT_TEXT = text(np.array(KEPT_IDS, np.int32))
KEPT = [[10, 4, 7], [11]]
SPANS = [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": 2}]
RLLM = {"session_id": "s", "prompt_token_ids": [1, 2], "completion_token_ids": [3, 4], "messages": []}
ATIF = {"schema_version": "ATIF-v1.8", "agent": {"name": "a"}, "steps": [{
    "step_id": 1, "source": "agent", "message": "4", "metrics": {
        "prompt_token_ids": [1], "completion_token_ids": [3, 4]}}]}
CAPTURE = {"rollout_id": "r", "prompt_token_ids": [1], "generation_token_ids": [3, 4]}
BATCH = {"id": "b", "custom_id": "t", "error": None, "response": {"status_code": 200, "body": CALL["response"]}}
DOORS: list[tuple[dict[str, Any], tuple[Any, ...], int]] = [
    (CALL, ("response", "choices", 0), 0),
    (BATCH, ("response", "body", "choices", 0), 0),
    (EVENT, ("data", "response", "choices", 0), 0),
    (RLLM, (), 0),
    (RLLM_EPISODE, ("trajectories", 0, "steps", 0, "model_output"), 0),
    (RLLM_EPISODE, ("trajectories", 0, "steps", 0), 0),
    (GYM, ("response", "output", 1), 0),
    (CAPTURE, (), 0),
    (ATIF, ("steps", 0, "metrics"), 0),
    (SGLANG, ("response", "meta_info"), 0),
    (TRACE_04, ("traces", 0, "nodes", 1), 0),
]
"""Records of one call or more, where an engine's fields stand, and the step that has two tokens."""


def told(record: dict[str, Any], path: tuple[Any, ...], **fields: Any) -> Trajectory:
    for name, value in fields.items():
        record = changed(record, *path, name, to=value)
    _, trajectories, rejected = read(jsonl(record))
    assert not rejected
    return trajectories[0]


@pytest.mark.parametrize(("record", "path", "index"), DOORS)
def test_kept_sets_and_spans_of_versions_are_read_at_every_door(record: Any, path: Any, index: int) -> None:
    n = len(told(record, path).steps[index].completion_ids)
    spans = [{"version": "v1", "start": 0, "end": 1}, {"version": "v2", "start": 1, "end": n + 1}]
    found = told(record, path, sampling_mask=[[1] * 3, *[[1]] * (n - 1)], weight_versions=spans)
    step = found.steps[index]
    assert step.kept_set is not None and step.kept_set.tolist() == [3.0, *[1.0] * (n - 1)]
    assert step.extra["policy_versions"] == [["v1", 1], ["v2", n]]
    assert "sampling_mask" not in str(step.extra) and "weight_versions" not in str(step.extra)
    assert "mixed_policy_versions" in {finding.kind for finding in diagnose(found, None)}


@pytest.mark.parametrize(
    "value",
    [KEPT, {"token_ids": KEPT}, {"token_ids": [10, 4, 7, 11], "offsets": [0, 3, 4]}, {"ids": [1], "counts": [3, 1]},
     {"ids": "", "counts": base64.b64encode(np.array([3, 1], np.int32).tobytes()).decode()},
     {"counts": {"data": text(np.array([3, 1], np.int64)), "shape": [2], "dtype": "int64"}},
     {"counts": [3, 1], "ids": KEPT_TEXT}, {"counts": [3, 1], "ids": [10, 4, 7, -1]},
     {"counts": [3, 1], "ids": [10, 4, 7, 2**31]}, {"counts": [3, 1], "ids": [0.5, 4, 7, 1]}],
)
def test_every_form_of_a_kept_set_has_the_same_sizes_and_its_ids_where_they_can_be_read(value: Any) -> None:
    step = told(CALL, ("response", "choices", 0), sampling_mask=value).steps[0]
    assert step.kept_set is not None and step.kept_set.tolist() == [3, 1] and "left_out" not in step.extra
    has_ids = not isinstance(value, dict) or "token_ids" in value or value.get("ids") == KEPT_TEXT
    assert step.kept_ids is None or step.kept_ids.tolist() == KEPT_IDS
    assert (step.kept_ids is not None) is has_ids


def test_of_large_kept_sets_the_sizes_alone_are_kept() -> None:
    for size, has_ids in ((MAX_KEPT * 2 - 1, True), (MAX_KEPT * 2, False)):
        for value in ([[*range(size)], [11]], {"counts": [size, 1], "ids": [*range(size), 11]}):
            step = told(CALL, ("response", "choices", 0), sampling_mask=value).steps[0]
            assert step.kept_set is not None and step.kept_set.tolist() == [size, 1]
            assert (step.kept_ids is not None) is has_ids and "sampling_mask" not in str(step.extra)


def test_ids_of_our_own_lines_must_be_as_many_as_the_sizes_tell() -> None:
    sizes = np.array([2, np.nan, 1], np.float32)
    step = Step(ids_array([1]), ids_array([5, 6, 7]), kept_set=sizes, kept_ids=ids_array([5, 9, 7]))
    (found,) = read(own_line(Trajectory("a", (step,))))[1]
    kept = found.steps[0]
    assert [kept_at(kept.kept_set, kept.kept_ids, n).tolist() for n in range(3)] == [[5, 9], [], [7]]
    for other in (replace(step, kept_ids=ids_array([5, 9])), replace(step, kept_set=None)):
        (line,) = read(own_line(Trajectory("a", (other,))))[2]
        assert "kept_ids are not as many as kept_set tells" in line.reason


@pytest.mark.parametrize("value", [[[1]], [[1], 2], "x", 5, {}, {"counts": "no"}, {"counts": [[1], [2, 3]]}, [None]])
def test_a_kept_set_that_does_not_fit_is_left_out_with_its_reason(value: Any) -> None:
    step = told(CALL, ("response", "choices", 0), sampling_mask=value).steps[0]
    assert step.kept_set is None and "sampling_mask" in step.extra["left_out"]


def test_rows_have_a_kept_set_as_a_column_and_tokens_that_nobody_sampled_have_none() -> None:
    row = {"token_ids": [1, 2, 10, 11], "mask": [0, 0, 1, 1], "advantages": [0.0, 0, 1, 1], "logprobs": [0, 0, -1, -1]}
    for value in (KEPT, {"counts": [0, 0, 3, 1]}):
        (found,) = read(jsonl({**row, "sampling_mask": value}), "prime_rl_samples")[1]
        np.testing.assert_array_equal(found.rows[0].columns["kept_set"], [np.nan, np.nan, 3, 1])
        assert "sampling_mask" not in found.extra
    (found,) = read(jsonl({**row, "sampling_mask": [[1]]}), "prime_rl_samples")[1]
    assert "kept_set" not in found.rows[0].columns and "sampling_mask" in found.rows[0].extra["left_out"]


def test_turns_of_harbor_have_what_their_extra_lists() -> None:
    lists = {"sampling_mask": [[[1]], KEPT], "weight_versions": [None, SPANS]}
    details = [{**HARBOR["agent_result"]["rollout_details"][0], "extra": lists}]
    steps = told(HARBOR, ("agent_result",), rollout_details=details).steps
    kept = [step.kept_set.tolist() for step in steps if step.kept_set is not None]
    assert kept == [[1], [3, 1]] and [step.policy_version for step in steps] == ["", "v2"]


def test_spans_in_a_pushed_line_of_our_own_tell_mixed_versions_too() -> None:
    step = Step(ids_array([1]), ids_array([2, 3]), kept_set=np.array([3, np.nan], np.float32), extra={
        "weight_versions": SPANS})
    (found,) = read(own_line(Trajectory("a", (step,))))[1]
    np.testing.assert_array_equal(found.steps[0].kept_set, step.kept_set)
    assert "mixed_policy_versions" in {finding.kind for finding in diagnose(found, None)}
