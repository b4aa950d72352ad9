"""The place that an address of the tokens page names: a row, a view, a lens, a window and a mark."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from urllib.parse import urlencode

from inspector.trajectories.tokens import lenses
from inspector.trajectories.tokens.findings import DrawnFinding
from inspector.web.twins import whole_number

WINDOW = 4096  # Tokens in one window of the token view.

MAX_RUN_VIEW_TOKENS = 400_000
"""The most tokens that one response of the run view reads. The browser fetches the rest as the reader scrolls."""

TOKEN_KINDS = {"noncanonical_sampling", "boundary_merge", "invalid_utf8", "row_not_sampled", "tokenizer_mismatch"}
"""Finding kinds that may leave the text alike and change only how it is cut: the token view shows that."""

MAX_FIND = 200  # The longest text that an address searches for.

MAX_FINDINGS = 300  # The most findings that one page lists.


class View(StrEnum):
    """How the tokens of a row are drawn."""

    RUNS = "runs"  # Text in runs of equal state: the whole row.
    TOKENS = "tokens"  # An element per token: one window.


VIEW_NAMES = {View.RUNS: "run view", View.TOKENS: "token view"}


@dataclass(frozen=True)
class PagePlace:
    """What an address of the tokens page asks for, corrected to fit the stored rows."""

    row: int = 0
    view: View = View.RUNS
    lens: str = lenses.DEFAULT  # The slug of a built-in lens, or the name of a trainer's column.
    window: int = 0  # Row offset of the first token shown.
    mark: tuple[int, int] | None = None
    find: str = ""  # The text that is being searched for in the row.
    solo: int = 0  # The number of the turn that is shown alone; 0 = all are shown.
    keep: tuple[tuple[str, str], ...] = ()  # Parameters of the run's list, so that the neighbours follow its filter.
    notices: tuple[str, ...] = field(default=(), compare=False)
    """A sentence for each part of the address that could not be followed."""
    has_fault: bool = field(default=False, compare=False)
    """An address without a place opens at a fault. So the top of row 0 must be named."""
    most: int = field(default=0, compare=False)
    """The most tokens of a file that somebody saves; 0 = a page, whose view says how many."""

    @property
    def size(self) -> int:
        """The most tokens that are drawn."""
        return self.most or (WINDOW if self.view == View.TOKENS else MAX_RUN_VIEW_TOKENS)

    def query(self, **changes: object) -> str:
        """The query string of this place with ``changes``, ``?`` included. Defaults are left out."""
        moved = {"solo": 0} if changes.keys() & {"row", "mark", "window"} else {}
        place = replace(self, **moved | changes)  # type: ignore[arg-type]
        has_top = place.has_fault and not place.mark and not place.window
        fields: list[tuple[str, object, object]] = [
            ("row", place.row, place.row or has_top),
            ("view", place.view.value, place.view != View.RUNS),
            ("lens", place.lens, place.lens != lenses.DEFAULT),
            ("t", "{}-{}".format(*place.mark or ("", "")), place.mark),
            ("w", place.window, place.window),
            ("find", place.find, place.find),
            ("solo", place.solo, place.solo),
        ]
        return "?" + urlencode([*((name, value) for name, value, is_named in fields if is_named), *place.keep])

    def marked(self, start: int, stop: int, **changes: object) -> str:
        """:meth:`query` with the tokens ``[start, stop)`` marked, at least one, in the window that shows them."""
        return self.query(mark=(start, max(stop, start + 1)), window=0, **changes)

    def marked_template(self, **changes: object) -> str:
        """:meth:`marked` for many ranges: ``str.format`` with start and stop fills it."""
        query = self.marked(0, 1, **changes).replace("{", "{{").replace("}", "}}")
        return query.replace("t=0-1", "t={}-{}", 1)


_RANGE = re.compile(r"\s*(\d{1,12})\s*(?:-\s*(\d{1,12})\s*)?", re.ASCII)


def read_range(text: str) -> tuple[int, int] | None:
    """Start and stop that ``1204-1260`` or ``1204`` names, whether or not they make sense; None for other texts."""
    match = _RANGE.fullmatch(text)
    return None if match is None else (int(match[1]), int(match[2]) if match[2] else int(match[1]) + 1)


def read_place(
    params: Mapping[str, str], row_lengths: Sequence[int], keep: Iterable[str] = (),
    columns: Mapping[int, Sequence[str]] | None = None, fault: DrawnFinding | None = None,
) -> PagePlace:
    """The place that query parameters name. Never raises: a wrong value is corrected, and ``notices`` says so.
    ``columns``: row index -> names of its trainer's columns, each a lens. ``keep``: parameters of the run's list.
    ``fault``: the worst finding, which is shown when the address names no place, in a view and a lens that show it."""
    notices: list[str] = []
    if fault is not None and fault.drawn_row is not None and not any(params.get(name) for name in ("row", "t", "w")):
        fields = {name: params[name] for name in params}  # a QueryDict holds lists
        lens = lenses.lens_of(fault.kind, (columns or {}).get(fault.drawn_row, ()))
        view = View.TOKENS if fault.kind in TOKEN_KINDS else View.RUNS
        place = {"row": str(fault.drawn_row), "t": "{}-{}".format(*fault.drawn_places[0])}
        params = {"lens": lens, "view": view.value} | {k: v for k, v in fields.items() if v} | place
    row = _whole(params.get("row"), 0)
    if row is None or not 0 <= row < max(len(row_lengths), 1):
        last = max(len(row_lengths) - 1, 0)
        notices.append(f"There is no row {params['row'][:20]} here: rows run from 0 to {last}. This is row 0.")
        row = 0
    view = View.TOKENS if params.get("view") == View.TOKENS else View.RUNS
    lens = params.get("lens") or lenses.DEFAULT
    if lenses.find(lens) is None and lens not in (columns or {}).get(row, ()):
        notices.append(f"This row has no lens “{lens[:40]}”; the loss mask is shown.")
        lens = lenses.DEFAULT
    n_tokens = row_lengths[row] if row_lengths else 0
    mark = None
    range_text = params.get("t", "")
    if range_text:
        span = read_range(range_text)
        if span is None:
            notices.append(f"“{range_text[:40]}” is not a range of tokens. Write it as t=1204-1260.")
        else:
            first, stop = span
            if first >= n_tokens or stop > n_tokens or stop < first:
                notices.append(
                    f"Tokens {first:,}-{stop:,} are not in row {row}, which holds tokens 0-{n_tokens:,}. "
                    "The link may be of another row, or of a longer trajectory."
                )
            if first < n_tokens and stop >= first:
                mark = (first, max(min(stop, n_tokens), first + 1))
    window = _whole(params.get("w"), 0)
    if window is None or window < 0:
        notices.append("The window start w is not a token offset; this is the first window.")
        window = 0
    if n_tokens and window >= n_tokens:
        notices.append(f"Row {row} ends at token {n_tokens:,}; this is its last window.")
        window = max(n_tokens - 1, 0) // WINDOW * WINDOW
    n_shown = WINDOW if view == View.TOKENS else MAX_RUN_VIEW_TOKENS
    if mark and not (params.get("w") and window <= mark[0] < window + n_shown):
        window = opening(view, mark[0], n_tokens)
    other_params = tuple((name, params[name]) for name in keep if params.get(name))
    solo = _whole(params.get("solo"), 0)
    if solo is None:
        notices.append("The turn to show alone is not a number; all turns are shown.")
    find = params.get("find", "")[:MAX_FIND]
    return PagePlace(row, view, lens, window, mark, find, solo or 0, other_params, tuple(notices), fault is not None)


def opening(view: View, offset: int, n_tokens: int) -> int:
    """The start of the window that shows ``offset``. Windows lie on a grid, so that two links open the same page."""
    if view == View.TOKENS:
        return offset // WINDOW * WINDOW
    return 0 if n_tokens <= MAX_RUN_VIEW_TOKENS else max(offset // WINDOW * WINDOW - WINDOW, 0)


def _whole(text: str | None, default: int) -> int | None:
    if text is None or text == "":
        return default
    return whole_number(text, 12)
