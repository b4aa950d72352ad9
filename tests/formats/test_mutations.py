"""Every reader against changed examples: a value, a sentence, or a refusal; never another exception.

``INSPECTOR_TEST_MUTATIONS=10000 python -m pytest tests/formats/test_mutations.py`` reads so many of every format.
"""

import copy
import io
import json
import os
import random
from typing import Any

import pytest

from rollouts import formats
from rollouts.formats import FileRefused, Rejected
from rollouts.formats.writers.exports import EXPORTS, write
from rollouts.tito.trajectory import Trajectory
from tests.formats.test_formats import CALL, GYM, TRAIN, jsonl, read
from tests.formats.test_reader_shapes import EVENT, HARBOR, RLLM_EPISODE, SGLANG
from tests.formats.test_text_formats import AREAL, ART, EVALS, MESSAGES, SWIFT, VERL
from tests.formats.test_trainer_formats import (
    ATROPOS,
    CAPTURE,
    EXPORT,
    LEGACY,
    LIGHTNING,
    RLLM,
    SKYRL_OBSERVED,
    TRACE_04,
)
from tests.storage.build import chain, rows_only

FILES = int(os.environ.get("INSPECTOR_TEST_MUTATIONS", "500"))
"""Changed files of each format."""

ODD: list[Any] = [
    None, -1, 0, 2**31, 2**70, 1.5, True, "", "\0", "x" * 300, [], {}, [[]], {"a": []}, "\ud800", 1e308, -0.0, [None],
    ["1"], [-5], [1, [2]], "token_id:x", [{}], {"role": 1}, [1e308, 1e308], 10**30,
]


def own(value: Trajectory) -> Any:
    file = io.BytesIO()
    formats.FORMATS["own_jsonl"].write([value], file)  # type: ignore[misc]
    return json.loads(file.getvalue())


def exported(name: str) -> Any:
    file = io.BytesIO()
    write(EXPORTS[name], [chain("t", 2)], file)
    return json.loads(file.getvalue())


EXAMPLES = {
    "recorded_calls": CALL, "nemo_gym": GYM, "nemo_rl": TRAIN, "token_capture": CAPTURE, "verifiers_traces": TRACE_04,
    "verifiers_legacy": LEGACY, "prime_rl_export": EXPORT, "skyrl": SKYRL_OBSERVED, "rllm": RLLM, "verl": VERL,
    "skyrl_evals": EVALS, "areal": AREAL, "completions": SWIFT, "messages": MESSAGES, "art": ART,
    "agent_lightning": LIGHTNING, "atropos": ATROPOS, "rllm_steps": RLLM_EPISODE, "sglang": SGLANG, "harbor": HARBOR,
    "agent_lightning_events": EVENT, "agent_lightning_archive": {"rollout": {"rollout_id": "r"}, "events": [EVENT]},
    "miles_columns": {
        "sample_index": 1, "response_length": 2, "total_length": 3, "tokens": [1, 2, 3], "loss_mask": [1, 0],
        "rollout_log_probs": [-0.5, 0.0]},
    "own_jsonl": own(chain(hostile="")),
    "own_parquet": {"external_id": "a", "record": json.dumps(own(chain("a", hostile="")))},
    "verl_agent_loop": exported("verl"), "trl_rollouts": exported("trl"), "prime_rl_samples": exported("prime_rl"),
    "tinker_data": exported("tinker"), "nemo_message_log": exported("nemo_message_log"), "sft_rows": exported("sft"),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def mutate_value(rng: random.Random, value: Any) -> None:
    path = rng.choice(places(value))
    place = value
    for key in path[:-1]:
        place = place[key]
    action = rng.random()
    if action < 0.2 and isinstance(place, dict):
        del place[path[-1]]
    elif action < 0.3 and isinstance(place, list):
        place.append(copy.deepcopy(rng.choice(ODD)))
    else:
        place[path[-1]] = copy.deepcopy(rng.choice(ODD))


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    at = rng.randrange(len(changed))
    action = rng.random()
    if action < 0.3:
        del changed[at : at + rng.randint(1, 40)]
    elif action < 0.6:
        changed[at] = rng.randrange(256)
    elif action < 0.8:
        changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 5)))
    else:
        changed[at:at] = changed[: rng.randint(0, 200)]
    return bytes(changed)


def changed_values(rng: random.Random, name: str) -> list[Any]:
    """One to three examples of a format, a few of their values changed."""
    values = [json.loads(json.dumps(EXAMPLES[name])) for _ in range(rng.randint(1, 3))]
    for _ in range(rng.randint(0, 3)):
        target = rng.choice(values)
        if places(target):
            mutate_value(rng, target)
    return values


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_a_changed_file_is_read_or_answered_with_a_sentence(name: str) -> None:
    rng = random.Random(name)
    for n in range(FILES):
        values = changed_values(rng, name)
        data = jsonl(*values)
        if n % 3 == 0:
            data = mutate_bytes(rng, data)
        try:
            _, found, rejected = read(data, rng.choice(["auto", name]))
        except FileRefused as refusal:
            assert str(refusal).endswith((".", "FILE.json")), refusal
            continue
        for item in rejected:
            assert isinstance(item, Rejected) and item.reason.endswith("."), item
        for one in found:
            assert 0 < len(one.external_id) <= 200 and "\0" not in one.external_id
            for step in one.steps:
                assert step.prompt_ids.dtype == step.completion_ids.dtype == "int32"
                assert (step.prompt_ids >= 0).all() and (step.completion_ids >= 0).all()
        # What was read can be written and read again.
        file = io.BytesIO()
        formats.FORMATS["own_jsonl"].write(found, file)  # type: ignore[misc]
        if found:
            names = {one.external_id for one in found}
            again = list(formats.FORMATS["own_jsonl"].read(formats.Source.of_bytes(file.getvalue())))
            assert {one.external_id for one in again if isinstance(one, Trajectory)} == names


def test_rows_survive_the_same() -> None:
    rng = random.Random(1)
    for _ in range(FILES):
        value = own(rows_only())
        mutate_value(rng, value)
        _, found, rejected = read(jsonl(own(chain("other", hostile="")), value), "own_jsonl")
        assert len(found) + len(rejected) == 2


HOSTILE = {
    "deep": b"[" * 100_000 + b"]" * 100_000, "deep objects": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "huge": b"1e400", "minus huge": b"-1e400", "lone surrogate": b'"\\ud800"', "half a pair": b'"\\udc00x"',
    "NUL": b'"a\\u0000b"', "raw NUL": b"\0", "raw surrogate": b'"\xed\xa0\x80"', "long number": b"9" * 5000,
    "not a number": b"NaN",
}


@pytest.mark.parametrize("what", list(HOSTILE))
@pytest.mark.parametrize("name", list(EXAMPLES))
def test_hostile_values_anywhere_reject_their_line_alone(name: str, what: str) -> None:
    rng = random.Random(f"{name} {what}")
    good = EXAMPLES[name]
    for path in rng.sample(all_places := places(good), min(4, len(all_places))):
        value = json.loads(json.dumps(good))
        place = value
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = "@here@"
        line = json.dumps(value).encode().replace(b'"@here@"', HOSTILE[what])
        try:
            _, found, rejected = read(jsonl(good, line), name)
        except FileRefused as refusal:
            assert what == "raw NUL" and "binary file" in str(refusal)
            continue
        assert found or (rejected and rejected[0].reason.endswith(".")), path
        assert all(item.line in (1, 2) and item.reason.endswith(".") for item in rejected)
        for one in found:
            assert "\0" not in one.external_id + one.group + one.stop_reason + one.tokenizer
            one.external_id.encode()


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_an_id_never_comes_twice_out_of_one_file(name: str) -> None:
    """A repetition is rejected, is another call of the same trajectory, or gets a name of its own."""
    _, found, rejected = read(jsonl(*[EXAMPLES[name]] * 3))
    names = [one.external_id for one in found]
    assert len(set(names)) == len(names) >= 1
    assert all("earlier" in item.reason for item in rejected)
