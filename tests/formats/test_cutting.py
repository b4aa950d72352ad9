"""Files cut into parts: together they read like the file."""

import gzip
import io
import json
import random
from itertools import accumulate
from typing import Any
from unittest import mock

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, strategies as st

from rollout_inspector.formats import FORMATS, FileRefused, Rejected, Source, read
from rollout_inspector.formats.containers import compression, cutting
from rollout_inspector.formats.containers.compression import zstd
from rollout_inspector.formats.containers.cutting import parts_of
from rollout_inspector.formats.containers.file_part import FilePart
from rollout_inspector.formats.readers import sessions
from rollout_inspector.streams.trajectory import Trajectory
from tests.samples.formats import CALL, GYM, TRAIN, changed, jsonl


def lines(source: Source) -> list[tuple[int, bytes | None]]:
    return [(line.number, line.data) for line in source.lines()]


def in_parts(source: Source, n_bytes: int) -> list[tuple[int, bytes | None]]:
    return [line for part in parts_of(source, n_bytes) for line in lines(source.of_part(part))]


@given(
    st.lists(st.binary(max_size=12).map(lambda data: b"x" + data.replace(b"\n", b" ")) | st.just(b"") | st.just(b" ")),
    st.integers(1, 40), st.booleans(), st.sampled_from([b"", b"\xef\xbb\xbf", b"\n\n"]),
)
def test_the_parts_have_the_lines_of_the_file(texts: list[bytes], n: int, ends: bool, head: bytes) -> None:
    data = head + b"\n".join([b"first", *texts]).replace(b"\0", b"0") + (b"\n" if ends else b"")
    source = Source.of_bytes(data)
    if parts := parts_of(source, n):
        assert in_parts(source, n) == lines(Source.of_bytes(data))
        assert sum(part.size for part in parts) == len(data) and len(parts) > 1


PACK = {"gzip": gzip.compress, "zstd": zstd.compress}
SEEK_TABLE = b"\x5e\x2a\x4d\x18\x04\0\0\0abcd"
"""What the seekable form of zstd has behind its frames: a frame that holds nothing."""


@given(
    st.lists(st.integers(0, 60).map(lambda n: b"x" * n), min_size=1, max_size=40), st.integers(1, 300),
    st.integers(1, 400), st.sampled_from(list(PACK)), st.booleans(),
)
def test_a_packed_file_is_cut_at_its_frames(texts: list[bytes], size: int, n: int, kind: str, ends: bool) -> None:
    data = b"\xef\xbb\xbf" + b"\n".join([b"first", *texts]) + (b"\n" if ends else b"")
    frames = [PACK[kind](data[at : at + size]) for at in range(0, len(data), size)]
    source = Source.of_bytes(b"".join(frames) + (SEEK_TABLE if kind == "zstd" else b"\0" * 9))
    parts = parts_of(source, n)
    starts = list(accumulate(map(len, frames), initial=0))
    if size > 61 and len(frames[0]) <= 2 * n <= source.size and any(start >= n for start in starts[1:-2]):
        assert parts  # a frame in the middle holds the end of a line
    if parts:
        assert len(parts) > 1 and in_parts(source, n) == lines(Source.of_bytes(data))
        assert sum(part.size for part in parts) <= source.size
        last = source.of_part(parts[-1])
        assert all(0 <= last.position <= last.size for _ in last.lines()) and last.position == last.size
        assert all(FilePart.of_json(json.loads(json.dumps(part.to_json()))) == part for part in parts)


def test_a_frame_that_is_read_in_two_pieces_is_cut_where_it_begins() -> None:
    # Frames of 21 bytes: the 293rd and the 488th hold a newline, and 2,048 bytes that are read at once end in them.
    data = b"first\n" + b"x" * 286 + b"\n" + b"x" * 194 + b"\nxxxxx\nxx"
    source = Source.of_bytes(b"".join(gzip.compress(data[at : at + 1]) for at in range(len(data))))
    for n in range(22, 80):
        assert in_parts(source, n) == lines(Source.of_bytes(data)), n


@pytest.mark.parametrize("kind", PACK)
def test_a_file_that_is_packed_in_one_or_damaged_is_not_cut(kind: str) -> None:
    data = b"".join(b"%d\n" % n for n in range(3000))
    one, two = PACK[kind](data), PACK[kind](data[:99]) + PACK[kind](data[99:])
    assert parts_of(Source.of_bytes(one), len(one) // 4) == [] and len(parts_of(Source.of_bytes(two), 60)) == 2
    with pytest.raises(FileRefused, match="damaged or cut off"):
        parts_of(Source.of_bytes(two[:-20]), 60)
    reads = 0

    def spy(*arguments: Any) -> Any:
        nonlocal reads
        for piece in compression.pieces(*arguments):
            reads += 1
            yield piece

    with mock.patch.object(cutting, "pieces", spy):
        noise = random.Random(1).randbytes(45_000).hex().encode()
        assert parts_of(Source.of_bytes(PACK[kind](noise) + two), 2048) == []
    assert reads < 9  # it is not read to its end


def test_what_is_one_value_is_not_cut() -> None:
    array = json.dumps([GYM] * 9, indent=1).encode()
    for data in (array, b"\n" + array, gzip.compress(jsonl(*[GYM] * 99)), jsonl(GYM)):
        assert parts_of(Source.of_bytes(data), len(data) // 3 if data[:1] != b"\x1f" else 10) == [] or data == jsonl(
            GYM
        )
    document = Source.of_bytes(json.dumps(GYM, indent=1).encode() * 9)
    read(document)
    assert document.is_document and parts_of(document, 100) == []


def test_row_groups_are_parts() -> None:
    rows = [changed(TRAIN, "idx", to=n) for n in range(40)]
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file, row_group_size=7)
    source = Source.of_bytes(file.getvalue(), "a.parquet")
    parts = parts_of(source, 200)
    assert [part.line for part in parts] == [1, 8, 15, 22, 29, 36]
    assert in_parts(source, 200) == lines(Source.of_bytes(file.getvalue()))
    damaged = Source.of_bytes(b"PAR1" + b"x" * 999)
    assert parts_of(damaged, 10) == []


@pytest.mark.parametrize("n_bytes", [1, 900, 2500])
def test_a_format_reads_parts_like_the_file(n_bytes: int) -> None:
    data = jsonl(*[changed(GYM, "_ng_task_index", to=n) if n % 5 else b"{" for n in range(1, 30)])
    source = Source.of_bytes(data, "a.jsonl")
    chosen, items = read(source)
    assert chosen.cut is not None
    parts = [one for part in chosen.cut(source, n_bytes) for one in chosen.read(source.of_part(part))]
    assert [told(one) for one in parts] == [told(one) for one in items]


def told(item: Trajectory | Rejected) -> object:
    return item if isinstance(item, Rejected) else (item.external_id, item.n_ids, item.reward)


CALLS = {
    "recorded_calls": (CALL, "session_id"),
    "rllm": ({"session_id": "", "prompt_token_ids": [1], "completion_token_ids": [3]}, "session_id"),
    "token_capture": ({"rollout_id": "", "prompt_token_ids": [1], "generation_token_ids": [3]}, "rollout_id"),
}


def session_file(name: str, order: list[int]) -> Source:
    """A call on each line; a number is its session, or a line that cannot be read."""
    call, key = CALLS[name]
    deep: Any = []
    for _ in range(101):
        deep = [deep]
    deep = {**changed(call, key, to="s1"), "x": deep}  # its session can be told, and it cannot be read
    found = {-1: b"\n", -2: b"{\n", -3: jsonl(deep), -4: b" \n\n"}
    text = b"".join(found.get(n) or jsonl(changed(call, key, to=f"s{n}")) for n in [0, *order])
    return Source.of_bytes(b"\xef\xbb\xbf" + text, "calls.jsonl")


@given(
    st.sampled_from(list(CALLS)), st.lists(st.integers(-4, 6), max_size=30), st.integers(1, 3000),
    st.sampled_from([1, 400, 1 << 20]),
)
def test_sessions_are_cut_where_they_end(name: str, order: list[int], n_bytes: int, max_gap: int) -> None:
    source = session_file(name, order)
    chosen, items = read(source, name)
    whole = [told(one) for one in items]
    assert chosen.cut is not None
    with mock.patch.object(sessions, "MAX_GAP", max_gap):
        parts = chosen.cut(source, n_bytes)
    parts = [part for one in parts if (part := FilePart.of_json(json.loads(json.dumps(one.to_json()))))]
    found = [told(one) for part in parts for one in chosen.read(source.of_part(part))]
    assert not parts or (len(parts) > 1 and found == whole)
    assert sum(part.size for part in parts) <= source.size
    if max_gap == 1:  # no part reads what it does not need, but for blank lines
        assert sum(n for part in parts if part.sessions for *_, n in part.sessions[0]) <= len(order) + 9
    if len(set(order) - {-1, -4}) > 2 and n_bytes < 3:
        assert parts


def test_mixed_sessions_have_fewer_parts() -> None:
    """All parts together read the file a few times at most."""
    source = session_file("recorded_calls", [n % 50 for n in range(150)])
    chosen, _ = read(source)
    assert chosen.cut is not None
    parts = chosen.cut(source, source.size // 50)
    n_read = [n for part in parts if part.sessions for *_, n in part.sessions[0]]
    assert 2 < len(parts) < 20 and 151 * 2 < sum(n_read) <= sessions.MAX_READS * 151


def test_a_part_of_sessions_tells_how_far_it_is() -> None:
    source = session_file("recorded_calls", [n % 7 for n in range(70)])
    chosen, _ = read(source)
    assert chosen.cut is not None
    parts = chosen.cut(source, source.size // 4)
    assert sum(part.size for part in parts) == source.size
    for part in parts:
        one = source.of_part(part)
        places = [one.position for _ in one.lines()]
        assert places == sorted(places) and places[-1] == one.position == part.size


def test_one_value_or_one_packed_file_of_sessions_is_not_cut() -> None:
    array = json.dumps([changed(CALL, "session_id", to=n) for n in range(20)]).encode()
    for data in (array, gzip.compress(jsonl(*[changed(CALL, "session_id", to=n) for n in range(99)]))):
        source = Source.of_bytes(data)
        chosen, _ = read(source)
        assert chosen.cut is not None and chosen.cut(source, 10) == []
    assert FORMATS["own_jsonl"].cut and FORMATS["nemo_rl"].cut and not FORMATS["skyrl"].cut


def test_the_position_of_a_part_is_its_own() -> None:
    data = jsonl(*[changed(GYM, "_ng_task_index", to=n) for n in range(200)])
    source = Source.of_bytes(data)
    last = source.of_part(parts_of(source, len(data) // 3)[-1])
    assert last.position == 0
    for _ in last.lines():
        assert 0 < last.position <= last.size
    assert last.position == last.size < len(data)
