"""The end of a trajectory: the one value that the loop makes, the pipe carries and the database stores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.streams.strategies.protocol import TemplateRewrites
from rollout_inspector.streams.trajectory import Row


@dataclass(frozen=True, eq=False)
class TrajectoryEnd:
    """How a trajectory ended: with an outcome, or with an error."""

    key: Any
    """The owner's name of the trajectory: the primary key of a launched one, the external id of a recorded one."""
    attempt: int = 0  # The attempt of a launched trajectory that ended; the end of an older attempt changes nothing.
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    findings: tuple[Finding, ...] = ()  # Findings that are known. The diagnosis adds others where the end is stored.
    checks: Mapping[str, Any] | None = None  # What each check of the diagnosis came to; None = not diagnosed.
    rows: tuple[Row, ...] | None = None  # None = the rows follow from the steps.
    error: str = ""  # A sentence when the trajectory failed; then nothing but ``findings`` is stored.
    refused: TemplateRewrites | None = None
    """Set when the strategy refused the chat template because it is not prefix-preserving."""

    @classmethod
    def of_refusal(cls, key: Any, error: Exception) -> TrajectoryEnd:
        """Returns the end of a trajectory that its strategy cannot continue."""
        return cls(key, error=str(error), refused=error if isinstance(error, TemplateRewrites) else None)
