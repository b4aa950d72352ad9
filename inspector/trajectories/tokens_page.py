"""The trajectory page as one dict: read, arrange, and leave drawing to the template (or to JSON)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from urllib.parse import urlencode

import numpy as np
from django.http import HttpRequest
from django.urls import reverse

from inspector.html.tokens import Tokens, value_classes
from inspector.trajectories import legends
from inspector.trajectories import reads as data
from inspector.trajectories.neighbours import FILTER_FIELDS, find_siblings, no_siblings
from inspector.trajectories.place import MAX_FINDINGS, MAX_RUN_VIEW_TOKENS, WINDOW, Lens, PagePlace, View, read_place
from inspector.trajectories.token_pane import Reader, build_reader, wanted_range
from inspector.trajectories.turns import FindingItem, Turn
from rollouts import selectors
from rollouts.formats import lacks_of
from rollouts.models import Run, StoredTrajectory
from rollouts.selectors import parts
from rollouts.selectors.parts import RowSummary
from rollouts.services.findings import worst_severity

MAX_OUTLINE = 400
MAX_ROWS = 60
LENS_NAMES = {Lens.MASK: "loss mask", Lens.ORIGIN: "origin", Lens.LOGPROB: "logprob"}
VIEW_NAMES = {View.RUNS: "run view", View.TOKENS: "token view"}


def base_url(trajectory: StoredTrajectory) -> str:
    return reverse("trajectory", args=[trajectory.code])


def is_live(trajectory: StoredTrajectory) -> bool:
    """Still growing: its page asks again."""
    return trajectory.status in (StoredTrajectory.Status.QUEUED, StoredTrajectory.Status.RUNNING)


def names(trajectory: StoredTrajectory) -> dict[str, Any]:
    """How each JSON twin begins."""
    return {
        "trajectory": trajectory.code,
        "external_id": trajectory.external_id,
        "run": trajectory.run.code,
        "status": trajectory.status,
        "reward": trajectory.reward,
        "reward_parts": trajectory.reward_parts,
        "stop_reason": trajectory.stop_reason,
        "tokenizer": trajectory.run.tokenizer.name if trajectory.run.tokenizer else None,
    }


def shows_one(request: HttpRequest) -> bool:
    """The visitor of a link to one trajectory alone: no other is theirs to see."""
    share = getattr(request, "share", None)
    return share is not None and share.run_id is None


def frame(request: HttpRequest, trajectory: StoredTrajectory, here: str) -> dict[str, Any]:
    """What the header of each of a trajectory's pages needs: facts, siblings, tabs. Three queries."""
    run = trajectory.run
    is_alone = shows_one(request)
    siblings = no_siblings() if is_alone else find_siblings(trajectory, request.GET, here)
    own, keep = base_url(trajectory), siblings.keep_query
    pages = [
        ("tokens", "Tokens", own),
        ("compare", "Side by side", reverse("trajectory-compare", args=[trajectory.code])),
        ("deltas", "Template deltas", reverse("trajectory-deltas", args=[trajectory.code])),
        ("mask", "Mask, explained", reverse("trajectory-mask", args=[trajectory.code])),
        ("strategies", "Strategies", reverse("trajectory-strategies", args=[trajectory.code])),
        ("record", "As recorded", reverse("trajectory-record", args=[trajectory.code])),
    ]
    return {
        "trajectory": trajectory,
        "run": run,
        "run_url": siblings.list_url,
        "trajectory_url": own + keep,
        "siblings": siblings,
        "facts": _header_fields(trajectory, run, is_alone),
        "has_siblings": not is_alone,
        "tabs": [{"name": name, "url": url + keep, "current": slug == here} for slug, name, url in pages],
        "tokenizer": run.tokenizer,
    }


def _header_fields(trajectory: StoredTrajectory, run: Run, is_alone: bool) -> list[dict[str, Any]]:
    reward = trajectory.reward
    parts = ", ".join(f"{name} {value:g}" for name, value in list((trajectory.reward_parts or {}).items())[:6]
                      if isinstance(value, int | float))  # fmt: skip
    facts = [
        {"label": "reward", "value": "none" if reward is None else f"{reward:.4g}", "note": parts,
         "tone": "" if reward is None else "good" if reward > 0 else "bad"},
        {"label": "status" if trajectory.status != "done" else "stopped by",
         "value": trajectory.status if trajectory.status != "done" else trajectory.stop_reason or "not recorded"},
    ]  # fmt: skip
    if trajectory.group:
        url = "" if is_alone else f"{reverse('run', args=[run.code])}?{urlencode({'group': trajectory.group})}"
        facts.append({"label": "group", "value": trajectory.group, "url": url, **_group_note(trajectory)})
    facts.append({"label": "steps", "value": f"{trajectory.n_steps:,}"})
    facts.append({"label": "rows", "value": f"{trajectory.n_rows:,}", "tone": "bad" if trajectory.n_rows > 1 else ""})
    # Rows that came without steps rarely tell which of their tokens were sampled; a mask does not.
    sampled = {"note": f"{trajectory.n_sampled:,} sampled"} if trajectory.n_steps else {}
    facts.append({"label": "tokens", "value": f"{trajectory.n_tokens:,}", **sampled})
    facts.append({"label": "trained", "value": f"{trajectory.n_trained:,}"})
    if run.model:
        facts.append({"label": "model", "value": run.model, "note": run.engine})
    facts.append({"label": "tokenizer", "value": run.tokenizer.name if run.tokenizer else "none"})
    return facts


def _group_note(trajectory: StoredTrajectory) -> dict[str, str]:
    """The rewards of the trajectories of the same prompt."""
    stats = selectors.group_stats(trajectory.run, [trajectory.group]).get(trajectory.group)
    if stats is None or stats.n < 2 or stats.mean is None:
        return {}
    if stats.has_no_signal:
        return {"note": f"{stats.n} trajectories, all rewards {stats.mean:.3g}: no learning signal", "tone": "bad"}
    return {"note": f"{stats.n} trajectories, rewards {stats.low:.3g} to {stats.high:.3g}, mean {stats.mean:.3g}"}


def read_page(request: HttpRequest, trajectory: StoredTrajectory) -> dict[str, Any]:
    """Everything of the tokens page except its HTML: the same for the page and its twin."""
    rows, steps = parts.rows_and_steps(trajectory)
    columns = data.read_columns(trajectory)
    place = read_place(request.GET, [row.n_tokens for row in rows], keep=FILTER_FIELDS, columns=columns)
    findings = data.read_findings(trajectory, steps, rows)
    turns: list[Turn] = []
    if rows:
        row = rows[place.row]
        turns = data.read_turns(trajectory, row, steps, findings)
    return {"rows": rows, "steps": steps, "place": place, "findings": findings, "turns": turns, "columns": columns}


def html_context(request: HttpRequest, trajectory: StoredTrajectory, page: dict[str, Any]) -> dict[str, Any]:
    """The context of the template."""
    place: PagePlace = page["place"]
    rows: list[RowSummary] = page["rows"]
    turns: list[Turn] = page["turns"]
    findings: list[FindingItem] = page["findings"]
    painter, missing = data.painter_of(trajectory.run.tokenizer)
    own = base_url(trajectory)
    n_tokens = rows[place.row].n_tokens if rows else 0
    start, stop = wanted_range(place, n_tokens)
    tokens = data.read_tokens(trajectory, rows[place.row], start, stop) if rows else _no_tokens()
    values, signed = None, False
    if rows and place.lens not in list(Lens):
        values = data.read_values(trajectory, rows[place.row], place.lens)
        classes = value_classes(values, n_tokens)
        signed = bool((values[np.isfinite(values)] < 0).any())
        tokens = replace(tokens, classes=classes[tokens.start : tokens.start + len(tokens)])
    reader = build_reader(place, turns, tokens, n_tokens, painter)
    shown = tokens.slice(reader.start, reader.stop)
    context = frame(request, trajectory, "tokens")
    window_query = place.query(view=View.TOKENS, mark=None, window=reader.start, keep=())
    return {
        **context,
        "place": place,
        "reader": reader,
        "window_json_url": f"{own}.json{window_query}",
        "tokenizer_missing": missing,
        "findings": _finding_entries(findings, place, trajectory, own),
        "no_findings": _no_findings(trajectory),
        "row_tabs": [
            {"index": row.index, "current": row.index == place.row, "text": f"{row.n_tokens:,}",
             "worst": worst_severity(item.severity for item in findings if item.row == row.index),
             "url": own + place.query(row=row.index, mark=None, window=0)}
            for row in rows[:MAX_ROWS]
        ],
        "rows_rest": f"and {len(rows) - MAX_ROWS:,} more: ?row=N opens them" if len(rows) > MAX_ROWS else "",
        "turns": turns,
        "outline": _outline(turns, place, reader),
        "outline_rest": f"and {len(turns) - MAX_OUTLINE:,} more turns" if len(turns) > MAX_OUTLINE else "",
        "view_choices": [
            {"name": name, "current": view == place.view,
             "url": own + place.query(view=view, window=_window_for(view, place, n_tokens))}
            for view, name in VIEW_NAMES.items()
        ],
        "lens_choices": [
            {"slug": lens.value, "name": name, "current": lens == place.lens, "url": own + place.query(lens=lens)}
            for lens, name in LENS_NAMES.items()
        ]
        + [
            {"slug": name, "name": name.replace("_", " "), "current": name == place.lens, "column": True,
             "url": own + place.query(lens=name)}
            for name in page["columns"].get(place.row, ())[:12]
        ],
        "lens_paint": place.lens if values is None else "signed" if signed else "value",
        "logprob_scale": legends.logprob_scale(),
        "value_scale": legends.value_scale(place.lens, values, signed),
        "value_note": legends.value_note(place, values, reader),
        "go_fields": _go_fields(place),
        "mark_text": f"{place.mark[0]}-{place.mark[1]}" if place.mark else "",
        "window_text": f"tokens {reader.start:,}-{reader.stop:,} of {n_tokens:,}",
        "more_from": f"{reader.stop:,}",
        "nothing_here": _nothing(trajectory),
        "record_url": reverse("trajectory-record", args=[trajectory.code]) if trajectory.n_steps else "",
        "lacks": lacks_of(trajectory.run.format) if trajectory.n_steps and not trajectory.n_tokens else [],
        "live_url": f"{own}{place.query()}&have={fingerprint(trajectory)}" if is_live(trajectory) else "",
        **legends.strips(turns, findings, place, reader, shown, n_tokens, own),
    }  # fmt: skip


def _no_tokens() -> Tokens:
    return Tokens(0, np.zeros(0, np.int32), np.zeros(0, np.uint8), np.zeros(0, np.bool_))


def fingerprint(trajectory: StoredTrajectory) -> str:
    """Changes whenever the trajectory does."""
    moment = trajectory.finished_at.timestamp() if trajectory.finished_at else 0
    counts = f"{trajectory.n_steps}.{trajectory.n_tokens}.{trajectory.n_findings}"
    return f"{trajectory.status}.{trajectory.attempt}.{counts}.{moment}"


def _window_for(view: View, place: PagePlace, n_tokens: int) -> int:
    if place.mark:
        return 0
    if view == View.TOKENS:
        return place.window // WINDOW * WINDOW
    return 0 if n_tokens <= MAX_RUN_VIEW_TOKENS else place.window


def _finding_entries(
    findings: Sequence[FindingItem], place: PagePlace, trajectory: StoredTrajectory, own: str
) -> list[dict[str, Any]]:
    compare = reverse("trajectory-compare", args=[trajectory.code])
    deltas = reverse("trajectory-deltas", args=[trajectory.code])
    entries = []
    for item in findings[:MAX_FINDINGS]:
        mark = (item.start, max(item.stop, item.start + 1))
        where = f"step {item.step}" if item.step is not None else f"row {item.row}"
        is_probe = item.step is None and item.row is None  # refused before anything was sampled
        if is_probe:
            where = "the template’s probe"
        stop = f"-{item.stop:,}" if item.stop > item.start + 1 else ""
        sides = {"step": item.step, "side": "prompt"} if item.is_comparable and item.breaks else {"step": item.step}
        compare_url = f"{compare}?{urlencode(sides)}" if item.is_comparable else ""
        delta_url = f"{deltas}?step={item.step}" if item.axis == "delta" and item.step is not None else ""
        url = own + place.query(row=item.row or 0, mark=mark if item.row is not None else None, window=0)
        entries.append(
            {
                "item": item,
                "place": f"{where}, token{'s' * bool(stop)} {item.start:,}{stop}",
                # A step whose stream is in no row, because a strategy made the rows anew, is shown on another page.
                "url": url if item.row is not None else compare_url or delta_url or url,
                "current": item.row == place.row and place.mark == mark,
                "compare_url": compare_url,
                "script_url": "" if is_probe else reverse("finding-script", args=[trajectory.code, item.number]),
                "delta_url": delta_url,
            }
        )
    return entries


def _no_findings(trajectory: StoredTrajectory) -> str:
    if is_live(trajectory):
        return "None yet: the diagnosis runs when the trajectory ends."
    return (
        "None: every prompt starts with what was sampled before it, and every completion is canonical, "
        "as far as the recorded data can tell."
    )


def _nothing(trajectory: StoredTrajectory) -> str:
    if is_live(trajectory):
        return "No step has finished yet. This page grows by itself."
    return "This trajectory has no tokens" + (": the source recorded none." if not trajectory.error else ".")


def _outline(turns: Sequence[Turn], place: PagePlace, reader: Reader) -> list[dict[str, Any]]:
    outline = []
    for turn in turns[:MAX_OUTLINE]:
        on_page = reader.start <= turn.start and turn.start < reader.stop
        url = f"#turn-{turn.number}" if on_page else place.query(mark=(turn.start, turn.start + 1), window=0)
        outline.append(
            {"number": turn.number, "role": turn.role, "part": turn.part, "size": f"{turn.n_tokens:,}", "url": url,
             "worst": turn.worst, "n_findings": len(turn.findings)}
        )  # fmt: skip
    return outline


def _go_fields(place: PagePlace) -> list[tuple[str, str]]:
    fields = [("row", str(place.row) if place.row else ""), ("view", "tokens" if place.view == View.TOKENS else "")]
    fields.append(("lens", str(place.lens) if place.lens != Lens.MASK else ""))
    return [(name, value) for name, value in [*fields, *place.keep] if value]
