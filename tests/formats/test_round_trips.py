"""What is exported and imported again keeps ids, masks and logprobs; our own formats keep everything."""

import io
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from rollout_inspector import formats
from rollout_inspector.formats.writers.exports import EXPORTS, padded, rows_of, step_rows_of, write
from rollout_inspector.streams.trajectory import Request, Row, Step, Trajectory
from tests.samples.formats import read
from tests.storage.build import assert_same, chain

FEW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
READERS = {
    "skyrl": "skyrl", "skyrl_step_wise": "skyrl", "nemo_message_log": "nemo_message_log", "trl": "trl_rollouts",
    "verl": "verl_agent_loop", "prime_rl": "prime_rl_samples", "tinker": "tinker_data", "sft": "sft_rows",
}
ids = st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=6)
logprob = st.floats(-50, -(2**-20), width=32)
texts = st.text(max_size=8)  # surrogates too: JSON can say them, UTF-8 cannot


def array(values: list[int]) -> np.ndarray:
    return np.array(values, dtype=np.int32)


@st.composite
def trajectories(draw: st.DrawFn, name: str, one_row: bool = False) -> Trajectory:
    """Steps that extend each other, or do not."""
    steps: list[Step] = []
    prompt = draw(ids)
    for _ in range(draw(st.integers(1, 4))):
        completion = draw(ids)
        logprobs = draw(st.lists(logprob, min_size=len(completion), max_size=len(completion)))
        request = Request(tuple({"role": "user", "content": text} for text in draw(st.lists(texts, max_size=2))))
        more = draw(st.none() | st.lists(st.tuples(logprob, logprob | st.just(-math.inf)), min_size=1, max_size=3))
        told: dict[str, Any] = {}
        if more is not None:
            values = np.resize(np.array(more, dtype=np.float32), (len(completion), 2))
            told = {"alternative_ids": np.resize(array(completion), values.size), "entropy": -values[:, 0]}
            told["alternative_logprobs"] = values.reshape(-1)
        steps.append(
            Step(
                array(prompt), array(completion), np.array(logprobs, dtype=np.float32), **told, finish_reason="stop",
                request=draw(st.sampled_from([None, request])), text=draw(st.none() | texts),
                temperature=draw(st.none() | st.floats(0, 2)), extra=draw(st.dictionaries(texts, texts, max_size=2)),
            )
        )
        stream = prompt + completion
        if not one_row and draw(st.booleans()):
            stream = stream[: draw(st.integers(1, len(stream)))]
        prompt = stream + draw(ids)
    return Trajectory(name, tuple(steps), reward=draw(st.floats(-10, 10, width=32)), group=draw(st.sampled_from("ab")))


@st.composite
def rows(draw: st.DrawFn) -> Row:
    """Rows as a trainer holds them, in which all of the row's columns may be anything that an array can be."""
    n = draw(st.integers(1, 8))

    def column(values: st.SearchStrategy[Any], dtype: Any) -> np.ndarray:
        return np.array(draw(st.lists(values, min_size=n, max_size=n)), dtype=dtype)

    any_float = st.floats(width=32)
    return Row(
        column(st.integers(0, 2**31 - 1), np.int32), column(st.booleans(), np.bool_),
        draw(st.none() | st.just(column(any_float, np.float32))), columns={"advantages": column(any_float, np.float32)},
    )


def exported(name: str, values: list[Trajectory], **more: Any) -> list[Row]:
    file = io.BytesIO()
    n = write(more.pop("target", EXPORTS[name]), values, file, **more)
    found_name, found, rejected = read(file.getvalue())
    assert (found_name, rejected) == (READERS[name], [])
    back = [row for value in found for row in (value.rows or step_rows_of(value))]
    assert len(back) == n
    return back


def assert_rows(back: list[Row], expected: list[Row], with_logprobs: bool = True) -> None:
    for one, other in zip(back, expected, strict=True):
        assert np.array_equal(one.ids, other.ids) and np.array_equal(one.loss_mask, other.loss_mask)
        if with_logprobs:
            assert one.logprobs is not None and other.logprobs is not None
            assert np.array_equal(one.logprobs[one.loss_mask], other.logprobs[other.loss_mask])


@pytest.mark.parametrize("name", list(READERS))
@FEW
@given(data=st.data())
def test_ids_masks_and_logprobs_survive(name: str, data: st.DataObject) -> None:
    values = [
        data.draw(trajectories(f"{n}", one_row=name == "skyrl"), label=f"trajectory {n}")
        for n in range(data.draw(st.integers(1, 3)))
    ]
    rows_of_one = step_rows_of if name == "skyrl_step_wise" else rows_of
    expected = [row for value in values for row in rows_of_one(value)]
    # One batch has one kind of reward, and a first prompt is at least one token, so nothing here needs force.
    assert_rows(exported(name, values), expected, with_logprobs=name != "sft")
    if name == "sft":
        target = padded(EXPORTS["sft"], max(len(row.ids) for row in expected), pad_id=3)
        assert_rows(exported(name, values, target=target), expected, with_logprobs=False)


@pytest.mark.parametrize("name", ["own_jsonl", "own_parquet"])
@FEW
@given(data=st.data())
def test_our_own_formats_keep_everything(name: str, data: st.DataObject) -> None:
    values = [data.draw(trajectories(f"{n}")) for n in range(data.draw(st.integers(1, 2)))]
    values += [Trajectory("r", rows=tuple(data.draw(st.lists(rows(), min_size=1, max_size=2))), reward=None)]
    values[0] = replace(values[0], rows=tuple(rows_of(values[0])))
    file = io.BytesIO()
    formats.FORMATS[name].write(values, file)  # type: ignore[misc]
    found_name, back, rejected = read(file.getvalue())
    assert (found_name, rejected) == (name, [])
    for one, other in zip(back, values, strict=True):
        assert_same(one, other)


@FEW
@given(data=st.data())
def test_every_export_of_an_import_is_the_same_file(data: st.DataObject) -> None:
    """Rows that came from one trainer's format go out in the same one unchanged."""
    value = data.draw(trajectories("a", one_row=True))
    for name, reader in READERS.items():
        file = io.BytesIO()
        write(EXPORTS[name], [value], file)
        found = read(file.getvalue(), reader)[1]
        again = io.BytesIO()
        more: Any = {"rows": lambda one: one.rows or step_rows_of(one)}
        write(EXPORTS[name], found, again, force=True, **more)
        first, second = (read(one.getvalue(), reader)[1] for one in (file, again))
        for left, right in zip(first, second, strict=True):
            assert_rows(list(right.rows or step_rows_of(right)), list(left.rows or step_rows_of(left)), name != "sft")


@pytest.mark.parametrize("source", [*READERS, "own_jsonl", "own_parquet"])
def test_what_one_trainer_wrote_another_reads(source: str) -> None:
    """Every pair: rows imported from one format, written in another, are read back with their ids and masks."""
    value = chain("a", 3, hostile="")
    file = io.BytesIO()
    if source in EXPORTS:
        write(EXPORTS[source], [value], file)
    else:
        formats.FORMATS[source].write([value], file)  # type: ignore[misc]
    _, found, rejected = read(file.getvalue())
    assert not rejected
    (expected,) = rows_of(value)
    for target in READERS:
        out = io.BytesIO()
        # Supervised rows have no logprobs and some formats no reward, which some targets insist on.
        write(EXPORTS[target], found, out, force=source == "sft" or found[0].reward is None)
        _, back, rejected = read(out.getvalue())
        assert not rejected
        rows = [row for one in back for row in rows_of(one)]
        assert_rows(rows, [expected], with_logprobs="sft" not in (source, target))
