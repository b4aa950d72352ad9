"""The one bulk writer of steps and rows. Imports, pushes, launches and the recorder store by it."""

from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any

from rollout_inspector.streams import alternatives
from rollout_inspector.streams.align import trained_tokens
from rollout_inspector.streams.coding import BODIES, COLUMNS, REQUEST_FIELDS, StepField
from rollout_inspector.streams.prefix import common_prefix, merge_steps
from rollout_inspector.streams.trajectory import Link, Row, Step
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store import models
from rollouts.store.bulk import bare, change_whole, insert_whole, reserve_keys
from rollouts.store.token_arrays import Place
from rollouts.store.trajectories.contents import Contents
from rollouts.store.trajectories.token_encoding import EncodedStep, StoredSteps, derive_origins, encode_step


class StepWriter:
    """Gathers steps and rows of any number of trajectories and inserts them together. It is made, filled and saved
    within one transaction. With a ``token_table`` the origin of the tokens between completions is found where no
    strategy wrote it."""

    def __init__(self, n_steps: int, token_table: ByteTable | None = None) -> None:
        """``n_steps``: how many steps are added at most."""
        self.contents = Contents()
        self._keys = reserve_keys(models.StoredStep, n_steps)
        self._token_table = token_table
        self._steps: list[models.StoredStep] = []
        self._tokens: list[models.StepTokens] = []
        self._later: list[tuple[models.StepTokens, Step, int]] = []
        self._moved: list[models.StoredStep] = []
        self._rows: list[models.StoredRow] = []
        self._own: list[tuple[models.StoredRow, Row]] = []

    def add_step(
        self, trajectory_key: int, earlier: StoredSteps, step: Step, encoded: EncodedStep | None = None
    ) -> models.StoredStep:
        """Add the step behind ``earlier``, which grows by it unless the step is ``encoded`` already."""
        index, key, request, fields = len(earlier.keys), next(self._keys), step.request, vars(step)
        is_new = encoded is None
        (link, _, _, messages_shared, messages_new), tokens, place = encoded or encode_step(earlier, step)
        parent_key = None if link.parent is None else earlier.keys[link.parent]
        if link.parent is None and earlier.prefix is not None:
            n = common_prefix(step.prompt_ids, earlier.prefix)
            link, tokens.delta_ids = Link(None, n, n), tokens.delta_ids[n:]
        earlier.keys.append(key)
        earlier.links.append(link)
        values = {name: fields[name] for name in COLUMNS}
        self._add_bodies(values, BODIES, fields)
        if request is not None:
            values["messages_new_id"] = self.contents.add(messages_new)
            self._add_bodies(values, REQUEST_FIELDS, vars(request))
        stored = bare(
            models.StoredStep,
            id=key,
            trajectory_id=trajectory_key,
            index=index,
            parent_id=parent_key,
            shared_length=link.shared_length,
            parent_length=link.parent_length,
            prompt_length=len(step.prompt_ids),
            completion_length=len(step.completion_ids),
            messages_shared=messages_shared,
            has_entropy=step.entropy is not None or None,
            n_alternatives=alternatives.count(step) or None,
            least_kept=alternatives.least_kept(step),
            **values,
        )
        self._steps.append(stored)
        if place is not None:
            stored.segment_id, stored.segment_offset = self._saved(place), place.offset
            stored.has_origin = tokens.delta_origin is not None
            return stored
        tokens.step_id = key
        self._tokens.append(tokens)
        if is_new and parent_key is not None:
            self._later.append((tokens, step, messages_shared))
        return stored

    def _saved(self, place: Place) -> int:
        """The key of the segment of a place, which is inserted first."""
        if place.segment.pk is None:
            place.segment.save(force_insert=True)
        return place.segment.pk

    def _add_bodies(self, values: dict[str, Any], bodies: Sequence[StepField], fields: Mapping[str, Any]) -> None:
        """Set the keys of the JSON bodies of these fields; what says nothing has none."""
        for name, kind, _, column in bodies:
            value = fields[name]
            if value or (value is not None and kind != "mapping"):
                values[column] = self.contents.add(value)

    def add_rows(
        self,
        record: models.StoredTrajectory,
        steps: Sequence[models.StoredStep],
        values: StoredSteps,
        rows: Sequence[Row] | None,
        places: Sequence[Place | None] = (),
    ) -> None:
        """Add all rows of a trajectory and count its steps, rows and tokens. ``steps`` are all its steps, stored before
        or added now, and ``values`` the same; ``rows`` None = they follow from the steps. ``places``: where segments
        hold the arrays of the rows; empty = they are inserted."""
        if rows is None:
            chains = merge_steps(values.steps, values.links)
            stored_rows = [_merged_row(record, index, [steps[n] for n in chain]) for index, chain in enumerate(chains)]
        else:
            chains = [row.step_indices for row in rows]
            at = places or [None] * len(rows)
            stored_rows = [
                self._stored_row(record, n, row, place) for n, (row, place) in enumerate(zip(rows, at, strict=True))
            ]
        row_of_step = {step: index for index, chain in enumerate(chains) for step in chain}
        for step in steps:
            row_index = row_of_step.get(step.index, 0)
            if step.row_index != row_index and not step._state.adding:
                self._moved.append(step)
            step.row_index = row_index
        self._rows += stored_rows
        # Rows alone count their own tokens.
        record.n_steps, record.n_rows = len(steps), len(stored_rows)
        record.n_trained = sum(row.n_trained for row in stored_rows)
        record.n_sampled, record.n_tokens = record.n_trained, sum(row.n_tokens for row in stored_rows)
        if steps:
            record.n_sampled, record.n_tokens = count_tokens(steps)
        record.n_lost = trained_tokens(values.steps, rows or ()).n_lost

    def save(self, trajectories: Sequence[models.StoredTrajectory] = ()) -> None:
        """Insert new ``trajectories``, then everything that was added."""
        if self._token_table is not None:
            derive_origins(self._later, self._token_table)
        for row, key in zip(self._rows, reserve_keys(models.StoredRow, len(self._rows)), strict=True):
            row.id = key
        # In the order of their ids, so that two writers of the same ids cannot deadlock.
        insert_whole(sorted(trajectories, key=attrgetter("external_id")))
        insert_whole(self._steps)
        insert_whole(self._tokens)
        change_whole(models.StoredStep, ("row_index",), [(step.row_index, step.pk) for step in self._moved])
        insert_whole(self._rows)
        insert_whole([
            bare(
                models.RowTokens,
                row_id=stored.pk,
                ids=row.ids,
                loss_mask=row.loss_mask,
                logprobs=row.logprobs,
                origin=row.origin,
            )
            for stored, row in self._own
        ])
        models.RowColumn.objects.bulk_create(
            models.RowColumn(row_id=stored.pk, name=name, values=values)
            for stored, row in self._own
            for name, values in row.columns.items()
        )
        # Last, because other writers of the same bodies wait for the end of this transaction.
        self.contents.save()

    def _stored_row(
        self, record: models.StoredTrajectory, index: int, row: Row, place: Place | None
    ) -> models.StoredRow:
        """A row that keeps its own arrays."""
        stored = bare(
            models.StoredRow,
            trajectory_id=record.pk,
            index=index,
            n_tokens=len(row.ids),
            n_trained=row.n_trained,
            step_indices=list(row.step_indices),
            extra_id=self.contents.add_unless_empty(row.extra),
        )
        if place is None:
            self._own.append((stored, row))
        else:
            stored.segment_id, stored.segment_offset = self._saved(place), place.offset
            stored.column_names = sorted(row.columns)
        return stored


def _merged_row(record: models.StoredTrajectory, index: int, chain: Sequence[models.StoredStep]) -> models.StoredRow:
    """A row that is the stream of the last step of a chain."""
    last = chain[-1]
    return bare(
        models.StoredRow,
        trajectory_id=record.pk,
        index=index,
        last_step_id=last.pk,
        n_tokens=last.prompt_length + last.completion_length,
        n_trained=sum(step.completion_length for step in chain),
        step_indices=[step.index for step in chain],
    )


def count_tokens(steps: Sequence[models.StoredStep]) -> tuple[int, int]:
    """Tokens that steps sampled, and all tokens that they add."""
    n_sampled = sum(step.completion_length for step in steps)
    return n_sampled, n_sampled + sum(step.prompt_length - step.shared_length for step in steps)
