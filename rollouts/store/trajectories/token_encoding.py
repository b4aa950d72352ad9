"""Finished trajectories as they will be stored. Their arrays are put where the run keeps them, before a transaction."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from rollout_inspector.streams import token_origins
from rollout_inspector.streams.coding import ARRAYS, CodedStep
from rollout_inspector.streams.prefix import links_of
from rollout_inspector.streams.preview import Preview
from rollout_inspector.streams.trajectory import Link, Step, Trajectory
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store import models
from rollouts.store.bulk import bare
from rollouts.store.token_arrays import STORES, Place, TokenItem
from rollouts.store.token_arrays.items import row_item, step_item
from rollouts.store.trajectories.previews import stored_preview
from rollouts.store.trajectories.stored_steps import StoredSteps
from rollouts.store.trajectories.token_segments import delete_files


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
