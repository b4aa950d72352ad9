"""The steps of stored trajectories, decoded from the tokens and messages that each step adds."""

import json
from collections.abc import Collection

import numpy as np

from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.streams.coding import StepCodec
from rollout_inspector.streams.trajectory import Ids, Link, Request, Step
from rollouts.store import models
from rollouts.store.token_arrays.reading import prefixes_of, read_places


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

