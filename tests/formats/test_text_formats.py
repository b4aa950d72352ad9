"""Files of text alone, and Parquet."""

import io
import json
import math
import tracemalloc
from typing import Any

import pytest

from rollout_inspector import formats
from rollout_inspector.formats import FileRefused, Source
from rollout_inspector.formats.containers.parquet import rows
from rollout_inspector.streams.trajectory import Trajectory
from tests.samples.formats import CALL, changed, jsonl, read
from tests.samples.text_formats import AREAL, ART, EVALS, MESSAGES, SWIFT, VERL
from tests.storage.build import assert_same, chain, rows_only


@pytest.mark.parametrize(
    ("name", "value", "texts", "rewards"),
    [
        ("verl", VERL, ["4"], [1.0]),
        ("skyrl_evals", EVALS, ["4<end>"], [1.0]),
        ("areal", AREAL, ["!"], [0.5]),
        ("completions", SWIFT, ["A", "B"], [0.0, 1.0]),
        ("completions", {"prompt": "a", "completion": "A", "reward": 1.0, "task": "t"}, ["A"], [1.0]),
    ],
)
def test_text_is_kept_and_said_to_be_all_there_is(
    name: str, value: Any, texts: list[str], rewards: list[float]
) -> None:
    found_name, found, rejected = read(jsonl(value))
    assert (found_name, rejected) == (name, [])
    assert [one.steps[0].text for one in found] == texts and [one.reward for one in found] == rewards
    assert all(len(one.steps[0].completion_ids) == 0 for one in found)
    assert "no token ids" in formats.FORMATS[name].lacks


def test_a_line_without_its_completion_is_rejected() -> None:
    _, found, (rejected,) = read(jsonl(VERL, {**VERL, "output": None}))
    assert len(found) == 1 and "output is missing" in rejected.reason
    _, found, (rejected,) = read(jsonl(SWIFT, {**SWIFT, "prompt": ["a"]}))
    assert len(found) == 2 and "prompt has 1 elements for 2 completions" in rejected.reason


def test_columns_of_reward_functions_are_parts_of_the_reward() -> None:
    """TRL's table: strings or messages, a column for each reward function, the advantage."""
    row = {"step": 3, "completion": "A", "accuracy_reward": 1.0, "length_penalty": -0.25, "advantage": 0.5}
    talk = [{"role": "assistant", "content": "A"}]
    _, found, rejected = read(
        jsonl({**row, "prompt": "a"}, {**row, "prompt": [{"role": "user", "content": "a"}], "completion": talk})
    )
    assert not rejected and len(found) == 2
    for one in found:
        assert one.reward == 0.75 and one.reward_parts == {"accuracy_reward": 1.0, "length_penalty": -0.25}
        assert one.extra == {"step": 3, "advantage": 0.5}


def test_what_stands_behind_the_advantages_is_no_reward() -> None:
    """ms-swift's table: the reward functions, the advantages, then whatever else was logged."""
    table = {
        "gen_step": [1, 1], "prompt": ["a", "b"], "completion": ["A", "B"], "Accuracy": [1.0, 0.0],
        "Format": [0.5, None], "advantages": [0.1, -0.1], "entropy": [0.3, 0.4], "solution_length": [9.0, 8.0],
    }
    name, found, rejected = read(jsonl(table))
    assert (name, rejected, [one.reward for one in found]) == ("completions", [], [1.5, 0.0])
    assert [one.reward_parts for one in found] == [{"Accuracy": 1.0, "Format": 0.5}, {"Accuracy": 0.0}]
    assert found[0].extra == {"gen_step": 1, "advantages": 0.1, "entropy": 0.3, "solution_length": 9.0}
    # A writer that sorts its keys says nothing by their order.
    assert read(jsonl(dict(sorted(table.items()))))[1][0].reward_parts["Format"] == 0.5
    del table["completion"]
    _, found, (refused,) = read(jsonl(SWIFT, table))
    assert len(found) == 2 and "completion is missing" in refused.reason


def test_a_conversation_has_a_step_for_each_answer() -> None:
    name, (one,), _ = read(jsonl(MESSAGES))
    assert name == "messages" and [len(step.request.messages) for step in one.steps if step.request] == [1, 3]
    assert [step.reply["content"] for step in one.steps if step.reply] == ["a", "b"]
    assert "no assistant message" in read(jsonl(MESSAGES, {"messages": MESSAGES["messages"][:1]}))[2][0].reason


def test_art_keeps_calls_and_tools_as_json_text() -> None:
    """openpipe-art ``write_trajectory_groups_parquet``: a column of text holds what has several shapes."""
    name, (one,), rejected = read(parquet([ART]))
    assert (name, rejected, one.group, one.reward) == ("art", [], "4", 0.5)
    assert one.extra == {"metadata": {"id": "t0"}, "group_metadata": {"step": 2}, "logs": ["hm"]}
    assert [len(step.request.messages) for step in one.steps if step.request] == [2, 4]  # what the model wrote
    first, request = one.steps[0], one.steps[1].request
    assert request is not None and request.tools == ({"type": "function", "function": {"name": "f"}},)
    assert first.reply == request.messages[2] == {
        "role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f"}}],
    }
    untold = {**ART, "messages": [{**message, "trainable": False} for message in ART["messages"]]}
    assert len(read(jsonl(untold))[1][0].steps) == 3
    for path, says in ((("tools",), "tools is a text"), (("messages", 2, "tool_calls"), "messages[2].tool_calls is a")):
        _, found, (refused,) = read(jsonl(changed(ART, *path, to="[{")))
        assert not found and says in refused.reason


def test_what_is_wrong_in_areals_own_cut_is_told() -> None:
    assert "that cut is at the wrong place" in formats.FORMATS["areal"].lacks
    assert "cut" not in formats.FORMATS["verl"].lacks


def parquet(rows: list[dict[str, Any]]) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    out = io.BytesIO()
    pq.write_table(pyarrow.Table.from_pylist(rows), out)
    return out.getvalue()


def test_any_format_may_come_as_parquet() -> None:
    name, found, rejected = read(parquet([CALL, changed(CALL, "session_id", to="s2")]))
    assert (name, [one.external_id for one in found], rejected) == ("recorded_calls", ["s1", "s2"], [])
    assert found[0].steps[0].prompt_ids.tolist() == [1, 2, 3]
    trl = [{"step": 1, "prompt": "?", "completion": "!", "accuracy_reward": 1.0, "advantage": 0.5}]
    assert read(parquet(trl))[0] == "completions"


def test_damaged_parquet_is_refused() -> None:
    whole = parquet([CALL] * 3)
    for data in (whole[:-20], whole[:50], b"PAR1" + b"\0" * 50):
        with pytest.raises(FileRefused, match=r"Parquet|recognised"):
            read(data)


@pytest.mark.parametrize("name", ["own_parquet", "own_jsonl"])
def test_our_own_formats_are_lossless(name: str) -> None:
    pytest.importorskip("pyarrow")
    values = [chain("a", hostile="é"), chain("b", broken_at=1, hostile="\0"), rows_only()]
    file = io.BytesIO()
    assert formats.FORMATS[name].write(values, file) == 3  # type: ignore[misc]
    found_name, back, rejected = read(file.getvalue())
    assert (found_name, rejected) == (name, [])
    for one, other in zip(values, back, strict=True):
        assert_same(one, other)
    assert json.loads(json.dumps([one.external_id for one in back])) == ["a", "b", "r"]


def test_parquet_is_read_and_written_in_pieces_of_bounded_size() -> None:
    """Of a row group that holds all rows, one row's values are Python objects at a time; ours gathers small rows."""
    n, size = 24, 40_000
    row = {"token_ids": list(range(1_000, 1_000 + size)), "token_loss_mask": [1] * size, "idx": 0}
    data = parquet([{**row, "idx": idx} for idx in range(n)])
    tracemalloc.start()
    found = [len(one.rows[0].ids) for one in formats.read(Source.of_bytes(data))[1] if isinstance(one, Trajectory)]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found == [size] * n and peak < n * size * 36 / 3  # a number in a list takes 36 bytes and more
    file = io.BytesIO()
    assert formats.FORMATS["own_parquet"].write((rows_only() for _ in range(300)), file) == 300  # type: ignore[misc]
    import pyarrow.parquet as pq

    assert pq.ParquetFile(file).metadata.num_row_groups == 1


def test_parquet_says_what_json_says() -> None:
    value = {
        "token_ids": [1, 2, 3], "token_loss_mask": [True, False, True], "idx": 7, "advantages": [0.5, None, math.nan],
        "generation_logprobs": [-0.25, math.nan, -math.inf], "note": None, "text": 'a"\u2028\0', "nested": [[1], []],
        "bytes": b"x",
    }
    (row,) = rows(io.BytesIO(parquet([value])), "x.parquet", 1 << 20)
    assert json.loads(row) == {
        "token_ids": [1, 2, 3], "token_loss_mask": [True, False, True], "idx": 7, "advantages": [0.5, None, None],
        "generation_logprobs": [-0.25, None, None], "text": 'a"\u2028\0', "nested": [[1], []], "bytes": "b'x'",
    }
