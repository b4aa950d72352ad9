"""The codec of a stored step: what it keeps, and that nothing is lost."""

import json
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollout_inspector.streams.coding import (
    ARRAYS, BODIES, COLUMNS, REQUEST_FIELDS, STEP_FIELDS, StepCodec, StepExtent, stream_pieces
)
from rollout_inspector.streams.prefix import link_steps
from rollout_inspector.streams.trajectory import Request, Step, ids_array

ids = st.lists(st.integers(0, 2), max_size=4)
messages = st.lists(st.sampled_from([{"n": 1}, {"n": 1.0}, {"n": True}, {"n": "1"}]), max_size=3)


def step(prompt: list[int], completion: list[int], said: list[dict[str, Any]] | None = None) -> Step:
    request = None if said is None else Request(tuple(dict(message) for message in said))
    return Step(ids_array(prompt), ids_array(completion), request=request)


def steps_of(*values: Any) -> list[Step]:
    """Steps of which each may go on where an earlier one ended: in ids and in messages."""
    found: list[Step] = []
    for prompt, completion, said, parent in values:
        before = found[parent % len(found)] if parent is not None and found else None
        prompt = ([] if before is None else before.stream.tolist()) + prompt
        if said is not None and before is not None and before.request is not None:
            said = [*before.request.messages, *said]
        found.append(step(prompt, completion, said))
    return found


@given(st.lists(st.tuples(ids, ids, st.none() | messages, st.none() | st.integers(0, 5)), max_size=6))
def test_what_is_coded_comes_back(values: list[Any]) -> None:
    steps = steps_of(*values)
    coder, decoder = StepCodec(json.dumps), StepCodec(json.dumps)
    extents, arrays = [], []
    for one, link in zip(steps, link_steps(steps), strict=True):
        coded = coder.encode(one)
        assert coded.link == link
        prompt = decoder.prompt_ids(link.parent, link.shared_length, coded.delta_ids)
        said = decoder.messages(link.parent, coded.messages_shared, coded.messages_new)
        request = None if one.request is None else Request(said)
        decoder.steps.append(Step(prompt, one.completion_ids, request=request))
        assert prompt.tolist() == one.prompt_ids.tolist()
        assert json.dumps(said) == json.dumps([] if one.request is None else one.request.messages)
        extents.append(StepExtent(link.parent, link.shared_length, len(prompt), len(one.completion_ids)))
        arrays.append({"delta_ids": coded.delta_ids, "completion_ids": one.completion_ids})
    for index, one in enumerate(steps):
        pieces = stream_pieces(extents, index)
        read = [arrays[piece.step_index][piece.array][: piece.stop - piece.start] for piece in pieces]
        assert np.concatenate([ids_array([]), *read]).tolist() == one.stream.tolist()
        assert sum(piece.stop - piece.start for piece in stream_pieces(extents, index, whole=False)) == len(
            one.prompt_ids
        )


def test_only_what_is_new_is_kept() -> None:
    codec = StepCodec(json.dumps)
    first = codec.encode(step([1, 2], [3], [{"n": 1}]))
    second = codec.encode(step([1, 2, 3, 4], [5], [{"n": 1}, {"n": 2}]))
    assert (first.link.parent, first.delta_ids.tolist(), first.messages_new) == (None, [1, 2], ({"n": 1},))
    assert (second.link.parent, second.link.shared_length, second.delta_ids.tolist()) == (0, 3, [4])
    assert (second.messages_shared, second.messages_new) == (1, ({"n": 2},))


def test_numbers_that_json_tells_apart_are_not_shared() -> None:
    codec = StepCodec(json.dumps)
    codec.encode(step([1], [2], [{"n": 1}]))
    assert codec.encode(step([1, 2], [3], [{"n": 1.0}])).messages_shared == 0
    assert codec.encode(step([1, 2, 3], [4], [{"n": True}])).messages_shared == 0


def test_an_origin_of_another_length_is_not_kept() -> None:
    codec = StepCodec(json.dumps)
    codec.encode(step([1], [2]))
    kept = Step(ids_array([1, 2, 7]), ids_array([3]), delta_origin=np.array([3], dtype=np.uint8))
    lost = Step(ids_array([1, 2, 7, 3, 8]), ids_array([3]), delta_origin=np.array([3, 3], dtype=np.uint8))
    assert codec.encode(kept).delta_origin is kept.delta_origin
    assert codec.encode(lost).delta_origin is None


def test_more_than_the_parent_has_is_refused() -> None:
    codec = StepCodec(json.dumps)
    codec.encode(step([1, 2], [3], [{"n": 1}]))
    with pytest.raises(ValueError, match="shared_length is 4, but the parent's stream has 3 ids"):
        codec.prompt_ids(0, 4, ids_array([1]))
    with pytest.raises(ValueError, match="messages_shared is 2, but the parent's request has 1 messages"):
        codec.messages(0, 2, [])


def test_every_field_of_a_step_is_in_the_table() -> None:
    coded = ("prompt_ids", "delta_origin")
    assert [one.name for one in STEP_FIELDS] == [one.name for one in fields(Step) if one.name not in coded]
    assert {"messages", *(one.name for one in REQUEST_FIELDS)} == {one.name for one in fields(Request)}
    kept = {*COLUMNS, *ARRAYS, *(one.name for one in BODIES), "request"}
    assert kept == {one.name for one in STEP_FIELDS}
    assert all(one.column for one in REQUEST_FIELDS)
