"""The loss mask explained: how many tokens of each role and turn are trained, why, and what looks odd."""

from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from django.http import HttpRequest

from inspector.trajectories.frame import PageLink, TrajectoryHead, base_url, head_of
from inspector.trajectories.place import PagePlace, View, read_place
from inspector.trajectories.tokens import page_queries as data
from inspector.trajectories.tokens.findings import read_findings, worst_finding
from inspector.trajectories.tokens.turns import Turn, mask_table
from rollout_inspector.diagnose.kinds import KINDS, title_of
from rollout_inspector.streams.align import TrainedTokens, trained_tokens
from rollout_inspector.streams.figures import trained_as_sampled
from rollout_inspector.streams.trajectory import Origin, Row, Step, Tokens
from rollout_inspector.text.html.tokens import TokenPainter, painter_of
from rollouts.store import models
from rollouts.store.runs.muted import muted_in
from rollouts.store.trajectories import trajectory_parts as parts
from rollouts.store.trajectories.trajectory_parts import RowSummary

MAX_LINES = 500
OBSERVATIONS = "Are tool results and later user messages trained?"


@dataclass(frozen=True)
class MaskPage(TrajectoryHead):
    """The loss mask of one row, explained."""

    row: int
    """The index of the row."""
    roles: list[dict[str, Any]] = field(default_factory=list)
    """``turns``, ``tokens`` and ``trained`` tokens of each ``role``."""
    turns: list[dict[str, Any]] = field(default_factory=list)
    """Every turn of the row, how many of its tokens are ``trained`` and ``why``; of a completion whether its
    ``stop_token`` is ``trained``, ``masked`` or ``none``."""
    verdicts: dict[str, str] = field(default_factory=dict)
    """Question -> answer in words."""
    oddities: list[str] = field(default_factory=list)
    """A sentence for each thing that looks wrong about the loss mask."""
    not_odd: str = ""
    """What was checked, where nothing looks odd; or what could not be checked."""
    notices: list[str] = field(default_factory=list)
    """A sentence for each part of the address that could not be followed."""


def mask_page(request: HttpRequest, trajectory: models.StoredTrajectory) -> tuple[MaskPage, dict[str, Any]]:
    """The page: the audit of the row that the address names."""
    rows, steps = parts.rows_and_steps(trajectory)
    worst = worst_finding(read_findings(trajectory, steps, rows))
    place = read_place(request.GET, [row.n_tokens for row in rows], fault=worst)
    table, _ = data.table_of(trajectory.run.tokenizer)
    painter = painter_of(table)
    page = MaskPage(
        **head_of(trajectory), row=place.row, notices=list(place.notices), not_odd="Not checked: there are no rows."
    )
    lines: list[tuple[dict[str, Any], bool]] = []
    if rows:
        row = rows[place.row]
        tokens = data.read_tokens(trajectory, row, 0, row.n_tokens, steps)
        turns = data.read_turns(trajectory, row, steps, [], tokens)
        compared = _compared(trajectory, row, tokens)
        lines = [audit_line(turn, tokens, painter, row) for turn in turns]
        odd_sentences = oddities(tokens, turns, painter, compared)
        page = replace(
            page, roles=mask_table(turns, tokens.loss_mask), turns=[turn for turn, _ in lines],
            verdicts=dict(_verdicts(tokens, turns, painter, compared)),
            oddities=[*odd_sentences, *_found(trajectory, row, bool(odd_sentences))],
            not_odd=_not_odd(trajectory, tokens, turns),
        )
    turn_place, own = PagePlace(row=place.row, view=View.TOKENS), base_url(trajectory)
    return page, {
        "lines": [
            (turn, turn["stop"] - turn["start"], is_odd, own + turn_place.marked(turn["start"], turn["stop"]))
            for turn, is_odd in lines[:MAX_LINES]
        ],
        "lines_rest": max(len(lines) - MAX_LINES, 0),
        "rows": [PageLink(f"row {row.index}", f"?row={row.index}", row.index == place.row) for row in rows[:60]],
    }


def _compared(trajectory: models.StoredTrajectory, row: RowSummary, tokens: Tokens) -> TrainedTokens | None:
    """For a row with its own arrays and steps: its trained tokens against the sampled ones. One query."""
    if row.follows_steps or not row.steps or len(tokens.loss_mask) != len(tokens.ids):
        return None
    stored = parts.steps_with_tokens(trajectory, row.steps)
    # Of a prompt only the length is needed.
    steps = [
        Step(np.zeros(stored_step.prompt_length, np.int32), stored_step.tokens.completion_ids)
        for _, stored_step in sorted(stored.items())
    ]
    whole = Row(tokens.ids, np.asarray(tokens.loss_mask), step_indices=tuple(range(len(steps))))
    return trained_tokens(steps, [whole]) if steps else None


def _not_odd(trajectory: models.StoredTrajectory, tokens: Tokens, turns: list[Turn]) -> str:
    """The sentence where nothing looks odd."""
    outcome = (trajectory.checks or {}).get("mask")
    if isinstance(outcome, list):
        return f"Not checked: the check of the loss mask lacks {', '.join(outcome)}."
    if any(turn.part == "reply" for turn in turns):
        return "Nothing looks odd: no turn of others is trained. Role headers tell the turns."
    if not tokens.origin_known:
        return "Not checked: the source does not say who wrote which token, and no role header tells it."
    return "Nothing looks odd: every sampled token is trained, and no other token is."


def _found(trajectory: models.StoredTrajectory, row: RowSummary, is_told_by_turn: bool) -> list[str]:
    """The findings of this row and of its steps, a sentence each. One query."""
    by_turn = [slug for slug, kind in KINDS.items() if kind.said_by_turn and is_told_by_turn]
    sentences = parts.row_finding_sentences(trajectory, row, without=by_turn, limit=30)
    muted = muted_in(trajectory.run)
    return [
        f"{title_of(kind)}{' (muted)' * (kind in muted)}: {evidence} {remedy}"
        for kind, evidence, remedy in sentences
    ]


def audit_line(turn: Turn, tokens: Tokens, painter: TokenPainter, row: RowSummary) -> tuple[dict[str, Any], bool]:
    """A turn, why its tokens are trained or not, and whether that looks odd."""
    part = tokens.slice(turn.start, turn.stop)
    trained = int(part.loss_mask.sum())
    whole = trained == turn.n_tokens
    odd = False
    if turn.part == "reply":
        why, odd = _why_reply(turn, part, painter)
    elif turn.part == "message":
        why = (
            f"{trained:,} tokens that the policy did not write are under the gradient"
            if trained
            else "read, not written"
        )
        odd = bool(trained)
    elif turn.part == "completion":
        step = "this step" if turn.step is None else f"step {turn.step}"
        if not turn.n_tokens:
            why = f"nothing was sampled at {step}"
        elif whole:
            why = f"sampled at {step}, verbatim"
        elif trained:
            why, odd = f"sampled at {step}, but {turn.n_tokens - trained:,} of its tokens are masked", True
        elif row.follows_steps:
            why = f"sampled at {step}, which another row trains; here it is context"
        else:
            why, odd = f"sampled at {step}, yet masked by the source", True
    elif trained:
        why, odd = f"{trained:,} tokens that nobody sampled are under the gradient", True
    elif turn.part == "history":
        why = f"in the prompt of step {turn.step}: " + (
            "an earlier reply, written again" if turn.role == "assistant" else "read, not sampled"
        )
    elif turn.part == "prompt":
        why = "the first prompt: read, never sampled"
    else:
        counts = [f"{int((part.origin == o).sum()):,} {o.slug}" for o in Origin if (part.origin == o).any()]
        why = "put in between two completions: " + ", ".join(counts or ["nothing"])
    place = {name: getattr(turn, name) for name in ("number", "role", "part", "start", "stop")}
    return {**place, "trained": trained, "why": why, "stop_token": _stop_token(turn, part, painter)}, odd


def _why_reply(turn: Turn, part: Tokens, painter: TokenPainter) -> tuple[str, bool]:
    """For an assistant's turn that was found by its header: which part is trained, and whether that is odd."""
    places = np.flatnonzero(part.loss_mask)
    if not places.size:
        return "not trained: context here, or the mask forgot it", False
    first, last = int(places[0]), int(places[-1])
    gaps = last + 1 - first - places.size
    if gaps:
        return f"trained from token {turn.start + first:,} with {gaps:,} gaps", True
    header = " its header included," if first == 0 else ""
    end = _turn_end(part, painter)
    beyond = part.ids[end + 1 : last + 1] if end is not None and painter.table is not None else part.ids[:0]
    separator = (
        bool(len(beyond)) and painter.table is not None and not b"".join(painter.table.token_bytes(beyond)).strip()
    )
    if separator:
        reach = f"through its stop token and {len(beyond)} more that the template wrote"
    elif end is None or last > end:
        reach = "to the end"
    else:
        reach = "through its stop token" if last == end else "before its stop token"
    return f"trained from token {turn.start + first:,} on,{header} {reach}", first == 0 or separator


def _turn_end(part: Tokens, painter: TokenPainter) -> int | None:
    """The offset of the last control token in an assistant's turn; None when only its header has one."""
    places = np.flatnonzero(painter.special(part.ids))
    return int(places[-1]) if places.size and places[-1] > 1 else None


def _stop_token(turn: Turn, part: Tokens, painter: TokenPainter) -> str:
    """For a completion: whether its last token ends the turn, and whether that token is trained."""
    if turn.part == "reply":
        end = _turn_end(part, painter)
        return "none" if end is None else "trained" if part.loss_mask[end] else "masked"
    if turn.part != "completion" or not len(part):
        return ""
    last = int(part.ids[-1])
    if not painter.is_special(last):
        return "none: cut off" if turn.finish_reason == "length" else "none"
    return "trained" if part.loss_mask[-1] else "masked"


def _verdicts(
    tokens: Tokens, turns: list[Turn], painter: TokenPainter, compared: TrainedTokens | None = None
) -> list[tuple[str, str]]:
    by_headers = any(t.part == "reply" for t in turns)
    trained_turns = [t for t in turns if not by_headers or t.n_trained]
    ends = [_stop_token(t, tokens.slice(t.start, t.stop), painter) for t in trained_turns]
    ends = [end for end in ends if end]
    stopped = [end for end in ends if end in ("trained", "masked")]
    if painter.table is None:
        stop = "not decidable: no tokenizer tells which tokens end a turn"
    elif not stopped:
        stop = "no completion here ends with a control token"
    else:
        n_trained = sum(end == "trained" for end in stopped)
        answer = "Yes" if n_trained == len(stopped) else "Not always" if n_trained else "NO"
        stop = f"{answer}: {n_trained} of {len(stopped)} are under the gradient"
    n_in_loss, n_sampled = _kept(tokens, compared)
    sampled = (
        "Are sampled tokens trained?",
        f"{n_in_loss:,} of {n_sampled:,}" if n_sampled else "none is known as sampled",
    )
    if by_headers:
        by_role = _verdicts_by_role(tokens, turns)
        return [("Are stop tokens trained?", stop), *(by_role if compared is None else [*by_role[:-1], sampled])]
    observed = tokens.origin == Origin.OBSERVATION
    is_answered = False
    for turn in turns:
        is_answered = is_answered or (turn.part == "history" and turn.role == "assistant")
        if turn.part == "history" and is_answered and turn.role not in ("assistant", "system", "developer", "prompt"):
            observed[turn.start : turn.stop] = True
    wrong = int((tokens.loss_mask & observed).sum())
    total = int(observed.sum())
    observations = "there are none" if not total else f"{'No' if not wrong else 'YES'}: {wrong:,} of {total:,} tokens"
    return [("Are stop tokens trained?", stop), (OBSERVATIONS, observations), sampled]


def _kept(tokens: Tokens, compared: TrainedTokens | None) -> tuple[int, int]:
    """How many sampled tokens the row trains as they were sampled, and how many it would train."""
    if compared is not None and compared.n_lost is not None:
        n_sampled = sum(len(times) for times in compared.times)
        return trained_as_sampled(n_sampled, compared.n_lost), n_sampled
    sampled = tokens.origin == Origin.SAMPLED
    return int((tokens.loss_mask & sampled).sum()), int(sampled.sum())


def _verdicts_by_role(tokens: Tokens, turns: list[Turn]) -> list[tuple[str, str]]:
    """The answers by role headers, for a row in which nobody recorded what was sampled."""
    verdicts: list[tuple[str, str]] = []
    for question, part in (
        ("Are tokens of others' turns trained?", "message"),
        ("Are the assistant's turns trained?", "reply"),
    ):
        of = [t for t in turns if t.part == part]
        total = sum(t.n_tokens for t in of)
        trained = sum(int(tokens.loss_mask[t.start : t.stop].sum()) for t in of)
        answer = f"{trained:,} of {total:,} tokens"
        if part == "message":
            answer = "there are none" if not total else f"{'YES' if trained else 'No'}: {answer}"
        verdicts.append((question, answer))
    which = "none as they stand" if tokens.origin_known else "not recorded"
    return [*verdicts, ("Which tokens were sampled?", f"{which}; turns are told by their role headers")]


def oddities(
    tokens: Tokens, turns: list[Turn], painter: TokenPainter, compared: TrainedTokens | None = None
) -> list[str]:
    """A sentence for each thing about the mask that would make a careful engineer stop."""
    sentences: list[str] = []
    mask, origin = tokens.loss_mask, tokens.origin
    foreign = compared.foreign[0] if compared is not None else None
    if not len(tokens):
        return ["This row has no tokens."]
    if not mask.any():
        return ["No token is under the gradient: this row teaches nothing."]
    by_headers = any(turn.part == "reply" for turn in turns)
    for turn in turns:
        wrong = np.flatnonzero(mask[turn.start : turn.stop]) if turn.part == "message" else np.zeros(0)
        if wrong.size and len(sentences) < 10:
            sentences.append(
                f"{wrong.size:,} trained token{'s' * (wrong.size != 1)} of turn {turn.number} ({turn.role}); the first "
                f"at {turn.start + int(wrong[0]):,}. The policy did not write that turn."
            )
    for source, words in (
        ()
        if not tokens.origin_known
        else (
            (Origin.OBSERVATION, "text of a tool or of the environment"),
            (Origin.TEMPLATE, "scaffold that the chat template wrote"),
            (Origin.INSERTED, "tokens that the strategy added, or encoded again from text"),
            (Origin.PROMPT, "tokens of the first prompt"),
        )
    ):
        if source is Origin.INSERTED and compared is not None:
            continue  # a finding names the tokens that were not sampled
        wrong = np.flatnonzero(mask & (origin == source) & (True if foreign is None else foreign))
        if wrong.size:
            sentences.append(
                f"{wrong.size:,} trained token{'s are' if wrong.size != 1 else ' is'} {words}; "
                f"the first at {int(wrong[0]):,}. The policy did not sample them: that gradient is not of its actions."
            )
    if by_headers:
        replies = [turn for turn in turns if turn.part == "reply"]
        idle = [turn for turn in replies if not turn.n_trained]
        if idle and len(idle) < len(replies):
            sentences.append(
                f"{len(idle)} of {len(replies)} assistant turns are not trained; the first is turn {idle[0].number}."
            )
    masked = np.flatnonzero(~mask & (origin == Origin.SAMPLED))
    trained_turns = {t.number for t in turns if t.part == "completion" and mask[t.start : t.stop].any()}
    whole = [t for t in turns if t.part == "completion" and t.number not in trained_turns and t.n_tokens]
    in_whole = sum(t.n_tokens for t in whole)
    if masked.size > in_whole:
        n = masked.size - in_whole
        sentences.append(
            f"{n:,} sampled token{'s' * (n != 1)} inside trained turns {'are' if n != 1 else 'is'} masked."
        )
    if whole:
        sentences.append(
            f"{len(whole)} completion{'s are' if len(whole) != 1 else ' is'} only context here: "
            f"{in_whole:,} sampled tokens that this row does not train."
        )
    if painter.table is not None:
        for turn in turns:
            end = _stop_token(turn, tokens.slice(turn.start, turn.stop), painter)
            if end == "masked" and (turn.number in trained_turns or (turn.part == "reply" and turn.n_trained)):
                sentences.append(
                    f"Turn {turn.number} is trained but its stop token is not: the policy does not learn to stop there."
                )
            elif end == "none" and turn.finish_reason == "stop":
                sentences.append(f"Turn {turn.number} ended by “stop”, yet its last token is no control token.")
            if len(sentences) > 30:
                sentences.append("There are more of this kind.")
                break
    if tokens.logprobs is not None:
        lacking = int(np.isnan(tokens.logprobs[mask]).sum())
        if lacking:
            sentences.append(f"{lacking:,} trained tokens have no log-probability.")
    return sentences
