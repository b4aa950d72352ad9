"""The tokens page as JSON: the trajectory, its turns and findings, and one window of tokens with every field."""

from __future__ import annotations

from typing import Any

import numpy as np

from inspector.html.text import characters
from inspector.html.tokens import TokenPainter, Tokens
from inspector.trajectories import reads as data
from inspector.trajectories.place import WINDOW, Lens, PagePlace
from inspector.trajectories.tokens_page import names
from inspector.trajectories.turns import FindingItem, Turn
from rollouts import selectors
from rollouts.models import StoredTrajectory
from rollouts.selectors.parts import RowSummary
from rollouts.tito.trajectory import Origin


def tokens_json(trajectory: StoredTrajectory, page: dict[str, Any]) -> dict[str, Any]:
    """The dict of the twin; tokens are those of the window that the place names, whatever the view."""
    place: PagePlace = page["place"]
    rows: list[RowSummary] = page["rows"]
    turns: list[Turn] = page["turns"]
    findings: list[FindingItem] = page["findings"]
    painter, missing = data.painter_of(trajectory.run.tokenizer)
    report: dict[str, Any] = {
        **names(trajectory),
        "group": trajectory.group,
        "n_steps": trajectory.n_steps,
        "n_rows": trajectory.n_rows,
        "notices": [*place.notices, *([f"No text: {missing}"] if missing else [])],
        "rows": [{"index": row.index, "n_tokens": row.n_tokens, "n_trained": row.n_trained} for row in rows],
        "row": None,
        "lenses": [*(lens.value for lens in Lens), *page["columns"].get(place.row, ())],
        "mark": list(place.mark) if place.mark else None,
        "turns": [
            {
                "number": turn.number, "role": turn.role, "part": turn.part, "step": turn.step_index,
                "start": turn.start, "stop": turn.stop, "n_trained": turn.n_trained,
                "findings": [item.number for item in turn.findings],
            }
            for turn in turns
        ],
        "findings": [finding_json(item) for item in findings],
        "window": {"start": 0, "stop": 0, "tokens": []},
    }  # fmt: skip
    if rows:
        row = rows[place.row]
        start = min(place.window, row.n_tokens)
        stop = min(start + WINDOW, row.n_tokens)
        tokens = data.read_tokens(trajectory, row, start, stop)
        report["row"] = {"index": row.index, "n_tokens": row.n_tokens, "n_trained": row.n_trained}
        report["window"] = {"start": start, "stop": stop, "tokens": window_tokens(tokens, turns, painter)}
        if page["columns"].get(row.index):
            _add_columns(report["window"]["tokens"], trajectory, row.index, start)
    return report


def finding_json(item: FindingItem) -> dict[str, Any]:
    """A finding as the twin gives it."""
    return {
        "number": item.number, "kind": item.kind, "title": item.title, "severity": item.severity, "axis": item.axis,
        "step": item.step, "row": item.row, "start": item.start, "stop": item.stop, "evidence": item.evidence,
        "remedy": item.remedy, "cost": item.cost, "expected_text": item.expected_text,
        "actual_text": item.actual_text, "missing": item.missing,
    }  # fmt: skip


def window_tokens(tokens: Tokens, turns: list[Turn], painter: TokenPainter) -> list[dict[str, Any]]:
    """Every field of each token. ``text`` is None where the bytes are no text alone, ``bytes`` None where unknown."""
    table = painter.table
    pieces: list[bytes | None] = [None] * len(tokens)
    if table is not None:
        pieces = [piece or None for piece in table.token_bytes(tokens.ids)]
    logprobs = tokens.logprobs if tokens.logprobs is not None else np.full(len(tokens), np.nan, np.float32)
    found = []
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
                "findings": _findings(turn, offset),
            }
        )
    return found


def _add_columns(tokens: list[dict[str, Any]], trajectory: StoredTrajectory, row: int, start: int) -> None:
    """Each token's values in the columns that a trainer wrote; None where a column is too short."""
    record = selectors.get_row(trajectory, row)
    for name, values in selectors.row_columns(record, start, start + len(tokens)).items():
        for n, token in enumerate(tokens):
            value = float(values[n]) if n < len(values) else float("nan")
            token.setdefault("columns", {})[name] = value if np.isfinite(value) else None


def _text(piece: bytes | None) -> str | None:
    if piece is None:
        return None
    parts = characters(piece)
    return None if any(char is None for _, _, char in parts) else "".join(char or "" for _, _, char in parts)


def _step_place(turn: Turn | None, offset: int) -> str | None:
    if turn is None or turn.step_index is None:
        return None
    part = {"completion": "completion", "delta": "ids put in", "prompt": "prompt"}.get(turn.part, turn.part)
    return f"step {turn.step_index}, {part} {offset - turn.start:,} of {turn.n_tokens:,}"


def _findings(turn: Turn | None, offset: int) -> list[str]:
    items = turn.findings if turn else ()
    return [
        f"{item.number}: {item.title} ({item.severity})"
        for item in items
        if item.start <= offset < max(item.stop, item.start + 1)
    ]
