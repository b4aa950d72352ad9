"""Hostile files: what a small body may become is bounded, and the refusal names the number."""

from __future__ import annotations

import io
import json
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from rollouts.formats import FileRefused, Rejected, Source, read
from rollouts.formats.containers import source
from rollouts.formats.readers import inspector_jsonl


def own_line(steps: list[dict[str, Any]]) -> bytes:
    return json.dumps({"format": "rollout-inspector", "version": 1, "external_id": "a", "steps": steps}).encode()


def one_prompt_again(n: int, message: dict[str, Any] | None = None) -> list[dict[str, Any]]:
    """A step of 1,000 ids, and ``n`` steps that read them again."""
    first: dict[str, Any] = {"delta_ids": [1] * 1000, "completion_ids": [2]}
    again: dict[str, Any] = {"parent": 0, "shared_length": 1001, "delta_ids": [1], "completion_ids": [2]}
    if message is not None:
        first["request"] = {"messages_new": [message] * 100}
        again["request"] = {"messages_shared": 100}
    return [first, *[again] * n]


@pytest.mark.parametrize("message", [None, {"role": "user", "content": "x"}])
def test_deltas_that_become_gigabytes_are_rejected(message: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspector_jsonl, "MAX_DECODED_IDS", 1000 + 50 * 1002)
    if message is not None:
        monkeypatch.setattr(inspector_jsonl, "MAX_DECODED_IDS", 1 << 40)
        monkeypatch.setattr(inspector_jsonl, "MAX_DECODED_MESSAGES", 51 * 100)
    _, (kept,) = read(Source.of_bytes(own_line(one_prompt_again(50, message))), "own_jsonl")
    assert not isinstance(kept, Rejected)
    _, (rejected,) = read(Source.of_bytes(own_line(one_prompt_again(51, message))), "own_jsonl")
    assert isinstance(rejected, Rejected) and "steps[51]" in rejected.reason and "at most" in rejected.reason


@pytest.mark.parametrize("before", [b"", b"{}\n"])
def test_blank_lines_without_end_are_refused(before: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "MAX_BLANK_LINES", 1000)
    few = Source.of_bytes(zstandard.compress(before + b"\n" * 1000 + b"{}\n" + b"\n" * 1000))
    assert [line.number for line in few.lines()][-1] == 1001 + bool(before)
    many = Source.of_bytes(zstandard.compress(before + b"\n" * 1001 + b"{}\n"))
    with pytest.raises(FileRefused, match="more than 1,000 blank lines"):
        list(many.lines())


def test_a_parquet_file_of_one_value_in_every_row_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "FREE_BYTES", 1 << 20)
    file = io.BytesIO()
    values = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 500, pyarrow.int32()), ["x" * 100_000])
    pyarrow.parquet.write_table(pyarrow.table({"text": values}), file, compression="zstd")
    bomb = Source.of_bytes(file.getvalue())
    assert bomb.size * source.MAX_PARQUET_RATIO < 500 * 100_000
    with pytest.raises(FileRefused, match="grows more than 2,000 times"):
        list(bomb.lines())
