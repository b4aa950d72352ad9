"""A trajectory or a finding as one HTML file that opens without a server: no script, no request, style within.

It draws with the templates and the painter of the tokens page. A file holds a limited number of tokens, and says what
is not in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from django.contrib.staticfiles import finders
from django.http import Http404, HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.safestring import SafeString, mark_safe

from inspector.trajectories.discussion import CommentValues, Discussion, discussion_of
from inspector.trajectories.frame import HeaderField, header_fields
from inspector.trajectories.place import TOKEN_KINDS, PagePlace, View, read_place
from inspector.trajectories.tokens import lenses
from inspector.trajectories.tokens import page_queries as data
from inspector.trajectories.tokens.lane_tree import drawn_lanes, listed_lanes, read_lanes
from inspector.trajectories.tokens.tokens_page import TokensRead, check_lines, read_lenses, trajectory_html
from inspector.trajectories.tokens.turns import FindingItem, worst_finding
from inspector.web.access import reads_trajectory
from inspector.web.twins import whole_number
from rollout_inspector.diagnose import VERSION
from rollout_inspector.formats import lacks_of
from rollout_inspector.refusal import Refusal
from rollouts.store.jobs.activity import is_active
from rollouts.store.jobs.jobs import diagnosed_at
from rollouts.store.models import StoredTrajectory, Tokenizer
from rollouts.store.text import without_paths
from rollouts.store.trajectories import trajectory_parts

MAX_FILE_TOKENS = {View.RUNS: 100_000, View.TOKENS: 20_000}
"""The most tokens of a file in each view, of all its rows together."""

AROUND_FINDING = 4_096
"""The most tokens of the file of one finding."""

MAX_ROWS = 8
"""The most rows of a file."""

LENS = "origin"
"""The lens of a file that names none: the fill tells the origin, and the lines tell mask and findings."""

STYLES = ("base", "tokens", "trajectory", "offline")


@dataclass(frozen=True)
class FileRow:
    """The part of a row that a file holds: tokens ``[start, stop)`` of ``n_tokens``."""

    row: int
    start: int
    stop: int
    n_tokens: int


@dataclass(frozen=True)
class OfflineFile:
    """A file, and what it holds."""

    name: str
    """The name of the file, made of codes and numbers alone."""
    html: str
    rows: list[FileRow]
    """In the order of the file."""
    findings: list[int]
    """The numbers of the findings whose cards it holds."""
    is_whole: bool
    """It holds every token of every row, and every finding."""


@cache
def _styles() -> SafeString:
    """The style sheets of the reader as one text. They are ours and hold no ``<``."""
    paths = [finders.find(f"css/{name}.css") for name in STYLES]
    text = "\n".join(Path(str(path)).read_text(encoding="utf-8") for path in paths)
    if "<" in text:
        raise ValueError("A style sheet holds a <, which could end the style element of a file.")
    return mark_safe(text)


def offline_file(
    trajectory: StoredTrajectory, params: Mapping[str, str], comments: Sequence[CommentValues] = ()
) -> OfflineFile:
    """The file that the parameters of an address ask for. Raises :class:`Refusal`.

    ``row``: that row alone. ``finding``: that finding alone, with the tokens around it. ``view``, ``lens`` and ``t``
    are those of the tokens page. Of ``comments`` it holds those on the whole trajectory and on tokens of the file.
    """
    chosen = {name: params[name] for name in ("row", "finding", "view", "lens", "t") if params.get(name)}
    rows, steps = trajectory_parts.rows_and_steps(trajectory)
    findings = data.read_findings(trajectory, steps, rows)
    page_read = TokensRead(rows, steps, PagePlace(), findings, [], read_lenses(trajectory, rows, steps))
    finding = _finding(page_read, chosen.get("finding"))
    row = _row(page_read, chosen.get("row"))
    n_left = AROUND_FINDING if finding else MAX_FILE_TOKENS[_view(chosen, finding)]
    file_rows, contexts = list[FileRow](), list[dict[str, Any]]()
    for index in _rows_wanted(page_read, row, finding):
        n_tokens = page_read.rows[index].n_tokens
        if file_rows and n_tokens > n_left:
            continue
        row_context = _drawn_row(
            trajectory, page_read, index, chosen, n_left, finding, Discussion(list(comments), False)
        )
        start, stop = row_context["reader"].start, row_context["reader"].stop
        n_left -= stop - start
        file_rows.append(FileRow(index, start, stop, n_tokens))
        contexts.append(row_context)
    file_rows.sort(key=lambda part: part.row)
    contexts.sort(key=lambda drawn: drawn["index"])
    if not contexts:
        contexts = [trajectory_html(trajectory, page_read)]
    entries = _cards(file_rows, contexts, finding)
    is_whole = (
        len(file_rows) == len(page_read.rows)
        and finding is None
        and all(r.stop - r.start == r.n_tokens for r in file_rows)
    )
    context = {
        "trajectory": trajectory,
        "run": trajectory.run,
        "is_file": True,
        "facts": _head(trajectory),
        "versions": _versions(trajectory),
        "version_now": VERSION,
        "diagnosed_at": diagnosed_at(trajectory),
        "is_active": is_active(trajectory),
        "saved_at": timezone.now(),
        "finding": finding,
        "tokenizer_missing": contexts[0]["tokenizer_missing"],
        "notices": list(dict.fromkeys(notice for row_context in contexts for notice in row_context["place"].notices)),
        "lacks": lacks_of(trajectory.run.format) if trajectory.n_steps and not trajectory.n_tokens else [],
        "findings": entries,
        "n_findings": len(page_read.findings),
        "no_findings": contexts[0]["no_findings"],
        "checks": check_lines(trajectory),
        "nothing_here": contexts[0]["nothing_here"],
        "rows": contexts if file_rows else [],
        "discussion": Discussion(_comments(file_rows, comments), False),
        **({} if finding is not None or row is not None else _lanes(trajectory, page_read, file_rows)),
        "left_out": _left_out(page_read, file_rows),
        "styles": _styles(),
    }
    name = f"trajectory-{trajectory.code}" + (f"-finding-{finding.number}" if finding else "")
    name += f"-row-{row}" if row is not None and not finding else ""
    html = render_to_string("trajectories/offline.html", context)
    return OfflineFile(f"{name}.html", html, file_rows, [entry["item"].number for entry in entries], is_whole)


def _view(asked: Mapping[str, str], finding: FindingItem | None) -> View:
    """The view that was asked for, else the one in which the finding can be seen."""
    view = asked.get("view") or (View.TOKENS if finding is not None and finding.kind in TOKEN_KINDS else "")
    return View.TOKENS if view == View.TOKENS else View.RUNS


def _finding(found: TokensRead, number: str | None) -> FindingItem | None:
    if number is None:
        return None
    item = next((item for item in found.findings if str(item.number) == number), None)
    if item is None:
        n = len(found.findings)
        range_text = f"its findings are numbered from 1 to {n:,}" if n else "it has no findings"
        raise Refusal(f"This trajectory has no finding {number[:20]}: {range_text}.")
    return item


def _row(found: TokensRead, asked: str | None) -> int | None:
    if asked is None:
        return None
    row = whole_number(asked)
    if row is None or row >= len(found.rows):
        n = len(found.rows)
        range_text = f"its rows are numbered from 0 to {n - 1:,}" if n else "it has no rows"
        raise Refusal(f"This trajectory has no row {asked[:20]}: {range_text}.")
    return row


def _rows_wanted(found: TokensRead, row: int | None, finding: FindingItem | None) -> list[int]:
    """The row that was asked for, or all: the one with the worst finding first, because the others may not fit."""
    if finding is not None and (finding.row is not None or row is None):
        return [finding.row or 0] if found.rows else []
    if row is not None:
        return [row]
    worst = worst_finding(found.findings)
    first = worst.row if worst is not None and worst.row is not None else 0
    others = [index for index in range(len(found.rows)) if index != first]
    return [first, *others][:MAX_ROWS] if found.rows else []


def _drawn_row(
    trajectory: StoredTrajectory,
    found: TokensRead,
    index: int,
    asked: Mapping[str, str],
    most: int,
    finding: FindingItem | None,
    discussion: Discussion,
) -> dict[str, Any]:
    """What the template of a row needs: the whole row where it fits, else the part around what is looked at."""
    lengths = [row.n_tokens for row in found.rows]
    params = {"lens": LENS, **asked, "row": str(index), "view": _view(asked, finding)}
    if asked.get("row") != str(index):
        params.pop("t", None)  # it speaks of another row
    if finding is not None and finding.places and finding.row == index:
        params["t"] = "{}-{}".format(*finding.places[0])
        lens = lenses.lens_of(finding.kind, found.columns.get(index, ()))
        params["lens"] = asked.get("lens") or (LENS if lens == lenses.DEFAULT else lens)
    place = read_place(params, lengths, columns=found.columns)
    worst = worst_finding(found.findings, index)
    at = place.mark[0] if place.mark else worst.places[0][0] if worst else 0
    start = max(min(at - most // 2, lengths[index] - most), 0)
    place = replace(place, window=start, most=most)
    turns = data.read_turns(trajectory, found.rows[index], found.steps, found.findings)
    context = trajectory_html(trajectory, replace(found, place=place, turns=turns), discussion)
    context["legends"] = [(lens, legend) for lens, legend in context["legends"] if lens == place.lens]
    return context | {"index": index, "anchor": f"row-{index}-", "part_text": _part_text(context["reader"].start,
                    context["reader"].stop, lengths[index])}


def _part_text(start: int, stop: int, n_tokens: int) -> str:
    if stop - start == n_tokens:
        return f"all {n_tokens:,} tokens"
    return f"tokens {start:,}-{stop:,} of {n_tokens:,}: a file holds a limited number of tokens"


def _cards(
    shown: Sequence[FileRow], contexts: Sequence[dict[str, Any]], finding: FindingItem | None
) -> list[dict[str, Any]]:
    """The cards of the findings, each drawn with its row, and their links to places of the file."""
    by_row = {part.row: (part, context["findings"]) for part, context in zip(shown, contexts, strict=False)}
    cards = []
    for number, entry in enumerate(contexts[0]["findings"]):
        item = entry["item"]
        if finding is not None and item.number != finding.number:
            continue
        part, entries = by_row.get(item.row, (None, contexts[0]["findings"]))
        offset = min(item.places[0][0], part.n_tokens) if part else 0
        is_here = part is not None and (part.start <= offset < part.stop or offset == part.stop == part.n_tokens)
        card = entries[number] | {"compare_url": "", "delta_url": "", "script_url": "", "current": False}
        card["url"] = f"#place-{item.number}" if is_here else f"#finding-{item.number}"
        card["place"] += "" if is_here or item.row is None else ", not in this file"
        cards.append(card)
    return cards


def _comments(shown: Sequence[FileRow], comments: Sequence[CommentValues]) -> list[CommentValues]:
    """The comments on the whole trajectory and on tokens of the file, with links to its rows."""
    parts_of = {part.row: part for part in shown}
    comments_in_rows = []
    for comment in comments:
        part = None if comment.row is None else parts_of.get(comment.row)
        if comment.row is None or (part and comment.start is not None and part.start <= comment.start < part.stop):
            comments_in_rows.append(replace(comment, url="#tokens" if part is None else f"#row-{comment.row}"))
    return comments_in_rows


def _lanes(trajectory: StoredTrajectory, found: TokensRead, shown: Sequence[FileRow]) -> dict[str, Any]:
    """The variables of the list of lanes, with links to the rows of the file; empty where there is one lane alone."""
    lanes = read_lanes(trajectory, found.rows, found.steps, found.findings)
    row_indices = {part.row for part in shown}
    lines = drawn_lanes(trajectory, lanes, found.rows, PagePlace(), "")
    here = [
        replace(lane_line, url=f"#row-{lane.row}" if lane.row in row_indices else "", current=False)
        for lane, lane_line in zip(lanes, lines, strict=False)
    ]
    return listed_lanes(trajectory, lanes, found.rows, here) if lanes else {}


def _head(trajectory: StoredTrajectory) -> list[HeaderField]:
    """The fields of the head. A model or a tokenizer is named by a hub id or a hash, and no path of a machine."""
    fields = [field for field in header_fields(trajectory, trajectory.run, "") if field.label != "tokenizer"]
    facts = [replace(field, value=without_paths(field.value)) if field.label == "model" else field for field in fields]
    return [*facts, HeaderField("tokenizer", *tokenizer_identity(trajectory.run.tokenizer))]


def tokenizer_identity(tokenizer: Tokenizer | None) -> tuple[str, str]:
    """What a tokenizer is called, and what tells it from others: the revision of a hub id, else its sha256."""
    if tokenizer is None:
        return "none", ""
    if tokenizer.revision:
        return tokenizer.source, f"revision {tokenizer.revision}"
    return without_paths(tokenizer.name), f"sha256 {tokenizer.sha256}"


def _versions(trajectory: StoredTrajectory) -> list[int]:
    """The versions of the diagnosis that made the findings; without a finding, the oldest one of the run."""
    versions = trajectory_parts.versions_of_findings(trajectory)
    if versions or trajectory.checks is None:
        return versions
    return [trajectory.run.diagnosis_version] if trajectory.run.diagnosis_version is not None else []


def _left_out(found: TokensRead, shown: Sequence[FileRow]) -> str:
    """The rows that are not in the file, in words; empty when all are."""
    row_indices = {part.row for part in shown}
    rows_left = [row for row in found.rows if row.index not in row_indices]
    row_names = ", ".join(f"row {row.index} ({row.n_tokens:,} tokens)" for row in rows_left[:20])
    return row_names + (f" and {len(rows_left) - 20:,} more" if len(rows_left) > 20 else "")


@reads_trajectory
def offline_page(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    """The file as a download."""
    return file_answer(request, trajectory)


def file_answer(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    """The file that the address asks for. It is no page of the server: its style stands within, which our policy
    forbids. Raises ``Http404``."""
    comments = [] if request.GET.get("comments") == "no" else discussion_of(request, trajectory).comments or []
    try:
        offline = offline_file(trajectory, request.GET, comments)
    except Refusal as error:
        raise Http404(str(error)) from error
    response = HttpResponse(offline.html, content_type="text/html; charset=utf-8")
    response["Content-Disposition"] = f'attachment; filename="{offline.name}"'
    response["Cache-Control"] = "private, no-store"
    return response
