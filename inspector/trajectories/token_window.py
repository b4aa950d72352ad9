"""One window of tokens as JSON: each token with every field, or an array per field for the cards of the page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from inspector.html.tokens import TokenPainter, Tokens
from inspector.trajectories import lenses
from inspector.trajectories import reads as data
from inspector.trajectories.place import WINDOW
from inspector.trajectories.turns import FindingItem, Turn
from inspector.web.twins import Page
from rollouts import selectors
from rollouts.models import StoredTrajectory
from rollouts.selectors.parts import RowSummary, StepSummary
from rollouts.tito.trajectory import Origin


class TokenFields(TypedDict):
    """All fields of a token."""

    index: int
    """Its offset in the row."""
    id: int
    text: str | None
    """None when the bytes of the token alone are no UTF-8."""
    bytes: str | None
    """The bytes in hexadecimal; None when they are not known."""
    special: bool
    """A control token of the tokenizer."""
    origin: str
    loss_mask: bool
    logprob: float | None
    """None when the token was not sampled, or when no log-probability was recorded."""
    step: int | None
    step_place: str | None
    """Its place in the step, in words."""
    turn: str | None
    findings: list[str]
    columns: NotRequired[dict[str, float | None]]
    """Column of a trainer, or of what an engine told -> value; None = none here. Missing when the row has no column."""


@dataclass(frozen=True)
class TokenWindow:
    """Tokens ``[start, stop)`` of a row."""

    start: int
    stop: int
    tokens: list[TokenFields]


def read_window(
    trajectory: StoredTrajectory,
    row: RowSummary | None,
    start: int,
    turns: Sequence[Turn],
    findings: Sequence[FindingItem],
    painter: TokenPainter,
    has_columns: bool,
    steps: Sequence[StepSummary],
) -> TokenWindow:
    """At most ``WINDOW`` tokens of a row, from ``start`` on. No tokens without a row.

    ``findings``: those of the row. ``steps``: all of the trajectory.
    """
    if row is None:
        return TokenWindow(0, 0, [])
    start = min(start, row.n_tokens)
    stop = min(start + WINDOW, row.n_tokens)
    tokens = window_tokens(data.read_tokens(trajectory, row, start, stop, steps), turns, painter, findings)
    if has_columns:
        _add_columns(tokens, row, start)
    return TokenWindow(start, stop, tokens)


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


def card_columns(
    trajectory: StoredTrajectory,
    row: RowSummary | None,
    start: int,
    turns: Sequence[Turn],
    findings: Sequence[FindingItem],
    painter: TokenPainter,
    has_columns: bool,
    steps: Sequence[StepSummary],
) -> CardColumns:
    """At most ``WINDOW`` tokens of a row, from ``start`` on, for the card.

    ``turns``: at least those that have a token here. ``findings``: those of the row. ``steps``: all of the trajectory.
    """
    if row is None:
        return CardColumns(0, 0, 0, 0, [], None, {}, [], [], [], [], {})
    start = min(start, row.n_tokens)
    stop = min(start + WINDOW, row.n_tokens)
    tokens = data.read_tokens(trajectory, row, start, stop, steps)
    known = np.unique(tokens.ids)
    pieces = dict.fromkeys(known.tolist(), b"")
    if painter.table is not None:
        pieces = dict(zip(known.tolist(), painter.table.token_bytes(known), strict=True))
    logprobs = None
    if tokens.logprobs is not None and np.isfinite(tokens.logprobs).any():
        small = np.round(np.nan_to_num(tokens.logprobs, nan=0.0, posinf=0.0, neginf=0.0) * 1e4).astype(np.int64)
        logprobs = _where(np.isfinite(tokens.logprobs), small)
    state = tokens.origin.astype(np.int64) * 2 + tokens.loss_mask
    edges = np.flatnonzero(np.diff(state, prepend=-1))
    origins = {origin.value: origin.slug for origin in Origin}
    columns: dict[str, list[float | None]] = {}
    if has_columns:
        for name, values in selectors.row_columns(row.handle, start, stop).items():
            padded = np.full(stop - start, np.nan)
            padded[: len(values)] = values[: stop - start]
            columns[lenses.column_label(name)] = [
                float(f"{value:.6g}") if np.isfinite(value) else None for value in padded.tolist()
            ]
    return CardColumns(
        row.index, row.n_tokens, start, stop, tokens.ids.tolist(), logprobs,
        {str(token_id): piece.hex() for token_id, piece in pieces.items() if piece},
        known[painter.special(known)].tolist(),
        [
            (start + at, origins.get(int(tokens.origin[at]), str(tokens.origin[at])), bool(tokens.loss_mask[at]))
            for at in edges.tolist()
        ],
        [
            (turn.start, turn.stop, turn.number, turn.role, turn.step_index, turn.part)
            for turn in turns
            if turn.start < stop and turn.stop > start
        ],
        [
            (max(first, start), min(last, stop), f"{item.number}: {item.title} ({item.severity_words})")
            for item in findings for first, last in item.places
            if first < stop and last > start
        ],
        columns,
    )


def _where(known: NDArray[np.bool_], values: NDArray[np.int64]) -> list[int | None]:
    return [value if there else None for value, there in zip(values.tolist(), known.tolist(), strict=True)]


def window_tokens(
    tokens: Tokens, turns: Sequence[Turn], painter: TokenPainter, findings: Sequence[FindingItem] = ()
) -> list[TokenFields]:
    """Every field of each token. ``findings``: those of the row."""
    table = painter.table
    pieces: list[bytes | None] = [None] * len(tokens)
    if table is not None:
        pieces = [piece or None for piece in table.token_bytes(tokens.ids)]
    logprobs = tokens.logprobs if tokens.logprobs is not None else np.full(len(tokens), np.nan, np.float32)
    found: list[TokenFields] = []
    named = _findings(findings, tokens.start, tokens.start + len(tokens))
    at = 0
    origins = [origin.slug for origin in Origin]
    columns = zip(
        tokens.ids.tolist(), tokens.origin.tolist(), tokens.loss_mask.tolist(), logprobs.tolist(), pieces, strict=True
    )
    for offset, (token_id, origin, trained, logprob, piece) in enumerate(columns, start=tokens.start):
        while at < len(turns) - 1 and offset >= turns[at].stop:
            at += 1
        turn = turns[at] if turns else None
        found.append(
            {
                "index": offset,
                "id": token_id,
                "text": _text(piece),
                "bytes": None if piece is None else piece.hex(),
                "special": painter.is_special(token_id),
                "origin": origins[origin] if origin < len(origins) else str(origin),
                "loss_mask": trained,
                "logprob": logprob if np.isfinite(logprob) else None,
                "step": turn.step_index if turn else None,
                "step_place": _step_place(turn, offset),
                "turn": f"turn {turn.number} · {turn.role}" if turn else None,
                "findings": named.get(offset, []),
            }
        )
    return found


def _add_columns(tokens: list[TokenFields], row: RowSummary, start: int) -> None:
    for name, values in selectors.row_columns(row.handle, start, start + len(tokens)).items():
        for n, token in enumerate(tokens):
            value = float(values[n]) if n < len(values) else float("nan")
            token.setdefault("columns", {})[name] = value if np.isfinite(value) else None


def _text(piece: bytes | None) -> str | None:
    try:
        return None if piece is None else piece.decode()
    except UnicodeDecodeError:
        return None


def _step_place(turn: Turn | None, offset: int) -> str | None:
    if turn is None or turn.step_index is None:
        return None
    part = {"completion": "completion", "delta": "ids put in", "prompt": "prompt"}.get(turn.part, turn.part)
    return f"step {turn.step_index}, {part} {offset - turn.start:,} of {turn.n_tokens:,}"


def _findings(findings: Sequence[FindingItem], start: int, stop: int) -> dict[int, list[str]]:
    """Offset -> the findings that mark it, for the offsets ``[start, stop)`` that a finding marks."""
    found: dict[int, list[str]] = {}
    for item in findings:
        for first, last in item.places:
            for offset in range(max(first, start), min(last, stop)):
                found.setdefault(offset, []).append(f"{item.number}: {item.title} ({item.severity_words})")
    return found
