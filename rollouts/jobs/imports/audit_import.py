"""What an audit flagged becomes a file of its own, which is then imported like any other."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.formats.readers import inspector_jsonl
from rollout_inspector.guard.audit_folder import FINDINGS, read_summary
from rollout_inspector.guard.shard_audit import AuditSettings, AuditShard, trajectories_at
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Trajectory

FLAGGED = "flagged.jsonl"
"""The file in the folder of the audit. It stays there, so that a worker can go on with an import that was stopped."""
_WORST_FIRST = [level.value for level in (Severity.ERROR, Severity.WARNING, Severity.INFO)]


@dataclass(frozen=True)
class FlaggedTrajectories:
    """Which trajectories an import takes out of the audited files."""

    places: list[tuple[int, int]]
    """(shard, place in it), in the order of the files."""
    n_left_out: int
    """More that were flagged, beyond the limit."""
    settings: AuditSettings
    shards: list[AuditShard]

    def read(self) -> Iterator[Trajectory]:
        """Yields them. Shards without any are not opened. Raises ``OSError`` when a file is not as it was audited."""
        for number, places in groupby(self.places, key=lambda one: one[0]):
            yield from trajectories_at(self.shards[number], self.settings, {place for _, place in places})


def flagged_by(folder: Path, kinds: Collection[str], severity: Severity, limit: int) -> FlaggedTrajectories:
    """The trajectories with a finding of these kinds, or of this severity or a worse one where no kind is named.

    At most ``limit`` of them, those with the worst finding first. Raises :class:`Refusal`.
    """
    summary = read_summary(folder)
    unknown = sorted(set(kinds) - set(summary["kinds"]))
    if unknown:
        names = ", ".join(summary["kinds"]) or "none at all"
        raise Refusal(f"The audit has no finding of the kind {unknown[0]!r}. It has: {names}.")
    severities = set(_WORST_FIRST if kinds else _WORST_FIRST[: _WORST_FIRST.index(severity.value) + 1])
    worst: dict[tuple[int, int], int] = {}
    try:
        for batch in pq.ParquetFile(folder / FINDINGS).iter_batches(columns=["shard", "place", "kind", "severity"]):
            for finding in batch.to_pylist():
                if finding["severity"] in severities and (not kinds or finding["kind"] in kinds):
                    place, rank = (finding["shard"], finding["place"]), _WORST_FIRST.index(finding["severity"])
                    worst[place] = min(rank, worst.get(place, rank))
        settings = AuditSettings(**summary["settings"])
        shards = [AuditShard(tuple(pieces)) for pieces in summary["pieces"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Refusal(f"{folder} cannot be read: {error}. Run the audit again.") from error
    chosen = sorted(worst, key=lambda place: (worst[place], place))[:limit]
    return FlaggedTrajectories(sorted(chosen), len(worst) - len(chosen), settings, shards)


def write_flagged(folder: Path, flagged: FlaggedTrajectories) -> Path:
    """Write the flagged trajectories, lossless, and return the file. It is whole or not there.

    Raises :class:`Refusal` when a file changed since the audit, or the folder cannot be written.
    """
    part = folder / f"{FLAGGED}.part"
    try:
        with part.open("wb") as file:
            n = _write(flagged, file)
        if n != len(flagged.places):
            raise Refusal(
                f"Only {n:,} of {len(flagged.places):,} flagged trajectories are in the files. Run the audit again."
            )
        return part.replace(folder / FLAGGED)
    except OSError as error:
        raise Refusal(f"{error.strerror or error}") from error


def _write(flagged: FlaggedTrajectories, file: Any) -> int:
    n = 0
    for trajectory in flagged.read():
        file.write(inspector_jsonl.encode(trajectory) + b"\n")
        n += 1
    return n
