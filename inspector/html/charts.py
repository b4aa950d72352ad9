"""Charts as geometry: bars in the units of a viewBox. Templates draw them, except the many pieces of a minimap.

Each coordinate is text with two decimals, because Django localizes numbers in templates, which is slow for many bars.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe
from numpy.typing import NDArray

from rollout_inspector.streams.figures import percent_of, share
from rollouts.store.runs.runs import RunSummary


@dataclass(frozen=True)
class Bar:
    """A rectangle in the units of its viewBox."""

    x: str
    y: str
    width: str
    height: str

    @property
    def middle(self) -> str:
        return _text(float(self.x) + float(self.width) / 2)


@dataclass(frozen=True)
class RewardBar(Bar):
    """Trajectories whose reward lies in ``[low, high)``, and the query of their list."""

    low: float
    high: float
    count: int
    query: str


@dataclass(frozen=True)
class ShareBar(Bar):
    """``trajectories`` of ``of``, and the address of their list."""

    label: str
    trajectories: int
    of: int
    url: str
    has_label: bool = True
    """Its label stands below the axis: of narrow bars only some have the room."""

    @property
    def has_room(self) -> bool:
        """The bar is wide enough for a text."""
        return float(self.width) >= 48

    @property
    def percent(self) -> str:
        return percent_of(share(self.trajectories, self.of), 1)


@dataclass(frozen=True)
class TokenBar(Bar):
    """Tokens ``[start, stop)`` of a row."""

    start: int
    stop: int
    label: str
    kind: str = ""
    """The ``part`` of the turn with most of the tokens."""
    trained: float = 0.0
    """The share of its tokens that is trained, as far as the turns tell it."""


@dataclass(frozen=True)
class ChartFrame:
    """The place of the columns of a chart: equal slots from left to right, on a base line."""

    width: int
    top: int
    """The top of the highest column."""
    base: int
    """The base line: y grows downwards."""
    gap: int
    """The least distance between two columns."""

    def columns(self, values: Sequence[float]) -> Iterator[tuple[str, str, str, str]]:
        """``x, y, width, height`` of a column for each value; the largest value fills the height."""
        slot = self.width / max(len(values), 1)
        wide = min(slot - self.gap, 90)
        most = max(values, default=0) or 1
        for place, value in enumerate(values):
            # A value above 0 is always visible.
            tall = max((self.base - self.top) * value / most, 2.0) if value else 0.0
            yield _text(place * slot + (slot - wide) / 2), _text(self.base - tall), _text(wide), _text(tall)


REWARDS = ChartFrame(width=560, top=18, base=124, gap=2)
SHARES = ChartFrame(width=960, top=18, base=170, gap=3)
LABEL_ROOM = 96
"""Units between two labels of an axis."""
STRIP_WIDTH = 1000
"""Width of the viewBox of a row's minimap and of the strip of a lens."""
STRIP_HEIGHT = 40
MAX_MAP_PIECES = 500
"""The most elements of a minimap. Narrower neighbours are merged."""


def _text(value: float) -> str:
    return f"{value:.2f}"


def histogram(summary: RunSummary) -> dict[str, Any] | None:
    """The geometry of a run's reward bins; None when no trajectory has a reward."""
    bins = summary.reward_bins
    if not any(bar.n for bar in bins):
        return None
    bars = tuple(
        RewardBar(*box, bar.start, bar.stop, bar.n, query=f"min={bar.start:.9g}&max={bar.stop:.9g}")
        for bar, box in zip(bins, REWARDS.columns([bar.n for bar in bins]), strict=True)
    )
    low, high, mean = bins[0].start, bins[-1].stop, summary.reward_mean
    is_exact = all(bar.start == bar.stop for bar in bins)  # a bar for each value: no axis, so no place for the mean
    mean_x = None
    if mean is not None and high > low and not is_exact:
        mean_x = round((mean - low) / (high - low) * REWARDS.width, 2)
    # Below the base line there is room for the lowest and the highest reward.
    sizes = {"width": REWARDS.width, "height": REWARDS.base + 20, "base": REWARDS.base}
    return {
        **sizes,
        "is_exact": is_exact,
        "bars": bars,
        "low": low,
        "high": high,
        "total": summary.n_rewards,
        "mean": mean,
        "mean_x": mean_x,
    }


def share_bars(entries: Sequence[tuple[str, int, int, str]]) -> list[ShareBar]:
    """A column for each (label, trajectories, of, url)."""
    columns = SHARES.columns([share(n, of) for _, n, of, _ in entries])
    every = -(-LABEL_ROOM * len(entries) // SHARES.width)
    return [
        ShareBar(*box, *entry, has_label=place % max(every, 1) == 0)
        for place, (entry, box) in enumerate(zip(entries, columns, strict=True))
    ]


def highest_share(bars: Sequence[ShareBar]) -> str:
    """The share of the tallest bar, which is the top of the axis, as text."""
    return max(bars, key=lambda bar: share(bar.trajectories, bar.of)).percent if bars else ""


def extent(start: int, stop: int, n_tokens: int) -> dict[str, str]:
    """``x`` and ``width`` of tokens ``[start, stop)`` on a strip, always wide enough to be visible."""
    scale = STRIP_WIDTH / n_tokens if n_tokens else 0.0
    return {"x": _text(min(start * scale, STRIP_WIDTH - 3)), "width": _text(max((stop - start) * scale, 3))}


@dataclass(frozen=True)
class MapTurn:
    """A turn as the minimap draws it: tokens ``[start, stop)`` of the row."""

    start: int
    stop: int
    number: int
    """The number of the turn on the page."""
    role: str
    part: str
    """``prompt``, ``delta``, ``completion`` ...: the colour of the piece."""
    n_trained: int = 0


def minimap(turns: Sequence[MapTurn], n_tokens: int) -> list[TokenBar]:
    """One rectangle for each turn. Turns that are too narrow to be visible are merged with their neighbours."""
    if not n_tokens:
        return []
    scale = STRIP_WIDTH / n_tokens
    least = n_tokens / MAX_MAP_PIECES
    pieces: list[TokenBar] = []
    pending: list[MapTurn] = []
    for turn in turns:
        pending.append(turn)
        if pending[-1].stop - pending[0].start >= least or turn is turns[-1]:
            a, b = pending[0].start, pending[-1].stop
            kinds: Counter[str] = Counter()
            for part in pending:
                kinds[part.part] += part.stop - part.start
            label = (
                f"turn {pending[0].number} · {pending[0].role}"
                if len(pending) == 1
                else f"turns {pending[0].number}-{pending[-1].number}"
            )
            width = _text(max((b - a) * scale, 0.8))
            kind, trained = kinds.most_common(1)[0][0], share(sum(part.n_trained for part in pending), b - a)
            pieces.append(TokenBar(_text(a * scale), "6", width, "10", a, b, label, kind=kind, trained=trained))
            pending = []
    return pieces


def trained_path(pieces: Sequence[TokenBar]) -> str:
    """The loss mask below the pieces of a minimap as one SVG path: the height is the share that is trained."""
    return "".join(
        f"M{piece.x} 17h{piece.width}v{max(4 * piece.trained, 1):.1f}h-{piece.width}z"
        for piece in pieces
        if piece.trained
    )


@lru_cache(maxsize=64)
def drawn_map(turns: tuple[MapTurn, ...], n_tokens: int, address: str) -> tuple[SafeString, str]:
    """The pieces of a minimap as links, and the path of its mask. Kept, because every window of a row shows the same.

    ``address``: what ``str.format`` turns into the address of the tokens ``[start, stop)``.
    """
    pieces = minimap(turns, n_tokens)
    links = [
        f'<a href="{escape(address.format(piece.start, max(piece.stop, piece.start + 1)))}" tabindex="-1">'
        f"<title>{escape(piece.label)}</title>"
        f'<rect class="map-{escape(piece.kind)}" x="{piece.x}" y="{piece.y}" '
        f'width="{piece.width}" height="{piece.height}"/></a>'
        for piece in pieces
    ]
    return mark_safe("".join(links)), trained_path(pieces)


def strip_means(values: NDArray[np.float32], most: int = 240) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """At most ``most`` equal stretches of ``values`` ``[n]``: their edges, and the mean of each; NaN = no value."""
    n = int(values.size)
    edges = np.unique(np.linspace(0, n, min(most, n) + 1).astype(np.int64))
    is_known = np.isfinite(values)
    sums = np.add.reduceat(np.where(is_known, values, 0.0).astype(np.float64), edges[:-1])
    counts = np.add.reduceat(is_known.astype(np.int64), edges[:-1])
    return edges, np.where(counts, sums / np.maximum(counts, 1), np.nan)


def strip_path(edges: NDArray[np.int64], heights: NDArray[np.float64], is_signed: bool) -> str:
    """The columns of a strip as one SVG path. A height is a share of the strip, from the middle when it has a sign.

    NaN has no column. Neighbours of one height are one column.
    """
    is_new = np.append(True, heights[1:] != heights[:-1])
    edges, heights = np.append(edges[:-1][is_new], edges[-1]), heights[is_new]
    scale = STRIP_WIDTH / max(int(edges[-1]), 1)
    base = STRIP_HEIGHT / 2 if is_signed else STRIP_HEIGHT
    tall = heights * (base - 1)
    # A known value is always visible.
    tall = np.where(np.abs(tall) > 1, tall, np.where(heights < 0, -1.0, 1.0))
    starts, widths = edges[:-1] * scale, np.maximum(np.diff(edges) * scale - 0.4, 0.6)
    columns = np.stack([starts, -tall, widths, tall])[:, ~np.isnan(heights)]
    return "".join(f"M{x:.1f} {base:g}v{up:.1f}h{wide:.1f}v{down:.1f}z" for x, up, wide, down in columns.T.tolist())
