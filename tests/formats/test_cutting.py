"""Files cut into parts: together they read like the file."""

from __future__ import annotations

import io
import json

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.formats import FORMATS, Rejected, Source, read
from rollouts.formats.containers.cutting import parts_of
from rollouts.tito.trajectory import Trajectory
from tests.formats.test_formats import CALL, GYM, TRAIN, changed, jsonl


def lines(source: Source) -> list[tuple[int, bytes | None]]:
    return [(line.number, line.data) for line in source.lines()]


def in_parts(source: Source, n_bytes: int) -> list[tuple[int, bytes | None]]:
    return [line for part in parts_of(source, n_bytes) for line in lines(source.of_part(part))]


@given(
    st.lists(st.binary(max_size=12).map(lambda data: b"x" + data.replace(b"\n", b" ")) | st.just(b"") | st.just(b" ")),
    st.integers(1, 40), st.booleans(), st.sampled_from([b"", b"\xef\xbb\xbf", b"\n\n"]),
)  # fmt: skip
def test_the_parts_have_the_lines_of_the_file(texts: list[bytes], n: int, ends: bool, head: bytes) -> None:
    data = head + b"\n".join([b"first", *texts]).replace(b"\0", b"0") + (b"\n" if ends else b"")
    source = Source.of_bytes(data)
    if parts := parts_of(source, n):
        assert in_parts(source, n) == lines(Source.of_bytes(data))
        assert sum(part.size for part in parts) == len(data) and len(parts) > 1


def test_what_is_one_value_is_not_cut() -> None:
    import gzip

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
    assert chosen.by_line
    parts = [one for part in parts_of(source, n_bytes) for one in chosen.read(source.of_part(part))]
    assert [told(one) for one in parts] == [told(one) for one in items]


def told(item: Trajectory | Rejected) -> object:
    return item if isinstance(item, Rejected) else (item.external_id, item.n_ids, item.reward)


def test_formats_whose_lines_need_others_are_not_cut() -> None:
    assert not FORMATS["recorded_calls"].by_line and read(Source.of_bytes(jsonl(CALL)))[0].name == "recorded_calls"
    assert FORMATS["own_jsonl"].by_line and FORMATS["nemo_rl"].by_line and not FORMATS["skyrl"].by_line


def test_the_position_of_a_part_is_its_own() -> None:
    data = jsonl(*[changed(GYM, "_ng_task_index", to=n) for n in range(200)])
    source = Source.of_bytes(data)
    last = source.of_part(parts_of(source, len(data) // 3)[-1])
    assert last.position == 0
    for _ in last.lines():
        assert 0 < last.position <= last.size
    assert last.position == last.size < len(data)
