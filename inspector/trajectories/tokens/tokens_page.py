"""The tokens page: one row of a trajectory as text or as tokens, with its turns and findings. The same as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import zip_longest
from typing import Any
from urllib.parse import urlencode

import numpy as np
from django.urls import reverse

from inspector.html.inspector_tags import kind_shown
from inspector.html.tokens import TokenPainter, Tokens
from inspector.runs.muted import MutedValues
from inspector.trajectories.discussion import CommentValues, Discussion, comment_marks
from inspector.trajectories.frame import PageLink, TrajectoryHead, base_url, fingerprint, head_of
from inspector.trajectories.neighbours import FILTER_FIELDS
from inspector.trajectories.place import MAX_FINDINGS, MAX_RUN_VIEW_TOKENS, WINDOW, PagePlace, View, read_place
from inspector.trajectories.tokens import legends, lenses
from inspector.trajectories.tokens import page_queries as data
from inspector.trajectories.tokens.finding_marks import DiffIds, drawn_diff, finding_diffs, row_marks
from inspector.trajectories.tokens.lane_tree import LaneTree, lane_tree, lanes_shown
from inspector.trajectories.tokens.lens_values import lens_links, lens_values, weight_lenses, weights_shown
from inspector.trajectories.tokens.scales import scale_of
from inspector.trajectories.tokens.token_pane import Reader, build_reader, wanted_range
from inspector.trajectories.tokens.token_window import CardColumns, TokenWindow, card_columns, read_window
from inspector.trajectories.tokens.turns import FindingItem, Turn, worst_finding
from rollout_inspector.diagnose.checks import all_clear, totals
from rollout_inspector.formats import lacks_of
from rollouts.store.jobs.activity import is_active
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories import engine_columns, trajectory_parts
from rollouts.store.trajectories.findings import worst_severity
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

MAX_OUTLINE = 400
MAX_ROWS = 60
VIEW_NAMES = {View.RUNS: "run view", View.TOKENS: "token view"}


@dataclass(frozen=True)
class TokensRead:
    """What the page and its JSON share: everything except tokens."""

    rows: list[RowSummary]
    steps: list[StepSummary]
    place: PagePlace
    findings: list[FindingItem]
    turns: list[Turn]
    """The turns of the row that the place names, or those that touch its window."""
    columns: dict[int, list[str]]
    """Row index -> names of the lenses from a trainer's columns, or from what engines told."""

    @property
    def row(self) -> RowSummary | None:
        """The row that the place names."""
        return self.rows[self.place.row] if self.rows else None

    @property
    def findings_here(self) -> list[FindingItem]:
        """The findings of the row."""
        return [item for item in self.findings if item.row == self.place.row]

    @property
    def has_trainers(self) -> bool:
        """Whether the row has columns of a trainer: it has arrays of its own then."""
        return bool(self.columns.get(self.place.row)) and self.row is not None and not self.row.follows_steps


@dataclass(frozen=True)
class RowSize:
    """A row in the JSON."""

    index: int
    n_tokens: int
    n_trained: int


@dataclass(frozen=True)
class TurnSummary:
    """A turn in the JSON: tokens ``[start, stop)`` of its row."""

    number: int
    role: str
    part: str
    step: int | None
    start: int
    stop: int
    n_trained: int | None
    """None: only the loss mask tells it, and the mask was not read."""
    findings: list[int]
    """Numbers of the findings that begin in it."""


OUTCOMES = ("failed", "noted", "passed", "not decidable")


@dataclass(frozen=True)
class CheckLine:
    """A check of the diagnosis in the JSON."""

    name: str
    claim: str
    """What is true when it passes."""
    outcome: str
    """``passed``, ``noted`` (info findings alone), ``failed`` or ``not decidable``."""
    needs: list[str]
    """The fields that are missing, if it is not decidable."""


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
    rows: list[RowSize]
    """All rows. When no row is stored yet, the rows that the steps make so far."""
    row: RowSize | None
    """The row that the address names; None when there is no row."""
    lenses: list[str]
    """Values of ``lens`` in an address of this row."""
    mark: tuple[int, int] | None
    """Tokens ``[start, stop)`` that the address marks."""
    turns: list[TurnSummary]
    """The turns of the row."""
    findings: list[FindingItem]
    """All findings of the trajectory, in reading order."""
    muted: list[MutedValues]
    """The rules that mute some of these findings."""
    checks: list[CheckLine] | None
    """What the diagnosis checked. None = not known: it has not run, or an earlier version ran."""
    comments: list[CommentValues] | None
    """What people say of it, in reading order; null for the visitor of a share link."""
    lanes: LaneTree | None
    """The chains of steps, and where each leaves another one; None where the steps form one chain."""
    seen: bool | None
    """The reader has marked it as seen; null for the visitor of a share link."""
    window: TokenWindow
    """At most 4096 tokens of the row, with every field."""


@dataclass(frozen=True)
class RowTab(PageLink):
    """A row above the pane."""

    size: str
    worst: str
    """The worst severity of its findings, or empty."""


def read_lenses(
    trajectory: StoredTrajectory, rows: Sequence[RowSummary], steps: Sequence[StepSummary]
) -> dict[int, list[str]]:
    """Row index -> names of its lenses from a trainer's columns, or from what engines told. At most one query."""
    columns = {} if all(row.follows_steps for row in rows) else data.read_columns(trajectory)
    return weight_lenses(columns) | engine_columns.names_beside(rows, steps)


def read_tokens_page(params: Mapping[str, str], trajectory: StoredTrajectory, window_alone: bool = False) -> TokensRead:
    """Everything of the tokens page except its tokens. ``window_alone``: only the turns that touch the window."""
    rows, steps = trajectory_parts.rows_and_steps(trajectory)
    columns = read_lenses(trajectory, rows, steps)
    findings = data.read_findings(trajectory, steps, rows)
    worst = worst_finding(findings, wanted={"finding": kind_shown(trajectory), **dict(params.items())})
    place = read_place(params, [row.n_tokens for row in rows], keep=FILTER_FIELDS, columns=columns, fault=worst)
    turns: list[Turn] = []
    if rows:
        row = rows[place.row]
        within = wanted_range(place, row.n_tokens) if window_alone else None
        turns = data.read_turns(trajectory, row, steps, findings, within)
    return TokensRead(rows, steps, place, findings, turns, columns)


def trajectory_page(trajectory: StoredTrajectory, found: TokensRead, discussion: Discussion) -> TrajectoryPage:
    """The page as JSON."""
    place = found.place
    painter, missing = data.painter_of(trajectory.run.tokenizer)
    rows = [RowSize(row.index, row.n_tokens, row.n_trained) for row in found.rows]
    row, columns = found.row, found.columns.get(place.row, [])
    window = read_window(
        trajectory, row, place.window, found.turns, found.findings_here, painter, found.has_trainers, found.steps
    )
    return TrajectoryPage(
        **head_of(trajectory),
        group=trajectory.group,
        n_steps=trajectory.n_steps,
        n_rows=trajectory.n_rows,
        notices=[*place.notices, *([f"No text: {missing}"] if missing else [])],
        rows=rows,
        row=rows[place.row] if rows else None,
        lenses=[*(lens.slug for lens in lenses.LENSES), *columns],
        mark=place.mark,
        turns=[
            TurnSummary(
                turn.number, turn.role, turn.part, turn.step_index, turn.start, turn.stop, turn.n_trained,
                [item.number for item in turn.findings],
            )
            for turn in found.turns
        ],
        findings=found.findings,
        muted=[rule for rule in discussion.muted if any(item.kind == rule.kind for item in found.findings)],
        checks=check_lines(trajectory),
        comments=discussion.comments,
        lanes=lane_tree(trajectory, found.rows, found.steps, found.findings),
        seen=discussion.seen,
        window=_with_columns(trajectory, window, found, columns),
    )


def card_page(trajectory: StoredTrajectory, found: TokensRead) -> CardColumns:
    """The window that the page shows, for the cards of its tokens."""
    place = found.place
    painter, _ = data.painter_of(trajectory.run.tokenizer)
    card = card_columns(
        trajectory, found.row, place.window, found.turns, found.findings_here, painter, found.has_trainers, found.steps
    )
    if found.row is None:
        return card
    parts_of_row = engine_columns.parts_with_alternatives(trajectory, found.row, found.steps)
    spans = engine_columns.spans_with_alternatives(parts_of_row, card.start, card.stop)
    columns = card.columns | _entropy(found, found.row, card)
    weights = weights_shown(trajectory, found.row, place.lens, found.steps, card.start, card.stop)
    if weights is not None:
        columns |= {lenses.column_label(place.lens): weights}
    return replace(card, columns=columns, alternatives=spans)


def _entropy(found: TokensRead, row: RowSummary, card: CardColumns) -> dict[str, list[float | None]]:
    """The entropy of a window for its cards. Four digits: with the rest of the data it must stay small."""
    if not row.follows_steps or engine_columns.ENTROPY not in found.columns.get(row.index, ()):
        return {}
    values = engine_columns.columns_beside(row, found.steps, [engine_columns.ENTROPY], card.start, card.stop)[
        engine_columns.ENTROPY
    ]
    return {
        engine_columns.ENTROPY: [
            float(f"{entropy:.4g}") if np.isfinite(entropy) else None for entropy in values.tolist()
        ]
    }


def _with_columns(
    trajectory: StoredTrajectory, window: TokenWindow, found: TokensRead, names: Sequence[str]
) -> TokenWindow:
    """The window, with what engines told beside its tokens, and their weights where the lens shows these."""
    row, lens = found.row, found.place.lens
    columns: dict[str, list[float | None]] = {}
    if row is not None and row.follows_steps and names:
        for name, values in engine_columns.columns_beside(row, found.steps, names, window.start, window.stop).items():
            columns[name] = [value if np.isfinite(value) else None for value in values.tolist()]
    weights = weights_shown(trajectory, row, lens, found.steps, window.start, window.stop)
    for name, column in (columns | ({lens: weights} if weights is not None else {})).items():
        for token, value in zip(window.tokens, column, strict=True):
            token.setdefault("columns", {})[name] = value
    return window


class PagePart(StrEnum):
    """How much of the page a request asks for, by the target that htmx or a script names."""

    PAGE = ""
    READER = "reader"
    """Bar, map of the row, strips and tokens."""
    WINDOW = "window"
    """The reader without the map, which stays: another window of the same row."""
    MORE = "more"
    """The same for the next part of a row in the run view."""

    @property
    def has_map(self) -> bool:
        """Without the map of the row, only the turns that touch the window are read."""
        return self in (PagePart.PAGE, PagePart.READER)


def trajectory_html(
    trajectory: StoredTrajectory,
    found: TokensRead,
    discussion: Discussion | None = None,
    part: PagePart = PagePart.PAGE,
) -> dict[str, Any]:
    """The variables of the page's template, or those of the reader alone.

    Without ``discussion`` the tokens have no signs of comments.
    """
    place, rows, turns = found.place, found.rows, found.turns
    painter, missing = data.painter_of(trajectory.run.tokenizer)
    own = base_url(trajectory)
    n_tokens = rows[place.row].n_tokens if rows else 0
    start, stop = wanted_range(place, n_tokens)
    tokens = data.read_tokens(trajectory, rows[place.row], start, stop, found.steps) if rows else _no_tokens()
    keys = [(lens.slug, lens.legend) for lens in lenses.LENSES]
    lens = lenses.find(place.lens)
    values = scale = None
    lacking = ""
    if lens is not None:
        paint = lens.paint
        tokens = replace(tokens, classes=lens.classes(tokens)) if lens.classes else tokens
    else:  # read_place accepts a column only when the row has it
        column = lens_values(trajectory, rows[place.row], place.lens, found.steps)
        values, lacking = column.values, column.note
        scale = scale_of(place.lens, values)
        classes = scale.classes(values, n_tokens)
        paint = scale.paint
        keys.append((place.lens, scale.legend(place.lens)))
        tokens = replace(tokens, classes=classes[tokens.start : tokens.start + len(tokens)])
    ids = trajectory_parts.ids_of_findings(trajectory, MAX_FINDINGS) if found.findings else []
    diffs = finding_diffs(found.findings, ids, found.steps)
    comment_boxes = comment_marks(discussion.comments or [] if discussion else [], place.row)
    marks = row_marks(place, found.findings, diffs, tokens, n_tokens, painter, comment_boxes)
    reader = build_reader(place, turns, tokens, n_tokens, painter, marks)
    shown_tokens = tokens.slice(reader.start, reader.stop)
    map_address = legends.map_address(place, n_tokens, own)
    window_query = place.query(view=View.TOKENS, mark=None, window=reader.start, find="", keep=())
    columns = found.columns.get(place.row, [])
    shown_here = {
        "place": place,
        "reader": reader,
        "solo": place.solo if any(section.turn.number == place.solo for section in reader.sections) else 0,
        "map_address": map_address,
        "map": legends.row_map(turns, found.findings, place, n_tokens, map_address) if part.has_map else {},
        "map_now": legends.map_now(place, reader, n_tokens),
        "strips": list(legends.lens_strips(place, shown_tokens, values, scale)),
        # What is drawn over the tokens beside the lens, for the legend.
        "has_gaps": any(gap != comment_boxes.get(at) for at, gap in marks.gaps.items()),
        "has_comments": bool(comment_boxes),
        # Each token is a box of its own there, and boxes stand from left to right.
        "mixes_directions": place.view == View.TOKENS and painter.runs_right_to_left(shown_tokens.ids),
        "has_foreign": any(section.n_foreign for section in reader.sections),
        "card_url": f"{own}/card.json{window_query}",
        "alternatives_url": f"{own}/alternatives.json?row={place.row}",
        "find_url": f"{own}/find.json?row={place.row}",
        "tokenizer_missing": missing,
        "row_tabs": [
            RowTab(
                f"row {row.index}", own + _row_query(place, found.findings, row.index), row.index == place.row,
                f"{row.n_tokens:,}",
                worst_severity(item.weight for item in found.findings if item.row == row.index),
            )
            for row in rows[:MAX_ROWS]
        ],
        "rows_rest": f"and {len(rows) - MAX_ROWS:,} more: ?row=N opens them" if len(rows) > MAX_ROWS else "",
        "view_choices": [
            PageLink(name, own + place.query(view=view, window=_window_for(view, place, n_tokens)), view == place.view)
            for view, name in VIEW_NAMES.items()
        ],
        "lens_choices": lens_links(place, own, columns),
        # The lens as the style sheet knows it: a trainer's column is "value" or "signed".
        "lens_paint": paint,
        "legends": keys,
        "value_note": legends.value_note(place, values, scale, reader, lacking),
        "go_fields": _go_fields(place),
        "mark_text": f"{place.mark[0]}-{place.mark[1]}" if place.mark else "",
        "window_text": f"tokens {reader.start:,}-{reader.stop:,} of {n_tokens:,}",
        "more_from": f"{reader.stop:,}",
        "nothing_here": _nothing(trajectory),
        "conversation_url": _conversation_url(trajectory, place, reader.start) if trajectory.n_steps else "",
        "record_url": reverse("trajectory-record", args=[trajectory.code]) if trajectory.n_steps else "",
    }
    if part != PagePart.PAGE:
        return shown_here
    marked = own + place.marked_template()
    kinds = {item.kind for item in found.findings}
    entries = _finding_entries(found, trajectory, own, diffs, tokens, painter)
    return shown_here | {
        "lacks": lacks_of(trajectory.run.format) if trajectory.n_steps and not trajectory.n_tokens else [],
        "findings": entries,
        "muted_findings": [entry for entry in entries if entry["item"].muted],
        "muted_rules": [rule for rule in (discussion.muted if discussion else []) if rule.kind in kinds],
        "no_findings": _no_findings(trajectory),
        "checks": check_lines(trajectory),
        **lanes_shown(trajectory, found.rows, found.steps, found.findings, place, own),
        "turns": turns,
        "outline": [(turn, _turn_url(turn, marked, reader)) for turn in turns[:MAX_OUTLINE]],
        "outline_rest": f"and {len(turns) - MAX_OUTLINE:,} more turns" if len(turns) > MAX_OUTLINE else "",
        # The address that the page of a growing trajectory asks.
        "live_url": f"{own}{place.query()}&have={fingerprint(trajectory)}" if is_active(trajectory) else "",
    }


def _conversation_url(trajectory: StoredTrajectory, place: PagePlace, start: int) -> str:
    """The message that holds the mark, else the first token of the window."""
    first, stop = place.mark or (start, start + 1)
    at = place.query(mark=(first, stop), keep=())[1:]
    query = urlencode([*place.keep, ("place", at)])
    return f"{reverse('trajectory-record', args=[trajectory.code])}?{query}#here"


def _row_query(place: PagePlace, findings: Sequence[FindingItem], row: int) -> str:
    """The address of a row's tab: at the worst finding of the row, else at its start."""
    worst = worst_finding(findings, row)
    return place.query(row=row, mark=worst.places[0] if worst else None, window=0)


def _no_tokens() -> Tokens:
    return Tokens(0, np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.bool_))


def _window_for(view: View, place: PagePlace, n_tokens: int) -> int:
    if place.mark:
        return 0
    if view == View.TOKENS:
        return place.window // WINDOW * WINDOW
    return 0 if n_tokens <= MAX_RUN_VIEW_TOKENS else place.window


def _finding_entries(
    found: TokensRead,
    trajectory: StoredTrajectory,
    own: str,
    diffs: Sequence[DiffIds | None],
    tokens: Tokens,
    painter: TokenPainter,
) -> list[dict[str, Any]]:
    """The findings in the list beside the pane, with their addresses."""
    place = found.place
    compare = reverse("trajectory-compare", args=[trajectory.code])
    deltas = reverse("trajectory-deltas", args=[trajectory.code])
    breaks = {(step.index, step.shared_length) for step in found.steps if step.breaks}
    entries = []
    for item, one_diff in zip_longest(found.findings[:MAX_FINDINGS], diffs):
        mark = item.places[0]
        where = f"step {item.step}" if item.step is not None else f"row {item.row}"
        is_probe = item.step is None and item.row is None  # refused before anything was sampled
        if is_probe:
            where = "the template’s probe"
        stop = f"-{item.stop:,}" if item.stop > item.start + 1 else ""
        query_of_finding = {"step": item.step, **({"side": "prompt"} if (item.step, item.start) in breaks else {})}
        compare_url = f"{compare}?{urlencode(query_of_finding)}" if item.is_comparable else ""
        delta_url = f"{deltas}?step={item.step}" if item.axis == "delta" and item.step is not None else ""
        lens = lenses.lens_of(item.kind, found.columns.get(item.row or 0, ()))
        lens = place.lens if lens == lenses.DEFAULT else lens
        url = own + place.query(row=item.row or 0, mark=mark if item.row is not None else None, window=0, lens=lens)
        entries.append(
            {
                "item": item,
                "place": f"{where}, token{'s' * bool(stop)} {item.start:,}{stop}",
                "trained_place": "" if item.is_held else f"row {item.row}, token {mark[0]:,}",
                # When a strategy made other rows, no row holds the stream of the step. Then another page shows it.
                "url": url if item.row is not None else compare_url or delta_url or url,
                # Another lens shows it: its link is followed, and no script lights it in this one.
                "needs_lens": lens != place.lens,
                "diff": drawn_diff(one_diff, place, tokens, painter),
                "current": item.row == place.row and place.mark == mark,
                "compare_url": compare_url,
                "script_url": "" if is_probe else reverse("finding-script", args=[trajectory.code, item.number]),
                "delta_url": delta_url,
            }
        )
    return entries


def check_lines(trajectory: StoredTrajectory) -> list[CheckLine] | None:
    """What each check of the diagnosis came to."""
    if trajectory.checks is None:
        return None
    lines = [
        CheckLine(
            total.name, total.claim, trajectory.checks[total.name] if total.checked else "not decidable", total.needs
        )
        for total in totals([(trajectory.checks, 1)])
    ]
    return sorted(lines, key=lambda one: OUTCOMES.index(one.outcome))


def _no_findings(trajectory: StoredTrajectory) -> str:
    if is_active(trajectory):
        return "None yet: the diagnosis runs when the trajectory ends."
    if trajectory.status != StoredTrajectory.Status.DONE:
        return "Not checked: the trajectory did not reach its end."
    return all_clear(totals([(trajectory.checks, 1)]))


def _nothing(trajectory: StoredTrajectory) -> str:
    if is_active(trajectory):
        return "No step has finished yet. This page grows by itself."
    return "This trajectory has no tokens" + (": the source recorded none." if not trajectory.error else ".")


def _turn_url(turn: Turn, marked: str, reader: Reader) -> str:
    if reader.start <= turn.start < reader.stop:
        return f"#turn-{turn.number}"
    return marked.format(turn.start, turn.start + 1)


def _go_fields(place: PagePlace) -> list[tuple[str, str]]:
    fields = [("row", str(place.row) if place.row else ""), ("view", "tokens" if place.view == View.TOKENS else "")]
    fields.append(("lens", place.lens if place.lens != lenses.DEFAULT else ""))
    fields.append(("find", place.find))
    return [(name, value) for name, value in [*fields, *place.keep] if value]
