"""One window of tokens in the JSON of the tokens page, each token with every field."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NotRequired, TypedDict

import numpy as np

from inspector.html.tokens import TokenPainter, Tokens
from inspector.trajectories import reads as data
from inspector.trajectories.place import WINDOW
from inspector.trajectories.turns import Turn
from rollouts import selectors
from rollouts.models import StoredTrajectory
from rollouts.selectors.parts import RowSummary
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
    """Column of a trainer -> value; None when the column is too short. Missing when the row has no column."""


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
    painter: TokenPainter,
    has_columns: bool,
) -> TokenWindow:
    """At most ``WINDOW`` tokens of a row, from ``start`` on. No tokens without a row."""
    if row is None:
        return TokenWindow(0, 0, [])
    start = min(start, row.n_tokens)
    stop = min(start + WINDOW, row.n_tokens)
    tokens = window_tokens(data.read_tokens(trajectory, row, start, stop), turns, painter)
    if has_columns:
        _add_columns(tokens, trajectory, row.index, start)
    return TokenWindow(start, stop, tokens)


def window_tokens(tokens: Tokens, turns: Sequence[Turn], painter: TokenPainter) -> list[TokenFields]:
    """Every field of each token."""
    table = painter.table
    pieces: list[bytes | None] = [None] * len(tokens)
    if table is not None:
        pieces = [piece or None for piece in table.token_bytes(tokens.ids)]
    logprobs = tokens.logprobs if tokens.logprobs is not None else np.full(len(tokens), np.nan, np.float32)
    found: list[TokenFields] = []
    named = _findings(turns, tokens.start, tokens.start + len(tokens))
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


def _add_columns(tokens: list[TokenFields], trajectory: StoredTrajectory, row: int, start: int) -> None:
    record = selectors.get_row(trajectory, row)
    for name, values in selectors.row_columns(record, start, start + len(tokens)).items():
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


def _findings(turns: Sequence[Turn], start: int, stop: int) -> dict[int, list[str]]:
    """Offset -> the findings that mark it, for the offsets ``[start, stop)`` that a finding marks."""
    found: dict[int, list[str]] = {}
    for item in sorted((item for turn in turns for item in turn.findings), key=lambda item: item.number):
        for first, last in item.places:
            for offset in range(max(first, start), min(last, stop)):
                found.setdefault(offset, []).append(f"{item.number}: {item.title} ({item.severity})")
    return found
