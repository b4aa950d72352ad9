"""Rows for other trainers: aligned as each of them wants, and refused when they are unsound."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.formats.writers.exports import EXPORTS, padded, row_fault, rows_of, step_rows_of, write
from rollout_inspector.refusal import Refusal, Remedy
from rollout_inspector.streams.trajectory import NO_IDS, Row, Step, Trajectory
from tests.conftest import ROOT
from tests.samples.formats import read
from tests.storage.build import chain, rows_only

VALUE = chain("t", 3)
ROW = next(iter(rows_of(VALUE)))


def export(name: str, *values: Trajectory, force: bool = False, **more: Any) -> Any:
    """The lines of a file, or the one object of lists."""
    file = io.BytesIO()
    target = more.pop("target", EXPORTS[name])
    n = write(target, values, file, force, **more)
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    if target.columns:
        (batch,) = lines
        assert {len(batch[key]) for key in target.columns} == {n}
        return batch
    assert len(lines) == n
    return lines


def test_a_row_is_split_at_its_first_trained_token() -> None:
    (one,) = export("verl", VALUE)
    assert one["prompt_ids"] == VALUE.steps[0].prompt_ids.tolist()
    assert one["prompt_ids"] + one["response_ids"] == ROW.ids.tolist()
    assert len(one["response_mask"]) == len(one["response_ids"]) and sum(one["response_mask"]) == ROW.loss_mask.sum()
    batch = export("trl", VALUE, chain("u", 1, seed=5))
    assert batch["prompt_ids"][0] == one["prompt_ids"] and batch["completion_ids"][0] == one["response_ids"]
    assert batch["env_mask"][0] == one["response_mask"] and batch["external_id"] == ["t", "u"]


def test_what_belongs_to_a_token_moves_with_it() -> None:
    (one,) = export("tinker", VALUE)
    assert len({len(one[key]) for key in ("model_input", "target_tokens", "logprobs", "mask")}) == 1
    for n, trained in enumerate(one["mask"]):
        if trained:
            assert ROW.logprobs is not None
            assert one["target_tokens"][n] == ROW.ids[n + 1] and one["logprobs"][n] == pytest.approx(
                ROW.logprobs[n + 1]
            )


def test_messages_are_cut_where_the_mask_changes() -> None:
    (one,) = export("nemo_message_log", VALUE, decode=lambda ids: f"{len(ids)} ids")
    log = one["message_log"]
    assert [message["role"] for message in log] == ["user", "assistant", *["environment", "assistant"] * 2]
    assert [token for message in log for token in message["token_ids"]] == ROW.ids.tolist()
    assert all(("generation_logprobs" in message) == (message["role"] == "assistant") for message in log)
    assert log[0]["content"] == "7 ids"
    assert [message["trainable"] for message in log] == [False, True] * 3
    assert one["num_turns"] == 3 and one["full_rollout"]["external_id"] == VALUE.external_id


def test_the_lines_that_verify_a_message_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The docs' own lines, over a rollout of the lengths that the guide of NeMo Gym prints (source 5)."""
    stream, steps = NO_IDS, []
    for n_new, n_sampled in ((15, 23), (8, 45), (12, 18)):
        prompt = np.concatenate([stream, np.arange(n_new, dtype=np.int32)])
        ids = np.arange(n_sampled, dtype=np.int32)
        steps.append(Step(prompt, ids, np.full(n_sampled, -0.5, dtype=np.float32), finish_reason="stop"))
        stream = steps[-1].stream
    with (tmp_path / "rollouts.jsonl").open("wb") as file:
        write(EXPORTS["nemo_message_log"], [Trajectory("t", tuple(steps), reward=1.0)], file)
    monkeypatch.chdir(tmp_path)
    page = (ROOT / "docs" / "exports.md").read_text(encoding="utf-8")
    exec(page.partition("**Verify a message log.**")[2].partition("```python\n")[2].partition("```")[0], {})
    assert capsys.readouterr().out == (
        "Turns: 3\nReward: 1.0\n  user: 15 tokens, trainable=False\n  assistant: 23 tokens, trainable=True\n"
        "  environment: 8 tokens, trainable=False\n  assistant: 45 tokens, trainable=True\n"
        "  environment: 12 tokens, trainable=False\n  assistant: 18 tokens, trainable=True\n"
    )


def test_labels_leave_out_what_is_not_trained() -> None:
    (one,) = export("sft", VALUE)
    assert [label != -100 for label in one["labels"]] == ROW.loss_mask.tolist()


def test_supervised_rows_are_padded_to_one_length() -> None:
    n = len(ROW.ids)
    short, long = export("sft", chain("s", 1), VALUE, target=padded(EXPORTS["sft"], n + 2, pad_id=9))
    assert all(len(one[key]) == n + 2 for one in (short, long) for key in one)
    assert long["input_ids"][n:] == [9, 9] and long["labels"][n:] == [-100] * 2 and long["attention_mask"][n:] == [0, 0]
    assert sum(short["attention_mask"]) == len(rows_of(chain("s", 1))[0].ids)
    tight = padded(EXPORTS["sft"], n - 1)
    with pytest.raises(Refusal, match=f"has {n} tokens, and rows are padded to {n - 1}"):
        export("sft", VALUE, target=tight)
    assert len(export("sft", VALUE, target=tight, force=True)[0]["input_ids"]) == n - 1


# -- SkyRL


def test_a_whole_run_is_one_batch() -> None:
    batch = export("skyrl", VALUE, replace(chain("g-7", 1), group="g"), replace(chain("x", 1), group=""))
    assert batch["trajectory_ids"] == [
        {"instance_id": "g", "repetition_id": 0}, {"instance_id": "g", "repetition_id": 7},
        {"instance_id": "x", "repetition_id": 0},
    ]
    assert batch["rewards"] == [0.5] * 3 and batch["is_last_step"] is None and batch["stop_reasons"] == ["answered"] * 3
    assert batch["prompt_token_ids"][0] + batch["response_ids"][0] == ROW.ids.tolist()


def test_repetitions_of_one_prompt_never_share_a_number() -> None:
    values = [replace(chain(name, 1), group="g") for name in ("a", "g-1", "b", "g-0", "g-1x")]
    ids = export("skyrl", *values)["trajectory_ids"]
    assert len({one["repetition_id"] for one in ids}) == 5 and {one["instance_id"] for one in ids} == {"g"}


def step_wise_faults(batch: dict[str, Any]) -> list[str]:
    """The five invariants of docs.skyrl.ai, step-wise training, "Key Invariants", each by its number."""
    last, ids = batch.get("is_last_step"), batch.get("trajectory_ids")
    if last is None or ids is None:
        return ["1 both are present"]
    n = len(batch["response_ids"])
    if any(isinstance(value, list) and len(value) != n for value in batch.values()):
        return ["2 lengths match"]
    faults = [] if last[-1] is True else ["3 the last is the end of its trajectory"]
    names = [json.dumps(one) for one in ids]
    runs = [name for i, name in enumerate(names) if not i or names[i - 1] != name]
    if len(runs) != len(set(runs)):
        faults.append("4 steps of a trajectory are adjacent")
    if any(names[i] != names[i + 1] and not last[i] for i in range(n - 1)):
        faults.append("5 a trajectory ends where the ids change")
    return faults


def test_step_wise_output_has_the_five_invariants() -> None:
    broken = chain("b", 3, broken_at=1)
    batch = export("skyrl_step_wise", VALUE, broken, chain("c", 1))
    assert step_wise_faults(batch) == []
    assert batch["is_last_step"] == [False, False, True, False, False, True, True]
    assert [sum(one) for one in batch["rewards"]] == [0, 0, 0.5, 0, 0, 0.5, 0.5] and batch["rewards"][2][-1] == 0.5
    for n, step in enumerate((*VALUE.steps, *broken.steps)):
        assert batch["prompt_token_ids"][n] == step.prompt_ids.tolist()
        assert batch["response_ids"][n] == step.completion_ids.tolist() and all(batch["loss_masks"][n])


@pytest.mark.parametrize(
    ("key", "value", "number"),
    [
        ("is_last_step", None, "1"), ("trajectory_ids", None, "1"), ("rewards", [[0]], "2"),
        ("is_last_step", [False, True, False], "3"), ("trajectory_ids", ["a", "b", "a"], "4"),
        ("trajectory_ids", ["a", "b", "b"], "5"),
    ],
)
def test_each_invariant_can_fail(key: str, value: Any, number: str) -> None:
    batch = export("skyrl_step_wise", VALUE)
    assert any(fault.startswith(number) for fault in step_wise_faults({**batch, key: value}))


def test_masks_of_single_steps_are_kept() -> None:
    rows = tuple(
        Row(step.stream, np.arange(len(step.stream)) == len(step.stream) - 2, np.full(len(step.stream), -1, np.float32),
            step_indices=(n,))
        for n, step in enumerate(VALUE.steps)
    )
    batch = export("skyrl_step_wise", replace(VALUE, rows=rows))
    assert [sum(one) for one in batch["loss_masks"]] == [1, 1, 1] and step_wise_faults(batch) == []


def test_several_rows_are_no_whole_trajectory() -> None:
    broken = chain("b", 3, broken_at=1)
    with pytest.raises(Refusal, match=r"'b' .*2 rows: step 1 does not continue .* a strategy .*It was x\.$"):
        export("skyrl", broken, cause=lambda _: "It was x.")
    assert len(export("skyrl", broken, force=True)["response_ids"]) == 2
    assert len(export("prime_rl", broken)) == 2


def test_a_batch_needs_rewards_of_one_kind_and_a_row() -> None:
    with pytest.raises(Refusal, match="no reward"):
        export("skyrl", replace(VALUE, reward=None))
    with pytest.raises(Refusal, match="no row to write"):
        export("skyrl")
    token_rewards = replace(ROW, columns={"rewards": np.ones(len(ROW.ids), dtype=np.float32)})
    by_token = export("skyrl", Trajectory("r", rows=(token_rewards,)), VALUE)["rewards"]
    assert all(isinstance(one, list) for one in by_token) and sum(by_token[1]) == 0.5


# -- refusals


BAD = {
    "finding length_mismatch: The row has 3 ids": rows_only().rows[1],
    "finding mask_overrun: None of the": replace(ROW, loss_mask=np.zeros(len(ROW.ids), dtype=np.bool_)),
    "no log-probabilities": replace(ROW, logprobs=None),
    "finding length_mismatch: .*logprobs has 2": replace(ROW, logprobs=np.full(2, -1, dtype=np.float32)),
    "finding logprob_invalid: .* is nan": replace(ROW, logprobs=np.full(len(ROW.ids), np.nan, dtype=np.float32)),
    "finding logprob_invalid: .* is 0.5": replace(ROW, logprobs=np.full(len(ROW.ids), 0.5, dtype=np.float32)),
    "finding advantage_misplaced": replace(
        ROW, columns={"advantages": (~ROW.loss_mask).astype(np.float32)}
    ),
}


@pytest.mark.parametrize("reason", list(BAD))
@pytest.mark.parametrize("name", list(EXPORTS))
def test_an_unsound_row_is_refused_with_its_finding_unless_told_to(reason: str, name: str) -> None:
    bad = Trajectory("bad", rows=(BAD[reason],), reward=1.0)
    if name == "sft" and "log" in reason and "length" not in reason:
        assert len(export(name, bad)) == 1  # nobody asks a supervised row for log-probabilities
        return
    if "advantage" in reason and name not in ("prime_rl", "tinker"):
        assert export(name, bad)  # the others write no advantages
        return
    with pytest.raises(Refusal, match=f"Row 0 of trajectory 'bad' cannot be exported as {name}: .*{reason}"):
        export(name, bad)
    assert export(name, bad, force=True)


@pytest.mark.parametrize("name", ["prime_rl", "tinker"])
def test_one_advantage_beside_every_token_is_written_where_tokens_are_trained(name: str) -> None:
    """NeMo RL expands a row's advantage over all of its tokens, the masked ones too."""
    row = replace(ROW, columns={"advantages": np.full(len(ROW.ids), 0.5, dtype=np.float32)})
    (one,) = export(name, Trajectory("a", rows=(row,), reward=1.0))
    assert one["advantages"] == [0.5 if trained else 0.0 for trained in one["mask"]]


@pytest.mark.parametrize("name", list(EXPORTS))
def test_text_alone_has_nothing_to_train_on(name: str) -> None:
    said = Trajectory("t", (Step(NO_IDS, NO_IDS, text="4"),), reward=1.0)
    with pytest.raises(Refusal, match="It has no token ids"):
        export(name, said)


@pytest.mark.parametrize("name", list(EXPORTS))
def test_a_trajectory_with_an_unsound_row_is_left_out_whole(name: str) -> None:
    bad = Trajectory("bad", rows=(ROW, replace(ROW, loss_mask=np.zeros(len(ROW.ids), dtype=np.bool_))), reward=1.0)
    told: list[str] = []
    assert export(name, bad, VALUE, bad, leave_out=told.append) == export(name, VALUE)
    (one,) = set(told)
    assert len(told) == 2 and f"trajectory 'bad' cannot be exported as {name}: finding mask_overrun" in one
    assert "--" not in one, "what is left out needs no way out"
    with pytest.raises(Refusal) as refusal:
        export(name, bad)
    assert refusal.value.remedy is Remedy.LEAVE_OUT and str(refusal.value) == one


def test_a_sound_row_has_no_fault() -> None:
    assert row_fault(ROW, True, True) is None


def test_a_first_token_that_is_trained_has_no_prompt() -> None:
    row = replace(ROW, loss_mask=np.ones(len(ROW.ids), dtype=np.bool_), logprobs=np.full(len(ROW.ids), -1, np.float32))
    value = Trajectory("x", rows=(row,), reward=1.0)
    for name, target in EXPORTS.items():
        if target.needs_prompt:
            with pytest.raises(Refusal, match="nothing stands before it"):
                export(name, value)
        else:
            assert export(name, value)


def test_other_rows_can_be_given() -> None:
    other = replace(ROW, ids=ROW.ids[::-1].copy())
    (one,) = export("verl", VALUE, rows=lambda _: (other,))
    assert one["prompt_ids"] + one["response_ids"] == ROW.ids[::-1].tolist()


def test_our_skyrl_export_is_read_back() -> None:
    batch = export("skyrl", replace(VALUE, external_id="g-3"))
    name, (back,), rejected = read(json.dumps(batch).encode())
    assert (name, rejected, back.external_id, back.group, back.reward) == ("skyrl", [], "g-3", "g", 0.5)
    assert np.array_equal(back.rows[0].ids, ROW.ids) and np.array_equal(back.rows[0].loss_mask, ROW.loss_mask)


def test_verls_number_of_turns_is_left_out_where_no_call_is_known() -> None:
    (whole, _) = rows_only().rows
    for extra, turns in ({}, None), ({"num_turns": 6}, 6), ({"num_turns": 0}, None), ({"num_turns": "6"}, None):
        value = Trajectory("t", rows=(whole,), reward=1.0, extra=extra)
        (line,) = export("verl", value)
        assert line.get("num_turns") == turns
    assert [line["num_turns"] for line in export("verl", VALUE, chain("u", 1))] == [6, 2]


def test_rows_of_steps_that_continue_each_other_are_not_said_to_break() -> None:
    """A step-wise source keeps a row for each step; each begins with the whole row before it."""
    with pytest.raises(Refusal, match=r"It is 3 rows, and a batch") as refused:
        export("skyrl", replace(VALUE, rows=tuple(step_rows_of(VALUE))))
    assert "does not continue" not in str(refused.value)
