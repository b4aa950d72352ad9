"""A stored trajectory as the value it was."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from django.db.models import QuerySet

from rollouts import models
from rollouts.selectors.streams import join, stream_pieces
from rollouts.tito.batches import batched
from rollouts.tito.trajectory import Ids, Request, Row, Step, Trajectory


def load_trajectory(trajectory: models.StoredTrajectory) -> Trajectory:
    """The value back, every array identical. Five queries, whatever its length.

    Rows that follow from the steps are not given: ``rows`` holds what a trainer or a strategy wrote.
    """
    return next(load_trajectories([trajectory]))


def load_trajectories(trajectories: Sequence[models.StoredTrajectory]) -> Iterator[Trajectory]:
    """The values of several trajectories, in their order. The queries do not grow with their number."""
    keys = [trajectory.pk for trajectory in trajectories]
    steps: dict[int, list[models.StoredStep]] = {key: [] for key in keys}
    for step in models.StoredStep.objects.filter(trajectory__in=keys).select_related("tokens").order_by("index"):
        steps[step.trajectory_id].append(step)
    rows: dict[int, list[models.StoredRow]] = {key: [] for key in keys}
    own = models.StoredRow.objects.filter(trajectory__in=keys, last_step=None)
    for row in own.select_related("tokens").prefetch_related("columns").order_by("index"):
        rows[row.trajectory_id].append(row)
    wanted = {trajectory.extra_id for trajectory in trajectories}
    for step in (step for held in steps.values() for step in held):
        wanted.update(
            (step.messages_new_id, step.tools_id, step.template_kwargs_id, step.reply_id, step.text_id, step.extra_id)
        )
    wanted.update(row.extra_id for held in rows.values() for row in held)
    bodies = _Bodies(wanted)
    for trajectory in trajectories:
        yield Trajectory(
            external_id=trajectory.external_id,
            steps=tuple(_steps(steps[trajectory.pk], bodies)),
            rows=tuple(_row(row, bodies) for row in rows[trajectory.pk]),
            reward=trajectory.reward,
            reward_parts=trajectory.reward_parts,
            stop_reason=trajectory.stop_reason,
            group=trajectory.group,
            tokenizer=trajectory.tokenizer_name,
            extra=bodies[trajectory.extra_id] or {},
        )


class _Bodies:
    """Stored JSON values by key, each decoded once."""

    def __init__(self, keys: set[str | None]) -> None:
        ordered = sorted(key for key in keys if key)
        self._texts: dict[str, str] = {}
        # SQLite takes a bounded number of parameters in one query.
        for batch in batched(ordered, 900):
            self._texts.update(models.Content.objects.filter(pk__in=batch).values_list("pk", "body"))
        self._values: dict[str, Any] = {}

    def __getitem__(self, key: str | None) -> Any:
        if key is None:
            return None
        if key not in self._values:
            self._values[key] = json.loads(self._texts[key])
        return self._values[key]


def _steps(stored: Sequence[models.StoredStep], bodies: _Bodies) -> list[Step]:
    values: list[Step] = []
    by_key = {step.pk: n for n, step in enumerate(stored)}
    arrays = {step.index: (step.tokens.delta_ids, step.tokens.completion_ids) for step in stored}
    messages: list[tuple[Any, ...]] = []
    for step in stored:
        parent = by_key.get(step.parent_id) if step.parent_id else None
        if parent is None:
            prompt = step.tokens.delta_ids
        else:
            # Long chains stay cheap: the parent's prompt is a value already, so one level is joined.
            earlier = values[parent]
            head = step.shared_length - len(earlier.prompt_ids)
            pieces = [earlier.prompt_ids[: step.shared_length]]
            if head > 0:
                pieces.append(earlier.completion_ids[:head])
            prompt = np.concatenate([*pieces, step.tokens.delta_ids])
        request = None
        said: tuple[Any, ...] = ()
        if step.messages_new_id is not None:
            kept = messages[parent][: step.messages_shared] if parent is not None else ()
            said = (*kept, *bodies[step.messages_new_id])
            tools = bodies[step.tools_id]
            request = Request(said, None if tools is None else tuple(tools), bodies[step.template_kwargs_id] or {})
        messages.append(said)
        values.append(
            Step(
                prompt_ids=prompt,
                completion_ids=arrays[step.index][1],
                logprobs=step.tokens.logprobs,
                logprobs_mode=step.logprobs_mode,
                finish_reason=step.finish_reason,
                stop_reason=step.stop_reason,
                request=request,
                reply=bodies[step.reply_id],
                text=bodies[step.text_id],
                chat_template_sha256=step.chat_template_sha256,
                temperature=step.temperature,
                top_p=step.top_p,
                top_k=step.top_k,
                engine=step.engine,
                policy_version=step.policy_version,
                delta_origin=step.tokens.delta_origin,
                extra=bodies[step.extra_id] or {},
            )
        )
    return values


def _row(row: models.StoredRow, bodies: _Bodies) -> Row:
    tokens = row.tokens
    return Row(
        ids=tokens.ids,
        loss_mask=tokens.loss_mask,
        logprobs=tokens.logprobs,
        origin=tokens.origin,
        columns={column.name: column.values for column in row.columns.all()},
        step_indices=tuple(row.step_indices),
        extra=bodies[row.extra_id] or {},
    )


def load_step_prompt(step: models.StoredStep) -> Ids:
    """One step's prompt ids ``[P]``, parents followed. Two queries."""
    steps = list(_columns(step.trajectory_id))
    pieces = stream_pieces(steps, step.index, whole=False)
    needed = {steps[piece.step_index].pk for piece in pieces}
    arrays = {
        index: (delta, completion)
        for index, delta, completion in models.StepTokens.objects.filter(step__in=needed).values_list(
            "step__index", "delta_ids", "completion_ids"
        )
    }
    return join(pieces, arrays)


def _columns(trajectory_key: int) -> QuerySet[models.StoredStep]:
    """The columns from which streams follow, of every step in order."""
    return models.StoredStep.objects.filter(trajectory=trajectory_key).order_by("index").only(
        "index", "parent_id", "trajectory_id", "shared_length", "parent_length", "prompt_length", "completion_length"
    )  # fmt: skip
