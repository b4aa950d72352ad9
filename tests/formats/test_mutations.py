"""Every reader against changed examples: a value, a sentence, or a refusal; never another exception.

``INSPECTOR_TEST_MUTATIONS=10000 python -m pytest tests/formats/test_mutations.py`` reads so many of every format.
"""

import io
import json
import os
import random

import pytest

from rollout_inspector import formats
from rollout_inspector.formats import FileRefused, Rejected
from rollout_inspector.streams.trajectory import Trajectory
from tests.samples.format_mutations import EXAMPLES, changed_values, mutate_bytes, mutate_value, own, places
from tests.samples.formats import jsonl, read
from tests.storage.build import chain, rows_only

FILES = int(os.environ.get("INSPECTOR_TEST_MUTATIONS", "500"))
"""Changed files of each format."""


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
