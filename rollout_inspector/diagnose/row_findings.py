"""Faults in the rows of a trajectory: first each row by itself, then all rows against the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from rollout_inspector.diagnose import row_checks as checks
from rollout_inspector.diagnose.context import MAX_STRETCH, DiagnosisContext
from rollout_inspector.diagnose.finding import Axis, Cost, Fault, Finding
from rollout_inspector.diagnose.finding_makers import bounded
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.diagnose.mask_checks import (
    TurnBoundaries,
    derived_header,
    derived_stops,
    header_places,
    mask_faults,
    mask_shifted,
    places_of,
    written_by_assistant,
)
from rollout_inspector.diagnose.row_versions import trained_versions
from rollout_inspector.streams.align import sampled_places
from rollout_inspector.streams.interfaces import Conversation, Renderer, RenderFailed
from rollout_inspector.streams.prefix import common_prefix, stream_length
from rollout_inspector.streams.recorded_renders import with_json
from rollout_inspector.streams.row_places import sampled_instead
from rollout_inspector.streams.snippets import counted
from rollout_inspector.streams.token_origins import mask_runs
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Mask, Message, Origin, Row, Step


def row_findings(case: DiagnosisContext) -> Iterator[Finding]:
    """Findings of the rows that the source holds. Rows that follow from steps are right by construction."""
    rows = case.trajectory.rows
    properties = _TemplateProperties(case) if rows else None
    for index, row in enumerate(rows):
        assert properties is not None
        for fault in _row_faults(case, row, properties):
            yield _finding(case, index, row, fault)
    if rows and case.steps:
        yield from _against_steps(case)
    yield from _order(case)
    yield from _routing(case)
    yield from _versions(case)
    yield from _step_rows(case)


def _row_faults(case: DiagnosisContext, row: Row, properties: _TemplateProperties) -> Iterator[Fault]:
    if fault := checks.length_mismatch(row):
        yield fault
        return  # without equal lengths nothing else can be compared
    if not len(row.ids):
        return
    row = _with_origin(case, row)
    marks = properties.marks(row)
    roles = bool(header_places(marks, row.ids)) or int(np.count_nonzero(marks.special)) > 2
    overrun = checks.mask_overrun(row, roles)
    if overrun:
        yield _with_counts(overrun, row, marks)
    # A row that trains nothing or everything has no pattern that shows a shift of the columns.
    shifted = None if overrun else checks.columns_shifted(row) or mask_shifted(row, properties.marks)
    others = list(checks.ROW_RULES)
    if shifted:
        yield shifted
    elif not overrun:
        wrong = [_with_counts(fault, row, marks) for fault in mask_faults(row, marks)]
        yield from _merged(wrong)
        # Advantages in place of the mask's fault follow from that fault.
        if not wrong or checks.advantage_misplaced(_mended(row, wrong)):
            others.append(checks.advantage_misplaced)
    for check in others:
        if fault := check(row):
            yield fault
    if fault := checks.prompt_split_wrong(row, written_by_assistant(row, marks)):
        yield fault
    if fault := checks.routing_misaligned(row.extra, len(row.ids)):
        yield fault


def _mended(row: Row, faults: Sequence[Fault]) -> Row:
    """The row with the mask that it should have."""
    mask = row.loss_mask.copy()
    for fault in faults:
        mask[fault.start : fault.stop] ^= True
    return replace(row, loss_mask=mask)


def _with_counts(fault: Fault, row: Row, marks: TurnBoundaries) -> Fault:
    """A mask that runs over turns or leaves out all: its wrong and lost tokens, counted by who wrote each token."""
    if fault.kind != "mask_overrun":
        return fault
    sampled = written_by_assistant(row, marks)
    if sampled is None:
        return replace(fault, wrong=None if fault.wrong else 0, lost=None if fault.lost else 0)
    wrong, lost = row.loss_mask & ~sampled, sampled & ~row.loss_mask
    return replace(fault, wrong=int(np.count_nonzero(wrong)), lost=int(np.count_nonzero(lost)))


def _merged(faults: Sequence[Fault]) -> Iterator[Fault]:
    """One fault for each kind: the first place, with all places and their counts."""
    by_kind: dict[str, list[Fault]] = {}
    for fault in faults:
        by_kind.setdefault(fault.kind, []).append(fault)
    for same in by_kind.values():
        if len(same) == 1:
            yield same[0]
            continue
        wrong, lost = [fault.wrong for fault in same], [fault.lost for fault in same]
        yield replace(
            same[0],
            wrong=None if None in wrong else sum(filter(None, wrong)),
            lost=None if None in lost else sum(filter(None, lost)),
            places=tuple((fault.start, fault.stop) for fault in same),
        )


def _with_origin(case: DiagnosisContext, row: Row) -> Row:
    """The row with origins from the steps, if the row is the stream of its last step."""
    knows_sampled = row.origin is not None and bool((row.origin == Origin.SAMPLED).any())
    if knows_sampled or not row.step_indices or row.step_indices[-1] >= len(case.steps):
        return row
    sampled = sampled_places(case.steps, row)
    if sampled is None:
        return row
    origin = np.full(len(row.ids), Origin.TEMPLATE, dtype=np.uint8)
    origin[: min((start for start, _, _ in sampled), default=0)] = Origin.PROMPT
    for start, stop, _ in sampled:
        origin[start:stop] = Origin.SAMPLED
    between = origin == Origin.TEMPLATE
    text = between & ~case.is_special(row.ids)
    # Long stretches between completions are text of a tool or user; short ones are the template's.
    for start, stop in mask_runs(text):
        if stop - start > 3:
            origin[start:stop] = Origin.OBSERVATION
    return replace(row, origin=origin)


_QUESTION: Message = {"role": "user", "content": "Question one"}
_ANSWER: Message = {"role": "assistant", "content": "Answer zwei"}
_CALLED: tuple[Message, ...] = (
    _QUESTION,
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"id": "call00001", "type": "function", "function": {"name": "ask", "arguments": {"q": "x"}}}],
    },
    {"role": "tool", "name": "ask", "tool_call_id": "call00001", "content": "Result drei"},
)


class _TemplateProperties:
    """The marks of turns, from a few small renders of the run's template. Without a template, from the row itself."""

    def __init__(self, case: DiagnosisContext) -> None:
        self.case = case
        self.renderer: Renderer | None = None
        self.headers: dict[bool | None, tuple[Ids, ...]] = {}
        """By whether thinking is on: the headers after a question and after a result. None = nobody said it."""
        self.stop_ids: frozenset[int] = frozenset()
        self.template_stops: frozenset[int] = frozenset()
        """The same ids, if the template told them. Without it an end of turn may stand before an end of text."""
        codec = case.codec
        if codec is None:
            return
        eos = () if codec.eos_id is None else (codec.eos_id,)
        self.stop_ids = frozenset((*eos, *getattr(codec, "stop_ids", ())))
        renderer = case.renderer_of(case.rows_template)
        if renderer is None:
            return
        self.renderer = renderer
        if not self._headers(None):
            return
        behind = self._around(renderer, (_QUESTION,))[1]
        if len(behind):
            # Other control tokens may stand before the stop token of the tokenizer.
            if not np.isin(behind, list(self.stop_ids)).any():
                self.stop_ids |= {int(behind[0])}
            self.template_stops = self.stop_ids

    def _headers(self, thinking: bool | None) -> tuple[Ids, ...]:
        """The ids that open the assistant's turn, rendered once for each switch."""
        if thinking not in self.headers:
            opens = self._opens((_QUESTION,), thinking)
            # Some templates join arguments as text and refuse objects.
            called = self._opens(_CALLED, thinking) or self._opens(with_json(_CALLED), thinking) if opens else ()
            self.headers[thinking] = opens + tuple(ids for ids in called if not np.array_equal(ids, opens[0]))
        return self.headers[thinking]

    def _opens(self, messages: Sequence[Message], thinking: bool | None) -> tuple[Ids, ...]:
        """The ids between messages and the assistant's answer: the generation prompt, else the last mark."""
        renderer = self.renderer
        if renderer is None:
            return ()
        kwargs = {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        try:
            with_prompt = renderer.render_ids(Conversation(messages, None, kwargs, True))
            without = renderer.render_ids(Conversation(messages, None, kwargs, False))
        except RenderFailed:
            return ()
        header = with_prompt[common_prefix(with_prompt, without) :]
        if not len(header):
            header = self._around(renderer, messages)[0][-1:]
        return (header,) if len(header) else ()

    def _around(self, renderer: Renderer, messages: Sequence[Message]) -> tuple[Ids, Ids]:
        """The control tokens before an answer and after it, when the conversation goes on."""
        assert self.case.codec is not None
        try:
            later = [*messages, _ANSWER, {"role": "user", "content": "Next"}]
            whole = renderer.render_ids(Conversation(later, None, {}))
        except RenderFailed:
            return NO_IDS, NO_IDS
        pieces = self.case.codec.token_bytes(whole)
        start = b"".join(pieces).find(b"Answer zwei")
        if start < 0:
            return NO_IDS, NO_IDS
        offsets = np.cumsum([len(piece) for piece in pieces])
        special = self.case.is_special(whole)
        return whole[special & (offsets <= start)], whole[special & (offsets > start + len(b"Answer zwei"))]

    def marks(self, row: Row) -> TurnBoundaries:
        """The marks of the turns in this row."""
        special = self.case.is_special(row.ids)
        # A row does not say whether thinking was on. Its first turn does.
        switched = (self._headers(thinking) for thinking in (None, True, False))
        headers = next((switch for switch in switched if switch and places_of(switch[0], row.ids)), self._headers(None))
        by_template = any(places_of(header, row.ids) for header in headers)
        if not by_template:
            derived = derived_header(row.ids, row.loss_mask, special)
            headers = (derived,) if len(derived) else ()
        stops = self.stop_ids | derived_stops(row.ids, row.loss_mask, special, self.template_stops)
        codec = self.case.codec
        if codec is None:
            blank = np.zeros(len(row.ids), dtype=np.bool_)
        else:
            distinct, places = np.unique(row.ids, return_inverse=True)
            pieces = codec.token_bytes(distinct)
            is_blank = (bool(piece) and not piece.strip() for piece in pieces)
            blank = np.fromiter(is_blank, np.bool_, count=len(pieces))[places]
        return TurnBoundaries(special, blank, headers, by_template, stops, self.stop_ids)


def _finding(case: DiagnosisContext, index: int, row: Row, fault: Fault, step: int | None = None) -> Finding:
    kind = KINDS[fault.kind]
    ids = row.ids[fault.start : fault.stop]
    return Finding(
        axis=Axis.ROW, kind=fault.kind, severity=fault.severity or kind.severity, step=step, row=index,
        start=fault.start, stop=fault.stop, expected_ids=bounded(fault.expected_ids),
        expected_text=case.text(fault.expected_ids), actual_ids=bounded(ids),
        actual_text=case.widened(row.ids, min(fault.start, len(row.ids)), min(fault.stop, len(row.ids))),
        places=fault.places[:MAX_STRETCH], evidence=fault.evidence, remedy=kind.remedy,
        cost=Cost(fault.lost, fault.wrong, rows=max(1, len(case.trajectory.rows))),
    )


def _against_steps(case: DiagnosisContext) -> Iterator[Finding]:
    """Compare rows with their steps: tokens must be as sampled, and each trained once."""
    rows, trained = case.trajectory.rows, case.trained
    for index, (row, foreign) in enumerate(zip(rows, trained.foreign, strict=True)):
        if foreign is None or trained.verbatim[index]:
            continue
        if (fault := _not_sampled(case, row, foreign)) is not None:
            yield _finding(case, index, row, fault)
    complete = all(trained.verbatim)
    for index, counts in enumerate(trained.times):
        twice = np.flatnonzero(counts > 1)
        if twice.size:
            yield _on_step(case, index, "trained_twice", int(twice[0]), int(twice[-1]) + 1,
                           f"Under the gradient in several rows: {counted(twice.size, 'token')} of step {index}.",
                           Cost(trained_tokens_wrong=int(twice.size), rows=len(rows)))
        if complete and len(counts) and not counts.any() and index not in case.no_ids:
            yield _on_step(case, index, "never_trained", 0, len(counts),
                           f"Under the gradient in no row: {counted(len(counts), 'token')} that step {index} sampled.",
                           Cost(trained_tokens_lost=len(counts), rows=len(rows)))


def _not_sampled(case: DiagnosisContext, row: Row, foreign: Mask) -> Fault | None:
    """A row that does not hold what its steps sampled, at each trained token that was not sampled as it stands.

    None when it trains no such token and begins with all that its last call read and sampled: then a break tells more.
    """
    stream = case.steps[row.step_indices[-1]].stream
    shared = common_prefix(stream, row.ids)
    lost = sum(int(np.count_nonzero(case.trained.times[index] == 0)) for index in row.step_indices)
    places = mask_runs(foreign)
    if not places:
        if shared == len(stream):
            return None
        return Fault(
            "row_not_sampled",
            f"From offset {shared} on the row's ids differ from the ids that its steps read and sampled.",
            shared, len(row.ids), lost=lost,
        )
    n = int(np.count_nonzero(foreign))
    return Fault(
        "row_not_sampled",
        f"The row trains {counted(n, 'token')} that its steps did not sample, the first at offset {places[0][0]}.",
        *places[0], wrong=n, lost=lost, places=tuple(places), expected_ids=sampled_instead(case.steps, row, *places[0]),
    )


def _on_step(
    case: DiagnosisContext, index: int, kind: str, start: int, stop: int, evidence: str, cost: Cost
) -> Finding:
    step = case.steps[index]
    offset, finding_kind = len(step.prompt_ids), KINDS[kind]
    return Finding(
        axis=Axis.ROW, kind=kind, severity=finding_kind.severity, step=index, start=offset + start, stop=offset + stop,
        actual_ids=bounded(step.completion_ids[start:stop]), evidence=evidence, remedy=finding_kind.remedy, cost=cost,
        actual_text=case.widened(step.stream, offset + start, offset + stop),
    )


def _order(case: DiagnosisContext) -> Iterator[Finding]:
    """Step-wise rows must follow each other in their batch, and only the last one has the last-step flag."""
    rows: Sequence[Row] = case.trajectory.rows
    flags = [row.extra.get("is_last_step") for row in rows]
    if not flags or any(not isinstance(flag, bool) for flag in flags):
        return
    places = [row.extra.get("batch_index") for row in rows]
    wrong = None
    if all(type(place) is int for place in places):
        wrong = next((i for i in range(1, len(rows)) if places[i] - places[i - 1] != 1), None)  # type: ignore[operator]
    if wrong is not None:
        what = f"is element {places[wrong]} of its batch, and the row before it is element {places[wrong - 1]}"
    else:
        wrong = next((i for i, flag in enumerate(flags) if flag != (i == len(flags) - 1)), None)
        if wrong is None:
            return
        what = "is marked as the last step and is not" if flags[wrong] else "is the last step and is not marked"
    fault = Fault("step_order_invalid", f"Row {wrong} of {len(rows)} {what}.", 0, len(rows[wrong].ids))
    yield _finding(case, wrong, rows[wrong], fault)


def _routing(case: DiagnosisContext) -> Iterator[Finding]:
    """Expert routing that the source keeps for the whole trajectory. It belongs to the row if there is only one."""
    rows = case.trajectory.rows
    if len(rows) == 1:
        if fault := checks.routing_misaligned(case.trajectory.extra, len(rows[0].ids)):
            yield _finding(case, 0, rows[0], fault)
    elif not rows and len(case.merged) == 1:
        last = case.merged[0][-1]
        step = case.steps[last]
        if fault := checks.routing_misaligned(case.trajectory.extra, stream_length(step)):
            yield _on_step(case, last, fault.kind, 0, len(step.completion_ids), fault.evidence, Cost())


def _versions(case: DiagnosisContext) -> Iterator[Finding]:
    """Several policy versions sampled the steps of a row, or a row without versions of steps records several."""
    rows = case.trajectory.rows
    chains = [row.step_indices for row in rows] or case.merged
    for index, steps in enumerate(chains):
        versions = [case.steps[i].policy_version for i in steps if i < len(case.steps) and case.steps[i].policy_version]
        distinct = list(dict.fromkeys(versions)) or (trained_versions(rows[index]) if rows else [])
        if len(distinct) > 1:
            finding_kind = KINDS["mixed_policy_versions"]
            names = ", ".join(version[:100] for version in distinct[:8])
            yield Finding(
                axis=Axis.ROW, kind=finding_kind.slug, severity=finding_kind.severity, row=index,
                remedy=finding_kind.remedy, evidence=f"Row {index} holds tokens of the policy versions {names}.",
            )


def _step_rows(case: DiagnosisContext) -> Iterator[Finding]:
    """What steps tell about their rows: stop strings that cut only the text, routing, truncation."""
    wants_masked = bool(case.trajectory.extra.get("mask_truncated"))
    for index, step in enumerate(case.steps):
        n = len(step.completion_ids)
        if fault := checks.routing_misaligned(step.extra, len(step.prompt_ids) + n):
            yield _on_step(case, index, fault.kind, 0, n, fault.evidence, Cost())
        if (cut := _past_stop_string(case, step)) is not None:
            yield _on_step(
                case, index, "stop_string_misaligned", cut, n,
                f"A stop string ended step {index}; {n - cut} of its ids stand after the text that was returned.",
                Cost(trained_tokens_wrong=n - cut),
            )
        if wants_masked and step.finish_reason == "length" and n and _is_trained(case, index):
            yield _on_step(
                case, index, "truncated_trained", 0, n,
                f"Step {index} was cut by its length limit and is under the gradient.", Cost(trained_tokens_wrong=n),
            )


def _past_stop_string(case: DiagnosisContext, step: Step) -> int | None:
    """The first id after the returned text, when a stop string cut the text. Else None."""
    by_string = step.finish_reason == "stop" and step.stop_reason and not step.stop_reason.isdigit()
    if not by_string or step.text is None or case.codec is None:
        return None
    decoded = case.text(step.completion_ids)
    if not decoded.startswith(step.text) or not decoded[len(step.text) :].startswith(step.stop_reason[:1]):
        return None
    sizes = np.cumsum([len(piece) for piece in case.codec.token_bytes(step.completion_ids)])
    cut = int(np.searchsorted(sizes, len(step.text.encode()), side="left")) + 1 if step.text else 0
    after_stop = step.completion_ids[cut:]
    return cut if len(after_stop) and not case.is_special(after_stop).all() else None


def _is_trained(case: DiagnosisContext, index: int) -> bool:
    for row in case.trajectory.rows:
        if index in row.step_indices and (places := sampled_places(case.steps, row)) is not None:
            return any(bool(row.loss_mask[start:stop].any()) for start, stop, step in places if step == index)
    return not case.trajectory.rows
