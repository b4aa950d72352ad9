"""Charts as geometry: bars in the units of a viewBox. Templates draw them, except the many pieces of a minimap. Each
coordinate is text with two decimals, because Django localizes numbers in templates, which is slow for many bars."""

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
from rollouts.store.runs.run_summary import RunSummary


@dataclass(frozen=True)
class Bar:
    """A column of a chart, in the units of its viewBox, and the list of the trajectories that it stands for."""

    x: str
    y: str
    width: str
    height: str
    trajectories: int
    url: str  # The address of the list, or its query.
    label: str = ""
    of: int = 0  # Of a share: the trajectories that it is a share of.
    has_label: bool = True  # Its label stands below the axis: of narrow bars only some have the room.
    low: float = 0.0  # Of rewards: they lie in ``[low, high)``.
    high: float = 0.0

    @property
    def middle(self) -> str:
        return _text(float(self.x) + float(self.width) / 2)

    @property
    def has_room(self) -> bool:
        """The bar is wide enough for a text."""
        return float(self.width) >= 48

    @property
    def percent(self) -> str:
        return percent_of(share(self.trajectories, self.of), 1)


@dataclass(frozen=True)
class ChartFrame:
    """The place of the columns of a chart: equal slots from left to right, on a base line."""

    width: int
    top: int  # The top of the highest column.
    base: int  # The base line: y grows downwards.
    gap: int  # The least distance between two columns.

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
LABEL_ROOM = 96  # Units between two labels of an axis.
STRIP_WIDTH = 1000  # Width of the viewBox of a row's minimap and of the strip of a lens.
STRIP_HEIGHT = 40
MAX_MAP_PIECES = 500  # The most elements of a minimap. Narrower neighbours are merged.


def _text(value: float) -> str:
    return f"{value:.2f}"


def histogram(summary: RunSummary) -> dict[str, Any] | None:
    """The geometry of a run's reward bins; None when no trajectory has a reward."""
    bins = summary.reward_bins
    if not any(bar.n for bar in bins):
        return None
    bars = tuple(
        Bar(*box, bar.n, f"min={bar.start:.9g}&max={bar.stop:.9g}", low=bar.start, high=bar.stop)
        for bar, box in zip(bins, REWARDS.columns([bar.n for bar in bins]), strict=True)
    )
    low, high, mean = bins[0].start, bins[-1].stop, summary.reward_mean
    is_exact = all(bar.start == bar.stop for bar in bins)  # a bar for each value: no axis, so no place for the mean
    mean_x = None
    if mean is not None and high > low and not is_exact:
        mean_x = round((mean - low) / (high - low) * REWARDS.width, 2)
    # Below the base line there is room for the lowest and the highest reward.
    return {
        "width": REWARDS.width, "height": REWARDS.base + 20, "base": REWARDS.base, "is_exact": is_exact, "bars": bars,
        "low": low, "high": high, "total": summary.n_rewards, "mean": mean, "mean_x": mean_x,
    }


def share_bars(entries: Sequence[tuple[str, int, int, str]]) -> list[Bar]:
    """A column for each (label, trajectories, of, url)."""
    columns = SHARES.columns([share(n, of) for _, n, of, _ in entries])
    every = -(-LABEL_ROOM * len(entries) // SHARES.width)
    return [
        Bar(*box, n, url, label, of, has_label=place % max(every, 1) == 0)
        for place, ((label, n, of, url), box) in enumerate(zip(entries, columns, strict=True))
    ]


def highest_share(bars: Sequence[Bar]) -> str:
    """The share of the tallest bar, which is the top of the axis, as text."""
    return max(bars, key=lambda bar: share(bar.trajectories, bar.of)).percent if bars else ""


def extent(start: int, stop: int, n_tokens: int) -> dict[str, str]:
    """``x`` and ``width`` of tokens ``[start, stop)`` on a strip, always wide enough to be visible."""
    scale = STRIP_WIDTH / n_tokens if n_tokens else 0.0
    return {"x": _text(min(start * scale, STRIP_WIDTH - 3)), "width": _text(max((stop - start) * scale, 3))}


def drawn_map(turns: Sequence[Any], n_tokens: int, address: str) -> tuple[SafeString, str]:
    """The minimap of a row: its turns as links, and as one path the share of each that is trained, below them.

    Turns that are too narrow to be visible are merged with their neighbours; the piece then shows the share of each
    ``part``, one below the other. ``turns``: with ``number, role, part, start, stop, n_trained``. ``address``: what
    ``str.format`` turns into the address of the tokens ``[start, stop)``.
    """
    pieces = tuple((t.start, t.stop, t.number, t.role, t.part, t.n_trained or 0) for t in turns if n_tokens)
    return _drawn_map(pieces, n_tokens, address)


@lru_cache(maxsize=64)
def _drawn_map(
    turns: tuple[tuple[int, int, int, str, str, int], ...], n_tokens: int, address: str
) -> tuple[SafeString, str]:
    """Kept, because every window of a row shows the same."""
    scale = STRIP_WIDTH / max(n_tokens, 1)
    links: list[str] = []
    trained_path: list[str] = []
    a, first = 0, 1
    kinds: Counter[str] = Counter()
    n_trained = 0
    for place, (start, stop, number, role, part, trained) in enumerate(turns):
        if not kinds:
            a, first, n_trained = start, number, 0
        kinds[part] += stop - start
        n_trained += trained
        if stop - a < n_tokens / MAX_MAP_PIECES and place < len(turns) - 1:
            continue
        label = f"turn {number} · {role}" if first == number else f"turns {first}-{number}"
        x, width = _text(a * scale), _text(max((stop - a) * scale, 0.8))
        rects, y = "", 6.0
        for name, n in sorted(kinds.items()) if kinds.total() else [(part, 0)]:
            tall = 10 * share(n, kinds.total()) if len(kinds) > 1 else 10
            rects += f'<rect class="map-{escape(name)}" x="{x}" y="{y:g}" width="{width}" height="{round(tall, 2):g}"/>'
            y = round(y + tall, 2)
        url = escape(address.format(a, max(stop, a + 1)))
        links.append(f'<a href="{url}" tabindex="-1"><title>{escape(label)}</title>{rects}</a>')
        if n_trained:
            tall = max(4 * share(n_trained, stop - a), 0.3)
            trained_path.append(f"M{x} 17h{width}v{tall:.1f}h-{width}z")
        kinds = Counter()
    return mark_safe("".join(links)), "".join(trained_path)


def strip_means(values: NDArray[np.float32], most: int = 240) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """At most ``most`` equal stretches of ``values`` ``[n]``: their edges, and the mean of each; NaN = no value."""
    n = int(values.size)
    edges = np.unique(np.linspace(0, n, min(most, n) + 1).astype(np.int64))
    is_known = np.isfinite(values)
    sums = np.add.reduceat(np.where(is_known, values, 0.0).astype(np.float64), edges[:-1])
    counts = np.add.reduceat(is_known.astype(np.int64), edges[:-1])
    return edges, np.where(counts, sums / np.maximum(counts, 1), np.nan)


def strip_path(edges: NDArray[np.int64], heights: NDArray[np.float64], is_signed: bool) -> str:
    """The columns of a strip as one SVG path. A height is a share of the strip, from the middle when it has a sign. NaN
    has no column. Neighbours of one height are one column."""
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
