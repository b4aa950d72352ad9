"""A file that is one array: its elements are read as if they were lines."""

import gzip
import json
import random
from typing import Any

import pytest

from rollout_inspector.formats import Source
from rollout_inspector.formats.containers.json_array import elements
from tests.samples.format_mutations import EXAMPLES
from tests.samples.formats import CALL, GYM, changed, read

VALUES: list[Any] = [
    {"a": 'quote " and \\ and ],[{ inside', "b": [[], {}, [1, {"c": "\\"}]]}, {}, {"é": "\u2028"}, [1, 2],
    "x,y", 3, None,
]


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_cut_anywhere_gives_its_elements(indent: int | None) -> None:
    data = json.dumps(VALUES, indent=indent).encode()
    for size in (1, 2, 3, 7, len(data)):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert [json.loads(one or b"") for one in elements(pieces, 1 << 20)] == VALUES
    assert list(elements([b" [ \n ] "], 9)) == []


def test_an_element_that_is_too_long_is_left_out_alone() -> None:
    data = json.dumps([1, "x" * 500, 2]).encode()
    assert list(elements([data[:100], data[100:200], data[200:]], 150)) == [b"1", None, b"2"]


def test_random_arrays() -> None:
    rng = random.Random(3)

    def value(depth: int) -> Any:
        kind = rng.randrange(5 if depth else 3)
        if kind == 3:
            return [value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 4:
            return {str(n): value(depth - 1) for n in range(rng.randrange(4))}
        return ["".join(rng.choices('"\\[]{}, ab\n', k=rng.randrange(8))), rng.random(), None][kind]

    for _ in range(300):
        values = [value(4) for _ in range(rng.randrange(1, 5))]
        data = json.dumps(values).encode()
        cuts = sorted(rng.randrange(len(data) + 1) for _ in range(3))
        pieces = [data[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(data)], strict=True)]
        assert [json.loads(one or b"") for one in elements(pieces, 1 << 20)] == values


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "own_parquet"])
@pytest.mark.parametrize("indent", [None, 1])
def test_every_format_may_come_as_an_array(name: str, indent: int | None) -> None:
    data = json.dumps([EXAMPLES[name]], indent=indent).encode()
    line = json.dumps(EXAMPLES[name]).encode()
    for one in (data, b"\xef\xbb\xbf\n " + data, gzip.compress(data)):
        found_name, found, rejected = read(one)
        assert (found_name, rejected) == (name, [])
        assert [value.external_id for value in found] == [value.external_id for value in read(line)[1]]


def test_what_is_wrong_in_an_array_is_named_by_its_place() -> None:
    good = [CALL, changed(CALL, "session_id", to="s2")]
    _, found, (rejected,) = read(json.dumps([good[0], {"session_id": 1}, good[1]]).encode())
    assert [one.external_id for one in found] == ["s1", "s2"] and rejected.line == 2
    whole = json.dumps([GYM, {**GYM, "_ng_task_index": 5}]).encode()
    for cut, n in ((whole[:-1], 2), (whole[:-9], 1), (whole + b"x", 2), (whole[:-1] + b",", 2)):
        _, found, rejected_all = read(cut)
        assert len(found) == n and len(rejected_all) == (cut != whole[:-1]), cut[-20:]
        assert all("not valid JSON" in one.reason for one in rejected_all)


def test_memory_does_not_grow_with_the_array() -> None:
    element = json.dumps({"x": list(range(2000))}).encode()

    def pieces() -> Any:
        yield b"["
        for n in range(60):
            yield (b"," if n else b"") + element
        yield b"]"

    import tracemalloc

    tracemalloc.start()
    assert sum(1 for _ in elements(pieces(), 1 << 20)) == 60
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 20 * len(element)
    assert Source.of_bytes(b"[{}]").kind() == "plain"
