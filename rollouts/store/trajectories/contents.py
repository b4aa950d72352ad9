"""JSON bodies stored once by their hash."""

import hashlib
from collections.abc import Collection
from typing import Any

from django.db import DEFAULT_DB_ALIAS, connections, transaction
from django.db.models import Exists, OuterRef

from rollout_inspector.formats.containers.json_text import canonical_json
from rollout_inspector.streams.batches import batched
from rollouts.store.bulk import insert_values
from rollouts.store.models import Content, StoredRow, StoredStep, StoredTrajectory
from rollouts.store.trajectories.trajectories import BODY_COLUMNS

_REFERENCES: list[tuple[type[Any], str]] = [
    *((StoredStep, column) for column in BODY_COLUMNS),
    (StoredRow, "extra_id"), (StoredTrajectory, "extra_id"), (StoredTrajectory, "task_id"),
]
"""Every model and column that holds keys of ``Content``."""


class Contents:
    """Bodies gathered for one insert."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}

    def add(self, value: Any) -> str:
        """Remember a value. Returns its key."""
        body = canonical_json(value)
        key = hashlib.sha256(body.encode("utf-8")).hexdigest()
        self._bodies[key] = body
        return key

    def add_unless_empty(self, value: Any) -> str | None:
        """None for an empty mapping or None: nothing is stored for nothing."""
        return self.add(value) if value else None

    def save(self) -> None:
        """Insert bodies that are not stored yet. Call it once in the transaction that names them. All lock and insert
        in the order of the keys, so that two writers cannot deadlock."""
        missing, self._bodies = self._bodies, {}
        # SQLite lets one writer in at a time, so nothing can go before the commit.
        connection = connections[DEFAULT_DB_ALIAS]
        locks, table = connection.features.has_select_for_update, connection.ops.quote_name(Content._meta.db_table)
        statement = f"SELECT sha256 FROM {table} WHERE sha256 = ANY(%s) ORDER BY sha256 FOR KEY SHARE"
        while missing:
            if locks:  # none of the bodies that are stored can be deleted before the transaction ends
                with connection.cursor() as cursor:
                    cursor.execute(statement, [sorted(missing)])
                    stored = {key for (key,) in cursor.fetchall()}
                missing = {key: body for key, body in missing.items() if key not in stored}
            n_new = insert_values(Content, sorted(missing.items()), ignore_conflicts=True)
            if n_new == len(missing) or not locks:
                return
            # Another one has stored the same body in this moment: it is not locked yet, so it is looked for again.


def keys_of(trajectories: Collection[int]) -> set[str]:
    """The keys of the bodies that trajectories name."""
    of_trajectories = {"trajectory__in": trajectories}
    columns = (
        StoredStep.objects.filter(**of_trajectories).values_list(*BODY_COLUMNS),
        StoredRow.objects.filter(**of_trajectories).values_list("extra_id"),
        StoredTrajectory.objects.filter(pk__in=trajectories).values_list("extra_id", "task_id"),
    )
    return {key for rows in columns for row in rows for key in row if key}


def delete_unused(keys: Collection[str], waits: bool = False) -> None:
    """Delete those bodies that nothing names any more. Bodies that somebody else uses in this moment are looked at
    again after the commit: only who holds no other lock may wait for them."""
    busy: set[str] = set()
    for batch in batched(sorted(keys), 500):
        with transaction.atomic(savepoint=False):
            bodies = Content.objects.filter(pk__in=batch).order_by("pk").values_list("pk", flat=True)
            skips = connections[bodies.db].features.has_select_for_update_skip_locked and not waits
            locked = set(bodies.select_for_update(skip_locked=skips))
            busy.update(set(batch) - locked)
            unused = Content.objects.filter(pk__in=locked)
            for model, column in _REFERENCES:
                unused = unused.filter(~Exists(model.objects.filter(**{column: OuterRef("pk")})))
            unused._raw_delete(unused.db)
    if busy and not waits:
        transaction.on_commit(lambda: delete_unused(busy, waits=True))
