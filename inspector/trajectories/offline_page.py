"""A trajectory or a finding as one HTML file that opens without a server: no script, no request, style within. It draws
with the templates and the painter of the tokens page. A file holds a limited number of tokens, and says what is not in
it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from django.http import Http404, HttpRequest, HttpResponse
from django.template.loader import render_to_string
from django.utils import timezone
from django.utils.safestring import mark_safe

from inspector.trajectories.discussion import CommentValues, Discussion, discussion_of
from inspector.trajectories.frame import HeaderField, header_fields
from inspector.trajectories.place import TOKEN_KINDS, View, read_place
from inspector.trajectories.tokens import lenses
from inspector.trajectories.tokens.findings import DrawnFinding, FindingGroup, worst_finding
from inspector.trajectories.tokens.lane_tree import drawn_lanes
from inspector.trajectories.tokens.reader import Reader
from inspector.trajectories.tokens.token_view import PagePart, TokenView, at_place, read_view_parts
from inspector.web.access import reads_trajectory
from inspector.web.twins import whole_number
from rollout_inspector.diagnose import VERSION
from rollout_inspector.opened.drawing import styles
from rollout_inspector.refusal import Refusal
from rollouts.store.jobs.jobs import diagnosed_at, is_active
from rollouts.store.models import StoredTrajectory, Tokenizer
from rollouts.store.text import without_paths
from rollouts.store.trajectories import trajectory_parts as parts

MAX_FILE_TOKENS = {View.RUNS: 100_000, View.TOKENS: 20_000}
"""The most tokens of a file in each view, of all its rows together."""

AROUND_FINDING = 4_096  # The most tokens of the file of one finding.

MAX_ROWS = 8  # The most rows of a file.

LENS = "origin"  # The lens of a file that names none: the fill tells the origin, and the lines tell mask and findings.


@dataclass(frozen=True)
class OfflineFile:
    """A file, and what it holds."""

    name: str  # The name of the file, made of codes and numbers alone.
    html: str
    rows: list[tuple[int, int, int, int]]
    """In the order of the file: the index of the row, start and stop of its part, and the tokens of the whole row."""
    findings: list[int]  # The numbers of the findings whose cards it holds.
    is_whole: bool  # It holds every token of every row, and every finding.


def offline_file(
    trajectory: StoredTrajectory, params: Mapping[str, str], comments: Sequence[CommentValues] = ()
) -> OfflineFile:
    """The file that the parameters of an address ask for. Raises :class:`Refusal`. ``row``: that row alone.
    ``finding``: that finding alone, with the tokens around it. ``view``, ``lens`` and ``t`` are those of the tokens
    page. Of ``comments`` it holds those on the whole trajectory and on tokens of the file."""
    chosen = {name: params[name] for name in ("row", "finding", "view", "lens", "t") if params.get(name)}
    view = read_view_parts(trajectory, PagePart.PAGE, Discussion(list(comments), False))
    finding = _finding(view, chosen.get("finding"))
    row = _row(view, chosen.get("row"))
    n_left = AROUND_FINDING if finding else MAX_FILE_TOKENS[_view(chosen, finding)]
    readers: list[Reader] = []
    for index in _rows_wanted(view, row, finding):
        if readers and view.rows[index].n_tokens > n_left:
            continue
        readers.append(_drawn_row(view, index, chosen, n_left, finding))
        n_left -= readers[-1].stop - readers[-1].start
    readers.sort(key=lambda reader: reader.place.row)
    file_rows = [(reader.place.row, reader.start, reader.stop, reader.n_tokens) for reader in readers]
    overview = readers[0] if readers else Reader(view)
    entries = _cards(overview, readers, finding)
    has_all_tokens = all(stop - start == n_tokens for _, start, stop, n_tokens in file_rows)
    is_whole = len(file_rows) == len(view.rows) and finding is None and has_all_tokens
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
        "notices": list(dict.fromkeys(notice for reader in readers for notice in reader.place.notices)),
        "overview": overview,
        "findings": entries,
        "groups": [FindingGroup([entry]) for entry in entries],
        "n_findings": len(view.findings),
        "no_findings": overview.no_findings,
        "checks": overview.checks,
        "check_sentence": overview.check_sentence,
        "rows": readers,
        "discussion": Discussion(_comments(readers, comments), False),
        "lanes": {} if finding is not None or row is not None else _lanes(view, readers),
        "left_out": _left_out(view, readers),
        "styles": mark_safe(styles()),
    }
    name = f"trajectory-{trajectory.code}" + (f"-finding-{finding.number}" if finding else "")
    name += f"-row-{row}" if row is not None and not finding else ""
    html = render_to_string("trajectories/offline.html", context)
    return OfflineFile(f"{name}.html", html, file_rows, [entry["item"].number for entry in entries], is_whole)


def _view(asked: Mapping[str, str], finding: DrawnFinding | None) -> View:
    """The view that was asked for, else the one in which the finding can be seen."""
    view = asked.get("view") or (View.TOKENS if finding is not None and finding.kind in TOKEN_KINDS else "")
    return View.TOKENS if view == View.TOKENS else View.RUNS


def _finding(view: TokenView, number: str | None) -> DrawnFinding | None:
    if number is None:
        return None
    item = next((item for item in view.findings if str(item.number) == number), None)
    if item is None:
        n = len(view.findings)
        range_text = f"its findings are numbered from 1 to {n:,}" if n else "it has no findings"
        raise Refusal(f"This trajectory has no finding {number[:20]}: {range_text}.")
    return item


def _row(view: TokenView, asked: str | None) -> int | None:
    if asked is None:
        return None
    row = whole_number(asked)
    if row is None or row >= len(view.rows):
        n = len(view.rows)
        range_text = f"its rows are numbered from 0 to {n - 1:,}" if n else "it has no rows"
        raise Refusal(f"This trajectory has no row {asked[:20]}: {range_text}.")
    return row


def _rows_wanted(view: TokenView, row: int | None, finding: DrawnFinding | None) -> list[int]:
    """The row that was asked for, or all: the one with the worst finding first, because the others may not fit."""
    if finding is not None and (finding.drawn_row is not None or row is None):
        return [finding.drawn_row or 0] if view.rows else []
    if row is not None:
        return [row]
    worst = worst_finding(view.findings)
    first = (worst.drawn_row if worst is not None else None) or 0
    others = [index for index in range(len(view.rows)) if index != first]
    return [first, *others][:MAX_ROWS] if view.rows else []


def _drawn_row(
    view: TokenView, index: int, asked: Mapping[str, str], most: int, finding: DrawnFinding | None
) -> Reader:
    """The whole row where it fits, else the part around what is looked at."""
    lengths = [row.n_tokens for row in view.rows]
    params = {"lens": LENS, **asked, "row": str(index), "view": _view(asked, finding)}
    if asked.get("row") != str(index):
        params.pop("t", None)  # it speaks of another row
    if finding is not None and finding.drawn_places and finding.drawn_row == index:
        params["t"] = "{}-{}".format(*finding.drawn_places[0])
        lens = lenses.lens_of(finding.kind, view.lenses.get(index, ()))
        params["lens"] = asked.get("lens") or (LENS if lens == lenses.DEFAULT else lens)
    place = read_place(params, lengths, columns=view.lenses)
    worst = worst_finding(view.findings, index)
    at = place.mark[0] if place.mark else worst.drawn_places[0][0] if worst else 0
    start = max(min(at - most // 2, lengths[index] - most), 0)
    return Reader(at_place(view, replace(place, window=start, most=most)))


def _cards(overview: Reader, readers: Sequence[Reader], finding: DrawnFinding | None) -> list[dict[str, Any]]:
    """The cards of the findings, each drawn with its row, and their links to places of the file."""
    by_row = {reader.place.row: reader for reader in readers}
    cards = []
    for number, entry in enumerate(overview.findings):
        item = entry["item"]
        if finding is not None and item.number != finding.number:
            continue
        reader = by_row.get(item.drawn_row)
        offset = min(item.drawn_places[0][0], reader.n_tokens) if reader else 0
        is_here = reader is not None and (
            reader.start <= offset < reader.stop or offset == reader.stop == reader.n_tokens
        )
        card = (reader or overview).findings[number] | {
            "compare_url": "", "delta_url": "", "script_url": "", "current": False,
        }
        card["url"] = f"#place-{item.number}" if is_here else f"#finding-{item.number}"
        card["place"] += "" if is_here or item.drawn_row is None else ", not in this file"
        cards.append(card)
    return cards


def _comments(readers: Sequence[Reader], comments: Sequence[CommentValues]) -> list[CommentValues]:
    """The comments on the whole trajectory and on tokens of the file, with links to its rows."""
    by_row = {reader.place.row: reader for reader in readers}
    comments_in_rows = []
    for comment in comments:
        reader = None if comment.row is None else by_row.get(comment.row)
        is_here = reader is not None and comment.start is not None and reader.start <= comment.start < reader.stop
        if comment.row is None or is_here:
            comments_in_rows.append(replace(comment, url="#tokens" if reader is None else f"#row-{comment.row}"))
    return comments_in_rows


def _lanes(view: TokenView, readers: Sequence[Reader]) -> dict[str, Any]:
    """The list of lanes, with links to the rows of the file."""
    row_indices = {reader.place.row for reader in readers}
    return drawn_lanes(
        view.trajectory, view.lanes, view.rows, lambda lane: f"#row-{lane.row}" if lane.row in row_indices else ""
    )


def _head(trajectory: StoredTrajectory) -> list[HeaderField]:
    """The fields of the head. A model or a tokenizer is named by a hub id or a hash, and no path of a machine."""
    fields = [field for field in header_fields(trajectory, trajectory.run, "") if field.label != "tokenizer"]
    facts = [replace(field, value=without_paths(field.value)) if field.label == "model" else field for field in fields]
    return [*facts, HeaderField("tokenizer", "what makes text of ids", *tokenizer_identity(trajectory.run.tokenizer))]


def tokenizer_identity(tokenizer: Tokenizer | None) -> tuple[str, str]:
    """What a tokenizer is called, and what tells it from others: the revision of a hub id, else its sha256."""
    if tokenizer is None:
        return "none", ""
    if tokenizer.revision:
        return tokenizer.source, f"revision {tokenizer.revision}"
    return without_paths(tokenizer.name), f"sha256 {tokenizer.sha256}"


def _versions(trajectory: StoredTrajectory) -> list[int]:
    """The versions of the diagnosis that made the findings; without a finding, the oldest one of the run."""
    versions = parts.versions_of_findings(trajectory)
    if versions or trajectory.checks is None:
        return versions
    return [trajectory.run.diagnosis_version] if trajectory.run.diagnosis_version is not None else []


def _left_out(view: TokenView, readers: Sequence[Reader]) -> str:
    """The rows that are not in the file, in words; empty when all are."""
    row_indices = {reader.place.row for reader in readers}
    rows_left = [row for row in view.rows if row.index not in row_indices]
    row_names = ", ".join(f"row {row.index} ({row.n_tokens:,} tokens)" for row in rows_left[:20])
    return row_names + (f" and {len(rows_left) - 20:,} more" if len(rows_left) > 20 else "")


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


offline_page = reads_trajectory(file_answer)
