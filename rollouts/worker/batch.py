"""The values that a worker and its storage process exchange."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.trajectory import Step


@dataclass(frozen=True)
class Handshake:
    """The first message: which database the worker uses. A test's database is not the one of the settings."""

    database: dict[str, Any]


@dataclass(frozen=True, eq=False)
class StorageBatch:
    """What is stored in one go. A batch that was stored already changes nothing."""

    run: int
    """Primary key of the run."""
    steps: Sequence[tuple[int, int, Step]]
    """(trajectory key, step index, step)."""
    ends: Sequence[TrajectoryEnd]
