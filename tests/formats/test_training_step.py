"""The training step of what is read: who says it, and in which order they are asked."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector import formats
from rollout_inspector.formats import FileRefused, Source
from rollout_inspector.formats.folders import files_of
from rollout_inspector.formats.readers import inspector_jsonl
from rollout_inspector.formats.training_step import ANY, MAX_STEP, TrainingStepRule, checked_rule
from rollout_inspector.streams.trajectory import Trajectory

ROW = {"token_ids": [[1, 2]], "token_loss_mask": [[0, 1]], "idx": 4}
TRL = {"step": 7, "prompt": "a", "completion": "b", "advantage": 0.5}


def steps_in(*records: dict[str, Any], path: str = "file.jsonl", rule: TrainingStepRule = ANY) -> list[int | None]:
    source = Source.of_bytes(b"\n".join(json.dumps(one).encode() for one in records))
    source.path = path
    found = list(formats.read(source, training_step=rule)[1])
    assert all(isinstance(one, Trajectory) for one in found), found
    return [one.training_step for one in found if isinstance(one, Trajectory)]


@pytest.mark.parametrize(
    ("path", "step"),
    [
        ("train_data_step12.jsonl", 12), ("runs/step_000123/rank_0.jsonl", 123), ("global_step_40_evals/x.jsonl", 40),
        ("iter-5.jsonl.gz", 5), ("step_1/step_2/a.jsonl", 2), ("steps12.jsonl", None), ("footstep_3.jsonl", None),
        ("step_99999999999.jsonl", None), ("rank_0.jsonl", None),
    ],
)
def test_a_path_tells_it(path: str, step: int | None) -> None:
    assert steps_in(ROW, path=path) == [step]


@pytest.mark.parametrize(
    ("record", "step"),
    [
        (TRL, 7), (ROW | {"global_step": [3]}, 3), (ROW | {"metadata": {"train_step": 5}}, 5), (TRL | {"step": 2.0}, 2),
        (TRL | {"step": -1}, None), (TRL | {"step": "7"}, None), (TRL | {"step": True}, None),
        (TRL | {"step": 1.5}, None),
        (TRL | {"step": MAX_STEP + 1}, None), (ROW | {"step": 3}, None),
    ],
)
def test_a_record_tells_it(record: dict[str, Any], step: int | None) -> None:
    assert steps_in(record) == [step]


def test_who_is_asked_first() -> None:
    path = "epoch_4/step_9.jsonl"
    assert steps_in(TRL, path=path) == [7]
    assert steps_in(ROW, path=path) == [9]
    assert steps_in(TRL, path=path, rule=checked_rule(pattern="epoch_([0-9]+)")) == [4]
    assert steps_in(TRL, path="other.jsonl", rule=checked_rule(pattern="epoch_([0-9]+)")) == [7]
    assert steps_in(TRL, path=path, rule=checked_rule("0")) == [0]


def test_steps_that_are_out_of_order_missing_or_there_twice_are_kept_as_they_are() -> None:
    assert steps_in(TRL | {"step": 9}, TRL | {"step": 3}, TRL | {"step": None}, TRL | {"step": 3}) == [9, 3, None, 3]


@pytest.mark.parametrize(
    ("step", "pattern", "sentence"),
    [
        ("-1", "", "whole number from 0"), ("x", "", "whole number"), ("9" * 5000, "", "whole number"),
        ("3", "(1)", "not both"), ("", "(", "no regular expression"), ("", "step", "exactly one group"),
        ("", "(a)(b)", "exactly one group"), ("", "a" * 300, "200 characters"),
    ],
)
def test_what_a_user_says_wrong_is_a_sentence(step: str, pattern: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        checked_rule(step, pattern)


def test_a_pattern_that_takes_for_ever_finds_nothing() -> None:
    assert checked_rule(pattern="(a|a?)+$").in_path("a" * 200 + "!") is None


def test_our_own_lines_keep_it() -> None:
    one = Trajectory("a", training_step=5)
    out = io.BytesIO()
    inspector_jsonl.write([one, replace(one, external_id="b", training_step=None)], out)
    read = list(inspector_jsonl.read(Source.of_bytes(out.getvalue())))
    assert [getattr(item, "training_step", "?") for item in read] == [5, None]


def test_a_folder_is_read_in_the_order_of_its_steps(tmp_path: Path) -> None:
    for name in ("step_10/rank_0.jsonl", "step_9/rank_1.jsonl", "step_9/rank_0.jsonl", "notes.txt", ".hidden/a.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("{}")
    (tmp_path / "link.jsonl").symlink_to("/etc/passwd")
    found = [str(one.relative_to(tmp_path)) for one in files_of(tmp_path)]
    assert found == ["step_9/rank_0.jsonl", "step_9/rank_1.jsonl", "step_10/rank_0.jsonl"]
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileRefused, match="holds no files"):
        files_of(tmp_path / "empty")
