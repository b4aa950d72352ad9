"""Strategies: what each one would have made of a trajectory, two of them side by side, and the step-wise cost. A worker
makes the replays (``rollouts.jobs.replays.trajectory_replays``). This page reads figures and rows, and aligns two
rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from django.http import HttpRequest

from inspector.trajectories.compare.side_by_side import (
    MAX_TOKENS, TokenComparison, align_texts, as_json, compare, first_shown, linked, opened_folds
)
from inspector.trajectories.frame import FILTER_FIELDS, TrajectoryHead, asking, base_url, head_of, work_state
from inspector.trajectories.place import PagePlace, View
from inspector.trajectories.tokens import page_queries as data
from inspector.web.twins import whole_number
from rollout_inspector.streams.figures import percent_of, trained_as_sampled
from rollout_inspector.streams.strategies import STRATEGIES, about_strategy
from rollout_inspector.streams.trajectory import Origin, Tokens
from rollout_inspector.text.html.tokens import painter_of
from rollouts.jobs.replays import trajectory_replays
from rollouts.store import models
from rollouts.store.trajectories import trajectory_parts as parts
from rollouts.store.trajectories.replays import stored_rows
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary, StepWiseRows

RECORDED = "recorded"  # The name of the stored rows, beside the names of the strategies.


@dataclass(frozen=True)
class StrategiesPage(TrajectoryHead):
    """What each strategy would have made of a trajectory."""

    state: str
    """The state of the replay: ``live``, ``missing``, ``unasked``, ``queued``, ``running``, ``failed``, ``cancelled``,
    ``done``."""
    why: str | None
    """A sentence about the state; None when there is nothing to say."""
    run_strategy: str | None
    """The strategy that the run used; None when nobody recorded it."""
    strategies: list[dict[str, Any]]
    """The figures of each strategy, as the worker stored them, and ``about``: what the strategy does."""
    step_wise: list[StepWiseRows]
    """What one row per step costs, for the trajectory and for its group."""
    comparison: dict[str, Any] | None
    """The two rows that the address names (``left``, ``right``), the ``verdict`` in a sentence, and what a comparison
    has everywhere; None when they cannot be compared."""


def strategies_page(request: HttpRequest, trajectory: models.StoredTrajectory) -> tuple[StrategiesPage, dict[str, Any]]:
    """The figures, and the comparison that the address asks for."""
    state, replay, words = work_state(
        trajectory, trajectory_replays.missing, lambda: trajectory_replays.current(trajectory),
        live="Strategies are replayed when the trajectory has ended.",
        unasked="No strategy has been replayed over this trajectory yet. Log in to replay one.",
    )
    rows, steps = parts.rows_and_steps(trajectory)
    figures = replay.report["strategies"] if replay is not None and replay.report else []
    page = StrategiesPage(
        **head_of(trajectory), state=state, why=words or None, run_strategy=trajectory.run.strategy or None,
        strategies=[{**figure, "about": about_strategy(figure["strategy"])} for figure in figures],
        step_wise=parts.step_wise_scopes(trajectory), comparison=None,
    )
    table, missing = data.table_of(trajectory.run.tokenizer)
    painter = painter_of(table)
    notices: list[str] = []
    html: dict[str, Any] = {
        "words": words,
        "notices": notices,
        "tokenizer_missing": missing,
        **asking(request, trajectory, state),
        "lines": [_line(figure, trajectory, rows, steps, request.GET) for figure in page.strategies],
        "recorded_share": _recorded_share(trajectory),
        "recorded_repaid": _recorded_repaid(rows, steps),
        "keep": [(name, value) for name in FILTER_FIELDS if (value := request.GET.get(name))],
    }
    pair_asked = _pair(request.GET, trajectory, figures, rows, notices) if figures else None
    if pair_asked is None or replay is None:
        return page, html
    replayed = [
        (figure["strategy"], figure["strategy"].replace("_", " ")) for figure in figures if not figure["refused"]
    ]
    html |= {"asked": pair_asked, "choices": [(RECORDED, "as recorded"), *replayed]}
    tokens = _both_rows(replay, trajectory, pair_asked, rows, notices)
    if tokens is None:
        return page, html
    left, right = (side.counted(row) for side, row in zip(pair_asked, tokens, strict=True))
    options: dict[str, Any] = {"opened": opened_folds(request.GET), "first": first_shown(request.GET)}
    options["sampled"] = tokens[0].origin == Origin.SAMPLED
    comparison = compare(*tokens, align_texts(*(row.ids for row in tokens)), painter, **options)
    verdict, same = _verdict(comparison, *tokens)
    compared = {"left": left, "right": right, "verdict": verdict, **as_json(comparison, painter)}
    row = left.row if left.strategy == RECORDED else None
    html |= {
        "comparison": linked(comparison, row, base_url(trajectory), request.GET),
        "verdict": verdict, "tone": "yes" if same else "no", "left_note": left.note, "right_note": right.note,
    }
    return replace(page, comparison=compared), html


def _recorded_share(trajectory: models.StoredTrajectory) -> str:
    """The share of the sampled tokens that the stored rows train as they were sampled; empty where it is not known."""
    if trajectory.n_lost is None or not trajectory.n_sampled:
        return ""
    return percent_of(trained_as_sampled(trajectory.n_sampled, trajectory.n_lost), trajectory.n_sampled)


def _recorded_repaid(rows: Sequence[RowSummary], steps: Sequence[StepSummary]) -> int | None:
    """Tokens of later rows that an earlier row has forwarded already; None for rows with ids of their own."""
    if not all(row.follows_steps for row in rows):
        return None
    firsts: dict[int, StepSummary] = {}
    for step in steps:
        firsts.setdefault(step.row, step)
    return sum(step.shared_length for step in firsts.values() if step.parent is not None)


def _line(
    figure: Mapping[str, Any], trajectory: models.StoredTrajectory, rows: Sequence[RowSummary],
    steps: Sequence[StepSummary], params: Mapping[str, str],
) -> dict[str, Any]:
    """The figures of a strategy, and their words for the table."""
    place = figure["differs_at"]
    url = ""
    if place is not None:
        row = next((step.row for step in steps if step.index == place["step"]), 0)
        if row < len(rows) and rows[row].follows_steps:  # else the row counts other tokens than the step
            url = base_url(trajectory) + PagePlace(row=row, view=View.TOKENS).marked(place["offset"], place["offset"])
    return {
        **figure,
        "name": figure["strategy"].replace("_", " "),
        "is_own": figure["strategy"] == trajectory.run.strategy,
        "share": percent_of(figure["trained_share"], 1),
        "place": "" if place is None else f"step {place['step']}, token {place['offset']:,}",
        "place_url": url,
        "is_right": figure["strategy"] == params.get("right"),
    }


@dataclass(frozen=True)
class StrategySide:
    """One side of the comparison."""

    strategy: str  # A strategy, or ``recorded``.
    row: int
    n_rows: int  # Rows of the strategy.
    tokens: int = 0
    trained: int = 0
    origins: dict[str, int] | None = None  # Tokens by origin; None when the origins are not known.

    @property
    def name(self) -> str:
        what = "as recorded" if self.strategy == RECORDED else self.strategy.replace("_", " ")
        return f"{what}, row {self.row} of {self.n_rows}" if self.n_rows > 1 else what

    @property
    def note(self) -> str:
        words = f"{self.tokens:,} tokens, {self.trained:,} trained"
        if self.origins is None:
            return f"{words}; encoded again, so nobody knows which of them were sampled"
        counts_text = [f"{n:,} {slug}" for slug, n in self.origins.items() if n and slug != "prompt"]
        return f"{words}: {', '.join(counts_text)}"

    def counted(self, tokens: Tokens) -> StrategySide:
        """The side with the counts of its tokens."""
        by_origin = {origin.slug: int(np.count_nonzero(tokens.origin == origin)) for origin in Origin}
        origins = by_origin if bool(np.any(tokens.origin)) else None
        return replace(self, tokens=len(tokens), trained=int(np.count_nonzero(tokens.loss_mask)), origins=origins)


def _pair(
    params: Mapping[str, str], trajectory: models.StoredTrajectory, figures: Sequence[Mapping[str, Any]],
    rows: Sequence[RowSummary], notices: list[str],
) -> tuple[StrategySide, StrategySide] | None:
    """The two sides that the address names. The default: the stored rows, and the first strategy that differs."""
    counts = {
        RECORDED: len(rows),
        **{figure["strategy"]: figure["rows_count"] for figure in figures if not figure["refused"]},
    }
    counts = {slug: count for slug, count in counts.items() if count}
    others = [figure for figure in figures if figure["strategy"] in counts]
    if not others:
        return None
    first = RECORDED if RECORDED in counts else others[0]["strategy"]
    other = next((figure["strategy"] for figure in others if figure["differs_at"]), others[0]["strategy"])
    sides = []
    for name, default in (("left", first), ("right", other)):
        slug = params.get(name, "") or default
        if slug not in counts:
            why = "cannot be replayed here" if slug in STRATEGIES else "is no strategy"
            notices.append(f"“{slug[:40]}” {why}; {default.replace('_', ' ')} is shown.")
            slug = default
        last = counts[slug] - 1
        row_number = whole_number(params.get(f"{name}_row"))
        row = last if row_number is None else row_number
        if row > last:
            notices.append(f"{slug.replace('_', ' ')} makes rows 0 to {last}; row {last} is shown.")
            row = last
        sides.append(StrategySide(slug, row, counts[slug]))
    return sides[0], sides[1]


def _both_rows(
    replay: models.Replay, trajectory: models.StoredTrajectory, asked: tuple[StrategySide, StrategySide],
    rows: Sequence[RowSummary], notices: list[str],
) -> tuple[Tokens, Tokens] | None:
    """Both rows with their origins and loss masks. None and a notice when figure cannot be shown."""
    stored = stored_rows(replay, [side.strategy for side in asked])
    row_pair = []
    for side in asked:
        is_recorded = side.strategy == RECORDED
        if not is_recorded and side.strategy not in stored:
            name = side.strategy.replace("_", " ")
            notices.append(f"The rows of {name} are too many to be kept; only its figures are.")
            return None
        length = rows[side.row].n_tokens if is_recorded else stored[side.strategy].lengths[side.row]
        if length > MAX_TOKENS:
            notices.append(f"{side.name} holds {length:,} tokens; at most {MAX_TOKENS:,} are compared at once.")
            return None
        if is_recorded:
            row_pair.append(data.read_tokens(trajectory, rows[side.row], 0, length))
        else:
            row = trajectory_replays.row_of(stored[side.strategy], side.row)
            assert row.origin is not None  # row_of fills it in
            row_pair.append(Tokens(0, row.ids, row.origin, row.loss_mask))
    return row_pair[0], row_pair[1]


def _verdict(comparison: TokenComparison, left: Tokens, right: Tokens) -> tuple[str, bool]:
    """The sentence above the table, and whether both rows train the same tokens."""
    if comparison.n_sites:
        return comparison.words, False
    masks = int(np.count_nonzero(left.loss_mask != right.loss_mask))
    if masks:
        return f"The ids are the same {len(left):,}; the loss masks differ at {masks:,} of them.", False
    return f"The same {len(left):,} tokens with the same loss mask.", True
