"""What an audit flagged becomes a file of its own, which is then imported like any other."""

from collections.abc import Collection
from itertools import groupby
from operator import itemgetter
from pathlib import Path

import pyarrow.parquet as pq

from rollout_inspector.diagnose.finding import Severity
from rollout_inspector.formats.readers import inspector_jsonl
from rollout_inspector.guard.audit_folder import FINDINGS, read_summary
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.shard_audit import trajectories_at
from rollout_inspector.outputs import whole_file
from rollout_inspector.refusal import Refusal

FLAGGED = "flagged.jsonl"
"""The file in the folder of the audit. It stays there, so that a worker can go on with an import that was stopped."""
_WORST_FIRST = [level.value for level in (Severity.ERROR, Severity.WARNING, Severity.INFO)]


def write_flagged(
    folder: Path, kinds: Collection[str], severity: Severity, limit: int
) -> tuple[Path, int, AuditSettings]:
    """Write the trajectories with a finding of these kinds, or of this severity or a worse one where no kind is named.

    At most ``limit`` of them, those with the worst finding first, lossless. Returns the file, which is whole or not
    there, how many more were flagged, and the settings of the audit. Raises :class:`Refusal`, also when a file changed
    since the audit, or the folder cannot be written.
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
        shards = [tuple(pieces) for pieces in summary["pieces"]]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise Refusal(f"{folder} cannot be read: {error}. Run the audit again.") from error
    if not worst:
        raise Refusal("The audit flagged nothing of that severity, so nothing was imported.")
    chosen = sorted(sorted(worst, key=lambda place: (worst[place], place))[:limit])  # in the order of the files
    n = 0
    try:
        with whole_file(folder / FLAGGED) as file:
            for number, places in groupby(chosen, key=itemgetter(0)):
                for trajectory in trajectories_at(shards[number], settings, {place for _, place in places}):
                    file.write(inspector_jsonl.encode(trajectory) + b"\n")
                    n += 1
            if n != len(chosen):
                raise Refusal(
                    f"Only {n:,} of {len(chosen):,} flagged trajectories are in the files. Run the audit again."
                )
        return folder / FLAGGED, len(worst) - len(chosen), settings
    except OSError as error:
        raise Refusal(f"{error.strerror or error}") from error
