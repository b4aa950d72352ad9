"""Files as users have them: the same content in another dress is read alike, or refused with a sentence that helps."""

import gzip
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from rollout_inspector.formats import FileRefused
from rollout_inspector.formats.containers.compression import zstd
from rollout_inspector.formats.containers.json_array import objects
from tests.samples.format_mutations import EXAMPLES
from tests.samples.formats import CALL, GYM, changed, jsonl, read

OWN_NAMES = ("own_jsonl", "own_parquet")


def mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    if isinstance(value, dict):
        return {key: mapped(item, change) for key, item in value.items()}
    if isinstance(value, list):
        return [mapped(item, change) for item in value]
    return change(value)


def with_unknown_keys(value: Any) -> Any:
    if isinstance(value, dict):
        # Names are data in an object of numbers, so that nothing is added there.
        more = {} if value and all(type(item) in (int, float) for item in value.values()) else {"zz": {"a": [1, None]}}
        return {**{key: with_unknown_keys(item) for key, item in value.items()}, **more}
    return [with_unknown_keys(item) for item in value] if isinstance(value, list) else value


def dresses(value: Any) -> dict[str, bytes]:
    line = json.dumps(value).encode()
    pretty = json.dumps(value, indent=2).encode()
    return {
        "blank lines": b"\n \n" + line + b"\n\n\n",
        "byte order mark": b"\xef\xbb\xbf" + line + b"\n",
        "CRLF": line + b"\r\n\r\n",
        "no end of line": line,
        "one array": b"[" + line + b"]",
        "pretty array": json.dumps([value], indent=4).encode(),
        "pretty object": pretty,
        "pretty object, CRLF and byte order mark": b"\xef\xbb\xbf" + pretty.replace(b"\n", b"\r\n"),
    }


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_the_same_in_another_dress(name: str) -> None:
    for what, data in dresses(EXAMPLES[name]).items():
        found_name, found, rejected = read(data)
        assert (found_name, bool(found), rejected) == (name, True, []), what


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_unknown_keys_are_kept_or_passed_over(name: str) -> None:
    found_name, found, rejected = read(jsonl(with_unknown_keys(EXAMPLES[name])))
    assert (found_name, rejected) == (name, []) and found


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name not in OWN_NAMES])
def test_whole_numbers_as_floats_and_logprobs_that_are_no_numbers(name: str) -> None:
    value = EXAMPLES[name]
    as_floats = mapped(value, lambda item: float(item) if type(item) is int else item)
    plain, (found_name, found, rejected) = read(jsonl(value))[1], read(jsonl(as_floats))
    assert (found_name, rejected) == (name, [])
    for left, right in zip(plain, found, strict=True):
        assert [step.stream.tolist() for step in left.steps] == [step.stream.tolist() for step in right.steps]
        assert [row.ids.tolist() for row in left.rows] == [row.ids.tolist() for row in right.rows]
    for odd in (math.nan, -math.inf):
        _, found, rejected = read(jsonl(mapped(value, lambda item: odd if type(item) is float and item < 0 else item)))  # noqa: B023
        assert found and not rejected


def test_a_logprob_that_is_no_number_is_none() -> None:
    line = changed(GYM, "response", "output", 1, "generation_log_probs", to=[math.nan, -math.inf])
    _, (one,), _ = read(jsonl(line))
    logprobs = one.steps[0].logprobs
    assert logprobs is not None and np.isnan(logprobs).all()
    assert one.steps[1].logprobs is not None and one.steps[1].logprobs.tolist() == pytest.approx([-0.1])
    _, found, (rejected,) = read(jsonl(GYM, b'{"response": {"output": []}, "reward": 1e400, "x": NaN}'))
    assert len(found) == 1 and rejected.line == 2


def test_objects_over_several_lines_are_read_one_by_one() -> None:
    values = [changed(CALL, "session_id", to=f"s{n}") for n in range(30)]
    values[3]["request"]["messages"][0]["content"] = 'braces } { ] [ and a quote " and \\'
    data = b"\n".join(json.dumps(value, indent=1).encode() for value in values)
    name, found, rejected = read(data)
    assert (name, rejected) == ("recorded_calls", []) and [one.external_id for one in found] == [
        f"s{n}" for n in range(30)
    ]
    for size in (1, 2, 3, 1000):
        pieces = [data[at : at + size] for at in range(0, len(data), size)]
        assert [json.loads(one or b"") for one in objects(pieces, 1 << 20)] == values
    assert list(objects([b'{"a": "', b"x" * 100, b'"}\n{}'], 50)) == [None, b"{}"]
    _, found, (rejected_one,) = read(data[:-3])
    assert len(found) == 29 and rejected_one.line == 30


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (json.dumps({"data": [GYM]}).encode(), "holds a list under 'data': NeMo Gym rollouts. Write that list alone"),
        (json.dumps([[GYM]]).encode(), "Line 1 is a list"),
        (b'{"a": 1, "b": 2}', "its keys are: a, b."),
        (json.dumps(GYM).encode("utf-16"), "UTF-16 text. Save it as UTF-8."),
        (b"a,b\n1,2\n", "not valid JSON"),
        (gzip.compress(pickle.dumps({"a": 1})), "is a pickle. Pickles can run code"),
        (zstd.compress(b"\0" * 100), "is a binary file"),
        (gzip.compress(gzip.compress(jsonl(GYM))), "holds another packed file. Unpack it once"),
    ],
)
def test_what_is_refused_says_the_way_out(data: bytes, says: str) -> None:
    with pytest.raises(FileRefused) as refusal:
        read(data)
    assert says in str(refusal.value)
