"""Hostile files (H4, M2): what a small body may become is bounded, and the refusal names the number."""

import gzip
import io
import json
import subprocess
import sys
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.formats import FileRefused, Rejected, Source, TooLarge, limits, read
from rollout_inspector.formats.containers.compression import zstd
from rollout_inspector.formats.limits import Limits, memory_of
from rollout_inspector.streams.trajectory import Trajectory
from tests.attack import hostile_bodies
from tests.attack.hostile_bodies import own_line
from tests.conftest import ROOT

pytestmark = pytest.mark.sqlite_only


def reasons(data: bytes, under: Limits, name: str = "auto") -> list[str]:
    """Why lines were rejected; a trajectory that was read counts as an empty reason."""
    with limits.reading(under):
        _, found = read(Source.of_bytes(data), name)
        return [one.reason if isinstance(one, Rejected) else "" for one in found]


def one_prompt_again(n: int, message: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """A step of 1,000 ids, and ``n`` steps that read them again."""
    first: dict[str, Any] = {"delta_ids": [1] * 1000, "completion_ids": [2]}
    again: dict[str, Any] = {"parent": 0, "shared_length": 1001, "delta_ids": [1], "completion_ids": [2]}
    if message is not None:
        first["request"] = {"messages_new": [message] * 100}
        again["request"] = {"messages_shared": 100}
    return [first, *[again] * n]


def nodes_of_one_root(n: int) -> dict[str, Any]:
    """A trace of verifiers: a root of 1,000 ids, and ``n`` answers to it."""
    root = {"token_ids": [1] * 1000, "mask": [0] * 1000, "message": {"role": "user", "content": "x"}}
    answer = {"parent": 0, "token_ids": [2], "mask": [1], "sampled": True, "message": {"role": "assistant"}}
    return {"id": "a", "nodes": [root, *[answer] * n]}


def calls_that_continue_one(n: int) -> list[dict[str, Any]]:
    """Calls of rLLM: one of 1,000 ids, and ``n`` that continue it."""
    first = {"session_id": "s", "trace_id": "0", "prompt_token_ids": [1] * 1000, "completion_token_ids": [2]}
    again = {"session_id": "s", "prompt_token_ids": [], "parent_trace_id": "0", "prompt_delta_token_ids": [1],
             "completion_token_ids": [2]}
    return [first, *[{**again, "trace_id": str(k + 1)} for k in range(n)]]


def lines(*values: Any) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


CALL = {"choices": [{"token_ids": [1]}], "prompt_token_ids": [1] * 1000}
MANY_CHOICES = {**CALL, "choices": [{"token_ids": [1], "index": n} for n in range(20)]}
BATCH = {"prompt_ids": [[1]] * 20, "completion_ids": [[2]] * 20, "logprobs": [[0.0]] * 20, "i": list(range(20))}
TRACES = {"traces": [nodes_of_one_root(1)] * 20, "id": "e"}
GROUP = {"completion": ["x"] * 20, "prompt": ["x"] * 20, "advantages": [0.0] * 20, "step": 1}
TALK = {"messages": [{"role": "assistant", "content": "x"}] * 100}
NOTE = {"note": "x" * 1000}

GROWS = {
    "ids of steps": (own_line("a", one_prompt_again(50)), Limits(line_ids=50_000), Limits(line_ids=51_100)),
    "messages of steps": (
        own_line("a", one_prompt_again(50, {"role": "user"})), Limits(line_messages=5000), Limits(line_messages=5100),
    ),
    "number of steps": (own_line("a", one_prompt_again(50)), Limits(line_items=50), Limits(line_items=51)),
    "ids of nodes": (lines(nodes_of_one_root(50)), Limits(line_ids=50_000), Limits(line_ids=51_100)),
    "ids of traces": (lines(TRACES), Limits(line_ids=39_000), Limits(line_ids=41_000)),
    "ids of calls": (lines(*calls_that_continue_one(50)), Limits(line_ids=50_000), Limits(line_ids=52_000)),
    "ids of choices": (lines(MANY_CHOICES), Limits(line_ids=20_000), Limits(line_ids=20_100)),
    "messages of a conversation": (lines(TALK), Limits(line_messages=4900), Limits(line_messages=4950)),
    "a field of a batch": (lines(BATCH | NOTE), Limits(line_repeated_bytes=20_000), Limits(line_repeated_bytes=21_000)),
    "a field of choices": (
        lines(MANY_CHOICES | NOTE), Limits(line_repeated_bytes=20_000), Limits(line_repeated_bytes=21_000),
    ),
    "a field of traces": (lines(TRACES | NOTE), Limits(line_repeated_bytes=20_000), Limits(line_repeated_bytes=21_000)),
    "a field of columns": (lines(GROUP | NOTE), Limits(line_repeated_bytes=20_000), Limits(line_repeated_bytes=21_000)),
    "size of a batch": (lines(BATCH), Limits(line_items=19), Limits(line_items=20)),
    "bytes of a line": (lines(CALL), Limits(line_bytes=3000), Limits(line_bytes=4000)),
    "values of a line": (lines(CALL), Limits(line_memory=40_000), Limits(line_memory=60_000)),
}
"""What grows: a file, limits that it breaks, and limits that it keeps."""


@pytest.mark.parametrize("name", GROWS)
def test_what_grows_while_it_is_read_is_rejected_with_the_number(name: str) -> None:
    data, broken, kept = GROWS[name]
    form = "recorded_calls" if name.endswith("of a line") else "auto"
    assert not any(reasons(data, kept, form))
    found = reasons(data, broken, form)
    assert found and all("at most" in one or "longer than" in one for one in found)
    assert any(letter.isdigit() for letter in found[0])


def test_many_small_trajectories_are_counted_together() -> None:
    data = b"".join(own_line(str(n), one_prompt_again(9)) for n in range(10))
    assert len(reasons(data, Limits(ids=101_000))) == 10
    with pytest.raises(TooLarge, match="more than 100,000 token ids"):
        reasons(data, Limits(ids=100_000))


def test_reading_ends_when_its_seconds_are_used_up() -> None:
    blank = zstd.compress(b" \n" * 500_000)
    for data in (own_line("a", []) * 1000, blank, lines(*calls_that_continue_one(20)), b"[" + b"{}," * 9 + b"{}]"):
        with pytest.raises(TooLarge, match="more than 0 seconds of computing"):
            reasons(data, Limits(seconds=0), "own_jsonl")


@pytest.mark.parametrize("before", [b"", b"{}\n"])
def test_blank_lines_without_end_are_refused(before: bytes) -> None:
    with limits.reading(Limits(blank_lines=1000)):
        few = Source.of_bytes(zstd.compress(before + b"\n" * 1000 + b"{}\n" + b"\n" * 1000))
        assert [line.number for line in few.lines()][-1] == 1001 + bool(before)
        many = Source.of_bytes(zstd.compress(before + b"\n" * 1001 + b"{}\n"))
        with pytest.raises(FileRefused, match="more than 1,000 blank lines"):
            list(many.lines())


def test_a_parquet_file_of_one_value_in_every_row_is_stopped() -> None:
    bomb = Source.of_bytes(hostile_bodies.parquet_of_one_value(500, 100_000))
    assert bomb.size * limits.IMPORT.parquet_ratio < 500 * 100_000
    with limits.reading(Limits(free_bytes=1 << 20)), pytest.raises(TooLarge, match="grows more than 2,000 times"):
        list(bomb.lines())


@pytest.mark.parametrize("pack", [gzip.compress, zstd.compress])
def test_packed_bytes_in_packed_bytes_are_not_unpacked(pack: Any) -> None:
    with pytest.raises(FileRefused, match="holds another packed file"):
        reasons(pack(gzip.compress(b"{}\n" * 1000)), limits.IMPORT)


@pytest.mark.parametrize(("log", "n_lines"), [(27, 1), (28, 0)])
def test_a_frame_that_asks_for_much_memory_is_refused(log: int, n_lines: int) -> None:
    """The window of a frame is made before its first byte is unpacked."""
    packer = zstd.ZstdCompressor(options={zstd.CompressionParameter.window_log: log})
    source = Source.of_bytes(packer.compress(b"{}\n") + packer.flush())
    if n_lines:
        assert len(list(source.lines())) == n_lines
    else:
        with pytest.raises(FileRefused, match="is damaged or cut off"):
            list(source.lines())


SHAPES = [b"{},", b"[],", b"[[]],", b'{"a":1},', b'"ab",', "\"é1\",".encode(), b"1000,", b"1e9,", b'{"abc":"def"},',
          b'"\\"{[,",', b'"{{{{,,,,[[[[",']


@pytest.mark.parametrize("shape", [*SHAPES, b"keys"])
def test_no_line_takes_more_memory_than_was_estimated(shape: bytes) -> None:
    from msgspec.json import decode

    line = b"[" + shape * (300_000 // len(shape)) + b"0]"
    if shape == b"keys":
        line = b"{" + b",".join(b'"%d":1000' % n for n in range(30_000)) + b"}"
    tracemalloc.start()
    value = decode(line)
    taken = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert value and taken <= memory_of(line) <= limits._MEMORY_RATIO * len(line) * 4


def test_marks_inside_texts_cost_nothing() -> None:
    inside = b'{"a":"' + rb"{[,\"{\\\\" * 400_000 + b'"}'
    assert memory_of(inside) < len(inside) + 1000
    assert memory_of(b'{"a":"\\\\"}' + b"[" * 50) > 50 * 100


MEASURE = """
import sys
from rollout_inspector.formats import FileRefused, Source, limits, read
import pyarrow.parquet
data = sys.stdin.buffer.read()
def most():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1])
before = most()
n = 0
with limits.reading(limits.PUSH):
    try:
        for one in read(Source.of_bytes(data))[1]:
            n += 1
            if n == 100:
                break
    except FileRefused as error:
        print(error)
print((most() - before) >> 10)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
@pytest.mark.parametrize("name", ["empty objects", "deltas", "numbers", "one value in Parquet"])
def test_a_hostile_body_takes_bounded_memory(name: str) -> None:
    body = hostile_bodies.BODIES[name]()
    ran = subprocess.run(
        [sys.executable, "-c", MEASURE], input=body, cwd=ROOT, stdout=subprocess.PIPE, timeout=300, check=True
    )
    assert int(ran.stdout.split()[-1]) < 500, ran.stdout


def test_a_trajectory_within_the_limits_is_read_whole() -> None:
    with limits.reading(limits.PUSH):
        _, (one,) = read(Source.of_bytes(own_line("a", one_prompt_again(50))))
    assert isinstance(one, Trajectory) and len(one.steps) == 51 and len(one.steps[50].prompt_ids) == 1002


PAGES = """
import sys
from rollout_inspector.formats import FileRefused, Source, limits
with limits.reading(limits.Limits(parquet_ratio=1 << 40, line_bytes=32 << 20, parquet_memory=int(sys.argv[2]))):
    try:
        print([(line.number, line.problem) for line in Source.of_path(sys.argv[1]).lines()])
    except FileRefused as error:
        print(type(error).__name__, error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")
def test_pages_of_parquet_take_bounded_memory(tmp_path: Path) -> None:
    """A page may unpack to 2 GB, whatever the file says of itself."""
    from pyarrow import array, parquet, table

    file = tmp_path / "a.parquet"
    parquet.write_table(table({"a": array([b"x" * (48 << 20)])}), file, compression="zstd", use_dictionary=False)

    def read_pages(limit: int) -> str:
        ran = subprocess.run(
            [sys.executable, "-c", PAGES, str(file), str(limit)],
            cwd=ROOT, capture_output=True, text=True, timeout=300, check=True,
        )
        return ran.stdout.strip()

    assert read_pages(16 << 20).startswith("TooLarge a.parquet needs more than 16 MB of memory")
    assert "longer than 32 MB" in read_pages(2 << 30)


def test_a_parquet_file_that_says_how_much_it_grows_is_not_read() -> None:
    from pyarrow import parquet, table

    file = io.BytesIO()
    parquet.write_table(table({"a": ["x" * (70 << 20)]}), file, compression="zstd", use_dictionary=False)
    with pytest.raises(TooLarge, match="grows more than 2,000 times"):
        list(Source.of_bytes(file.getvalue()).lines())
