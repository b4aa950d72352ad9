"""The parts around the token pane: the legends of trainers' columns, the minimap and the strip of surprise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspector.html.charts import MapTurn, extent, minimap, surprise_bars
from inspector.html.tokens import Tokens
from inspector.trajectories.lenses import Legend, Swatch
from inspector.trajectories.place import MAX_FINDINGS, MAX_RUN_VIEW_TOKENS, PagePlace, View
from inspector.trajectories.token_pane import Reader
from inspector.trajectories.turns import FindingItem, Turn
from rollouts.tito.trajectory import Origin


def value_note(place: PagePlace, values: NDArray[np.float32] | None, reader: Reader) -> str:
    """Why a trainer's column colours none of the tokens shown; empty when it colours some."""
    if values is None:
        return ""
    shown = values[reader.start : reader.stop]
    shown = shown[np.isfinite(shown)]
    if shown.any():
        return ""
    here = "in this window" if place.view == View.TOKENS else "in this row"
    why = f"every value {here} is 0" if shown.size else f"it has no value {here}"
    if shown.size and "advantage" in place.lens:
        why += ", as when every sample of a group has the same reward: no learning signal"
    return f"The lens “{place.lens.replace('_', ' ')}” colours nothing: {why}."


def value_legend(name: str, values: NDArray[np.float32], signed: bool) -> Legend:
    """The legend of a trainer's column."""
    known = values[np.isfinite(values)]
    largest = float(np.abs(known).max()) if known.size else 0.0
    step = largest / (4 if signed else 8)
    swatches = [
        Swatch(f"key-{'s' if signed else 'q'}{n}", f"{(n - 4 if signed else n) * step:.3g}", "up to this value")
        for n in range(9)
    ]
    return Legend(tuple(swatches), ends=(name.replace("_", " "), ""))


def strips(
    turns: Sequence[Turn],
    findings: Sequence[FindingItem],
    place: PagePlace,
    reader: Reader,
    shown: Tokens,
    n: int,
    own: str,
) -> dict[str, Any]:
    """The minimap of a row of ``n`` tokens, and the surprise of the tokens ``shown``. ``own``: the page's address."""
    pieces = minimap([MapTurn(one.start, one.stop, one.number, one.role, one.part) for one in turns], n)
    view = View.TOKENS if n > MAX_RUN_VIEW_TOKENS else place.view
    # A trainer's row may hold 0.0 for a token that was not sampled. That 0.0 does not mean certainty.
    sampled = None if shown.logprobs is None else np.where(shown.origin == Origin.SAMPLED, shown.logprobs, np.nan)
    bars = surprise_bars(sampled, reader.start)

    return {
        "map": [(piece, own + place.marked(piece.start, piece.stop, view=view)) for piece in pieces],
        # The turns were found by role headers, because nobody recorded the origins.
        "map_by_roles": any(turn.part == "reply" for turn in turns),
        "map_text": f"{len(turns)} turns, {n:,} tokens, {sum(t.n_trained or 0 for t in turns):,} trained",
        "map_findings": [
            {"severity": item.severity, **extent(start, start, n)}
            for item in findings[:MAX_FINDINGS]
            if item.row == place.row
            for start, _ in item.places
        ],
        "map_window": extent(reader.start, reader.stop, n) if reader.stop - reader.start < n else None,
        "map_mark": extent(*place.mark, n) if place.mark else None,
        "bars": bars,
        "bars_start": reader.start,
        "bars_stop": reader.stop,
        "bars_text": ("in this window" if place.view == View.TOKENS else "in this row")
        + (f", highest {max(bar.mean for bar in bars):.2f} nats" if bars else ""),
    }
