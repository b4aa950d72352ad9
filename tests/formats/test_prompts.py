"""Cutting prompts out of a line gives what decoding the whole line gives, whatever the line looks like."""

import json
import random
import re
from typing import Any

import msgspec
import numpy as np
import pytest

from rollout_inspector.formats import prompts, shapes
from rollout_inspector.formats.shapes import BadLine


def holders(value: Any) -> Any:
    yield from value["calls"]


OTHERS = {"generation_token_ids": prompts.parse_ids, "generation_log_probs": prompts.parse_floats}


SAMPLED = {"generation_token_ids": [4, 5], "generation_log_probs": [-1.5, 0]}


def listed(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: listed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [listed(item) for item in value]
    if isinstance(value, float) and abs(value) < 1e38:
        return float(np.float32(value))  # as an array of log-probabilities holds it
    return value.tolist() if isinstance(value, np.ndarray) else value


def both(data: bytes) -> tuple[Any, Any]:
    results: list[Any] = []
    for decode in (lambda: prompts.decode(data, holders, OTHERS), lambda: shapes.decode(data)):
        try:
            results.append(listed(decode()))
        except BadLine as error:
            results.append(str(error))
    return results[0], results[1]


def line(*ids: list[Any], separators: tuple[str, str] = (", ", ": "), sampled: Any = ()) -> bytes:
    calls = [{"n": n, "prompt_token_ids": one, **dict(sampled)} for n, one in enumerate(ids)]
    return json.dumps({"calls": calls}, separators=separators).encode()


def test_prompts_become_arrays_and_share_what_repeats() -> None:
    value = prompts.decode(line([1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [7]), holders)
    found = [call["prompt_token_ids"] for call in value["calls"]]
    assert [one.tolist() for one in found] == [[1, 2], [1, 2, 3, 4], [1, 2, 3, 4, 5], [7]]
    assert {one.dtype for one in found} == {np.dtype(np.int32)}


@pytest.mark.parametrize(
    "data",
    [
        line([], [], [1]),
        line([1, 2], [1, 23, 4]),  # the same bytes, another number
        line([1, 2], [1, 2]),
        line([1, 2], [1]),
        line([1], [1, 2], separators=(",", ":")),
        line([1, 2], [1, 2, -3]),
        line([1, 2], [1, 2, 2**31]),
        line([1, 2], [1, 2, 10**30]),
        line([1, 2], [1, 2, 3.0]),
        line([1, 2], [1, 2, None]),
        line([1, 2], [1, 2, True]),
        line([1, 2], [1, 2, "3"]),
        line([1, 2], [1, 2, [3]]),
        line([1], [1, 4, 5], [1, 4, 5, 4, 5, 6], [1, 4, 5, 4], [], [4, 5], sampled=SAMPLED),
        line([1], [1, 4, 56], [1, 4, 56, 4, 5.0], [1, 4, 56, 4, 5, 7], sampled=SAMPLED),
        line([1], [1, 4, 5], [1, 4, 5, 4, 5, 6], separators=(",", ":"), sampled=SAMPLED),
        line([1], [1, 4, 5], [1, 4, 5, 4, 5], sampled={"generation_token_ids": []}),
        line([1], [1, 4, 5, 6], sampled=SAMPLED).replace(b", 6]", b",]"),
        line([1], [1, 4, 5, 6], sampled=SAMPLED).replace(b", 6]", b", ]"),
        line([1], [1, 4, 5, 6], sampled=SAMPLED).replace(b"5, 6]", b"5 6]"),
        b'{"calls": [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 2,]}]}',
        b'{"calls": [{"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 2, , 3]}]}',
        b'{"calls": [{"prompt_token_ids": [ 1 , 2 ]}, {"prompt_token_ids" : [ 1 , 2 , 3\t]}]}',
        b'{"calls": [{"prompt_token_ids": [1, 2',
        b'{"calls": [{"prompt_token_ids": null}, {"prompt_token_ids": [1]}]}',
        b'{"calls": [{"prompt_token_ids": 0}, {"prompt_token_ids": [1]}]}',
        b'{"calls": [{"prompt_token_ids": [3], "prompt_token_ids": [4]}]}',
        b'{"calls": [{"prompt\\u005ftoken_ids": 0}, {"prompt_token_ids": [4]}]}',
        b'{"calls": [{"prompt\\u005ftoken_ids": 0, "prompt_token_ids": [4]}]}',
        b'{"calls": [{"text": "\\"prompt_token_ids\\": [1]", "prompt_token_ids": [4]}]}',
        b'{"calls": [{"text": "\\\\", "prompt_token_ids": [4]}], "prompt_token_ids": [5]}',
        b'{"calls": [[{"prompt_token_ids": [4]}]]}',
        b'{"calls": 3, "prompt_token_ids": [4]}',
        b'["prompt_token_ids", [1]]',
        b'{"calls": [{"generation_token_ids": [1, -2]}, {"generation_log_probs": [-0.5, 1]}]}',
        b'{"calls": [{"generation_log_probs": [1, null, 2], "prompt_token_ids": [4]}]}',
        b'{"calls": [{"generation_log_probs": [1e39], "prompt_token_ids": [4]}]}',
        b'{"calls": [{"generation_log_probs": [1e400], "prompt_token_ids": [4]}]}',
        b'{"calls": [{"generation_log_probs": [NaN], "prompt_token_ids": [4]}]}',
        b'{"calls": [{"generation_log_probs": [{"prompt_token_ids": [4]}], "prompt_token_ids": [4]}]}',
        b'{"calls": [{"generation_token_ids": 0, "prompt_token_ids": [4]}]}',
        b'{"calls": [{"generation_token_ids": 1, "generation\\u005ftoken_ids": 0, "prompt_token_ids": [4]}]}',
        b'{"calls": [{"generation_token_ids": [3], "prompt_token_ids": [1]}, {"generation_token_ids": [4]}]}',
        b'"prompt_token_ids"',
    ],
)
def test_odd_lines_are_read_as_they_always_are(data: bytes) -> None:
    left, right = both(data)
    assert left == right


def test_changed_lines_are_read_as_they_always_are() -> None:
    rng = random.Random(5)
    for _ in range(3000):
        ids: list[int] = []
        calls = []
        for _ in range(rng.randint(1, 4)):
            ids = ids[: rng.choice([len(ids), len(ids), rng.randint(0, 3)])]
            ids += rng.choice([[], [4, 5]])  # what was sampled behind the prompt before
            ids += [rng.choice([1, 12, 123, 2**31 - 1]) for _ in range(rng.randint(0, 3))]
            calls.append(list(ids))
        sampled = rng.choice([{}, SAMPLED])
        separators = rng.choice([(",", ":"), (", ", ": "), (" ,", " :\t")])
        data = bytearray(line(*calls, separators=separators, sampled=sampled))
        for _ in range(rng.randint(0, 2)):
            at = rng.randrange(len(data))
            data[at : at + rng.randint(0, 2)] = rng.choice([b"", b"1", b",", b"]", b"[", b" ", b'"', b"\\", b"-", b"."])
        left, right = both(bytes(data))
        assert left == right, bytes(data)


def test_what_was_sampled_is_not_parsed_again_in_the_next_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[bytes] = []

    def parse_ids(text: bytes) -> Any:
        parsed.append(text)
        return np.array(json.loads(text), dtype=np.int32)

    monkeypatch.setattr(prompts, "parse_ids", parse_ids)
    data = line([1, 2], [1, 2, 4, 5, 7], [1, 2, 4, 5, 7, 4, 5], sampled=SAMPLED)
    value = prompts.decode(data, holders, {**OTHERS, "generation_token_ids": parse_ids})
    assert parsed == [b"[1, 2]", b"[4, 5]", b"[7]", b"[4, 5]", b"[4, 5]"]
    assert [call["prompt_token_ids"].tolist() for call in value["calls"]][1:] == [
        [1, 2, 4, 5, 7],
        [1, 2, 4, 5, 7, 4, 5],
    ]


def test_the_same_numbers_in_another_form_are_read_again() -> None:
    """Bytes that differ are no prefix, although the numbers are the same."""
    data = re.sub(rb", 2", b",  2", line([1, 2, 3], [1, 2, 3, 4]), count=1)
    value = prompts.decode(data, holders)
    assert value["calls"][1]["prompt_token_ids"].tolist() == [1, 2, 3, 4]
    assert msgspec.json.decode(data)["calls"][1]["prompt_token_ids"] == [1, 2, 3, 4]


def test_what_was_sampled_becomes_arrays_too() -> None:
    data = line([1], [1, 4, 5, 2], sampled={"generation_token_ids": [4, 5], "generation_log_probs": [-1, 0.5]})
    (one, _) = prompts.decode(data, holders, OTHERS)["calls"]
    assert one["generation_token_ids"].tolist() == [4, 5] and one["generation_token_ids"].dtype == np.int32
    assert one["generation_log_probs"].tolist() == [-1.0, 0.5] and one["generation_log_probs"].dtype == np.float32
