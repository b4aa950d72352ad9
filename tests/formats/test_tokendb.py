"""Segments of tokendb: turns that store what they add, attempts of a resumed run, values for each sampled token."""

import io
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_inspector import formats
from rollout_inspector.formats import Rejected, Source
from rollout_inspector.streams.trajectory import Trajectory
from tests.samples.formats import jsonl, read


def turn(step: int, ob: list[int], ac: list[int], **more: Any) -> dict[str, Any]:
    return {
        "run_id": "r", "run_attempt": 0, "writer_id": "w", "split": "train", "iteration": 4, "sampling_client_step": 3,
        "group_idx": 1, "traj_idx": 2, "step_idx": step, "tags": ["math"], "source": "rollout", "ob_tokens": ob,
        "ob_is_delta": step > 0, "ac_tokens": ac, "ac_logprobs": [-0.5] * len(ac), "stop_reason": None,
        "total_reward": 1.0, "metrics": {"group/kl": 0.25}, "token_metrics": {"teacher/logprobs": [-0.25] * len(ac)},
        "filtered_reason": None, **more,
    }


TURNS = [turn(0, [1, 2], [10, 11]), turn(1, [30], [40], stop_reason="stop")]


def parquet(rows: list[dict[str, Any]]) -> bytes:
    """As its writer stores them: maps of numbers and of lists."""
    number, text = pa.float32(), pa.string()
    kinds = {"metrics": pa.map_(text, number), "token_metrics": pa.map_(text, pa.list_(number))}
    inferred = pa.Table.from_pylist([{name: one[name] for name in one if name not in kinds} for one in rows])
    for name, kind in kinds.items():
        inferred = inferred.append_column(name, pa.array([list(one[name].items()) for one in rows], kind))
    file = io.BytesIO()
    pq.write_table(inferred, file)
    return file.getvalue()


@pytest.mark.parametrize("is_parquet", [False, True])
def test_turns_become_steps_with_the_teachers_values_as_a_column(is_parquet: bool) -> None:
    chosen, items = formats.read(Source.of_bytes(parquet(TURNS) if is_parquet else jsonl(*TURNS)))
    (found,) = items
    assert chosen.name == "tokendb" and isinstance(found, Trajectory)
    assert (found.external_id, found.group, found.reward, found.training_step) == ("train/4/1/2", "train/4/1", 1.0, 4)
    first, second = found.steps
    assert second.prompt_ids.tolist() == [1, 2, 10, 11, 30] and second.completion_ids.tolist() == [40]
    assert (first.policy_version, second.finish_reason, found.stop_reason) == ("3", "stop", "stop")
    np.testing.assert_array_equal(found.rows[0].columns["teacher/logprobs"], [0, 0, -0.25, -0.25, 0, -0.25])
    assert "token_metrics" not in first.extra and "0.25" in str(first.extra["metrics"])


def test_a_reset_an_attempt_and_a_filtered_group_are_kept_apart() -> None:
    reset = turn(1, [99, 98], [40], ob_is_delta=False)
    again = [{**one, "run_attempt": 1, "source": "filtered", "filtered_reason": "same rewards"} for one in TURNS]
    _, found, rejected = read(jsonl(TURNS[0], reset, *again))
    assert not rejected and [one.external_id for one in found] == ["train/4/1/2", "train/4/1/2/attempt-1"]
    assert found[0].steps[1].prompt_ids.tolist() == [99, 98]
    assert found[1].stop_reason == "same rewards" and found[1].extra["source"] == "filtered"


@pytest.mark.parametrize(
    ("lines", "words"),
    [([TURNS[1]], "that turn is not on the lines before"), ([turn(0, [1], ["x"])], "ac_tokens"),  # type: ignore[list-item]
     ([{**TURNS[0], "ob_tokens": None}], "ob_tokens"), ([TURNS[0], turn(2, [5], [6])], "not on the lines before")],
)
def test_what_cannot_be_read_is_a_sentence(lines: list[Any], words: str) -> None:
    _, found, (rejected,) = read(jsonl(*lines), "tokendb")
    assert not found and isinstance(rejected, Rejected) and words in rejected.reason


@pytest.mark.parametrize("metrics", [5, "text", [1, 2], [["a"]], {"a": "b"}, {"a": [1.0]}, [[1, [2.0, 3.0], 4]], None])
def test_values_that_do_not_fit_the_tokens_are_no_column(metrics: Any) -> None:
    _, (found,), rejected = read(jsonl({**TURNS[0], "token_metrics": metrics}))
    assert not rejected and not found.rows
