"""Stored steps decoded, and finished trajectories as they will be stored. Arrays go to their store before that."""

import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.streams import token_origins
from rollout_inspector.streams.coding import ARRAYS, CodedStep, StepCodec
from rollout_inspector.streams.prefix import links_of
from rollout_inspector.streams.preview import Preview
from rollout_inspector.streams.trajectory import Ids, Link, Request, Step, Trajectory
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store import models
from rollouts.store.bulk import bare
from rollouts.store.token_arrays import STORES, Place, TokenItem
from rollouts.store.token_arrays.items import row_item, step_item
from rollouts.store.token_arrays.reading import prefixes_of, read_places
from rollouts.store.trajectories.previews import stored_preview
from rollouts.store.trajectories.token_segments import delete_files


class StoredSteps(StepCodec):
    """The stored steps of one trajectory: ids, links and messages. The codec appends new steps."""

    def __init__(self) -> None:
        super().__init__(canonical_json)
        self.keys: list[int] = []  # The primary key of each step.
        self.links: list[Link] = []
        self.prefix: Ids | None = None  # Of a fork: the ids that its first step shares and does not store.


def stored_steps(trajectory_keys: Collection[int], with_messages: bool = True) -> dict[int, StoredSteps]:
    """The steps of some trajectories with ids and messages; other fields are empty. One query."""
    by_trajectory: dict[int, StoredSteps] = {key: StoredSteps() for key in trajectory_keys}
    positions: dict[int | None, int | None] = {None: None}
    columns = (
        "pk", "trajectory_id", "parent_id", "shared_length", "parent_length", "segment__key", "segment_offset",
        "tokens__delta_ids", "tokens__completion_ids", "prompt_length", "messages_shared",
    )
    rows = models.StoredStep.objects.filter(trajectory__in=trajectory_keys).order_by("trajectory_id", "index")
    lines = list(rows.values_list(*columns, *(["messages_new__body"] if with_messages else [])))
    prefixes = prefixes_of([line[1] for line in lines if line[2] is None and line[3]])
    in_segments = iter(read_places([row[5:7] for row in lines if row[5] is not None], ("delta_ids", "completion_ids")))
    for key, trajectory, parent_key, shared, parent_length, segment, _, delta, completion, prompt_length, *messages in (
        lines
    ):
        if segment is not None:
            arrays = next(in_segments)
            delta, completion = arrays["delta_ids"], arrays["completion_ids"]
        if parent_key is None and shared and len(delta) < prompt_length:
            delta = np.concatenate([prefixes[trajectory][:shared], delta])
        steps, parent = by_trajectory[trajectory], positions[parent_key]
        positions[key] = len(steps.keys)
        n_shared, body = messages if with_messages else (0, None)
        request = None if body is None else Request(steps.messages(parent, n_shared, json.loads(body)))
        prompt = steps.prompt_ids(parent, shared, delta)
        steps.steps.append(Step(prompt_ids=prompt, completion_ids=completion, request=request))
        steps.links.append(Link(parent, shared, parent_length))
        steps.keys.append(key)
    return by_trajectory


class EncodedStep(NamedTuple):
    """A step as it will be stored."""

    coded: CodedStep  # What it adds to its parent.
    tokens: models.StepTokens  # Its arrays, without the key of the step.
    place: Place | None = None  # Where a segment holds the arrays; None = they are inserted with the step.


@dataclass(frozen=True)
class EncodedTrajectory:
    """A finished trajectory as it will be stored."""

    code: str  # The code that it will have.
    values: StoredSteps  # Its steps, without their keys.
    steps: Sequence[EncodedStep]  # As many as the trajectory has.
    row_places: Sequence[Place | None]  # For each row with its own arrays, as ``EncodedStep.place``.
    preview: Preview  # Its lines in lists.


def encode_step(earlier: StoredSteps, step: Step, link: Link | None = None) -> EncodedStep:
    """Encode the step behind ``earlier``, which grows by it. ``link`` spares the search for its parent."""
    coded, fields = earlier.encode(step, link), vars(step)
    arrays = {name: fields[name] for name in ARRAYS}
    tokens = bare(models.StepTokens, delta_ids=coded.delta_ids, delta_origin=coded.delta_origin, **arrays)
    return EncodedStep(coded, tokens)


def encode_trajectories(
    trajectories: Sequence[Trajectory], token_table: ByteTable | None = None, put_for: models.Run | None = None
) -> list[EncodedTrajectory]:
    """Encode finished trajectories as they will be stored. ``put_for``: put their arrays into the store of this run,
    which is slow, so that no transaction may be open. With a ``token_table`` the origin of the tokens between
    completions is found where no strategy wrote it."""
    coded = [_encoded(trajectory, token_table) for trajectory in trajectories]
    if token_table is not None:
        later = [
            (entry.tokens, step, entry.coded.messages_shared)
            for encoded, trajectory in zip(coded, trajectories, strict=True)
            for entry, step in zip(encoded.steps, trajectory.steps, strict=True)
            if entry.coded.link.parent is not None
        ]
        derive_origins(later, token_table)
    if put_for is None:
        return coded
    items = [item for entry, trajectory in zip(coded, trajectories, strict=True) for item in _items(entry, trajectory)]
    store = STORES[put_for.token_store]
    if not store.min_tokens or sum(item.n_tokens for item in items) < store.min_tokens:
        return coded
    places = iter(store.put(put_for, items))
    return [
        replace(
            entry,
            steps=[step._replace(place=next(places)) for step in entry.steps],
            row_places=[next(places) for _ in trajectory.rows],
        )
        for entry, trajectory in zip(coded, trajectories, strict=True)
    ]


def drop_arrays(encoded: Iterable[EncodedTrajectory]) -> None:
    """Delete the segments of trajectories whose transaction was rolled back. What fails is left for the sweep."""
    places = (
        place
        for trajectory in encoded
        for place in (*(step.place for step in trajectory.steps), *trajectory.row_places)
    )
    delete_files({place.segment.key for place in places if place is not None})


def _encoded(trajectory: Trajectory, token_table: ByteTable | None) -> EncodedTrajectory:
    values = StoredSteps()
    links = links_of(trajectory)
    steps = [encode_step(values, step, link) for step, link in zip(trajectory.steps, links, strict=True)]
    preview = stored_preview(trajectory.steps, trajectory.rows, token_table, trajectory.extra)
    return EncodedTrajectory(models.new_code(), values, steps, [None] * len(trajectory.rows), preview)


def _items(one: EncodedTrajectory, trajectory: Trajectory) -> Iterator[TokenItem]:
    for index, step in enumerate(one.steps):
        yield step_item(one.code, index, step.tokens)
    for index, row in enumerate(trajectory.rows):
        yield row_item(one.code, index, row, row.columns)


def derive_origins(
    steps: Iterable[tuple[models.StepTokens, Step, int]], token_table: ByteTable
) -> list[models.StepTokens]:
    """Find who wrote each token between completions where no strategy told: template scaffold or observation. ``steps``
    have a parent, each with how many of its messages the parent had. The bytes of all deltas are gathered at once.
    Returns the arrays that gained their origins."""
    unknown = [
        (tokens, step.request.messages[shared:] if step.request else ())
        for tokens, step, shared in steps
        if step.delta_origin is None and len(tokens.delta_ids)
    ]
    if not unknown:
        return []
    ids = np.concatenate([tokens.delta_ids for tokens, _ in unknown])
    whole, ends = token_table.joined(ids)
    offsets = np.concatenate([[0], ends])
    special = np.asarray(token_table.special).take(ids, mode="clip") & (ids >= 0) & (ids < token_table.vocab_size)
    stops = np.cumsum([len(tokens.delta_ids) for tokens, _ in unknown]).tolist()
    origins = token_origins.origins_of_texts(whole, offsets, special, stops, [messages for _, messages in unknown])
    for (tokens, _), start, stop in zip(unknown, [0, *stops[:-1]], stops, strict=True):
        tokens.delta_origin = origins[start:stop]
    return [tokens for tokens, _ in unknown]
