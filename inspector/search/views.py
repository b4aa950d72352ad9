"""The pages that search, part by part: the first part is in the page, and the page asks for the others."""

from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from inspector.runs.filters import ListQuery
from inspector.search.search_page import KINDS, SHOWN, SearchBusy, asked_of, nothing_asked, search_page, search_turn
from inspector.web.access import found_or_404, projects_to_filter, reader_of, reads_trajectory, visible
from inspector.web.twins import is_fragment, json_page, page, wants_json, whole_number
from rollout_inspector.diagnose.kinds import KINDS as FINDING_KINDS
from rollout_inspector.refusal import Refusal
from rollouts.jobs.search import ONLY_IDS, PatternTooSlow, SearchQuestion, find_in_row
from rollouts.store.chat_templates.tokenizers import byte_table_of
from rollouts.store.models import Run, StoredRow, StoredTrajectory
from rollouts.store.runs.runs import find_run
from rollouts.store.trajectories.rows import get_row

MAX_PLACES = 5000  # The most places that one answer of a row names.
OWN = ("by", "q", "project")


@require_safe
@never_cache
def everywhere(request: HttpRequest) -> HttpResponse:
    """Search all runs that the reader may see. ``?by=`` and ``?q=``; the filters of a run's list narrow it."""
    return _answer(request, None)


@require_safe
@never_cache
def in_run(request: HttpRequest, code: str) -> HttpResponse:
    """Search one run. A share link does not search: the reader needs a login and a role in the project."""
    return _answer(request, found_or_404(visible(request, find_run(code=code)), "run", code))


def _answer(request: HttpRequest, run: Run | None) -> HttpResponse:
    filters, cursor = ListQuery.read(request.GET, reader_of(request)), request.GET.get("cursor", "")
    project = request.GET.get("project", "")[:64] if run is None else ""
    answer_page, problem, status, busy = nothing_asked(run), "", 200, False
    stopped = bool(request.GET.get("stop"))
    try:
        question = asked_of(request.GET, filters)
        if question is not None and not (stopped and cursor):
            answer_page, part = search_page(request, question, run, cursor, project=project)
            stopped = part.too_slow
    except SearchBusy:
        if wants_json(request):
            return _busy()
        busy = True
    except ValueError as refusal:  # also a pattern that makes no sense
        problem, status = str(refusal), 422
    if wants_json(request):
        return json_page({"error": problem} if problem else answer_page, status)
    following = answer_page.next or (cursor if busy or stopped else "")
    waits = busy or bool(following)
    n = (whole_number(request.GET.get("shown")) or 0) + len(answer_page.results)
    fields = [(name, request.GET[name]) for name in OWN if request.GET.get(name)]
    fields += [pair for pair in filters.pairs() if pair[0] != "sort"]
    more: dict[str, Any] = {
        "problem": problem,
        "busy": busy,
        "here": f"?{urlencode(fields)}",
        "following": f"?{urlencode([*fields, ('cursor', following), ('shown', n)])}" if waits else "",
        "goes_on": waits and not stopped and n // SHOWN == (n - len(answer_page.results)) // SHOWN,
        "was_going_on": bool(request.GET.get("on")),
        "cursor": following,
        "n_shown": n,
        "first": n - len(answer_page.results) + 1,
        "begun": bool(answer_page.by or cursor or busy),
    }
    if is_fragment(request, "search-more"):
        return page(request, "search/_part.html", answer_page, run=run, **more)
    return page(
        request, "search/index.html", answer_page, status, run=run, filter=filters, kinds=KINDS,
        by=answer_page.by or request.GET.get("by") or "text", q=request.GET.get("q", "")[:2000],
        finding_kinds=sorted(FINDING_KINDS if run is None else run.finding_counts),
        narrowed=[pair for pair in filters.pairs() if pair[0] not in ("finding", "sort")],
        projects=projects_to_filter(request), project=project, **more,
    )


def _busy() -> HttpResponse:
    answer = json_page({"error": "Other searches are under way. Ask again."}, 503)
    answer["Retry-After"] = "2"
    return answer




@reads_trajectory
def in_row(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    """The places of one row, as JSON: ``?row=`` (default 0), ``?q=`` and ``?by=`` (text, ids or regex)."""
    try:
        row = get_row(trajectory, whole_number(request.GET.get("row") or "0") or 0)
        table, by = byte_table_of(trajectory.run), request.GET.get("by") or "text"
        if table is None and by == "regex":
            raise Refusal(ONLY_IDS)
        with search_turn():
            question = SearchQuestion.read(by, request.GET.get("q", "").replace("\0", ""))
            places, complete = find_in_row(trajectory, row, question, table, MAX_PLACES)
    except StoredRow.DoesNotExist:
        return json_page({"error": "There is no such row."}, 404)
    except Refusal as refusal:
        return json_page({"error": str(refusal)}, 422)
    except SearchBusy:
        return _busy()
    except PatternTooSlow:
        return json_page({"error": "The expression took too long. Make it more specific."}, 422)
    return json_page({"row": row.index, "places": places, "complete": complete})
