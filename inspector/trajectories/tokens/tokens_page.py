"""The tokens page as JSON: a row of a trajectory with its turns, findings and a window of tokens; and its cards."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NotRequired, TypedDict

import numpy as np

from inspector.runs.muted import MutedValues
from inspector.trajectories.discussion import CommentValues
from inspector.trajectories.frame import TrajectoryHead, head_of
from inspector.trajectories.tokens import lenses
from inspector.trajectories.tokens.findings import DrawnFinding
from inspector.trajectories.tokens.lane_tree import LaneTree, lane_tree
from inspector.trajectories.tokens.token_view import TokenView
from inspector.trajectories.tokens.turns import Turn
from inspector.web.twins import Page
from rollout_inspector.diagnose.checks import totals
from rollout_inspector.streams.trajectory import Floats, Origin
from rollout_inspector.text.tokenizers import ByteTable
from rollout_inspector.text.tokenizers.byte_table import special_tokens
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories import engine_columns as beside
from rollouts.store.trajectories.rows import Tokens

OUTCOMES = ("failed", "noted", "passed", "not decidable")


@dataclass(frozen=True)
class TrajectoryPage(TrajectoryHead):
    """The tokens page as JSON. In each view, the tokens are those of the window that the address names."""

    group: str
    """The name of the group. Trajectories of one group answer the same prompt."""
    n_steps: int
    """Requests to the engine."""
    n_rows: int
    """Rows that are stored."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""
    rows: list[dict[str, int]]
    """``index``, ``n_tokens`` and ``n_trained`` of all rows; of those that the steps make so far, where none is stored
    yet."""
    row: dict[str, int] | None
    """The row that the address names; None when there is no row."""
    lenses: list[str]
    """Values of ``lens`` in an address of this row."""
    mark: tuple[int, int] | None
    """Tokens ``[start, stop)`` that the address marks."""
    turns: list[Turn]
    """The turns of the row."""
    findings: list[DrawnFinding]
    """All findings of the trajectory, in reading order."""
    muted: list[MutedValues]
    """The rules that mute some of these findings."""
    checks: list[dict[str, Any]] | None
    """What the diagnosis checked. None = not known: it has not run, or an earlier version ran."""
    comments: list[CommentValues] | None
    """What people say of it, in reading order; null for the visitor of a share link."""
    lanes: LaneTree | None
    """The chains of steps, and where each leaves another one; None where the steps form one chain."""
    seen: bool | None
    """The reader has marked it as seen; null for the visitor of a share link."""
    window: dict[str, Any]
    """``start``, ``stop`` and at most 4096 ``tokens`` of the row, with every field."""


def trajectory_page(view: TokenView) -> TrajectoryPage:
    """The page as JSON."""
    trajectory, place, discussion = view.trajectory, view.place, view.discussion
    rows = [{"index": row.index, "n_tokens": row.n_tokens, "n_trained": row.n_trained} for row in view.rows]
    kinds = {item.kind for item in view.findings}
    return TrajectoryPage(
        **head_of(trajectory),
        group=trajectory.group,
        n_steps=trajectory.n_steps,
        n_rows=trajectory.n_rows,
        notices=[*place.notices, *([f"No text: {view.text_missing}"] if view.text_missing else [])],
        rows=rows,
        row=rows[place.row] if rows else None,
        lenses=[*(lens.slug for lens in lenses.LENSES), *view.row_lenses],
        mark=place.mark,
        turns=view.turns,
        findings=view.findings,
        muted=[rule for rule in discussion.muted if rule.kind in kinds],
        checks=check_lines(trajectory),
        comments=discussion.comments,
        lanes=lane_tree(trajectory, view.lanes, view.rows),
        seen=discussion.seen,
        window={
            "start": view.tokens.start,
            "stop": view.tokens.stop,
            "tokens": window_tokens(view.tokens, view.table, view.turns, view.row_findings),
        },
    )


def check_lines(trajectory: StoredTrajectory) -> list[dict[str, Any]] | None:
    """Name and outcome of each check of the diagnosis, its claim, and the fields that it lacked."""
    if trajectory.checks is None:
        return None
    lines = [
        {
            "name": total.name,
            "claim": total.claim,
            "outcome": trajectory.checks[total.name] if total.checked else "not decidable",
            "needs": total.needs,
        }
        for total in totals([(trajectory.checks, 1)])
    ]
    return sorted(lines, key=lambda line: OUTCOMES.index(line["outcome"]))


class TokenText(TypedDict):
    """An id, and the text that it stands for."""

    id: int
    text: str | None  # None when the bytes of the token alone are no UTF-8, or are not known.
    bytes: str | None  # The bytes in hexadecimal; None when they are not known.
    special: bool  # A control token of the tokenizer.
    logprob: float | None  # None when the token was not sampled, or when no log-probability was recorded.


class TokenFields(TokenText):
    """All fields of a token of a row."""

    index: int  # Its offset in the row.
    origin: str
    loss_mask: bool
    step: int | None
    step_place: str | None  # Its place in the step, in words.
    turn: str | None
    findings: list[str]
    columns: NotRequired[dict[str, float | None]]
    """Column of a trainer, or of what an engine told -> value; None = none here. Missing when the row has no column."""


def token_texts(table: ByteTable | None, ids: np.ndarray, logprobs: np.ndarray | None) -> list[TokenText]:
    """Ids ``[n]`` and their log-probabilities as values of JSON."""
    pieces = [piece or None for piece in table.token_bytes(ids)] if table is not None else [None] * len(ids)
    values = [None] * len(ids) if logprobs is None else [_number(value) for value in logprobs.tolist()]
    columns = zip(ids.tolist(), pieces, special_tokens(table, ids).tolist(), values, strict=True)
    return [
        {
            "id": token_id, "text": _text(piece), "bytes": None if piece is None else piece.hex(), "special": special,
            "logprob": logprob,
        }
        for token_id, piece, special, logprob in columns
    ]


def window_tokens(
    tokens: Tokens, table: ByteTable | None, turns: Sequence[Turn] = (), findings: Sequence[DrawnFinding] = (),
) -> list[TokenFields]:
    """Every field of each token. ``findings``: those of the row."""
    fields: list[TokenFields] = []
    names_by_place = _findings(findings, tokens.start, tokens.stop)
    at = 0
    states = zip(tokens.origin.tolist(), tokens.loss_mask.tolist(), strict=True)
    texts = token_texts(table, tokens.ids, tokens.logprobs)
    for offset, (text, (origin, is_trained)) in enumerate(zip(texts, states, strict=True), start=tokens.start):
        while at < len(turns) - 1 and offset >= turns[at].stop:
            at += 1
        turn = turns[at] if turns else None
        fields.append({
            **text,
            "index": offset,
            "origin": _ORIGINS.get(origin, str(origin)),
            "loss_mask": is_trained,
            "step": turn.step if turn else None,
            "step_place": _step_place(turn, offset),
            "turn": f"turn {turn.number} · {turn.role}" if turn else None,
            "findings": names_by_place.get(offset, []),
        })
    for name, values in tokens.columns.items():
        for token, value in zip(fields, _numbers(name, values), strict=True):
            token.setdefault("columns", {})[name] = value
    return fields


_ORIGINS = {origin.value: origin.slug for origin in Origin}


def _numbers(name: str, values: Floats, digits: int | None = None) -> list[float | None]:
    """Values of JSON. A weight has six digits everywhere."""
    digits = 6 if name.startswith(lenses.WEIGHT) else digits
    return [_number(value if digits is None else float(f"{value:.{digits}g}")) for value in values.tolist()]


def _number(value: float) -> float | None:
    return value if np.isfinite(value) else None


def _text(piece: bytes | None) -> str | None:
    try:
        return None if piece is None else piece.decode()
    except UnicodeDecodeError:
        return None


def _step_place(turn: Turn | None, offset: int) -> str | None:
    if turn is None or turn.step is None:
        return None
    part = {"completion": "completion", "delta": "ids put in", "prompt": "prompt"}.get(turn.part, turn.part)
    return f"step {turn.step}, {part} {offset - turn.start:,} of {turn.n_tokens:,}"


def _findings(findings: Sequence[DrawnFinding], start: int, stop: int) -> dict[int, list[str]]:
    """Offset -> the findings that mark it, for the offsets ``[start, stop)`` that a finding marks."""
    names_by_place: dict[int, list[str]] = {}
    for item in findings:
        for first, last in item.drawn_places:
            for offset in range(max(first, start), min(last, stop)):
                names_by_place.setdefault(offset, []).append(item.words)
    return names_by_place


@dataclass(frozen=True)
class CardColumns(Page):
    """The fields of the tokens ``[start, stop)`` for the card of a token, as small as they are told apart there."""

    row: int
    """The index of the row."""
    n_tokens: int
    """Tokens of the whole row."""
    start: int
    """Row offset of the first token."""
    stop: int
    """Row offset behind the last token."""
    ids: list[int]
    """The id of each token. The other lists have the same length, unless they say otherwise."""
    logprobs: list[int | None] | None
    """In units of 0.0001 nat; null = not sampled, or none was recorded. None = no token has one."""
    bytes: dict[str, str]
    """Id -> its bytes in hexadecimal. An id without known bytes is missing."""
    special: list[int]
    """The ids that are control tokens."""
    runs: list[tuple[int, str, bool]]
    """Start of each run of tokens with one origin and one value of the loss mask, its origin, and that value."""
    turns: list[tuple[int, int, int, str, int | None, str]]
    """Start, stop, number, role, step and part of each turn that has a token here."""
    findings: list[tuple[int, int, str]]
    """Start, stop and words of each stretch that a finding marks here."""
    columns: dict[str, list[float | None]]
    """Words for a trainer's column, or for what an engine told -> values of six digits."""
    alternatives: Sequence[tuple[int, int, int]] = ()
    """Start, stop and number of alternatives of each stretch that has some; ``alternatives.json`` tells them."""


def card_columns(view: TokenView) -> CardColumns:
    """The window of a view for the cards."""
    tokens, table = view.tokens, view.table
    start, stop = tokens.start, tokens.stop
    ids_present = np.unique(tokens.ids)
    pieces = table.token_bytes(ids_present) if table is not None else [b""] * len(ids_present)
    logprobs = None
    if tokens.logprobs is not None and np.isfinite(tokens.logprobs).any():
        logprobs = [round(value * 1e4) if np.isfinite(value) else None for value in tokens.logprobs]
    edges = np.flatnonzero(np.diff(tokens.origin.astype(np.int64) * 2 + tokens.loss_mask, prepend=-1)).tolist()
    return CardColumns(
        view.row.index if view.row is not None else 0,
        view.n_tokens,
        start,
        stop,
        tokens.ids.tolist(),
        logprobs,
        {str(token_id): piece.hex() for token_id, piece in zip(ids_present.tolist(), pieces, strict=True) if piece},
        ids_present[special_tokens(table, ids_present)].tolist(),
        [
            (start + at, _ORIGINS.get(int(tokens.origin[at]), str(tokens.origin[at])), bool(tokens.loss_mask[at]))
            for at in edges
        ],
        [
            (turn.start, turn.stop, turn.number, turn.role, turn.step, turn.part)
            for turn in view.turns
            if turn.start < stop and turn.stop > start
        ],
        [
            (max(first, start), min(last, stop), item.words)
            for item in view.row_findings for first, last in item.drawn_places
            if first < stop and last > start
        ],
        {
            lenses.column_label(name): _numbers(name, values, 4 if name == beside.ENTROPY else 6)
            for name, values in tokens.columns.items()
        },
        view.alternatives,
    )
