"""A teacher's values beside a row: of its tokens, or of several ids at each place."""

from typing import Any

import numpy as np
import pytest

from rollout_inspector.formats.teacher_columns import teacher_columns
from rollout_inspector.streams.trajectory import ids_array, is_teacher
from tests.samples.formats import jsonl, read

IDS = ids_array([5, 6, 7, 8])


def columns(**value: Any) -> dict[str, list[float | None]]:
    return {
        name: [None if np.isnan(number) else round(float(number), 3) for number in values]
        for name, values in teacher_columns(value, IDS).items()
    }


def test_a_value_for_each_token_of_the_row_or_of_its_response() -> None:
    assert columns(teacher_log_probs=[-1, -2]) == {"teacher_logprobs": [None, None, -1, -2]}
    assert columns(teacher_logprobs=[[None], [-1], [-2], [-3]]) == {"teacher_logprobs": [None, -1, -2, -3]}
    assert columns(other=[1]) == {}


@pytest.mark.parametrize(
    ("values", "ids"),
    [
        ("teacher_logprobs", "teacher_ids"), ("teacher_topk_log_probs", "teacher_topk_ids"),
        ("teacher_topk_logprobs", "teacher_topk_indices"), ("prompt_token_id_logprobs", "prompt_logprob_token_ids"),
    ],
)
def test_of_several_ids_the_own_one_and_the_likeliest(values: str, ids: str) -> None:
    value = {values: [[-0.5, -1.5], [-0.2, -2.0], [-3.0, -0.1]], ids: [[9, 6], [1, 2], [8, 3]]}
    assert columns(**value) == {
        "teacher_logprobs": [None, -1.5, None, -3.0], "teacher_best_logprobs": [None, -0.5, -0.2, -0.1],
    }


@pytest.mark.parametrize(
    "value",
    [
        {"teacher_logprobs": [0.0] * 5}, {"teacher_logprobs": "x"}, {"teacher_logprobs": [[-1, -2]] * 4},
        {"teacher_logprobs": [[-1, -2]] * 4, "teacher_ids": [[1]] * 4},
        {"teacher_logprobs": [[-1]] * 4, "teacher_ids": [[1]] * 3}, {"teacher_logprobs": [{"a": 1}] * 4},
    ],
)
def test_what_fits_nowhere_is_left_out(value: dict[str, Any]) -> None:
    assert columns(**value) == {}


LINES = {
    "slime": {"tokens": [5, 6, 7, 8], "response_length": 2, "rollout_log_probs": [-1.0, -1.0], "loss_mask": [1, 1],
              "status": "completed", "teacher_log_probs": [-0.5, -0.25]},
    "verl": {"prompt_ids": [5, 6], "response_ids": [7, 8], "response_mask": [1, 1], "response_logprobs": [-1.0, -1.0],
             "extra_fields": {"teacher_ids": [[0], [6], [7], [8]],
                              "teacher_logprobs": [[0.0], [-2.0], [-0.5], [-0.25]]}},
}


@pytest.mark.parametrize("trainer", LINES)
def test_rows_of_trainers_have_the_column(trainer: str) -> None:
    _, (trajectory,), rejected = read(jsonl(LINES[trainer]))
    assert not rejected
    assert trajectory.rows[0].columns["teacher_logprobs"][-2:].tolist() == [-0.5, -0.25]
    assert "teacher" not in str(trajectory.extra)


def test_columns_of_teachers_are_known_by_their_names() -> None:
    names = ("teacher_logprobs", "teacher/qwen/logprobs", "teacher_log_probs", "old_log_probs", "teacher_best_logprobs")
    assert [is_teacher(name) for name in names] == [True, True, True, False, False]
