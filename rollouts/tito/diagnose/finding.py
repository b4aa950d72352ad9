"""A finding as a value: what is wrong, where, how one can see it, what it costs and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from rollouts.tito.trajectory import NO_IDS, Ids


class Axis(StrEnum):
    """What a finding is about."""

    STREAM = "stream"
    """Between two steps: the next prompt does not start with what was sampled (or one step's own ids are unsound)."""
    DELTA = "delta"
    """The next prompt does start with it, but the tokens put in between are not the template's."""
    ROW = "row"
    """Inside one training row."""


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"
    """The gradient would sit on tokens that were not sampled, or tokens are lost."""
    WARNING = "warning"
    """Suspicious, or wrong only under some trainers."""
    INFO = "info"
    """Worth knowing; nothing is wrong."""


@dataclass(frozen=True)
class Cost:
    """What the fault costs this trajectory."""

    trained_tokens_lost: int = 0
    """Sampled tokens that can no longer be trained."""
    trained_tokens_wrong: int = 0
    """Tokens under the gradient that were not sampled as they stand."""
    rows: int = 1
    """Rows that this trajectory becomes, instead of one."""
    prompt_tokens_repaid: int = 0
    """Prompt tokens that an earlier row has forwarded already: what this row and that one share from their start."""


@dataclass(frozen=True, eq=False)
class Finding:
    """One diagnosis. Offsets count in the stream of ``step`` (prompt + completion); without a step, in ``row``."""

    axis: Axis
    kind: str
    """A slug of the closed list (``rollouts.tito.diagnose.kinds``)."""
    severity: Severity
    step: int | None = None
    row: int | None = None
    start: int = 0
    """First offset at which the two sides differ."""
    stop: int = 0
    """End (exclusive) of the differing stretch on the actual side; ``start == stop`` when something is missing."""
    expected_ids: Ids = field(default_factory=lambda: NO_IDS)
    """The differing stretch of what should stand there (sampled, or what the template gives)."""
    actual_ids: Ids = field(default_factory=lambda: NO_IDS)
    """The differing stretch that stands there: ``stream[start:stop]``."""
    expected_text: str = ""
    """The expected stretch decoded, widened to the nearest special token on both sides so that it can be read."""
    actual_text: str = ""
    message_index: int | None = None
    """The message of the step's request that the place lies in, when the request is known."""
    evidence: str = ""
    """One sentence that a tired engineer understands."""
    remedy: str = ""
    cost: Cost = field(default_factory=Cost)
    missing: str = ""
    """For ``not_decidable``: the field that the source lacks."""
