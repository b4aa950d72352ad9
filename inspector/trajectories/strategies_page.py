"""Strategies: what each would have made of a trajectory, any two side by side, and what step-wise training costs.

The replays come from a worker (``rollouts.work.replays``); this page reads figures and rows, and aligns two rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.http import HttpRequest
from django.utils import timezone

from inspector.html.tokens import Tokens
from inspector.server.health import PATIENCE_SECONDS, has_worker
from inspector.trajectories import reads as data
from inspector.trajectories.compare_page import linked_lines
from inspector.trajectories.group_compare import MAX_ROW_TOKENS
from inspector.trajectories.neighbours import FILTER_FIELDS
from inspector.trajectories.place import PagePlace, View
from inspector.trajectories.side_by_side import TokenComparison, as_json, compare, with_texts
from inspector.trajectories.tokens_page import base_url, is_live
from inspector.web.access import may_write
from inspector.web.twins import whole_number
from rollouts import models
from rollouts.selectors import parts
from rollouts.selectors.parts import RowSummary, StepSummary
from rollouts.tasks.replays import order
from rollouts.tito.align import align_ids
from rollouts.tito.strategies import STRATEGIES, about_strategy
from rollouts.tito.trajectory import Origin
from rollouts.work import replays

RECORDED = "recorded"
"""The rows as they are stored; stands beside the strategies in the comparison."""


def strategies_page(request: HttpRequest, trajectory: models.StoredTrajectory) -> tuple[dict[str, Any], dict[str, Any]]:
    """The figures and the comparison as JSON, and what the template needs beside it."""
    state, made, words = _replay_of(request, trajectory)
    rows, steps = parts.rows_and_steps(trajectory)
    figures = made.report["strategies"] if made is not None and made.report else []
    scopes = parts.step_wise_scopes(trajectory)
    report: dict[str, Any] = {
        "state": state,
        "why": words or None,
        "run_strategy": trajectory.run.strategy or None,
        "strategies": [{**one, "about": about_strategy(one["strategy"])} for one in figures],
        "step_wise": scopes,
        "comparison": None,
    }
    painter, missing = data.painter_of(trajectory.run.tokenizer)
    notices: list[str] = []
    drawn: dict[str, Any] = {
        "here": "strategies",
        "state": state,
        "words": words,
        "notices": notices,
        "tokenizer_missing": missing,
        "is_pending": state in ("queued", "running"),
        "can_retry": state == "failed" and may_write(request),
        "lines": [_line(one, trajectory, steps, request.GET) for one in report["strategies"]],
        "scopes": scopes,
        "about": [(slug.replace("_", " "), one.about) for slug, one in STRATEGIES.items()],
        "keep": [(name, value) for name in FILTER_FIELDS if (value := request.GET.get(name))],
    }
    if not figures or made is None:
        return report, drawn
    asked = _pair(request.GET, trajectory, figures, rows, notices)
    if asked is None:
        return report, drawn
    drawn["asked"] = asked
    drawn["choices"] = [(RECORDED, "as recorded"), *(
        (one["strategy"], one["strategy"].replace("_", " ")) for one in figures if not one["refused"]
    )]  # fmt: skip
    sides = _both_rows(made, trajectory, asked, rows, notices)
    if sides is None:
        return report, drawn
    left, right = sides
    comparison = compare(left, right, align_ids(left.ids, right.ids), painter)
    verdict, same = _verdict(comparison, left, right)
    report["comparison"] = {
        "left": {"strategy": asked[0].slug, "row": asked[0].row, **_counts(asked[0], left)},
        "right": {"strategy": asked[1].slug, "row": asked[1].row, **_counts(asked[1], right)},
        "verdict": verdict,
        **with_texts(as_json(comparison), painter),
    }
    recorded = asked[0].row if asked[0].slug == RECORDED else None
    drawn.update(
        comparison=comparison,
        verdict=verdict,
        tone="yes" if same else "no",
        left_note=_note(asked[0], left),
        right_note=_note(asked[1], right),
        site_lines=linked_lines(comparison, recorded, base_url(trajectory)),
        sites_rest=comparison.n_sites - comparison.n_shown,
    )
    return report, drawn


def _replay_of(request: HttpRequest, trajectory: models.StoredTrajectory) -> tuple[str, models.Replay | None, str]:
    """How far the replay is, the replay, and a sentence. Who is logged in sends a worker by opening the page."""
    if is_live(trajectory):
        return "live", None, "Strategies are replayed when the trajectory has ended."
    reason = replays.missing(trajectory)
    if reason:
        return "missing", None, reason
    if may_write(request):
        made, is_new = replays.ask(trajectory)
        if is_new:
            order(made)
    else:
        found = parts.find_replay(trajectory, replays.key_of(trajectory))
        if found is None:
            return "unasked", None, "Nobody has replayed strategies over this trajectory yet; it takes a login."
        made = found
    if made.status == models.Replay.Status.FAILED:
        return "failed", made, made.error
    return made.status, made, _waiting(made)


def _waiting(made: models.Replay) -> str:
    waited = (timezone.now() - made.asked_at).total_seconds()
    if made.status != models.Replay.Status.QUEUED or waited < PATIENCE_SECONDS:
        return ""
    if has_worker("default"):
        return "A worker is there but busy with something else."
    return "No worker has taken it: start the product (make run) or celery -A inspector worker -Q default."


def _line(
    one: Mapping[str, Any],
    trajectory: models.StoredTrajectory,
    steps: Sequence[StepSummary],
    params: Mapping[str, str],
) -> dict[str, Any]:
    """A line of the table of strategies."""
    place = one["differs_at"]
    url = ""
    if place is not None:
        row = next((step.row for step in steps if step.index == place["step"]), 0)
        mark = (place["offset"], place["offset"] + 1)
        url = base_url(trajectory) + PagePlace(row=row, view=View.TOKENS).query(mark=mark)
    return {
        **one,
        "name": one["strategy"].replace("_", " "),
        "is_own": one["strategy"] == trajectory.run.strategy,
        "share": f"{100 * one['trained_share']:.1f} %",
        "place": "" if place is None else f"step {place['step']}, token {place['offset']:,}",
        "place_url": url,
        "is_right": one["strategy"] == params.get("right"),
    }


@dataclass(frozen=True)
class StrategySide:
    """What stands on one side of the comparison."""

    slug: str
    row: int
    rows_count: int

    @property
    def name(self) -> str:
        what = "as recorded" if self.slug == RECORDED else self.slug.replace("_", " ")
        return f"{what}, row {self.row} of {self.rows_count}" if self.rows_count > 1 else what


def _pair(
    params: Mapping[str, str], trajectory: models.StoredTrajectory, figures: Sequence[Mapping[str, Any]],
    rows: Sequence[RowSummary], notices: list[str],
) -> tuple[StrategySide, StrategySide] | None:  # fmt: skip
    """The two that a URL names; without it, what was recorded against the first strategy that differs from it."""
    counts = {RECORDED: len(rows), **{one["strategy"]: one["rows_count"] for one in figures if not one["refused"]}}
    counts = {slug: count for slug, count in counts.items() if count}
    others = [one for one in figures if one["strategy"] in counts]
    if not others:
        return None
    left = RECORDED if RECORDED in counts else others[0]["strategy"]
    right = next((one["strategy"] for one in others if one["differs_at"]), others[0]["strategy"])
    sides = []
    for name, default in (("left", left), ("right", right)):
        slug = params.get(name, "") or default
        if slug not in counts:
            why = "cannot be replayed here" if slug in STRATEGIES else "is no strategy"
            notices.append(f"“{slug[:40]}” {why}; {default.replace('_', ' ')} is shown.")
            slug = default
        last = counts[slug] - 1
        asked = whole_number(params.get(f"{name}_row"))
        row = last if asked is None else asked
        if row > last:
            notices.append(f"{slug.replace('_', ' ')} makes rows 0 to {last}; row {last} is shown.")
            row = last
        sides.append(StrategySide(slug, row, counts[slug]))
    return sides[0], sides[1]


def _both_rows(
    made: models.Replay,
    trajectory: models.StoredTrajectory,
    asked: tuple[StrategySide, StrategySide],
    rows: Sequence[RowSummary],
    notices: list[str],
) -> tuple[Tokens, Tokens] | None:
    """Both rows with their origins and masks; None, and a sentence, where one cannot be shown."""
    stored = replays.stored_rows(made, [side.slug for side in asked])
    found = []
    for side in asked:
        if side.slug == RECORDED:
            facts = rows[side.row]
            length = facts.n_tokens
        elif side.slug in stored:
            length = stored[side.slug].lengths[side.row]
        else:
            notices.append(f"The rows of {side.slug.replace('_', ' ')} are too many to be kept; only its figures are.")
            return None
        if length > MAX_ROW_TOKENS:
            notices.append(f"{side.name} holds {length:,} tokens; at most {MAX_ROW_TOKENS:,} are compared at once.")
            return None
        if side.slug == RECORDED:
            found.append(data.read_tokens(trajectory, facts, 0, length))
        else:
            row = replays.row_of(stored[side.slug], side.row)
            assert row.origin is not None  # row_of fills it in
            found.append(Tokens(0, row.ids, row.origin, row.loss_mask))
    return found[0], found[1]


def _verdict(comparison: TokenComparison, left: Tokens, right: Tokens) -> tuple[str, bool]:
    """The one sentence above the table, and whether both rows train the same."""
    if comparison.n_sites:
        n = comparison.n_sites
        places = "one place" if n == 1 else f"{n:,} places, the first of them"
        return (
            f"They differ in {places} at token {comparison.site_places[0]:,}. Tokens "
            f"that differ: {comparison.left_changed:,} on the left, {comparison.right_changed:,} on the right."
        ), False
    masks = int(np.count_nonzero(left.loss_mask != right.loss_mask))
    if masks:
        return f"The ids are the same {len(left):,}; the loss masks differ at {masks:,} of them.", False
    return f"The same {len(left):,} tokens with the same loss mask.", True


def _counts(side: StrategySide, tokens: Tokens) -> dict[str, Any]:
    known = bool(np.any(tokens.origin))
    by_origin = {origin.slug: int(np.count_nonzero(tokens.origin == origin)) for origin in Origin}
    return {
        "tokens": len(tokens),
        "trained": int(np.count_nonzero(tokens.loss_mask)),
        "origins": by_origin if known else None,
    }


def _note(side: StrategySide, tokens: Tokens) -> str:
    counts = _counts(side, tokens)
    words = f"{counts['tokens']:,} tokens, {counts['trained']:,} trained"
    if counts["origins"] is None:
        return f"{words}; encoded again, so nobody knows which were sampled"
    named = [f"{n:,} {slug}" for slug, n in counts["origins"].items() if n and slug != "prompt"]
    return f"{words}: {', '.join(named)}"
