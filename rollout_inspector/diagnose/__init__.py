"""From a difference to its cause: what is wrong with a trajectory, where, why, at what cost, and what mends it.
``diagnose`` walks an ordered list of rules; the first rule that matches names the cause. A rule is a small pure
function in the module of its family, and one entry here. No rule knows a model's name."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rollout_inspector.diagnose import (
    branches, delta_rules, request, row_findings, step_checks, template, text, thinking
)
from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.checks import Diagnosis, lacks_of
from rollout_inspector.diagnose.context import DiagnosisContext, RendererFor
from rollout_inspector.diagnose.finding import Axis, Cost, Fault, Finding, Severity
from rollout_inspector.diagnose.finding_makers import finding_at_break
from rollout_inspector.diagnose.gap.figures import gap_of_rows
from rollout_inspector.diagnose.kinds import KINDS, VERSION, FindingKind
from rollout_inspector.streams.canonical import rows_again
from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.trajectory import FORKED, Trajectory

__all__ = [
    "BREAK_RULES", "KINDS", "VERSION", "Axis", "Cost", "Diagnosis", "Finding", "FindingKind", "Severity", "diagnose",
    "examine",
]

OF_FIRST_TURN = ("text", "reply", "first_prompt", "control_text")
"""The checks that a fork cannot decide: another trajectory has its first prompt, and may have begun its first turn."""
Rule = Callable[[Break], "Fault | None"]

# Why a prompt does not start with the sampled stream. The first rule that matches names the cause.
BREAK_RULES: tuple[Rule, ...] = (
    branches.duplicate_call,
    branches.branch,
    request.chat_template_changed,
    request.request_changed,
    request.bos_mismatch,
    template.other_render,
    request.context_truncated,
    request.history_rewritten,
    request.assistant_rewritten,
    thinking.empty_think_toggled,
    thinking.thinking_stripped,
    thinking.reasoning_misparsed,
    text.special_tokens_dropped,
    text.invalid_utf8,
    request.template_edits_turn,
    text.tool_call_reserialized,
    text.whitespace_changed,
    text.boundary_merge,
    text.noncanonical_sampling,
    template.template_not_append_only,
    template.other_head,
    request.template_rewrites_turn,
    template.tokenizer_mismatch,
    request.changed_request,
    template.other_text,
)


def diagnose(
    trajectory: Trajectory, codec: Codec | None, renderer_for: RendererFor | None = None, rows_template: str = ""
) -> list[Finding]:
    """The findings of a trajectory, in reading order: :func:`examine` without the checks."""
    return list(examine(trajectory, codec, renderer_for, rows_template, encode_rows=False).findings)


def examine(
    trajectory: Trajectory, codec: Codec | None, renderer_for: RendererFor | None = None, rows_template: str = "",
    encode_rows: bool = True,
) -> Diagnosis:
    """The findings of a trajectory, and what each check came to.

    ``renderer_for`` maps a sha256 to its chat template (empty = the run's template), or to None. ``rows_template`` is
    the hash of the template of the rows, if that is another one. ``encode_rows``: encode the text of rows again too;
    pages show that, and no finding needs it. Without a codec only ids and messages are checked, and a finding
    ``not_decidable`` says so. Deterministic; O(new tokens) while each step extends its parent.
    """
    case = DiagnosisContext(trajectory, codec, renderer_for, rows_template)
    if FORKED in trajectory.extra:
        case.undecided |= dict.fromkeys(OF_FIRST_TURN, "first turn of its own")
    if not trajectory.rows and trajectory.steps and not any(  # even a call without ids has a finish reason
        len(step.prompt_ids) or len(step.completion_ids) or step.logprobs is not None or step.finish_reason
        for step in trajectory.steps
    ):
        gap = _not_decidable(Axis.STREAM, "token ids", "What the engine read and sampled")
        return Diagnosis((gap,), {name: ["token ids"] for name in lacks_of(case)})
    findings: list[Finding] = []
    indices: list[int] = []
    for index in range(len(case.steps)):
        if not index and FORKED in trajectory.extra:
            pass  # its completion may be the end of a turn alone, whose message holds all of the turn
        elif (missing := step_checks.missing_ids(case, index)) is not None:
            findings.append(missing)
        elif index not in case.no_ids and (inconsistent := step_checks.inconsistent(case, index)) is not None:
            findings.append(inconsistent)
        elif index not in case.no_ids and (lost := step_checks.reply_text_lost(case, index)) is not None:
            findings.append(lost)
        link = case.link_of(index)
        if link.parent is None:
            findings += _first_prompt(case, index)
        elif index in case.no_ids or link.parent in case.no_ids:
            pass  # follows from missing ids, which are reported already
        elif not link.extends:
            findings.append(_name_break(Break(case, index, link)))
        elif (fault := delta_rules.check_delta(case, index)) is not None:
            findings.append(fault)
        if index not in case.no_ids:
            indices.append(index)
    broken = {(f.step, f.start) for f in findings if f.kind == "noncanonical_sampling"}
    findings += [f for f in step_checks.noncanonical(case, indices) if (f.step, f.start) not in broken]
    findings += row_findings.row_findings(case)
    findings += _undecidable(case)
    findings = [replace(f, row=_row_that_holds(case, f)) if f.row is None else f for f in findings]
    order = sorted(findings, key=lambda f: (f.step if f.step is not None else len(case.steps), f.row or 0, f.start))
    again = [] if codec is None else case.again
    if codec is not None and encode_rows:
        again = [*again, *rows_again(case.steps, trajectory.rows, case.merged, codec)]
    return Diagnosis(tuple(order), lacks_of(case), gap_of_rows(trajectory.rows), tuple(again))


def _row_that_holds(case: DiagnosisContext, finding: Finding) -> int | None:
    """The row of the source that is equal to the finding's step up to the end of its place. None = there is none."""
    if finding.step is None or not case.trajectory.rows:
        return None
    stream = case.steps[finding.step].stream
    needed = min(max(finding.stop, finding.start + 1), len(stream))
    if not needed:
        return None
    rows = sorted(enumerate(case.trajectory.rows), key=lambda one: finding.step not in one[1].step_indices)
    return next((index for index, row in rows if np.array_equal(row.ids[:needed], stream[:needed])), None)


def _first_prompt(case: DiagnosisContext, index: int) -> list[Finding]:
    if index in case.no_ids or FORKED in case.trajectory.extra:
        return []
    rules = (step_checks.doubled_bos, step_checks.head_lost, template.first_prompt, delta_rules.control_text_in_prompt)
    return [finding for rule in rules if (finding := rule(case, index)) is not None][:1]


def _name_break(b: Break) -> Finding:
    for rule in BREAK_RULES:
        if (verdict := rule(b)) is not None:
            if verdict.aside is not None:
                b.case.aside.add(verdict.aside)
            return finding_at_break(b, verdict)
    missing = "the tokenizer" if b.case.codec is None else "the request's messages" * (b.known_messages is None)
    needs = f" Naming the cause needs {missing}." if missing else ""
    return finding_at_break(
        b,
        Fault(
            "unclassified",
            f"The prompt of step {b.index} leaves the stream of step {b.parent_index} at offset {b.start} of "
            f"{len(b.expected)}.{needs}",
            missing=missing,
        ),
    )


def _undecidable(case: DiagnosisContext) -> list[Finding]:
    """What was not checked at all, with the field that the source lacks. Reported once a trajectory."""
    gaps: list[tuple[str, str, Axis]] = []
    if case.codec is None and case.steps:
        gaps.append(("tokenizer", "Text, canonical form and deltas", Axis.STREAM))
    if case.codec is None and case.trajectory.rows:
        gaps.append(("tokenizer", "Whose turn each token of the rows belongs to", Axis.ROW))
    if case.of_another_template:
        gaps.append(("chat template of the first prompt", "Whether this tokenizer wrote the first prompt", Axis.STREAM))
    later = [index for index, link in enumerate(case.links) if link.parent is not None]
    if later and case.codec is not None:
        if any(case.steps[index].request is None for index in range(len(case.steps))):
            gaps.append(("request messages", "What the template writes between two completions", Axis.DELTA))
        elif all(case.renderer(case.steps[index]) is None for index in later):
            gaps.append(("chat template", "What the template writes between two completions", Axis.DELTA))
    return [_not_decidable(axis, field, what) for field, what, axis in gaps]


def _not_decidable(axis: Axis, field: str, what: str) -> Finding:
    on_rows = axis is Axis.ROW
    return Finding(
        axis=axis, kind="not_decidable", severity=Severity.INFO, step=None if on_rows else 0,
        row=0 if on_rows else None, evidence=f"{what} could not be checked: the source has no {field}.",
        remedy=KINDS["not_decidable"].remedy, missing=field,
    )
