"""The audit of files that are opened where they lie: what it finds is kept in their index too."""

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa

from rollout_inspector.diagnose.checks import Diagnosis
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.shard_audit import Shard, audit
from rollout_inspector.opened.index import written
from rollout_inspector.streams.trajectory import Trajectory


def audit_and_keep(folder: Path, shard: Shard, settings: AuditSettings) -> pa.Table:
    """As :func:`audit`. ``folder``: of the index, whose ``take_checked`` takes over what is kept."""
    diagnosed: list[tuple[Any, ...]] = []

    def keep(piece: dict[str, Any], trajectory: Trajectory, diagnosis: Diagnosis) -> None:
        start, _, line = piece.get("part", (0, 0, 0))  # of two parts of a file, one of both is larger
        place = (piece["path"], piece["changed"], start + line, len(diagnosed))
        diagnosed.append((*place, trajectory.external_id, *written(diagnosis)))

    table = audit(shard, settings, keep)
    with closing(sqlite3.connect(folder / "index.sqlite3", 60)) as database, database:
        stale = {(piece["path"], piece["changed"]) for piece in shard}
        database.executemany("DELETE FROM checked WHERE path = ? AND changed != ?", stale)
        database.executemany("INSERT OR REPLACE INTO checked VALUES (?, ?, ?, ?, ?, ?, ?)", diagnosed)
    return table
