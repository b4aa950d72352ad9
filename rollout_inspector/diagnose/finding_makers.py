"""The finding that the fault of a rule becomes."""

from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.context import MAX_STRETCH, DiagnosisContext
from rollout_inspector.diagnose.finding import Axis, Cost, Fault, Finding, Severity
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.streams.trajectory import Ids


def bounded(ids: Ids) -> Ids:
    """The first ids of a stretch, at most ``MAX_STRETCH``."""
    return ids[:MAX_STRETCH].copy()


def bound_note(*stretches: Ids) -> str:
    """A sentence when a stretch is longer than what is stored."""
    longest = max(len(ids) for ids in stretches)
    return f" The difference is {longest} ids long; the first {MAX_STRETCH} of both are kept." * (longest > MAX_STRETCH)


def finding_at_break(b: Break, fault: Fault) -> Finding:
    """The finding of a stream break: the differing stretch of both streams, and what it costs."""
    kind = KINDS[fault.kind]
    expected_stop, actual_stop = fault.stops or (b.expected_stop, b.actual_stop)
    expected, actual = b.expected[b.start : expected_stop], b.actual[b.start : actual_stop]
    return Finding(
        axis=kind.axis, kind=fault.kind, severity=fault.severity or kind.severity, step=b.index, start=b.start,
        stop=actual_stop, expected_ids=bounded(expected), actual_ids=bounded(actual),
        expected_text=b.case.widened(b.expected, b.start, expected_stop),
        actual_text=b.case.widened(b.actual, b.start, actual_stop), message_index=fault.message_index,
        evidence=fault.evidence + bound_note(expected, actual), remedy=fault.remedy or kind.remedy,
        cost=break_cost(b, fault), missing=fault.missing,
        places=fault.places[:MAX_STRETCH] if len(fault.places) > 1 else (),
    )


def break_cost(b: Break, fault: Fault) -> Cost:
    """The cost of a break: what was sampled behind it in the row that it leaves, one more row, and repaid tokens.

    Rows count for a fault that begins one of them, and for no note. Repaid is the prefix that both rows share, as
    ``strategies.replay.repaid_tokens`` counts it. Nothing is lost where a later step continues the sampled stream. Of a
    call that was made twice, the dropped answer is lost.
    """
    case, kind = b.case, fault.kind
    behind: list[tuple[int, int]] = []  # (step, the first token of its completion behind the break)
    if kind == "duplicate_call":
        dropped = {b.index} if b.parent_index in case.continued else {b.parent_index, b.index} & case.aside
        behind = [(index, 0) for index in dropped - case.continued]
    elif kind != "branch" and b.parent_index not in case.continued:
        chain = case.chain(b.parent_index)
        behind = [(index, max(0, b.start - len(case.steps[index].prompt_ids))) for index in chain]
    stored = case.trajectory.rows
    opens_row = not stored or any(row.step_indices[:1] == (b.index,) for row in stored)
    has_rows = opens_row and (fault.severity or KINDS[kind].severity) is not Severity.INFO
    return Cost(
        trained_tokens_lost=case.n_lost(behind), rows=case.n_rows if has_rows else 1,
        prompt_tokens_repaid=b.start if opens_row else 0,
        lost_in_one_row=sum(max(0, len(case.steps[index].completion_ids) - first) for index, first in behind),
    )


def finding_on_step(
    case: DiagnosisContext, index: int, fault: Fault, axis: Axis | None = None, cost: Cost | None = None,
    expected_text: str | None = None,
) -> Finding:
    """A finding about tokens of one step. Offsets of the fault count in its prompt and completion. ``axis``: None =
    that of the kind. ``cost``: None = nothing. ``expected_text``: None = the text of the expected ids."""
    kind = KINDS[fault.kind]
    stream = case.steps[index].stream
    expected, actual = bounded(fault.expected_ids), stream[fault.start : fault.stop]
    return Finding(
        axis=axis or kind.axis, kind=fault.kind, severity=fault.severity or kind.severity, step=index,
        start=fault.start, stop=fault.stop, expected_ids=expected, actual_ids=bounded(actual),
        expected_text=case.text(expected) if expected_text is None else expected_text,
        actual_text=case.widened(stream, fault.start, fault.stop) if fault.stop >= fault.start and len(stream) else "",
        message_index=fault.message_index, evidence=fault.evidence + bound_note(fault.expected_ids, actual),
        remedy=fault.remedy or kind.remedy, cost=cost or Cost(), places=fault.places,
    )
