"""The parts around the token pane: the minimap, the strip of each lens, and the note of a trainer's column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inspector.html.charts import MapTurn, drawn_map, extent, strip_means, strip_path
from inspector.html.tokens import Tokens
from inspector.trajectories.place import MAX_FINDINGS, MAX_RUN_VIEW_TOKENS, PagePlace, View
from inspector.trajectories.tokens import lenses, scales
from inspector.trajectories.tokens.scales import Scale
from inspector.trajectories.tokens.token_pane import Reader
from inspector.trajectories.tokens.turns import FindingItem, Turn
from rollout_inspector.streams.trajectory import Origin
from rollouts.store.trajectories import engine_columns


def value_note(
    place: PagePlace, values: NDArray[np.float32] | None, scale: Scale | None, reader: Reader, lacking: str = ""
) -> str:
    """Why a trainer's column colours none of the tokens shown; empty when it colours some.

    ``lacking``: what the row lacks of the column, in words.
    """
    if values is None or scale is None:
        return ""
    finite = values[reader.start : reader.stop]
    finite = finite[np.isfinite(finite)]
    if (np.abs(finite) >= scale.edges[0]).any():
        return ""
    here = "in this window" if place.view == View.TOKENS else "in this row"
    why = f"every value {here} is {'0' if not finite.any() else f'closer to 0 than {scale.edges[0]:g}'}"
    if not finite.size:
        why = lacking or f"it has no value {here}"
    elif place.lens == engine_columns.BEHIND:
        why += ": each sampled token is the likeliest one, as at temperature 0"
    elif place.lens.startswith(lenses.WEIGHT):
        why += ": each advantage is 0, or each token is clipped or masked"
    elif "advantage" in place.lens:
        why += ", as when every sample of a group has the same reward: no learning signal"
    return f"The lens “{lenses.column_label(place.lens)}” colours nothing: {why}."


@dataclass(frozen=True)
class Strip:
    """The values of a lens over the tokens shown, as one path in a viewBox of 1000 x 40."""

    lens: str
    path: str
    is_signed: bool
    caption: str


def _strip(lens: str, values: NDArray[np.float32], scale: Scale, what: str, unit: str, here: str) -> Strip:
    edges, means = strip_means(values)
    finite = values[np.isfinite(values)]
    percent = scale is scales.SHARE
    mean = f"{100 * finite.mean():.3g} %" if percent else f"{finite.mean():.3g}{f' {unit}' if unit else ''}"
    marks = "full height is 100 %" if percent else f"steps at {', '.join(scale.edge_texts)}"
    return Strip(
        lens,
        strip_path(edges, scale.heights(means), scale.is_signed),
        scale.is_signed,
        f"{what}, {marks} · mean {here} {mean}",
    )


def lens_strips(
    place: PagePlace, shown: Tokens, values: NDArray[np.float32] | None, scale: Scale | None
) -> Iterator[Strip]:
    """The strip of each built-in lens, and that of a trainer's column that is shown: means of equal stretches."""
    if not len(shown):
        return
    here = "in this window" if place.view == View.TOKENS else "in this row"
    yield _strip("mask", shown.loss_mask.astype(np.float32), scales.SHARE, "share of trained tokens", "", here)
    sampled = shown.origin == Origin.SAMPLED
    yield _strip("origin", sampled.astype(np.float32), scales.SHARE, "share of sampled tokens", "", here)
    # A trainer's row may hold 0.0 for a token that was not sampled. That 0.0 does not mean certainty.
    if shown.logprobs is not None and np.isfinite(surprise := np.where(sampled, -shown.logprobs, np.nan)).any():
        yield _strip("logprob", surprise, scales.SURPRISE, "surprise of sampled tokens in nats", "nats", here)
    if values is not None and scale is not None:
        part = values[shown.start : shown.start + len(shown)]
        part = -part if scale.is_surprise else part
        if np.isfinite(part).any():
            name = lenses.column_label(place.lens)
            what = ("minus " if scale.is_surprise else "") + name + (f" in {scale.unit}" if scale.unit else "")
            yield _strip(place.lens, part, scale, what, scale.unit, here)


def map_address(place: PagePlace, n: int, own: str) -> str:
    """What ``str.format`` turns into the address of the tokens ``[start, stop)`` of the map of a row of ``n`` tokens.

    It tells one map from another, because it names row, view and lens. ``own``: the page's address.
    """
    return own + place.marked_template(view=View.TOKENS if n > MAX_RUN_VIEW_TOKENS else place.view)


def row_map(
    turns: Sequence[Turn], findings: Sequence[FindingItem], place: PagePlace, n: int, address: str
) -> dict[str, Any]:
    """The minimap of a row of ``n`` tokens: what stands there in every window. ``address``: see :func:`map_address`."""
    spans = tuple(
        MapTurn(row_turn.start, row_turn.stop, row_turn.number, row_turn.role, row_turn.part, row_turn.n_trained or 0)
        for row_turn in turns
    )
    here = [item for item in findings[:MAX_FINDINGS] if item.row == place.row]
    pieces, trained = drawn_map(spans, n, address)
    counts = f"{len(turns)} turns, {n:,} tokens, {sum(t.n_trained or 0 for t in turns):,} trained"
    return {
        "pieces": pieces,
        "trained": trained,
        # The turns were found by role headers, because nobody recorded the origins.
        "by_roles": any(turn.part == "reply" for turn in turns),
        "text": f"{counts}, {len(here)} finding{'s' * (len(here) != 1)}",
        "findings": [{"severity": item.weight, **extent(start, start, n)} for item in here for start, _ in item.places],
    }


def map_now(place: PagePlace, reader: Reader, n: int) -> dict[str, dict[str, str] | None]:
    """What the minimap of a row of ``n`` tokens shows of this window alone."""
    return {
        "window": extent(reader.start, reader.stop, n) if reader.stop - reader.start < n else None,
        "mark": extent(*place.mark, n) if place.mark else None,
    }
