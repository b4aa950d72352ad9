"""A finding as a value: what is wrong, where, what shows it, what it costs and what mends it."""

from dataclasses import dataclass, field
from enum import StrEnum

from rollout_inspector.streams.trajectory import NO_IDS, Ids


class Axis(StrEnum):
    """What a finding is about."""

    STREAM = "stream"
    """Between two steps: the next prompt does not start with the sampled stream. Also unsound ids of one step."""
    DELTA = "delta"
    """The next prompt does start with it, but the tokens between the completions are not the template's."""
    ROW = "row"  # Inside one training row.


class Severity(StrEnum):
    """How much a finding matters."""

    ERROR = "error"  # The gradient would be on tokens that were not sampled, or tokens are lost.
    WARNING = "warning"  # Suspicious, or wrong only with some trainers.
    INFO = "info"  # Good to know; nothing is wrong.


@dataclass(frozen=True)
class Cost:
    """What this fault alone costs. None = not known."""

    trained_tokens_lost: int | None = 0
    """Sampled tokens that no row trains as they were sampled."""
    trained_tokens_wrong: int | None = 0
    """Tokens under the gradient that were not sampled as they stand, or that are trained with wrong values."""
    rows: int = 1
    """How many rows the trajectory becomes, where this fault begins one of them; else 1."""
    prompt_tokens_repaid: int = 0
    """Prompt tokens that are forwarded once more, because this row shares them with an earlier row from the start."""
    lost_in_one_row: int = 0
    """Sampled tokens behind a break. They would be lost if the row went on over the break, and no new row began."""


@dataclass(frozen=True)
class Fault:
    """What a rule found: of a row, of the delta of a step or its stream with the place in it, or of a break."""

    kind: str
    evidence: str
    start: int = 0
    stop: int = 0  # Of a break the place is that of the break.
    wrong: int | None = 0
    """Tokens under the gradient that should not be there, or that have values of other tokens. None = not known."""
    lost: int | None = 0  # Sampled tokens that are not trained. None = not known.
    severity: Severity | None = None  # None = that of the kind.
    places: tuple[tuple[int, int], ...] = ()
    """The stretches to mark, when there are several; an empty one marks where tokens are missing."""
    expected_ids: Ids = field(default_factory=lambda: NO_IDS, compare=False)
    """The ids that should stand at ``[start, stop)``; empty = not known."""
    message_index: int | None = None
    missing: str = ""
    aside: int | None = None
    """Of a break: a step that is no part of the main conversation. Later breaks are measured against other steps."""
    stops: tuple[int, int] | None = None
    """Of a break: where the differing stretch ends in the sampled stream and in the prompt. None = by the alignment."""
    remedy: str = ""  # Empty = that of the kind.


@dataclass(frozen=True, eq=False)
class Finding:
    """One diagnosis. Offsets count in the stream of ``step`` (prompt + completion); without a step, in ``row``."""

    axis: Axis
    kind: str  # A slug of the closed list (``rollout_inspector.diagnose.kinds``).
    severity: Severity
    step: int | None = None
    row: int | None = None  # With a step: the row that the source holds, and that has the place at the same offset.
    start: int = 0  # The first offset at which actual and expected ids differ.
    stop: int = 0
    """The end (exclusive) of the differing stretch in the actual ids. ``start == stop`` when something is missing."""
    expected_ids: Ids = field(default_factory=lambda: NO_IDS)
    """The ids that should stand there: sampled ids, or ids that the template writes."""
    actual_ids: Ids = field(default_factory=lambda: NO_IDS)  # The ids that stand there: ``stream[start:stop]``.
    expected_text: str = ""
    """The text of the expected ids, widened to the nearest control token on both sides so that a person can read it."""
    actual_text: str = ""
    message_index: int | None = None  # The message of the step's request in which the place lies, if known.
    evidence: str = ""  # One plain sentence.
    remedy: str = ""
    cost: Cost = field(default_factory=Cost)
    missing: str = ""  # For ``not_decidable``: the field that the source lacks.
    places: tuple[tuple[int, int], ...] = ()
    """Every stretch ``[start, stop)``, when there are several. An empty one marks where tokens are missing. Either the
    first is that of ``start`` and ``stop``, or all lie between ``start`` and ``stop``, ends included."""

    @property
    def stretches(self) -> tuple[tuple[int, int], ...]:
        """Every stretch to mark, one at least."""
        return self.places or ((self.start, self.stop),)


def cost_sentence(cost: Cost, severity: str) -> str:
    """The cost of a finding in words, first that of the stored rows; empty when it costs nothing, as a note does."""
    if severity == Severity.INFO:
        return ""
    lost, rows, repaid, one_row = cost.trained_tokens_lost, cost.rows, cost.prompt_tokens_repaid, cost.lost_in_one_row
    parts = []
    for tokens, words in ((lost, "sampled token{} lost"), (cost.trained_tokens_wrong, "trained token{} wrong")):
        if tokens is None:
            parts.append(f"{words.format('s')}: not known")
        elif tokens:
            parts.append(f"{tokens:,} {words.format('s' * (tokens != 1))}")
    one_row = one_row if rows > 1 else 0  # one row alone went on over the break already
    if one_row and not lost and lost is not None:
        parts.append("no sampled token lost")
    if rows > 1:
        parts.append(f"{rows:,} rows instead of one")
    if repaid:
        parts.append(f"{repaid:,} prompt token{'s' * (repaid != 1)} recomputed")
    if one_row:
        parts.append(f"{one_row:,} would be lost if one row went on over the break")
    return ", ".join(parts)
