"""A row of a trajectory at the place that an address names, read once for its page, its JSON, its cards and files."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from inspector.trajectories.discussion import Discussion
from inspector.trajectories.frame import FILTER_FIELDS
from inspector.trajectories.place import MAX_FINDINGS, WINDOW, PagePlace, read_place
from inspector.trajectories.tokens import lens_values, lenses, page_queries as data
from inspector.trajectories.tokens.findings import DrawnFinding, read_findings, worst_finding
from inspector.trajectories.tokens.lane_tree import read_lanes
from inspector.trajectories.tokens.turns import Turn
from inspector.web.twins import whole_number
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.streams.lanes import Lane
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Tokens, plain_tokens
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.gallery import EXAMPLES
from rollouts.store.models import StoredTrajectory
from rollouts.store.runs.gallery import KEY
from rollouts.store.trajectories import engine_columns, trajectory_parts
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

MARGIN = 3
"""Tokens that are read beyond each edge: a character of four bytes reaches at most three tokens over an edge."""
NOBODY = Discussion(None, False)


class PagePart(StrEnum):
    """How much of the page a request asks for, by the target that htmx or a script names."""

    PAGE = ""
    READER = "reader"  # Bar, map of the row, strips and tokens.
    WINDOW = "window"  # The reader without the map, which stays: another window of the same row.
    MORE = "more"  # The same for the next part of a row in the run view.
    TWIN = "twin"  # The page as JSON.
    CARD = "card"  # The window as JSON, for the cards of its tokens.

    @property
    def has_map(self) -> bool:
        """Without the map of the row, only the turns that touch the window are read."""
        return self in (PagePart.PAGE, PagePart.READER, PagePart.TWIN)

    @property
    def is_drawn(self) -> bool:
        return self not in (PagePart.TWIN, PagePart.CARD)


@dataclass(frozen=True, eq=False)
class TokenView:
    """The parts of a trajectory, and of one of its rows those at ``place``."""

    trajectory: StoredTrajectory
    part: PagePart
    rows: list[RowSummary]
    steps: list[StepSummary]
    lenses: dict[int, list[str]]
    """Row index -> names of the lenses from a trainer's columns, or from what engines told."""
    findings: list[DrawnFinding]
    sides: list[tuple[Ids, Ids]]  # Expected and actual ids of the first findings; only for a part that is drawn.
    lanes: list[Lane]  # Empty where the steps form one chain.
    discussion: Discussion
    table: ByteTable | None
    text_missing: str  # Why no text can be shown; empty when it can.
    place: PagePlace = field(default_factory=PagePlace)
    turns: list[Turn] = field(default_factory=list)  # The turns of the row, or those that touch its window.
    tokens: Tokens = field(default_factory=lambda: plain_tokens(NO_IDS))
    """What is drawn, margins included. In JSON the window, with its columns and the weights that the lens shows."""
    lens_values: Floats | None = None  # The column of the whole row that the lens shows; None for a built-in lens.
    lens_lacks: str = ""  # What the row lacks of that column, in words.
    alternatives: Sequence[tuple[int, int, int]] = ()
    """For cards: start, stop and number of alternatives of each stretch that has some."""

    @property
    def row(self) -> RowSummary | None:
        """The row that the place names."""
        return self.rows[self.place.row] if self.rows else None

    @property
    def n_tokens(self) -> int:
        """Tokens of the row."""
        return self.row.n_tokens if self.row is not None else 0

    @property
    def row_lenses(self) -> list[str]:
        return self.lenses.get(self.place.row, [])

    @property
    def row_findings(self) -> list[DrawnFinding]:
        return [item for item in self.findings if item.drawn_row == self.place.row]


def read_token_view(
    trajectory: StoredTrajectory, params: Mapping[str, str], part: PagePart = PagePart.PAGE,
    discussion: Discussion = NOBODY,
) -> TokenView:
    """What an address of the tokens page names. The number of queries does not depend on the tokens."""
    view = read_view_parts(trajectory, part, discussion)
    number = whole_number(params.get("number"))
    worst = next((item for item in view.findings if item.number == number), None) or worst_finding(
        view.findings, wanted={"finding": _gallery_kind(trajectory), **dict(params.items())}
    )
    lengths = [row.n_tokens for row in view.rows]
    return at_place(view, read_place(params, lengths, keep=FILTER_FIELDS, columns=view.lenses, fault=worst))


def _gallery_kind(trajectory: StoredTrajectory) -> str:
    """The kind of finding that a trajectory of the gallery is there to show; empty for any other trajectory."""
    name = trajectory.external_id
    if KEY not in trajectory.run.settings:
        return ""
    return EXAMPLES[name].kind if name in EXAMPLES else name if name in KINDS else ""


def read_view_parts(trajectory: StoredTrajectory, part: PagePart, discussion: Discussion = NOBODY) -> TokenView:
    """What does not depend on the place."""
    rows, steps = trajectory_parts.rows_and_steps(trajectory)
    columns = {} if all(row.follows_steps for row in rows) else data.read_columns(trajectory)
    findings = read_findings(trajectory, steps, rows)
    lenses_of_rows = lens_values.weight_lenses(columns) | engine_columns.names_beside(rows, steps)
    more = [*[lenses.GRADIENT] * (trajectory.damage is not None), *lens_values.part_lenses(trajectory)]
    return TokenView(
        trajectory, part, rows, steps,
        {row.index: [*lenses_of_rows.get(row.index, []), *more] for row in rows} if more else lenses_of_rows,
        findings, trajectory_parts.ids_of_findings(trajectory, MAX_FINDINGS) if findings and part.is_drawn else [],
        read_lanes(trajectory, rows, steps, findings) if part in (PagePart.PAGE, PagePart.TWIN) else [], discussion,
        *data.table_of(trajectory.run.tokenizer),
    )


def at_place(view: TokenView, place: PagePlace) -> TokenView:
    """The view of the row that ``place`` names, read there."""
    view = replace(view, place=place)
    trajectory, row, part = view.trajectory, view.row, view.part
    if row is None:
        return view
    start, stop = max(place.window - MARGIN, 0), min(place.window + place.size + MARGIN, row.n_tokens)
    within = None if part.has_map else (start, stop)
    if not part.is_drawn:
        start, stop = min(place.window, row.n_tokens), min(place.window + WINDOW, row.n_tokens)
    values, lacks = None, ""
    # read_place accepts a column only when the row has it.
    if lenses.find(place.lens) is None:
        values, lacks = lens_values.lens_values(trajectory, row, place.lens, view.steps)
    tokens = data.read_tokens(trajectory, row, 0, row.n_tokens, view.steps)
    view = replace(
        view, turns=data.read_turns(trajectory, row, view.steps, view.findings, tokens, within),
        tokens=tokens.slice(start, stop), lens_values=values, lens_lacks=lacks,
    )
    if part.is_drawn:
        return view
    view = replace(view, tokens=replace(view.tokens, columns=_columns(view, row)))
    if part == PagePart.TWIN:
        return view
    parts_of_row = engine_columns.parts_beside(trajectory, row, view.steps)
    return replace(view, alternatives=engine_columns.spans_beside(parts_of_row, start, stop))


def _columns(view: TokenView, row: RowSummary) -> dict[str, Floats]:
    start, stop = view.tokens.start, view.tokens.stop
    # The data of the cards must stay small.
    names = [engine_columns.ENTROPY] if row.follows_steps and view.part == PagePart.CARD else None
    columns = engine_columns.columns_of_window(row, view.steps, start, stop, names) if view.row_lenses else {}
    if view.lens_values is not None:
        columns[view.place.lens] = view.lens_values[start:stop]
    return columns
