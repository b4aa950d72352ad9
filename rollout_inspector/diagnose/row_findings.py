"""Faults in the rows of a trajectory: first each row by itself, then all rows against the steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from rollout_inspector.diagnose import row_checks as checks
from rollout_inspector.diagnose.context import MAX_STRETCH, DiagnosisContext, special_in
from rollout_inspector.diagnose.finding import Axis, Cost, Fault, Finding, Severity
from rollout_inspector.diagnose.finding_makers import bounded, finding_on_step
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.diagnose.mask_checks import (
    TurnBoundaries, derived_header, derived_stops, header_places, mask_faults, mask_shifted, places_of,
    written_by_assistant
)
from rollout_inspector.diagnose.media import check_media
from rollout_inspector.diagnose.row_checks import step_versions, trained_versions
from rollout_inspector.diagnose.step_checks import past_stop_string
from rollout_inspector.streams.align import sampled_instead, sampled_places
from rollout_inspector.streams.canonical import is_utf8
from rollout_inspector.streams.interfaces import Codec, Conversation, Renderer, RenderFailed
from rollout_inspector.streams.prefix import common_prefix, stream_length
from rollout_inspector.streams.recorded_renders import with_json
from rollout_inspector.streams.snippets import counted, listed, quoted
from rollout_inspector.streams.token_origins import mask_runs
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Mask, Message, Origin, Row


def row_findings(case: DiagnosisContext) -> Iterator[Finding]:
    """Findings of the rows that the source holds. Rows that follow from steps are right by construction."""
    rows = case.trajectory.rows
    renderer: Any = case.renderer_of(case.rows_template) if rows else None
    properties = _properties(case.codec, renderer) if rows else None
    for index, row in enumerate(rows):
        assert properties is not None
        for fault in _row_faults(case, row, properties):
            yield _finding(case, index, row, fault)
    if rows and case.steps:
        yield from _against_steps(case)
    for rule in (_order, _rewards, _media, _routing, _versions, _step_rows, _step_logprobs):
        yield from rule(case)


def _row_faults(case: DiagnosisContext, row: Row, properties: _TemplateProperties) -> Iterator[Fault]:
    if fault := checks.length_mismatch(row):
        yield fault
        return  # without equal lengths nothing else can be compared
    if not len(row.ids):
        return
    row = _with_origin(case, row)
    marks = properties.marks(row)
    if row.origin is None and not marks.headers:
        case.undecided["mask"] = "role headers in the rows"
    roles = bool(header_places(marks, row.ids)) or int(np.count_nonzero(marks.special)) > 2
    overrun = checks.mask_overrun(row, roles)
    if overrun:
        yield _with_counts(overrun, row, marks)
    # A row that trains nothing or everything has no pattern that shows a shift of the columns.
    shifted = None if overrun else mask_shifted(row, properties.marks) or checks.columns_shifted(row)
    others, right = list(checks.ROW_RULES), row
    if shifted:
        yield shifted
    elif not overrun:
        wrong = list(mask_faults(row, marks))
        if (cut := _cut(case, row, marks)) is not None:
            yield cut
            wrong = [fault for fault in wrong if fault.severity is not Severity.INFO]
        versions = case.trajectory.extra.get("weight_versions")
        if isinstance(versions, list) and len(set(map(str, versions))) > 1:  # a resumed sample may mask its old part
            wrong = [
                replace(fault, severity=Severity.INFO) if fault.kind == "sampled_masked" and
                fault.start == row.extra.get("prompt_length") else fault for fault in wrong
            ]
        yield from _merged(wrong)
        # Advantages and logprobs in place of the mask's fault follow from it: they are looked at with the right mask.
        mask = row.loss_mask.copy()
        for fault in (loud := [fault for fault in wrong if fault.severity is not Severity.INFO]):
            for start, stop in fault.places or ((fault.start, fault.stop),):
                mask[start:stop] ^= True
        if not loud or checks.advantage_misplaced(replace(row, loss_mask=mask)):
            others.append(checks.advantage_misplaced)
        right = replace(row, loss_mask=mask & row.loss_mask)
    if not row.step_indices and (fault := _bos_fault(case, row, properties, marks)):
        yield fault
    if "preference" in case.trajectory.extra and (fault := _merged_seam(case, row)):
        yield fault
    for check in others:
        if fault := check(right if check is checks.logprob_invalid else row):
            yield fault
    if fault := checks.prompt_split_wrong(row, written_by_assistant(row, marks)):
        yield fault
    if fault := checks.routing_misaligned(row.extra, len(row.ids)):
        yield fault


def _cut(case: DiagnosisContext, row: Row, marks: TurnBoundaries) -> Fault | None:
    """A completion that the source calls cut, in a row without calls. Whether it is to be masked is a choice."""
    trajectory, runs = case.trajectory, mask_runs(row.loss_mask)
    if row.step_indices or not checks.was_cut({**trajectory.extra, **row.extra}, trajectory.stop_reason) or not runs:
        return None
    if int(row.ids[runs[-1][1] - 1]) in marks.known_stops or row is not trajectory.rows[-1]:
        return None
    severity = None if trajectory.extra.get("mask_truncated") else Severity.INFO
    return Fault(
        "truncated_trained", "The last completion was cut by its length limit and is under the gradient.", *runs[-1],
        wrong=runs[-1][1] - runs[-1][0], severity=severity,
    )


def _merged_seam(case: DiagnosisContext, row: Row) -> Fault | None:
    """In a preference pair, the prompt's last tokens and the answer's first became other tokens, or would.

    A reader notes ``prompt_tail``, the last ids of the prompt that the row of the whole conversation does not hold.
    https://github.com/huggingface/trl/issues/2054
    """
    seam, tail = int(row.loss_mask.argmax()), row.extra.get("prompt_tail")
    if isinstance(tail, list) and tail:
        text = quoted(case.text(np.asarray(tail, np.int32))) if case.codec else ""
        what = f"The prompt ends with {listed(tail)} {text}".rstrip()
        return Fault(
            "boundary_merge", f"{what}; encoded with the answer, the row holds id {int(row.ids[seam])} in their place.",
            seam, seam + 1, wrong=1, expected_ids=np.asarray(tail, np.int32),
        )
    if case.codec is None or not seam or not row.loss_mask.any() or row.logprobs is not None:
        return None
    special = case.is_special(row.ids)
    before, behind = np.flatnonzero(special[:seam]), np.flatnonzero(special[seam:])
    start = max(int(before[-1]) + 1 if before.size else 0, seam - _SEAM)
    stop = min(seam + (int(behind[0]) if behind.size else len(row.ids)), seam + _SEAM)
    sizes = np.cumsum([len(piece) for piece in case.codec.token_bytes(row.ids[start:stop])])
    data = case.bytes_of(row.ids[start:stop])
    if start == seam or stop == seam or not is_utf8(data):
        return None
    again = case.codec.encode(data.decode())
    cuts = np.cumsum([len(piece) for piece in case.codec.token_bytes(again)])
    if b"".join(case.codec.token_bytes(again)) != data or int(sizes[seam - start - 1]) in cuts:
        return None
    return Fault(
        "boundary_merge",
        f"Encoded together, {listed(row.ids[seam - 1 : seam + 1])} at the seam of prompt and answer would merge. "
        "Encoded apart, as here, they are what the model reads when it is asked.",
        seam - 1, seam + 1, wrong=0, severity=Severity.INFO,
    )


def _bos_fault(
    case: DiagnosisContext, row: Row, properties: _TemplateProperties, marks: TurnBoundaries
) -> Fault | None:
    """BOS is doubled, or missing before the token that the template writes behind it."""
    bos, behind = marks.bos_id, properties.behind_bos
    if fault := checks.doubled_bos(row, bos, marks.known_stops):
        return fault
    if behind is None or len(case.trajectory.rows) > 1 or int(row.ids[0]) != behind or (row.ids == bos).any():
        return None
    what = f"The row begins without BOS (id {bos}), which the chat template writes before id {behind}."
    return Fault("bos_mismatch", what, 0, 0, severity=Severity.WARNING)


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
        wrong, lost = [fault.wrong for fault in same], [fault.lost for fault in same]
        yield same[0] if len(same) == 1 else replace(
            same[0], places=tuple((fault.start, fault.stop) for fault in same),
            wrong=None if None in wrong else sum(filter(None, wrong)),
            lost=None if None in lost else sum(filter(None, lost)),
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
    # Long stretches between completions are text of a tool or user; short ones are the template's.
    for start, stop in mask_runs((origin == Origin.TEMPLATE) & ~case.is_special(row.ids)):
        if stop - start > 3:
            origin[start:stop] = Origin.OBSERVATION
    return replace(row, origin=origin)


_SEAM = 16  # Tokens on each side of a seam that are encoded together.
_QUESTION: Message = {"role": "user", "content": "Question one"}
_ANSWER: Message = {"role": "assistant", "content": "Answer zwei"}
_CALLED: tuple[Message, ...] = (
    _QUESTION,
    {"role": "assistant", "content": "", "tool_calls": [
        {"id": "call00001", "type": "function", "function": {"name": "ask", "arguments": {"q": "x"}}},
    ]},
    {"role": "tool", "name": "ask", "tool_call_id": "call00001", "content": "Result drei"},
)


class _TemplateProperties:
    """The marks of turns, from a few small renders of the run's template. Without a template, from the row itself."""

    def __init__(self, codec: Codec | None, renderer: Renderer | None) -> None:
        self.codec = codec
        self.renderer: Renderer | None = None
        self.headers: dict[bool | None, tuple[Ids, ...]] = {}
        """By whether thinking is on: the headers after a question and after a result. None = nobody said it."""
        self.stop_ids: frozenset[int] = frozenset()
        self.template_stops: frozenset[int] = frozenset()
        """The same ids, if the template told them. Without it an end of turn may stand before an end of text."""
        self.written: frozenset[int] = frozenset()
        self.behind_bos: int | None = None  # The control token that the template writes right behind BOS.
        if codec is None:
            return
        eos = () if codec.eos_id is None else (codec.eos_id,)
        self.stop_ids = frozenset((*eos, *getattr(codec, "stop_ids", ())))
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
        self._ends(renderer, codec)

    def _ends(self, renderer: Renderer, codec: Codec) -> None:
        """What the template writes at the ends of answers and of the row."""
        whole = NO_IDS
        for messages in ((_QUESTION, _ANSWER), _CALLED[:2], (*_CALLED, _ANSWER, _QUESTION)):
            for form in (messages, with_json(messages)):
                try:
                    ids = renderer.render_ids(Conversation(form, None, {}))
                except RenderFailed:
                    continue
                whole = ids if not len(whole) else whole
                self.written |= frozenset(ids[special_in(ids, codec)].tolist())
                break
        if len(whole) > 1 and int(whole[0]) == codec.bos_id not in self.stop_ids and int(whole[1]) in codec.special_ids:
            self.behind_bos = int(whole[1])

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
        assert self.codec is not None
        try:
            later = [*messages, _ANSWER, {"role": "user", "content": "Next"}]
            whole = renderer.render_ids(Conversation(later, None, {}))
        except RenderFailed:
            return NO_IDS, NO_IDS
        pieces = self.codec.token_bytes(whole)
        start = b"".join(pieces).find(b"Answer zwei")
        if start < 0:
            return NO_IDS, NO_IDS
        offsets = np.cumsum([len(piece) for piece in pieces])
        special = special_in(whole, self.codec)
        return whole[special & (offsets <= start)], whole[special & (offsets > start + len(b"Answer zwei"))]

    def marks(self, row: Row) -> TurnBoundaries:
        """The marks of the turns in this row."""
        special = special_in(row.ids, self.codec)
        # A row does not say whether thinking was on. Its first turn does.
        switched = (self._headers(thinking) for thinking in (None, True, False))
        headers = next((switch for switch in switched if switch and places_of(switch[0], row.ids)), self._headers(None))
        by_template = any(places_of(header, row.ids) for header in headers)
        if not by_template:
            derived = derived_header(row.ids, row.loss_mask, special)
            headers = (derived,) if len(derived) else ()
        codec, bos = self.codec, None if self.codec is None else self.codec.bos_id
        derived_ids = derived_stops(row.ids, row.loss_mask, special, self.template_stops)
        stops = self.stop_ids | frozenset(stop for stop in derived_ids if stop != bos)
        blank, tag = np.zeros_like(special), special
        if codec is not None:
            distinct, places = np.unique(row.ids, return_inverse=True)
            texts = [(piece, piece.strip()) for piece in codec.token_bytes(distinct)]
            is_blank = (bool(piece) and not text for piece, text in texts)
            is_tag = (text[:1] in (b"<", b"[") or text[-1:] in (b">", b"]") for _, text in texts)
            blank = np.fromiter(is_blank, np.bool_, count=len(texts))[places]
            tag = special | np.fromiter(is_tag, np.bool_, count=len(texts))[places]
        return TurnBoundaries(special, blank, tag, headers, by_template, stops, self.stop_ids, self.written, bos)


@lru_cache(maxsize=16)
def _properties(codec: Codec | None, renderer: Any) -> _TemplateProperties:
    """Made once for each tokenizer and chat template (``Renderer`` or None): no trajectory changes them."""
    return _TemplateProperties(codec, renderer)


def _finding(case: DiagnosisContext, index: int, row: Row, fault: Fault) -> Finding:
    kind = KINDS[fault.kind]
    ids = row.ids[fault.start : fault.stop]
    return Finding(
        axis=Axis.ROW, kind=fault.kind, severity=fault.severity or kind.severity, row=index,
        start=fault.start, stop=fault.stop, expected_ids=bounded(fault.expected_ids),
        expected_text=case.text(fault.expected_ids), actual_ids=bounded(ids),
        actual_text=case.widened(row.ids, min(fault.start, len(row.ids)), min(fault.stop, len(row.ids))),
        places=fault.places[:MAX_STRETCH], evidence=fault.evidence, remedy=kind.remedy,
        cost=Cost(fault.lost, fault.wrong),
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
                           Cost(trained_tokens_wrong=int(twice.size)))
        if complete and len(counts) and not counts.any() and index not in case.no_ids:
            yield _on_step(case, index, "never_trained", 0, len(counts),
                           f"Under the gradient in no row: {counted(len(counts), 'token')} that step {index} sampled.",
                           Cost(trained_tokens_lost=len(counts)))


def _not_sampled(case: DiagnosisContext, row: Row, foreign: Mask) -> Fault | None:
    """A row that does not hold what its steps sampled, at each trained token that was not sampled as it stands. None
    when it trains no such token and begins with all that its last call read and sampled: then a break tells more."""
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
    n_prompt = len(case.steps[index].prompt_ids)
    fault = Fault(kind, evidence, n_prompt + start, n_prompt + stop)
    return replace(finding_on_step(case, index, fault, Axis.ROW, cost), evidence=evidence)  # without a note on lengths


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


def _rewards(case: DiagnosisContext) -> Iterator[Finding]:
    """The rewards of tokens stand where the trainer reads them."""
    rows = case.trajectory.rows
    flags = [row.extra.get("is_last_step") for row in rows]
    is_batch = bool(rows) and all("batch_index" in row.extra for row in rows)
    if is_batch and flags != [False] * (len(rows) - 1) + [True]:
        return  # the order is wrong, which is a finding of its own
    for index, (row, flag) in enumerate(zip(rows, flags, strict=True)):
        if fault := checks.reward_misplaced(row, flag if is_batch else None):
            yield _finding(case, index, row, fault)


def _media(case: DiagnosisContext) -> Iterator[Finding]:
    """Placeholders of the rows, else of the last step of each chain, which has read all that stands before it."""
    rows = case.trajectory.rows
    above = (case.trajectory.extra,) if len(rows or case.merged) == 1 else ()
    for index, row in enumerate(rows):
        if fault := check_media(case, row.ids, row.extra, *above):
            yield _finding(case, index, row, fault)
    for chain in () if rows else case.merged:
        index = chain[-1]
        step = case.steps[index]
        fault, link = check_media(case, step.stream, step.extra, *above), case.links[chain[0]]
        if fault and (link.parent is None or link.extends):  # else a cut context explains a cut image
            yield finding_on_step(case, index, fault)


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
        versions = [version for i in steps if i < len(case.steps) for version in step_versions(case.steps[i])]
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
    severity = None if case.trajectory.extra.get("mask_truncated") else Severity.INFO
    for index, step in enumerate(case.steps):
        n = len(step.completion_ids)
        if fault := checks.routing_misaligned(step.extra, len(step.prompt_ids) + n):
            yield _on_step(case, index, fault.kind, 0, n, fault.evidence, Cost())
        if (cut := past_stop_string(case, index)) is not None:
            yield _on_step(
                case, index, "stop_string_misaligned", cut, n,
                f"A stop string ended step {index}; its ids go past the returned text by {counted(n - cut, 'id')}.",
                Cost(trained_tokens_wrong=n - cut),
            )
        if checks.was_cut({}, step.finish_reason) and n and int(step.completion_ids[-1]) not in case.stops:
            start = len(step.prompt_ids)
            what = f"Step {index} was cut by its length limit and is under the gradient."
            fault = Fault("truncated_trained", what, start, start + n, severity=severity)
            if _is_trained(case, index):
                yield finding_on_step(case, index, fault, cost=Cost(trained_tokens_wrong=n))


def _step_logprobs(case: DiagnosisContext) -> Iterator[Finding]:
    """Impossible logprobs of the calls. Rows that have logprobs of their own are checked themselves."""
    if any(row.logprobs is not None for row in case.trajectory.rows):
        return
    recorded = [
        (index, step.logprobs) for index, step in enumerate(case.steps)
        if step.logprobs is not None and len(step.logprobs) == len(step.completion_ids) and index not in case.no_ids
    ]
    has_values = any(logprobs.any() for _, logprobs in recorded)
    for index, logprobs in recorded:
        fault = checks.impossible_logprobs(logprobs, np.ones(len(logprobs), dtype=np.bool_), "sampled")
        if fault is not None and (fault.places or not has_values):  # certain tokens alone may make up one call
            start = len(case.steps[index].prompt_ids)
            moved = replace(
                fault, start=start + fault.start, stop=start + fault.stop,
                evidence=fault.evidence.replace("The logprob", f"Step {index}: the logprob", 1),
                places=tuple((start + first, start + last) for first, last in fault.places[:MAX_STRETCH]),
            )
            yield finding_on_step(case, index, moved, cost=Cost(trained_tokens_wrong=fault.wrong))


def _is_trained(case: DiagnosisContext, index: int) -> bool:
    for row in case.trajectory.rows:
        if index in row.step_indices and (places := sampled_places(case.steps, row)) is not None:
            return any(bool(row.loss_mask[start:stop].any()) for start, stop, step in places if step == index)
    return not case.trajectory.rows
