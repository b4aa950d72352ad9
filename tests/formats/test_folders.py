"""Folders of miles and prime-rl: files that belong together are read together, in the order of their steps."""

import json
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rollout_inspector import formats
from rollout_inspector.formats import Rejected, Source
from rollout_inspector.formats.containers.compression import zstd
from rollout_inspector.formats.folders import files_of
from rollout_inspector.streams.trajectory import Trajectory
from tests.samples.trainer_formats import TRAINED, episode, update


def read_folder(folder: Path) -> tuple[list[Trajectory], list[Rejected]]:
    items = [item for path in files_of(folder) for item in formats.read(Source.of_path(path))[1]]
    return [one for one in items if isinstance(one, Trajectory)], [one for one in items if isinstance(one, Rejected)]


def write_lines(path: Path, *lines: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))


# -- miles: the shape of miles/ray/rollout/debug_data.py


def columns(path: Path, indices: Sequence[int], **more: Any) -> None:
    """The Parquet file of samples with 2 tokens of prompt and 3 of response."""
    n = len(indices)
    table = {
        "sample_index": pa.array(indices, pa.int32()), "response_length": pa.array([3] * n, pa.int32()),
        "total_length": pa.array([5] * n, pa.int32()),
        "tokens": pa.array([[1, 2, 10 + n_, 20, 11] for n_ in range(n)], pa.list_(pa.int32())),
        "loss_mask": pa.array([[1, 0, 1]] * n, pa.list_(pa.int8())),
        "rollout_log_probs": pa.array([[-0.5, 0.0, -0.25]] * n, pa.list_(pa.float32())), **more,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(table), path, row_group_size=2)


def talk(index: int, **more: Any) -> dict[str, Any]:
    return {
        "sample_index": index, "sample_occurrence": 0, "group_index": 4, "status": "completed", "reward": 1.0,
        "prompt": "2+2?", "messages": [{"role": "user", "content": f"sample {index}"}], **more,
    }


def test_miles_columns_are_read_with_their_conversations(tmp_path: Path) -> None:
    columns(tmp_path / "dashboard_columns" / "rollout_10.parquet", [7])
    columns(tmp_path / "dashboard_columns" / "rollout_9.parquet", [3, 3, 5])
    columns(tmp_path / "dashboard_columns" / "rollout_eval_9.parquet", [0])
    # The first sample recorded no conversation; the second has the same index.
    write_lines(tmp_path / "trajectory" / "9.jsonl", talk(3, sample_occurrence=1, reward=None), "{broken", talk(5))
    write_lines(tmp_path / "dashboard" / "metrics.jsonl", {"ts": 1.0, "step": 9, "metrics": {}})
    found, rejected = read_folder(tmp_path)
    assert [one.external_id for one in found] == ["9-3", "9-3-1", "9-5", "10-7", "eval_9-0"]
    assert [one.training_step for one in found] == [9, 9, 9, 10, 9] and found[4].extra == {"evaluation": True}
    row = found[0].rows[0]
    assert row.ids.tolist() == [1, 2, 10, 20, 11] and row.loss_mask.tolist() == [False, False, True, False, True]
    assert row.logprobs is not None and row.logprobs[2:].tolist() == [-0.5, 0, -0.25] and np.isnan(row.logprobs[1])
    assert [one.reward for one in found] == [None, None, 1.0, None, None]
    assert (found[2].group, found[2].stop_reason, found[2].extra["prompt"]) == ("4", "completed", "2+2?")
    assert [one.extra.get("messages", [{}])[0].get("content") for one in found[:3]] == [None, "sample 3", "sample 5"]
    assert [(one.line, one.reason[:28]) for one in rejected] == [(None, "trajectory/9.jsonl, line 2: ")]


def test_miles_columns_alone_are_read_and_strange_conversations_are_named(tmp_path: Path) -> None:
    columns(tmp_path / "rollout_4.parquet", [0, 1], loss_mask=pa.nulls(2, pa.list_(pa.int8())))
    (first, _), rejected = read_folder(tmp_path)
    assert rejected == [] and first.rows[0].loss_mask.tolist() == [False, False, True, True, True]
    columns(tmp_path / "dashboard_columns" / "rollout_4.parquet", [0, 1])
    write_lines(tmp_path / "trajectory" / "4.jsonl", talk(8), talk(0))
    _, (sentence,) = read_folder(tmp_path / "dashboard_columns")
    assert "from sample 8 (occurrence 0) on belongs to no sample" in sentence.reason


def test_lengths_of_miles_that_disagree_are_rejected(tmp_path: Path) -> None:
    columns(tmp_path / "rollout_4.parquet", [0, 1], total_length=pa.array([5, 6], pa.int32()))
    (found,), (bad,) = read_folder(tmp_path)
    assert found.external_id == "4-0" and bad.line == 2 and "total_length 6, but there are 5" in bad.reason


# -- prime-rl: the shapes of prime_rl/monitors/file/traces and prime_rl/trainer/rl/annotations.py


def seal(path: Path) -> None:
    """Pack a chunk as prime-rl does: frames of zstd, and behind them a table in a frame that is skipped."""
    data = path.read_bytes()
    frames = [zstd.compress(data[:100]), zstd.compress(data[100:])]
    table = b"".join(struct.pack("<II", len(one), n) for one, n in zip(frames, (100, len(data) - 100), strict=True))
    footer = table + struct.pack("<IBI", 2, 0, 0x8F92EAB1)
    skipped = struct.pack("<II", 0x184D2A5E, len(footer)) + footer
    path.with_name(f"{path.name}.zst").write_bytes(b"".join(frames) + skipped)
    path.unlink()


def test_a_stream_of_prime_rl_is_read_with_its_annotations(tmp_path: Path) -> None:
    traces = tmp_path / "run" / "traces"
    write_lines(traces / "stream" / "00000.jsonl", episode("a"), episode("b"))
    write_lines(traces / "stream" / "00001.jsonl", episode("c"), '{"id": "torn')
    write_lines(traces / "stream" / "index.jsonl", {"line": 1, "id": "a"})
    write_lines(traces / "live" / "t-d.jsonl", {"open": {}})
    masked = [None] * 3 + [True, False, None, False, None]
    trained = update("a", trainer_logprobs=TRAINED, entropies=TRAINED, is_masked=masked)
    write_lines(traces / "annotations" / "trainer" / "00000.jsonl", trained, {"trace_id": 5}, {**trained, "version": 2})
    write_lines(
        traces / "annotations" / "orchestrator" / "00000.jsonl",
        update("a", {"ship": {"step": 5}, "advantage": 0.5}, advantages=[0.5] * 8, trainer_logprobs=[-9.0] * 8),
    )
    for path in (traces / "stream" / "00000.jsonl", traces / "annotations" / "trainer" / "00000.jsonl"):
        seal(path)
    found, rejected = read_folder(tmp_path / "run" / "traces")
    assert [one.external_id for one in found] == ["a", "b", "c"] and [one.training_step for one in found] == [5, 3, 3]
    assert {step.policy_version for one in found for step in one.steps} == {"2"} and found[1].rows == ()
    (row,) = found[0].rows
    nan = np.nan
    assert row.ids.tolist() == [1, 2, 3, 10, 11, 20, 12, 13] and row.logprobs is not None
    # The trainer wrote after the orchestrator. A token that it left out keeps no value.
    np.testing.assert_array_equal(row.columns["trainer_logprobs"], [0, 0, 0, -0.5, -0.75, 0, -0.25, nan])
    np.testing.assert_array_equal(row.columns["is_masked"], [0, 0, 0, 1, 0, 0, 0, nan])
    np.testing.assert_array_equal(row.columns["advantages"], [0, 0, 0, 0.5, 0.5, 0, 0.5, 0.5])
    assert found[0].extra["info"] == {"ship": {"step": 5}, "advantage": 0.5}
    assert [one.reason.split(":")[0] for one in rejected] == [
        "annotations/trainer/00000.jsonl.zst, line 2", "annotations/trainer/00000.jsonl.zst, line 3",
        "The line is not valid JSON",
    ]


def test_annotations_of_each_step_are_read(tmp_path: Path) -> None:
    folder = tmp_path / "traces" / "step_7" / "train"
    write_lines(folder / "traces.jsonl", episode("a"))
    write_lines(
        folder / "annotations" / "trainer.jsonl",
        update("a", {"train": {"trained_at_step": 8}}, trainer_logprobs=TRAINED),
        update("z", trainer_logprobs=[1.0]),
    )
    (found,), rejected = read_folder(tmp_path)
    assert rejected == [] and found.training_step == 8
    assert found.rows[0].columns["trainer_logprobs"][3:5].tolist() == [-0.5, -0.75]


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        ({"branches": [{"index": 1, "entropies": [1.0]}]}, "index is 1, but the trace has 1 branches"),
        ({"branches": [{"index": 0, "entropies": "x"}]}, "entropies must be a list"),
        ({"branches": [{"index": 0, "entropies": ["x"] * 8}]}, "must hold numbers"),
        ({"info": 5}, "info must be a JSON object"),
    ],
)
def test_an_update_that_does_not_fit_rejects_its_episode(wrong: Any, sentence: str, tmp_path: Path) -> None:
    write_lines(tmp_path / "traces.jsonl", episode("a"), episode("b"))
    write_lines(tmp_path / "annotations" / "trainer.jsonl", {**update("a"), **wrong})
    (found,), (bad,) = read_folder(tmp_path)
    assert found.external_id == "b" and bad.line == 1 and sentence in bad.reason


def test_values_that_end_early_leave_later_nodes_as_they_are(tmp_path: Path) -> None:
    write_lines(tmp_path / "traces.jsonl", episode("a"))
    write_lines(tmp_path / "annotations" / "trainer.jsonl", update("a", trainer_logprobs=TRAINED[:6]))
    (found,), _ = read_folder(tmp_path)
    np.testing.assert_array_equal(found.rows[0].columns["trainer_logprobs"], [0, 0, 0, -0.5, -0.75, 0, np.nan, np.nan])


def test_a_folder_of_that_name_without_traces_beside_it_is_read_as_any_other(tmp_path: Path) -> None:
    write_lines(tmp_path / "annotations" / "a.jsonl", episode("a"))
    write_lines(tmp_path / "other" / "b.jsonl", episode("b"))
    assert [one.external_id for one in read_folder(tmp_path)[0]] == ["a", "b"]


def test_a_file_that_stands_alone_is_read_without_its_neighbours(tmp_path: Path) -> None:
    write_lines(tmp_path / "traces.jsonl", episode("a"))
    write_lines(tmp_path / "annotations" / "trainer.jsonl", update("a", trainer_logprobs=TRAINED))
    for source in (
        Source.of_path(tmp_path / "traces.jsonl", "The request body", alone=True),
        Source.of_bytes((tmp_path / "traces.jsonl").read_bytes()),
    ):
        (found,) = formats.read(source)[1]
        assert isinstance(found, Trajectory) and found.rows == () and source.neighbour("traces.jsonl") is None
    (tmp_path / "linked").mkdir()
    write_lines(tmp_path / "linked" / "traces.jsonl", episode("a"))
    (tmp_path / "linked" / "annotations").symlink_to(tmp_path / "annotations")
    (tmp_path / "linked" / "other.jsonl").symlink_to(tmp_path / "traces.jsonl")
    inside = Source.of_path(tmp_path / "linked" / "traces.jsonl")
    assert inside.neighbour("other.jsonl") is None


def test_a_packed_file_may_begin_with_a_frame_that_is_skipped(tmp_path: Path) -> None:
    data = json.dumps(episode("a")).encode()
    (tmp_path / "traces.jsonl.zst").write_bytes(struct.pack("<II", 0x184D2A50, 4) + b"size" + zstd.compress(data))
    (found,), rejected = read_folder(tmp_path)
    assert found.external_id == "a" and rejected == []
