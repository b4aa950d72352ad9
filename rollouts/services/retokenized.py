"""Storing what encoding the text of trajectories again would change."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from django.db import transaction

from rollouts import models
from rollouts.selectors.retokenized import checksum
from rollouts.services.bulk import bare, insert_whole, reserve_keys
from rollouts.tito.retokenized import EncodedAgain
from rollouts.tito.trajectory import NO_IDS

MAX_DRIFTS = 20_000
"""Of a trajectory. One with more was made by another tokenizer, and nobody reads them all."""


def keep_retokenized(run: models.Run, found: Sequence[tuple[int, Sequence[EncodedAgain]]]) -> None:
    """Put new results in place of the old ones of these trajectories: primary key and what the diagnosis found.

    A trajectory that was deleted meanwhile is left out.
    """
    keys = [key for key, _ in found]
    with transaction.atomic():
        models.Retokenized.objects.filter(trajectory__in=keys).delete()
        if run.tokenizer is None:
            return
        locked = run.trajectories.select_for_update(of=("self",)).filter(pk__in=keys).order_by("pk")
        there = set(locked.values_list("pk", flat=True))
        kept = [(key, again) for key, again in found if key in there and _is_kept(again)]
        own = reserve_keys(models.Retokenized, len(kept))
        insert_whole([_stored(next(own), key, run.tokenizer.files_sha256, again) for key, again in kept])


def _is_kept(again: Sequence[EncodedAgain]) -> bool:
    return len(again) > 0 and sum(len(one.drifts) for one in again) <= MAX_DRIFTS


def _stored(key: int, trajectory: int, files_sha256: str, again: Sequence[EncodedAgain]) -> models.Retokenized:
    drifts = [drift for one in again for drift in one.drifts]
    return bare(
        models.Retokenized,
        id=key,
        trajectory_id=trajectory,
        files_sha256=files_sha256,
        streams=[
            value
            for one in again
            for value in (
                -1 if one.step is None else one.step, -1 if one.row is None else one.row,
                checksum(one.ids), len(one.drifts),
            )
        ],
        drifts=[
            value for one in drifts for value in (one.start, one.stop, len(one.expected_ids), int(one.invalid_utf8))
        ],
        expected_ids=np.concatenate([NO_IDS, *(drift.expected_ids for drift in drifts)]),
    )
