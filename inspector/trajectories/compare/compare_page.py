"""Side by side: what was sampled against a trained row, the ids that the engine read next, or its text encoded again.
The diagnosis stores what encoding the text again changes. Where it did not, this module may encode decoded text, in a
limited process that is kept warm; what that cannot encode in time is a notice."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from django.http import HttpRequest

from inspector.trajectories.compare import group_compare, sampled_compare
from inspector.trajectories.compare.side_by_side import (
    PairWords, TokenComparison, align_texts, as_json, by_cause, compare, first_shown, linked, opened_folds
)
from inspector.trajectories.frame import PageLink, TrajectoryHead, asking, base_url, head_of, shows_one
from inspector.trajectories.tokens import page_queries as data
from inspector.web.access import access
from inspector.web.twins import whole_number
from rollout_inspector.streams.align import AlignedGroup
from rollout_inspector.streams.canonical import Drift, canonical_check
from rollout_inspector.streams.trajectory import Ids, Mask, plain_tokens
from rollout_inspector.text.html.tokens import TokenPainter, painter_of
from rollout_inspector.text.tokenizers import LoadedTokenizer, TokenizerUnusable
from rollouts.store import models
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.text import without_paths
from rollouts.store.trajectories import trajectory_parts
from rollouts.store.trajectories.retokenized import stored_drifts
from rollouts.store.trajectories.trajectories import find_trajectory, load_step_prompt
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

MAX_ENCODED_TOKENS = 300_000
"""The most tokens that one request encodes again. A longer row is compared in windows of so many."""

MAX_CHOICES = 300

Answer = tuple[TokenComparison, PairWords]


@dataclass(frozen=True)
class ComparedPair:
    """What is compared with what."""

    step: StepSummary | None
    row: int | None
    against: str  # ``retokenized``, ``prompt``, ``trained``, ``repair`` or ``group``.
    other: models.StoredTrajectory | None = None
    """The trajectory on the right side: of the same group, or of another run."""
    there: Sequence[RowSummary] = ()  # The rows of that trajectory.
    right_row: int = 0  # The one of them that is compared.
    first: int = 0
    """The token of the left side from which differences are shown. It chooses the window of a row encoded again."""
    opened: frozenset[int] = frozenset()  # Left offsets of the folds that are open.

    @property
    def shown(self) -> dict[str, Any]:
        """What the comparison is told to draw."""
        return {"opened": self.opened, "first": self.first}

    @property
    def window(self) -> int:
        """The first token of the window of a row that is encoded again."""
        return self.first // MAX_ENCODED_TOKENS * MAX_ENCODED_TOKENS


@dataclass(frozen=True)
class ComparePage(TrajectoryHead):
    """Two streams of one trajectory, or of two, side by side."""

    step: int | None
    """The step that is compared; None when a whole row is compared."""
    row: int | None
    """The row that is compared; None when a step is compared."""
    against: str
    """What is on the right side: ``retokenized``, ``prompt``, ``trained``, ``repair`` or ``group``."""
    with_: str | None
    """The code of the trajectory on the right side, when it is another one of the group."""
    comparison: dict[str, Any] | None
    """Where the two sides differ; None when nothing could be compared."""
    verdict: str | None
    """The outcome in a sentence; None when nothing could be compared."""
    repair: dict[str, Any] | None
    """With ``side=repair``: ``state`` and ``why`` of the work, its figures under the repair or why there is none."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""


def compare_page(request: HttpRequest, trajectory: models.StoredTrajectory) -> tuple[ComparePage, dict[str, Any]]:
    """The comparison that the address asks for."""
    params = request.GET
    rows, steps = trajectory_parts.rows_and_steps(trajectory)
    # A break has the same kind when the samples of the parent were encoded again. It lies in the prompt.
    prompts = {step.index: step.prompt_length for step in steps}
    drifting = {index for index, start in trajectory_parts.drift_places(trajectory) if start >= prompts.get(index, 0)}
    notices: list[str] = []
    others = [] if shows_one(request) else trajectory_parts.others_of_group(trajectory, group_compare.MAX_OTHERS)
    question = (
        _with_other(request, params, others, rows, notices)
        or _repaired_row(params, rows)
        or _trained_row(trajectory, params, rows, notices)
        or _question(params, steps, len(rows), drifting, notices)
    )
    question = replace(question, opened=opened_folds(params), first=first_shown(params))
    table, missing = data.table_of(trajectory.run.tokenizer)
    painter = painter_of(table)
    repair = None
    if question.against == "repair" and question.row is not None:
        repair, replay = sampled_compare.repair_state(trajectory)
        answer = None
        if repair["state"] == "done" and not repair["refused"] and replay is not None:
            answer = sampled_compare.against_repair(
                trajectory, rows, question.row, repair, replay, painter, notices, **question.shown
            )
    else:
        answer = _answer(trajectory, question, rows, steps, painter, notices)
    page = ComparePage(
        **head_of(trajectory), step=question.step.index if question.step else None, row=question.row,
        against=question.against, with_=question.other.code if question.other else None,
        comparison=as_json(answer[0], painter) if answer else None, verdict=answer[1].verdict if answer else None,
        repair=repair, notices=notices,
    )
    offered = others if question.other is None or question.other in others else [question.other, *others]
    choices = _choices(steps, rows, drifting, question) + group_compare.choices(trajectory, offered, question.other)
    if question.other is not None and question.row is not None:
        choices += group_compare.row_choices(rows, question.row, question.other, question.there, question.right_row)
    html = {"choices": choices, "tokenizer_missing": missing}
    if repair is not None:
        html |= asking(request, trajectory, repair["state"])
    if answer is None:
        return page, html
    comparison, words = answer
    row = question.row
    if question.step is not None:
        holder = question.step.index if question.against == "retokenized" else question.step.parent
        row = next((step.row for step in steps if step.index == holder), 0)
    side = "right" if question.against == "trained" else "left"
    lines = linked(comparison, row or 0, base_url(trajectory), params, side)
    return page, {**html, "comparison": lines, "words": words, "causes": by_cause(comparison)}


def _answer(
    trajectory: models.StoredTrajectory, question: ComparedPair, rows: list[RowSummary], steps: list[StepSummary],
    painter: TokenPainter, notices: list[str],
) -> Answer | None:
    if question.step is None and question.row is None:
        notices.append("This trajectory has no tokens: there is nothing to compare.")
        return None
    if question.other is not None and question.row is not None:
        return group_compare.against(
            trajectory, rows, question.row, question.other, question.there, question.right_row, painter, notices,
            **question.shown,
        )
    if question.against == "trained" and question.row is not None:
        n_read = sum(step.prompt_length + step.completion_length for step in steps)
        return sampled_compare.against(trajectory, rows, question.row, painter, notices, n_read, **question.shown)
    if question.against == "prompt" and question.step is not None:
        return _against_prompt(trajectory, question.step, steps, painter, question.shown)
    try:
        return _against_retokenized(trajectory, question, rows, painter, notices)
    except TokenizerUnusable as error:
        notices.append(f"The text of these tokens cannot be encoded again: {error}")
        return None


def _with_other(
    request: HttpRequest, params: Mapping[str, str], others: Sequence[models.StoredTrajectory],
    rows: Sequence[RowSummary], notices: list[str],
) -> ComparedPair | None:
    """The comparison with another trajectory, of the group or of any run that the reader may see. None unless the
    address names one. At most three queries."""
    code = params.get("with", "")
    if not code or not rows:
        return None
    other = next((trajectory_choice for trajectory_choice in others if trajectory_choice.code == code), None)
    if other is None and (stranger := find_trajectory(code[:64].replace("\0", ""))) is not None:
        is_visible = access(request).role_in(stranger.run.project_id) is not None
        has_ended = stranger.status == models.StoredTrajectory.Status.DONE
        other = stranger if is_visible and has_ended and stranger.n_rows else None
    there = trajectory_parts.rows_and_steps(other)[0] if other is not None else []
    if other is None or not there:
        notices.append(f"There is no ended trajectory “{code[:40]}” to compare with.")
        return None
    left, right = (
        _row_of(params.get(name), rows_of_side) for name, rows_of_side in (("row", rows), ("right_row", there))
    )
    return ComparedPair(None, left, "group", other, there=there, right_row=right)


def _row_of(asked: str | None, rows: Sequence[RowSummary]) -> int:
    """The row that an address names, the last one where there are fewer; without a name the longest."""
    index = whole_number(asked)
    return group_compare.longest(rows) if index is None else min(index, len(rows) - 1)


def _repaired_row(params: Mapping[str, str], rows: Sequence[RowSummary]) -> ComparedPair | None:
    """A row under the repaired chat template; the last one unless the address names another."""
    if params.get("side") != "repair" or not rows:
        return None
    index = whole_number(params.get("row"), 18)
    return ComparedPair(None, len(rows) - 1 if index is None else min(index, len(rows) - 1), "repair")


def _trained_row(
    trajectory: models.StoredTrajectory, params: Mapping[str, str], rows: list[RowSummary], notices: list[str]
) -> ComparedPair | None:
    """The comparison of a row with what was sampled; None unless asked, or for the first row that was not sampled."""
    own = [row.index for row in rows if sampled_compare.can_compare(row)]
    if params.get("side") == "trained":
        index = whole_number(params.get("row"), 18)
        row = index if index in own else next(iter(own), None)
        if row is None or (index is not None and row != index):
            notices.append("There is no such row beside steps that say what was sampled.")
        return None if row is None else ComparedPair(None, row, "trained")
    if not own or {"row", "step", "side"} & set(params):
        return None
    first_row = trajectory_parts.row_not_sampled(trajectory)
    return ComparedPair(None, first_row, "trained") if first_row in own else None


def _question(
    params: Mapping[str, str], steps: list[StepSummary], n_rows: int, drifting: set[int], notices: list[str]
) -> ComparedPair:
    by_index = {step.index: step for step in steps}
    against = "prompt" if params.get("side") == "prompt" else "retokenized"
    row = whole_number(params.get("row"), 18)
    if row is not None and "step" not in params:
        if row < n_rows:
            return ComparedPair(None, row, "retokenized")
        notices.append(f"There is no row {row} here: rows run from 0 to {max(n_rows - 1, 0)}.")
    if not steps and n_rows:
        return ComparedPair(None, 0, "retokenized")
    step_text = params.get("step", "")
    index = whole_number(step_text)
    step = None if index is None else by_index.get(index)
    if step_text and step is None:
        notices.append(f"There is no step {step_text[:20]} here: steps run from 0 to {len(steps) - 1}.")
    if step is None:
        # The reader wants the first break, else the first drift, else the first step.
        broken = next((s for s in steps if s.breaks), None)
        drift = next((s for s in steps if s.index in drifting), None)
        step = broken or drift or (steps[0] if steps else None)
        if broken is not None and "side" not in params and not step_text:
            against = "prompt"
    if against == "prompt" and step is not None and step.parent is None:
        notices.append(f"Step {step.index} has no step before it: its prompt continues nothing.")
        against = "retokenized"
    return ComparedPair(step, None, against)


def _choices(
    steps: list[StepSummary], rows: list[RowSummary], drifting: set[int], question: ComparedPair
) -> list[PageLink]:
    current, is_repair = question.step.index if question.step else None, question.against == "repair"
    expected = "What the engine should have read next, against what it read:"
    trained = [
        PageLink(
            f"row {row.index}", f"?row={row.index}&side=trained",
            question.row == row.index and question.against == "trained",
            heading="What was sampled, against what is trained:",
        )
        for row in rows[:40] if sampled_compare.can_compare(row)
    ]
    prompts = [
        PageLink(
            f"prompt of step {step.index}", f"?step={step.index}&side=prompt",
            step.index == current and question.against == "prompt",
            note="the prompt does not start with what was sampled", tone="breaks", heading=expected,
        )
        for step in steps[:MAX_CHOICES] if step.breaks
    ]
    again = "What was sampled, against the same text encoded again:"
    completions = [
        PageLink(
            f"step {step.index}", f"?step={step.index}", step.index == current and question.against == "retokenized",
            note="drifts when re-tokenized" if step.index in drifting else "canonical",
            tone="drifts" * (step.index in drifting), heading=again,
        )
        for step in steps[:MAX_CHOICES]
    ]
    whole = [
        PageLink(
            f"row {row.index} from token {first:,}" if row.n_tokens > MAX_ENCODED_TOKENS else f"whole row {row.index}",
            f"?row={row.index}" + f"&from={first}" * bool(first),
            question.row == row.index and question.against == "retokenized" and question.window == first, heading=again,
        )
        for row in rows[:40] for first in range(0, max(row.n_tokens, 1), MAX_ENCODED_TOKENS)
    ][:MAX_CHOICES]
    repaired = [
        PageLink(
            f"row {row.index}", f"?row={row.index}&side=repair", question.row == row.index and is_repair,
            heading="As recorded, against the same conversation under the repaired chat template:",
        )
        for row in rows[:40] if prompts or is_repair
    ]
    return trained + prompts + repaired + completions + whole


def _against_prompt(
    trajectory: models.StoredTrajectory, step: StepSummary, steps: Sequence[StepSummary], painter: TokenPainter,
    shown: dict[str, Any],
) -> Answer:
    """The stream of the parent, which the engine should have read, against the prompt that it read."""
    stored: dict[int, Any] = trajectory_parts.steps_with_tokens(trajectory, [step.index, step.parent])
    parent = stored[step.parent if step.parent is not None else step.index]
    expected = np.concatenate([load_step_prompt(parent), parent.tokens.completion_ids])
    prompt_read = load_step_prompt(stored[step.index])
    groups = align_texts(expected, prompt_read)
    comparison = compare(
        plain_tokens(expected), plain_tokens(prompt_read), groups, painter, tail_is_new=True,
        sampled=_sampled(step, steps, len(expected)), **shown,
    )
    verdict = comparison.words if step.breaks else (
        f"The prompt of step {step.index} starts with the whole stream of step {step.parent}; the rest is new."
    )
    return comparison, PairWords(
        title=f"Step {step.index}: expected against read", left=f"Expected: the stream of step {step.parent}",
        left_note="its prompt and what was sampled, verbatim", right=f"Read: the prompt of step {step.index}",
        right_note="the ids the engine was given", verdict=verdict, tone="no" if step.breaks else "yes",
    )


def _sampled(step: StepSummary, steps: Sequence[StepSummary], n_tokens: int) -> Mask:
    """Which tokens of the stream of a step's parent some step sampled: the completions of the steps that it extends."""
    by_index = {summary.index: summary for summary in steps}
    sampled, reach = np.zeros(n_tokens, np.bool_), n_tokens
    earlier = None if step.parent is None else by_index.get(step.parent)
    while earlier is not None:
        sampled[earlier.prompt_length : min(earlier.prompt_length + earlier.completion_length, reach)] = True
        reach = min(reach, earlier.shared_length)
        earlier = None if earlier.parent is None else by_index.get(earlier.parent)
    return sampled


def _against_retokenized(
    trajectory: models.StoredTrajectory, question: ComparedPair, rows: list[RowSummary], painter: TokenPainter,
    notices: list[str],
) -> Answer | None:
    is_cut = (False, False)
    if question.step is not None:
        index = question.step.index
        step: Any = trajectory_parts.steps_with_tokens(trajectory, [index])[index]
        sampled, base = step.tokens.completion_ids, question.step.prompt_length
        what = f"Step {question.step.index}"
    else:
        facts = rows[question.row or 0]
        base = question.window if question.window < facts.n_tokens else 0
        stop = min(base + MAX_ENCODED_TOKENS, facts.n_tokens)
        sampled = data.read_tokens(trajectory, facts, base, stop).ids
        what = f"Row {question.row}" if stop - base == facts.n_tokens else f"Row {question.row}, {base:,}-{stop - 1:,}"
        is_cut = (base > 0, stop < facts.n_tokens)
    tokenizer = trajectory.run.tokenizer
    drifts = None
    if not any(is_cut):
        drifts = stored_drifts(trajectory, sampled, question.step.index if question.step else None, question.row)
    if drifts is None:
        drifts = _encoded_here(tokenizer, what, sampled, is_cut, notices)
    if drifts is None or tokenizer is None:
        return None
    again, groups = _retokenized(sampled, drifts)
    sides = plain_tokens(sampled, base), plain_tokens(again, base)
    all_sampled = np.ones(len(sampled), np.bool_) if question.step is not None else None
    comparison = compare(*sides, groups, painter, sampled=all_sampled, **question.shown)
    note = ""
    if comparison.n_sites:
        verdict = f"Decoded and encoded again: {comparison.words}"
        if any(drift.invalid_utf8 for drift in drifts):
            note = "Some of what was sampled is no text: its bytes become U+FFFD."
    elif not len(sampled):
        verdict = "Nothing can be compared: the source has no token ids here."
    else:
        verdict = f"Decoding and encoding again gives the same {len(sampled):,} tokens: this is canonical."
    return comparison, PairWords(
        title=f"{what}: sampled against re-tokenized", left="Sampled" if question.step else "As recorded",
        left_note=f"{len(sampled):,} tokens{', as the engine drew them' if question.step else ''}",
        right="Re-tokenized", right_note=f"{len(again):,} tokens, encode(decode(sampled)) by {tokenizer.encoder}",
        verdict=verdict, tone="no" if comparison.n_sites else "yes", note=note,
    )


def _encoded_here(
    record: models.Tokenizer | None, what: str, sampled: Ids, is_cut: tuple[bool, bool], notices: list[str]
) -> list[Drift] | None:
    """What encoding a stream again changes, where the diagnosis stored nothing: a long row, or an older diagnosis."""
    tokenizer = _encoder(record, notices)
    if tokenizer is None:
        return None
    if len(sampled) > MAX_ENCODED_TOKENS:
        notices.append(
            f"{what} holds {len(sampled):,} tokens; at most {MAX_ENCODED_TOKENS:,} are re-tokenized at once."
        )
        return None
    # A window may cut a character or a word: what differs at its edge is no finding about the row.
    return [
        drift for drift in canonical_check(sampled, tokenizer)
        if not ((is_cut[0] and drift.start == 0) or (is_cut[1] and drift.stop == len(sampled)))
    ]


def _retokenized(sampled: Ids, drifts: Sequence[Drift]) -> tuple[Ids, list[AlignedGroup]]:
    """``encode(decode(sampled))``, and its alignment with the sampled ids."""
    pieces: list[Ids] = []
    groups = []
    at = right = 0
    for drift in [*drifts, None]:
        stop = len(sampled) if drift is None else drift.start
        if stop > at:
            groups.append(AlignedGroup(at, stop, right, right + stop - at, True))
            pieces.append(sampled[at:stop])
            right += stop - at
        if drift is not None:
            groups.append(AlignedGroup(drift.start, drift.stop, right, right + len(drift.expected_ids), False))
            pieces.append(drift.expected_ids)
            right += len(drift.expected_ids)
            at = drift.stop
    return (np.concatenate(pieces) if pieces else sampled), groups


def _encoder(tokenizer: models.Tokenizer | None, notices: list[str]) -> LoadedTokenizer | None:
    if tokenizer is None:
        notices.append(
            "Without a tokenizer nothing can be decoded and encoded again. Register one, then choose it under "
            "“Diagnose again” on the page of the run."
        )
        return None
    try:
        return load_tokenizer(tokenizer.files_sha256)
    except (TokenizerUnusable, OSError) as error:
        notices.append(f"The tokenizer “{tokenizer.name}” cannot be loaded: {without_paths(str(error))}")
        return None
