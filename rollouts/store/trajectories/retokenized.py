"""What encoding the text of trajectories again would change, as the diagnosis found it."""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
from django.db import transaction

from rollout_inspector.streams.canonical import Drift, EncodedAgain
from rollout_inspector.streams.trajectory import NO_IDS, Ids
from rollouts.store import models
from rollouts.store.bulk import bare, insert_whole, reserve_keys
from rollouts.store.models import Retokenized, StoredTrajectory

MAX_DRIFTS = 20_000  # Of a trajectory. One with more was made by another tokenizer, and nobody reads them all.


def stored_drifts(
    trajectory: StoredTrajectory, ids: Ids, step: int | None = None, row: int | None = None
) -> list[Drift] | None:
    """What would change in a step's completion or in a row with these ``ids``. None = nothing is stored. One query.
    What was stored for other ids, or with another tokenizer than the run has now, is not used."""
    stored = Retokenized.objects.filter(trajectory=trajectory).first()
    tokenizer = trajectory.run.tokenizer
    if stored is None or tokenizer is None or stored.files_sha256 != tokenizer.files_sha256:
        return None
    streams, drifts = stored.streams.reshape(-1, 4), stored.drifts.reshape(-1, 4)
    key = np.array([-1 if step is None else step, -1 if row is None else row, checksum(ids)], dtype=np.int32)
    places = np.flatnonzero((streams[:, :3] == key).all(axis=1))
    if not len(places):
        return None
    first = int(streams[: places[0], 3].sum())
    at = int(drifts[:first, 2].sum())
    result = []
    for start, stop, n, invalid in drifts[first : first + int(streams[places[0], 3])].tolist():
        result.append(Drift(start, stop, stored.expected_ids[at : at + n], ids[start:stop], bool(invalid)))
        at += n
    return result


def checksum(ids: Ids) -> int:
    """A number that tells streams apart, as an int32."""
    return int(np.uint32(crc32(ids.astype("<i4").tobytes())).astype(np.int32))


def keep_retokenized(run: models.Run, found: Sequence[tuple[int, Sequence[EncodedAgain]]]) -> None:
    """Put new results in place of the old ones of these trajectories: primary key and what the diagnosis found. A
    trajectory that was deleted meanwhile is left out."""
    keys = [key for key, _ in found]
    with transaction.atomic():
        models.Retokenized.objects.filter(trajectory__in=keys).delete()
        if run.tokenizer is None:
            return
        locked = run.trajectories.select_for_update(of=("self",)).filter(pk__in=keys).order_by("pk")
        there = set(locked.values_list("pk", flat=True))
        fresh = [(key, again) for key, again in found if key in there and _is_kept(again)]
        own = reserve_keys(models.Retokenized, len(fresh))
        insert_whole([_stored(next(own), key, run.tokenizer.files_sha256, again) for key, again in fresh])


def _is_kept(again: Sequence[EncodedAgain]) -> bool:
    return len(again) > 0 and sum(len(stream.drifts) for stream in again) <= MAX_DRIFTS


def _stored(key: int, trajectory: int, files_sha256: str, again: Sequence[EncodedAgain]) -> models.Retokenized:
    drifts = [drift for stream in again for drift in stream.drifts]
    return bare(
        models.Retokenized,
        id=key,
        trajectory_id=trajectory,
        files_sha256=files_sha256,
        streams=[
            value
            for stream in again
            for value in (
                -1 if stream.step is None else stream.step,
                -1 if stream.row is None else stream.row,
                checksum(stream.ids),
                len(stream.drifts),
            )
        ],
        drifts=[
            value
            for stream in drifts
            for value in (stream.start, stream.stop, len(stream.expected_ids), int(stream.invalid_utf8))
        ],
        expected_ids=np.concatenate([NO_IDS, *(drift.expected_ids for drift in drifts)]),
    )
