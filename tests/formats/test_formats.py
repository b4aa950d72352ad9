"""Readers: the documented examples, what they keep, what they refuse."""

import gzip
import io
import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector import formats
from rollout_inspector.formats import FileRefused, Source, limits
from rollout_inspector.formats.containers.compression import zstd
from rollout_inspector.formats.registry import SeenIds
from rollout_inspector.streams.trajectory import Trajectory
from tests.samples.formats import CALL, GYM, TRAIN, changed, jsonl, read
from tests.storage.build import assert_same, chain, rows_only


def test_a_session_is_held_no_longer_than_to_its_last_line() -> None:
    """The file is read for names first; what names a line may stand in the answer, or beside a NaN."""
    bare = CALL["response"]
    alone, other = {**bare, "id": "b1"}, changed(CALL, "session_id", to="s3")
    lines = [CALL, {**CALL, "note": math.nan}, alone, other, alone]
    file, n_read = Source.of_bytes(jsonl(*lines)), 0

    def count() -> None:
        nonlocal n_read
        n_read += 1

    file.on_line = count
    seen = []
    for one in formats.read(file)[1]:
        assert isinstance(one, Trajectory)
        seen.append((one.external_id, len(one.steps), n_read - 1 - len(lines)))  # one line told the format
    assert seen == [("s1", 2, 2), ("s3", 1, 4), ("b1", 2, 5)]


def test_of_several_formats_each_lack_names_those_that_have_it() -> None:
    (alone,) = formats.lacks_of("nemo_rl")
    assert alone.startswith("These are the trainer's rows")
    assert formats.lacks_of("nemo_rl, own_jsonl") == [f"nemo_rl: {alone[0].lower()}{alone[1:]}"]
    assert formats.lacks_of("nemo_rl, atropos") == [alone]


def test_recorded_calls_keep_everything() -> None:
    second = changed(CALL, "response", "prompt_token_ids", to=[1, 2, 3, 10, 11, 20])
    name, (other, first), rejected = read(jsonl(CALL, changed(CALL, "session_id", to="s2"), second))
    assert (name, rejected, first.external_id, other.external_id) == ("recorded_calls", [], "s1", "s2")
    assert (first.tokenizer, first.reward, len(first.steps), len(other.steps)) == ("qwen3", 1.0, 2, 1)
    step = first.steps[1]
    assert step.prompt_ids.tolist() == [1, 2, 3, 10, 11, 20] and step.completion_ids.tolist() == [10, 11]
    assert step.logprobs is not None and step.logprobs.tolist() == pytest.approx([-0.1, -0.2])
    assert step.request is not None and step.request.chat_template_kwargs == {"enable_thinking": False}
    assert (step.finish_reason, step.stop_reason, step.text, step.temperature) == ("stop", "151645", "4<end>", 1.0)
    assert step.extra == {
        "line": {"created_at": 5},
        "request": {"model": "m", "max_tokens": 9},
        "response": {"id": "c1"},
    }


def test_tokens_written_as_token_ids_are_read() -> None:
    choice = {"index": 0, "logprobs": {"content": [{"token": "token_id:10", "logprob": -1}, {"token": "token_id:11"}]}}
    _, (one,), _ = read(jsonl(changed(CALL, "response", "choices", to=[choice])))
    assert one.steps[0].completion_ids.tolist() == [10, 11]
    assert np.isnan(one.steps[0].logprobs[1])  # type: ignore[index]


TOP = [[("token_id:8", -0.25), ("token_id:10", -1.5)], [("token_id:11", -0.5), ("token_id:9", -1.25)]]
"""The likeliest tokens at 10 and at 11. Token 10 is the last of its list: the server adds the sampled token there."""


@pytest.mark.parametrize("form", ["chat", "completions", "generate", "triplets"])
def test_alternatives_are_read_where_their_ids_are_known(form: str) -> None:
    ids, values = [10, 11], [-1.5, -0.5]
    as_list = [[{"token": name, "logprob": value} for name, value in entry] for entry in TOP]
    content = [
        {"token": f"token_id:{one}", "logprob": value, "top_logprobs": top}
        for one, value, top in zip(ids, values, as_list, strict=True)
    ]
    if form == "generate":
        for entry in content:
            entry["top_logprobs"] = [
                {"token_id": int(one["token"].removeprefix("token_id:")), "logprob": one["logprob"]}
                for one in entry["top_logprobs"]
            ]
    by_name = {"token_logprobs": values, "top_logprobs": [dict(entry) for entry in TOP]}
    choice = {"token_ids": ids, "logprobs": by_name if form == "completions" else {"content": content}}

    def line(told: Any) -> Any:
        if form == "triplets":
            response = {"token_ids": ids, "logprobs": told["logprobs"]["content"]}
            return {"rollout_id": "r", "triplets": [{"prompt": {"token_ids": [1]}, "response": response}]}
        return changed(CALL, "response", "choices", to=[told])

    _, (found,), rejected = read(jsonl(line(choice)))
    (step,) = found.steps
    assert not rejected and step.alternative_ids is not None and step.alternative_logprobs is not None
    assert step.alternative_ids.tolist() == [8, 0, 11, 9]
    assert step.alternative_logprobs.tolist() == [-0.25, float("-inf"), -0.5, -1.25]
    # A text may be several ids.
    _, (found,), _ = read(
        jsonl(line(choice)).replace(b"token_id:8", b"four").replace(b'"token_id": 8', b'"token": "4"')
    )
    assert found.steps[0].alternative_ids is None and found.steps[0].completion_ids.tolist() == ids


def test_bare_answers_are_trajectories_of_their_own() -> None:
    name, found, _ = read(jsonl(CALL["response"], {**CALL["response"], "id": "c2"}))  # type: ignore[dict-item]
    assert name == "recorded_calls" and [one.external_id for one in found] == ["c1", "c2"]
    assert found[0].steps[0].request is None


@pytest.mark.parametrize(
    "line",
    [
        changed(CALL, "response", "choices", 0, "token_ids", to=[1, -1]),
        changed(CALL, "response", "prompt_token_ids", to=[1, "2"]),
        changed(CALL, "response", "choices", 0, "token_ids", to=[2**31]),
        changed(CALL, "response", "choices", 0, "token_ids", to=[10**40]),
        changed(CALL, "response", "choices", 0, "token_ids", to=[True]),
        changed(CALL, "response", "choices", 0, "token_ids", to=[1.5]),
        changed(CALL, "response", "choices", to=[]),
        changed(CALL, "request", "messages", to=[{"content": "no role"}]),
    ],
)
def test_one_malformed_call_rejects_its_whole_session(line: dict[str, Any]) -> None:
    other = changed(CALL, "session_id", to="s2")
    _, found, (rejected,) = read(jsonl(CALL, other, line, CALL))
    assert [one.external_id for one in found] == ["s2"]
    assert rejected.line == 3 and "'s1' is left out whole" in rejected.reason


def test_memory_of_an_open_session_grows_with_new_tokens_only() -> None:
    from rollout_inspector.formats.readers.recorded_calls import _add_line
    from rollout_inspector.formats.readers.sessions import Session

    session = Session("s")
    prompt = list(range(1000))
    for _ in range(50):
        _add_line(session, changed(CALL, "response", "prompt_token_ids", to=prompt))
        prompt = [*prompt, 10, 11, 5]
    assert sum(len(step.prompt_ids) for _, step in session.steps) == 1000 + 49
    assert [len(step.prompt_ids) for step in session.trajectory().steps] == [1000 + 3 * n for n in range(50)]


def test_nemo_gym_long_and_short() -> None:
    short = {"response": {"output": [{**GYM["response"]["output"][3], "content": "4"}]}, "reward": 0}
    name, (long, other), rejected = read(jsonl(GYM, short))
    assert (name, rejected, long.external_id, long.group, other.external_id) == ("nemo_gym", [], "0-2", "0", "line-2")
    assert [step.prompt_ids.tolist() for step in long.steps] == [[1, 2, 3], [1, 2, 3, 10, 11, 20]]
    first = long.steps[0]
    assert first.reply == {
        "role": "assistant", "content": "", "reasoning_content": "hm",
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "calc", "arguments": '{"e":"2+2"}'}}],
    }
    assert long.steps[1].extra["items_before"] == [GYM["response"]["output"][2]]
    assert (
        long.extra["routing"] == {"repeats": 0.0, "zero_layers": 1, "length": 1} and long.extra["mask_sample"] is False
    )
    assert other.steps[0].reply == {"role": "assistant", "content": "4"}
    routed = read(jsonl(changed(GYM, "response", "output", 1, "routed_experts", to=[[[1]]] * 4)))[1][0].steps[0]
    assert routed.extra["routing"]["length"] == 4 and "routed_experts" not in routed.extra["items"][-1]


def test_a_nemo_gym_call_has_all_three_lists_or_none() -> None:
    part = json.loads(json.dumps(GYM))
    del part["response"]["output"][1]["generation_log_probs"]
    _, found, (rejected,) = read(jsonl(part))
    assert not found and "generation_log_probs" in rejected.reason
    for name in ("prompt_token_ids", "generation_token_ids"):
        del part["response"]["output"][1][name]
    _, (one,), _ = read(jsonl(part))
    assert [len(step.completion_ids) for step in one.steps] == [0, 1]  # the call without ids is there, and is a finding


def test_nemo_rl_rows_are_cut_at_their_length() -> None:
    name, (one,), _ = read(jsonl(TRAIN))
    (row,) = one.rows
    assert (name, one.external_id, one.reward, one.steps) == ("nemo_rl", "7", 1.0, ())
    assert row.ids.tolist() == [1, 2, 3] and row.loss_mask.tolist() == [False, True, True]
    assert sorted(row.columns) == ["advantages", "prev_logprobs"] and row.columns["advantages"].tolist() == [
        0,
        0.5,
        0.5,
    ]
    assert [read(jsonl(changed(TRAIN, "idx", to=empty)))[1][0].external_id for empty in ("", [""], None)] == [
        "line-1"
    ] * 3
    unwrapped = {key: value[0] if isinstance(value, list) else value for key, value in TRAIN.items()}
    assert np.array_equal(read(jsonl(unwrapped))[1][0].rows[0].ids, row.ids)


def test_a_nemo_rl_array_whose_length_disagrees_still_does_when_cut() -> None:
    _, (one,), _ = read(jsonl(changed(TRAIN, "token_loss_mask", to=[[0, 1, 1]])))
    assert len(one.rows[0].ids) == 3 and len(one.rows[0].loss_mask) == 1


@pytest.mark.parametrize(
    "value",
    [
        chain(hostile=""),
        chain("b", broken_at=2, hostile="\0"),
        rows_only(),
        chain("c", rows=rows_only().rows, hostile="é"),
    ],
)
def test_own_jsonl_is_lossless(value: Trajectory) -> None:
    file = io.BytesIO()
    assert formats.FORMATS["own_jsonl"].write([value], file) == 1  # type: ignore[misc]
    name, (back,), rejected = read(file.getvalue())
    assert (name, rejected) == ("own_jsonl", [])
    assert_same(back, value)


def test_own_jsonl_keeps_what_json_has_no_number_for() -> None:
    odd = np.array([np.nan, np.inf, -np.inf, -0.1, 1e-38, 3.4e38], dtype=np.float32)
    row = rows_only().rows[0]
    from dataclasses import replace

    value = replace(rows_only(), rows=(replace(row, logprobs=odd),))
    file = io.BytesIO()
    formats.FORMATS["own_jsonl"].write([value], file)  # type: ignore[misc]
    assert_same(read(file.getvalue())[1][0], value)


def test_a_later_version_of_own_jsonl_is_refused() -> None:
    file = io.BytesIO()
    formats.FORMATS["own_jsonl"].write([chain(hostile="")], file)  # type: ignore[misc]
    _, found, (rejected,) = read(file.getvalue().replace(b'"version":1', b'"version":2'))
    assert not found and "version 2" in rejected.reason


BAD_LINES = {
    b"{": "not valid JSON", b'{"a": NaN}': "must be", b'{"a": 1e400}': "cannot be kept",
    b'{"a": "\xff"}': "UTF-8", b'{"session_id": "x", "a": ' + b"[" * 90000: "JSON",
    b'{"a": ' + b"[" * 200 + b"]" * 200 + b"}": "nested more than 100",
    b'{"a": "\\ud800"}': "not valid JSON", b'{"a": "\\ud800", "b": NaN}': "half a character",
    b"[1]": "must be a JSON object", b'"text"': "must be a JSON object",
}


@pytest.mark.parametrize("line", list(BAD_LINES))
@pytest.mark.parametrize("good", [CALL, GYM, TRAIN])
def test_a_bad_line_is_named_and_the_rest_is_read(line: bytes, good: dict[str, Any]) -> None:
    _, found, rejected = read(jsonl(good, line))
    assert len(found) == 1
    assert [item.line for item in rejected] == [2] and BAD_LINES[line] in rejected[0].reason


@pytest.mark.parametrize(("line", "field"), [(CALL, "reward"), (GYM, "reward"), (TRAIN, "rewards")])
def test_a_reward_of_which_no_mean_can_be_made_is_rejected(line: dict[str, Any], field: str) -> None:
    _, found, (rejected,) = read(jsonl(changed(line, field, to=1e300)))
    assert not found and f"{field} is a number that does not fit into 32 bits." in rejected.reason


@pytest.mark.parametrize("good", [GYM, TRAIN])
def test_an_id_that_comes_twice_is_rejected(good: dict[str, Any]) -> None:
    _, found, (rejected,) = read(jsonl(good, good))
    assert len(found) == 1 and rejected.line == 2 and "earlier line" in rejected.reason


def test_ids_that_came_before_are_known_however_many_there_are() -> None:
    seen, known = SeenIds(), set()
    rng = random.Random(1)
    for _ in range(30_000):
        name = f"t{rng.randrange(20_000)}"
        assert (name in seen) == (name in known)
        if name not in known:
            seen.add(name)
            known.add(name)
    assert len(seen._newest) < 4096 and len(seen._sorted) + len(seen._newest) == len(known)


def test_an_id_that_the_database_cannot_hold_is_changed_and_noted() -> None:
    for odd, name in (("a\0b", "a\ufffdb"), ("x" * 201, "x" * 191 + "~"), ({"a": 1}, "line-2"), (True, "line-2")):
        _, trajectories, rejected = read(jsonl(CALL, changed(CALL, "session_id", to=odd)))
        assert not rejected and trajectories[1].external_id.startswith(name), odd
        assert "session_id" in trajectories[1].extra["left_out"]["session_id"]
        assert len(trajectories[1].external_id) <= 200 and "left_out" not in trajectories[0].extra


def test_a_line_that_is_too_long_is_not_held() -> None:
    class Endless(io.RawIOBase):
        left = 3 << 20

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            n = min(len(buffer), self.left)
            self.left -= n
            buffer[:n] = b"x" * n
            return n

    data = jsonl({"a": 1})
    one = Source("f", lambda: io.BytesIO(data + b"y" * 5000 + b"\n" + data), 1)
    with limits.reading(limits.Limits(line_bytes=1000)):
        assert [(line.number, line.data is None) for line in one.lines()] == [(1, False), (2, True), (3, False)]
        long = Source("f", lambda: io.BufferedReader(Endless()), 1)
        assert [(line.number, line.data) for line in long.lines()] == [(1, None)]


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_compressed_files_are_read_as_they_are(pack: Callable[[bytes], bytes]) -> None:
    assert read(pack(jsonl(CALL)))[1][0].external_id == "s1"
    with pytest.raises(FileRefused, match="damaged or cut off"):
        read(pack(jsonl(*[changed(CALL, "session_id", to=str(n)) for n in range(500)]))[:-200])


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_a_bomb_is_stopped(pack: Callable[[bytes], bytes]) -> None:
    with limits.reading(limits.Limits(free_bytes=1 << 20)), pytest.raises(FileRefused, match="zip bomb"):
        read(jsonl(CALL) and pack(b" " * (8 << 20)))


REFUSED = {
    b"": "is empty", b"\x80\x04\x95": "is a pickle", b"PK\x03\x04" + b"x" * 20 + b"archive/data.pkl": "PyTorch",
    b"PK\x03\x04abc": "Unpack it", b"\x93NUMPY\x01": "binary", b"\0\1\2": "binary",
    b"hello\n": "could not be recognised",
    b'{"a": 1}\n': "no format that is known", b"\n\n": "no lines",
}


@pytest.mark.parametrize("data", list(REFUSED))
def test_a_file_that_is_never_read_is_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(FileRefused, match=REFUSED[data]):
        read(data)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileRefused, match="There is no file"):
        Source.of_path(tmp_path / "none.jsonl")
    with pytest.raises(FileRefused, match="no format 'x'"):
        read(jsonl(CALL), "x")
