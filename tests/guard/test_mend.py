"""``rollout-inspector mend``: what is written passes the check, the rest stays as it was, every change is told."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector import formats
from rollout_inspector.commands.main import main
from rollout_inspector.formats import Rejected, Source
from rollout_inspector.formats.shapes import decode
from rollout_inspector.formats.writers.exports import EXPORTS, write
from rollout_inspector.formats.writers.mask_patches import PATCHED, without
from rollout_inspector.guard import mended_file
from rollout_inspector.guard.checked_files import check_files
from rollout_inspector.guard.mended_file import OWN, MendRefused
from rollout_inspector.guard.mended_trajectory import MendedPart, MendedTrajectory, MendWay
from rollout_inspector.refusal import Remedy
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Row, Trajectory
from rollout_inspector.text import chat_templates, tokenizers
from rollouts.gallery import BUNDLE
from rollouts.sampling.demo_policy import MODEL_DIR
from tests.samples.guard import lines_of


@pytest.fixture(scope="module")
def policy() -> Iterator[dict[str, Any]]:
    codec = tokenizers.load(MODEL_DIR)
    renderer = chat_templates.renderer(codec, codec.chat_template)
    yield {"codec": codec, "renderer": renderer}
    codec.close()


def read(path: Path) -> dict[str, Trajectory]:
    found = list(formats.read(Source.of_path(path))[1])
    assert not [one for one in found if isinstance(one, Rejected)]
    return {one.external_id: one for one in found if isinstance(one, Trajectory)}


def mend(path: Path, way: MendWay = MendWay.SPLIT, **more: Any) -> tuple[Path, dict[str, Any]]:
    output = path.with_name("mended.out")
    mended_file.mend_file(path, output, way, **more)
    assert not list(path.parent.glob("*.part"))
    return output, json.loads(output.with_name("mended.out.manifest.json").read_text())


@pytest.mark.parametrize("way", [MendWay.SPLIT, MendWay.MASK, MendWay.DROP])
def test_every_fault_of_the_gallery_is_gone_and_told(way: MendWay, policy: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "gallery.jsonl"
    path.write_bytes(BUNDLE.read_bytes())
    output, manifest = mend(path, way, **policy)
    before, after = check_files([path], **policy), check_files([output], **policy)
    failing = {kind for kind, count in before.kinds.items() if count.severity == "error"}
    assert len(failing) > 30 and not [kind for kind, count in after.kinds.items() if count.severity == "error"]
    old, new = read(path), read(output)
    told = {one["trajectory"]: one for one in manifest["changes"]}
    for name in old:
        if name in told:
            assert [piece["trajectory"] for piece in told[name]["written"]] == [
                piece for piece in new if piece == name or piece.startswith(f"{name}-part-")
            ]
        else:
            assert same_lines(path, output, name)
    assert manifest["before"]["trajectories"] == len(old) and manifest["after"]["trajectories"] == len(new)
    assert manifest["after"]["kinds"] == {kind: count.n_trajectories for kind, count in after.sorted_kinds()}


def same_lines(one: Path, other: Path, name: str) -> bool:
    first, second = (
        [value for line in path.read_text().splitlines() if (value := json.loads(line))["external_id"] == name]
        for path in (one, other)
    )
    return bool(first) and first == second


def test_a_split_loses_no_sampled_token_and_a_mask_keeps_the_prompt(policy: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_text(lines_of("whitespace_changed"))
    (before,) = read(path).values()
    split, _ = mend(path, MendWay.SPLIT, **policy)
    first, second = read(split).values()
    for n, part in enumerate((first, second)):
        assert np.array_equal(part.steps[0].stream, before.steps[n].stream) and part.reward == before.reward
        assert part.extra["mended"] == {"of": before.external_id, "steps": [n], "part": n + 1, "parts": 2}
    masked, manifest = mend(path, MendWay.MASK, **policy)
    (kept,) = read(masked).values()
    assert kept.external_id == before.external_id and len(kept.steps) == 1
    assert np.array_equal(kept.steps[0].stream, before.steps[1].stream)
    assert manifest["changes"][0]["trained_tokens"] == [
        sum(len(step.completion_ids) for step in before.steps), len(before.steps[1].completion_ids),
    ]


def test_rows_of_a_strategy_never_hide_ids_that_are_in_doubt(tmp_path: Path) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(lines_of("clean", "whitespace_changed", "engine_ids_inconsistent"))
    arguments = ["mend", str(path), "-o", str(output), "--strategy", "tool_delta", "--tokenizer", str(MODEL_DIR)]
    assert main(arguments) == 0
    found = read(output)
    assert list(found) == ["clean", "whitespace_changed"]
    made = found["whitespace_changed"]
    assert len(made.rows) == 1 and not made.steps and made.extra["mended"] == {"strategy": "tool_delta"}


# -- records of trainers ---------------------------------------------------------------------------

ROWS = [
    Row(
        ids=np.arange(5 + n, 13 + n, dtype=np.int32),
        loss_mask=np.array([0, 0, 1, 1, 0, 1, 1, 1], dtype=np.bool_),
        logprobs=np.array([0, 0, -1, -2, 0, -3, -1, -2], dtype=np.float32),
        columns={"advantages": np.array([0, 0, 2, 2, 0, 2, 2, 2], dtype=np.float32)},
    )
    for n in range(3)
]
READERS = {
    "trl_rollouts": "trl", "verl_agent_loop": "verl", "prime_rl_samples": "prime_rl", "tinker_data": "tinker",
    "sft_rows": "sft", "skyrl": "skyrl", "nemo_message_log": "nemo_message_log",
}


def records_of(name: str) -> list[dict[str, Any]]:
    """Records of a format with three trajectories, and fields that no reader knows."""
    if name in READERS:
        file = io.BytesIO()
        values = [Trajectory(f"t-{n}", rows=(row,), reward=1.0) for n, row in enumerate(ROWS)]
        write(EXPORTS[READERS[name]], values, file)
        records = [json.loads(line) for line in file.getvalue().splitlines()]
    elif name == "nemo_rl":
        records = [
            {
                "idx": [n], "token_ids": [[*row.ids.tolist(), 0, 0]], "input_lengths": [8], "rewards": [1.0],
                "token_loss_mask": [[*row.loss_mask.astype(float).tolist(), 0.0, 0.0]],
                "generation_logprobs": [[*np.nan_to_num(row.logprobs).tolist(), 0.0, 0.0]],  # type: ignore[arg-type]
                "advantages": [[*row.columns["advantages"].tolist(), 0.0, 0.0]],
            }
            for n, row in enumerate(ROWS)
        ]
    elif name == "slime_samples":
        samples = [
            {"tokens": row.ids.tolist(), "response_length": 6, "index": n,
             "loss_mask": row.loss_mask[2:].astype(int).tolist()} for n, row in enumerate(ROWS)
        ]
        records = [{"samples": samples}]
    elif name == "openrlhf_experience":
        padded = [[0, *row.ids.tolist()] for row in ROWS]
        masks, advantages = ([column[2:].tolist() for column in columns] for columns in
                             ([row.loss_mask for row in ROWS], [row.columns["advantages"] for row in ROWS]))
        records = [{"sequences": padded, "attention_mask": [[0, *[1] * 8]] * 3, "action_mask": masks,
                    "advantages": advantages}]
    else:
        labels = [np.where(row.loss_mask, row.ids, -100).tolist() for row in ROWS]
        records = [{"tokens": [row.ids.tolist() for row in ROWS], "masks": labels, "scores": [1.0, 0.5, 0.0]}]
    return [record | {"seen_by_nobody": {"a": None, "b": [1, 2.5]}} for record in records]


@pytest.mark.parametrize("name", PATCHED)
def test_a_record_is_masked_where_it_stands(name: str, tmp_path: Path) -> None:
    mask_places, list_key = PATCHED[name]
    path = tmp_path / "in.jsonl"
    records = records_of(name)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    before = list(read(path).values())
    is_batch = len(records) == 1
    changed = records[0] if is_batch else records[1]
    (row,) = before[1].rows
    mask = row.loss_mask.copy()
    mask[[3, 4, 5]] ^= True
    columns = {column: np.full(8, 2, np.float32) for column in row.columns}
    mask_places(changed, 1, [3, 4, 5], replace(row, loss_mask=mask, columns=columns))
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    chosen, _ = formats.read(Source.of_path(path))
    assert chosen.name == name
    for n, (old, new) in enumerate(zip(before, read(path).values(), strict=True)):
        (one,), (other,) = old.rows, new.rows
        assert np.array_equal(one.ids, other.ids)
        assert np.flatnonzero(one.loss_mask != other.loss_mask).tolist() == ([3, 4, 5] if n == 1 else [])
        for column in other.columns:
            if "advantage" in column:
                values = np.nan_to_num(other.columns[column])
                assert values[[3, 5]].any() == (n != 1) and (values[4] == 2) == (n == 1)
    left = without(records[0], [0], list_key)
    assert (left is None) != is_batch
    if left is not None:
        path.write_text(json.dumps(left) + "\n")
        assert [one.rows[0].ids[0] for one in read(path).values()] == [6, 7]
        assert left["seen_by_nobody"] == records[0]["seen_by_nobody"]


def test_untouched_lines_are_copied_and_a_faulty_element_leaves_every_list(tmp_path: Path) -> None:
    """None of the tokens of the second element is trained, which the check finds without a tokenizer."""
    path = tmp_path / "in.jsonl"
    (batch,) = records_of("trl_rollouts")
    healthy = json.dumps(batch, indent=None, separators=(" , ", " :  "))
    other = json.loads(json.dumps(batch).replace("t-", "u-"))
    other["env_mask"][1] = [0] * len(other["env_mask"][1])
    other["of_each"] = ["a", "b", "c"]
    path.write_text(f"{healthy}\n{json.dumps(other)}\n" + '{"prompt_ids": 1, "completion_ids": 2, "logprobs": 3}\n')
    output, manifest = mend(path)
    first, second = output.read_text().splitlines()
    assert first == healthy
    kept = decode(second.encode())
    assert kept["external_id"] == ["u-0", "u-2"] and kept["of_each"] == ["a", "c"] and len(kept["env_mask"]) == 2
    left_out, not_read = manifest["changes"]
    assert (left_out["line"], left_out["actions"], left_out["kinds"]) == (2, ["left_out"], ["mask_overrun"])
    assert (not_read["line"], not_read["actions"]) == (3, ["not_read"])
    assert manifest["actions"] == {"left_out": 1, "not_read": 1, "unchanged": 5}


def test_a_trained_observation_is_masked_in_the_trainers_own_record(policy: dict[str, Any], tmp_path: Path) -> None:
    own, path = tmp_path / "own.jsonl", tmp_path / "in.jsonl"
    own.write_text(lines_of("observation_trained"))
    (value,) = read(own).values()
    file = io.BytesIO()
    write(EXPORTS["verl"], [value], file)
    path.write_text(json.dumps(json.loads(file.getvalue()) | {"more": "é"}) + "\n")
    output, manifest = mend(path, **policy)
    (change,) = manifest["changes"]
    assert (change["actions"], change["kinds"]) == (["masked"], ["observation_trained"])
    ((start, stop),) = change["masked"][0]
    record, before = json.loads(output.read_text()), json.loads(path.read_text())
    at = len(record["prompt_ids"])
    assert before["response_mask"][start - at : stop - at] == [1] * (stop - start)
    before["response_mask"][start - at : stop - at] = [0] * (stop - start)
    assert record == before


@pytest.mark.parametrize(
    "name", ["verl_agent_loop", "sft_rows", "nemo_message_log", "prime_rl_samples", "trl_rollouts", "tinker_data"]
)
@pytest.mark.parametrize("by", [1, -1])
def test_a_shifted_mask_is_moved_back(name: str, by: int, policy: dict[str, Any], tmp_path: Path) -> None:
    """By its turns alone: the log-probabilities stand where the tokens were sampled."""
    if by < 0 and name in ("verl_agent_loop", "trl_rollouts"):
        by = 2  # their masks begin with the response
    own, path = tmp_path / "own.jsonl", tmp_path / "in.jsonl"
    own.write_text(lines_of("clean"))
    (value,) = read(own).values()
    (row,) = merged_rows(value.steps)
    assert row.logprobs is not None
    file = io.BytesIO()
    good = replace(row, logprobs=np.nan_to_num(row.logprobs), columns={}, step_indices=(), origin=None)
    write(EXPORTS[READERS[name]], [replace(value, steps=(), rows=(good,))], file)
    record = json.loads(file.getvalue())
    mask = np.roll(good.loss_mask, by)
    mask[slice(by) if by > 0 else slice(by, None)] = False
    moved = np.flatnonzero(mask != good.loss_mask).tolist()
    PATCHED[name][0](record, 0, moved, replace(good, loss_mask=mask))
    path.write_text(json.dumps(record))
    assert [len(item.rows) for item in read(path).values()] == [1] and record != json.loads(file.getvalue())
    output, manifest = mend(path, **policy)
    (change,) = manifest["changes"]
    assert change["actions"] == ["masked"] and "columns_shifted" in change["kinds"]
    mended = next(iter(read(output).values())).rows[0]
    assert np.array_equal(mended.loss_mask, good.loss_mask)
    assert name == "nemo_message_log" or json.loads(output.read_text()) == json.loads(file.getvalue())
    gained = int(np.count_nonzero(good.loss_mask & ~mask))
    assert change["n_unmasked"] == sum(stop - start for start, stop in change["unmasked"][0]) == gained > 0


# -- refusals --------------------------------------------------------------------------------------


def refused(path: Path, output: Path, *arguments: str) -> int:
    return main(["mend", str(path), "-o", str(output), *arguments])


def test_what_cannot_be_mended_is_a_sentence_and_leaves_the_output_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    output.write_text("earlier")
    for text, more, sentence in (
        ('{"messages": [{"role": "user", "content": "a"}]}\n', (), "--output-format own_jsonl"),
        (
            lines_of("whitespace_changed"),
            ("--drop",),
            "every trajectory fails (1), and drop mends none",
        ),
        ('{"format": "rollout-inspector", "version": 1}\n', (), "No trajectory could be read: line 1: external_id"),
        ("{}\n", (), "could not be recognised"),
        (lines_of("clean"), ("--fail-on", "nothing"), "--fail-on: There is no kind of finding"),
        (lines_of("clean"), ("--tokenizer", str(tmp_path)), "--tokenizer"),
    ):
        path.write_text(text)
        assert refused(path, output, *more) == 2
        said = capsys.readouterr()
        assert sentence in said.err and said.err.count("\n") == 1 and not said.out, said
    assert refused(path, path) == 2 and "is the input" in capsys.readouterr().err
    assert refused(tmp_path, output) == 2 and refused(path, tmp_path / "none" / "out") == 2
    assert output.read_text() == "earlier"
    assert sorted(one.name for one in tmp_path.iterdir()) == ["in.jsonl", "out.jsonl"]


def test_an_output_that_fails_is_never_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is read again: a repair that did nothing is found there."""
    path, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    path.write_text(lines_of("clean", "whitespace_changed"))

    def does_nothing(trajectory: Trajectory, *_: Any) -> MendedTrajectory:
        return MendedTrajectory((MendedPart(trajectory, (0, 1)),))

    monkeypatch.setattr(mended_file, "mend_trajectory", does_nothing)
    with pytest.raises(MendRefused, match="does not pass the check, so nothing is written"):
        mended_file.mend_file(path, output)
    assert [one.name for one in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_step_wise_batch_is_mended_in_our_own_format(tmp_path: Path) -> None:
    own, path = tmp_path / "own.jsonl", tmp_path / "in.jsonl"
    own.write_text(lines_of("clean", "whitespace_changed"))
    with path.open("wb") as file:
        write(EXPORTS["skyrl_step_wise"], read(own).values(), file)
    with pytest.raises(MendRefused, match="step-wise") as refusal:
        mend(path)
    assert refusal.value.remedy is Remedy.OWN_FORMAT
    for name in OWN:
        output, manifest = mend(path, output_format=name)
        assert manifest["format"] == name and len(read(output)) == 3


def test_objects_over_several_lines_become_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    first, faulty, last = records_of("verl_agent_loop")
    faulty["response_mask"] = [0] * len(faulty["response_mask"])
    path.write_text("\n".join(json.dumps(one, indent=2) for one in (first, faulty, last)))
    output, manifest = mend(path)
    assert [json.loads(line) for line in output.read_text().splitlines()] == [first, last]
    assert [one["line"] for one in manifest["changes"]] == [2]


def test_a_folder_with_a_mended_file_and_its_manifest_passes_the_check(tmp_path: Path) -> None:
    path, folder = tmp_path / "in.jsonl", tmp_path / "mended"
    folder.mkdir()
    path.write_text(lines_of("clean", "whitespace_changed"))
    assert main(["mend", str(path), "-o", str(folder / "out.jsonl")]) == 0
    assert len(list(folder.iterdir())) == 2 and main(["check", str(folder)]) == 0
    (folder / "out.jsonl").rename(folder / "other.jsonl")
    assert main(["check", str(folder)]) == 2  # it is told of no file that is there, so it may be data
