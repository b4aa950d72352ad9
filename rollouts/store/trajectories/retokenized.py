"""What the diagnosis found when it encoded the text of a stream again."""

from __future__ import annotations

from zlib import crc32

import numpy as np

from rollout_inspector.streams.canonical import Drift
from rollout_inspector.streams.trajectory import Ids
from rollouts.store.models import Retokenized, StoredTrajectory


def stored_drifts(
    trajectory: StoredTrajectory, ids: Ids, step: int | None = None, row: int | None = None
) -> list[Drift] | None:
    """What would change in a step's completion or in a row with these ``ids``. None = nothing is stored. One query.

    What was stored for other ids, or with another tokenizer than the run has now, is not used.
    """
    held = Retokenized.objects.filter(trajectory=trajectory).first()
    tokenizer = trajectory.run.tokenizer
    if held is None or tokenizer is None or held.files_sha256 != tokenizer.files_sha256:
        return None
    streams, drifts = held.streams.reshape(-1, 4), held.drifts.reshape(-1, 4)
    named = np.array([-1 if step is None else step, -1 if row is None else row, checksum(ids)], dtype=np.int32)
    places = np.flatnonzero((streams[:, :3] == named).all(axis=1))
    if not len(places):
        return None
    first = int(streams[: places[0], 3].sum())
    at = int(drifts[:first, 2].sum())
    found = []
    for start, stop, n, invalid in drifts[first : first + int(streams[places[0], 3])].tolist():
        found.append(Drift(start, stop, held.expected_ids[at : at + n], ids[start:stop], bool(invalid)))
        at += n
    return found


def checksum(ids: Ids) -> int:
    """A number that tells streams apart, as an int32."""
    return int(np.uint32(crc32(ids.astype("<i4").tobytes())).astype(np.int32))
