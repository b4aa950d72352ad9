"""The pages that search, part by part: the first part is in the page, and the page asks for the others."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from inspector.runs.filters import ListQuery
from inspector.search.docs_page import docs_titles, docs_url
from inspector.search.search_page import KINDS, SHOWN, SearchBusy, asked_of, nothing_asked, search_page, search_turn
from inspector.web.access import (
    access, found_or_404, may_write, project_name, projects_to_filter, reader_of, reads_trajectory, visible
)
from inspector.web.twins import Page, is_fragment, json_page, page, wants_json, whole_number
from rollout_inspector.diagnose.kinds import KINDS as FINDING_KINDS
from rollout_inspector.refusal import Refusal
from rollouts.jobs.search import ONLY_IDS, PatternTooSlow, SearchQuestion, find_in_row
from rollouts.store.chat_templates.tokenizers import byte_table_of
from rollouts.store.models import Run, StoredRow, StoredTrajectory
from rollouts.store.runs.runs import RunFilters, find_run, visible_runs
from rollouts.store.trajectories.rows import get_row
from rollouts.store.trajectories.search_queries import trajectories_named

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


MAX_TEXT = 100
EACH = 6  # The most places of one group.
NEWEST = 12
"""The runs, newest first, in which trajectories are looked for by their names; by its code one is found anywhere."""
PAGES = {
    "runs": "Runs", "search": "Search all runs", "gallery": "See what breaks", "tokenizers": "Tokenizers",
    "templates": "Chat templates", "templates-matrix": "Templates and probes", "templates-compare": "Compare templates",
    "workers": "Workers", "shares": "Shares", "account": "Account", "projects": "Projects", "api-tokens": "API keys",
    "api-docs": "API", "help": "Help, words, keys", "help-findings": "Every kind of finding", "docs-index": "Docs",
}
"""Name of an address -> the page, of those that everybody with a login may open."""
WRITER_PAGES = {"run-new": "New run", "import": "Import"}


@dataclass(frozen=True)
class GoPlace(Page):
    """Where one may go."""

    group: str
    """Runs, trajectories, pages or docs, as the list says it."""
    title: str
    """Its name."""
    about: str
    """What stands beside the title."""
    url: str
    """Its address."""


@require_safe
@never_cache
def go(request: HttpRequest) -> HttpResponse:
    """`?q=`: parts of a name, in any order; without them the newest runs and the pages are listed. At most three
    queries beside those of the login."""
    text = " ".join(request.GET.get("q", "").replace("\0", "").split())[:MAX_TEXT]
    value = {"q": text, "places": [*_runs_and_trajectories(request, text), *_pages(request, text)]}
    template = "search/_go.html" if is_fragment(request, "go-list") else "search/go.html"
    return page(request, template, value)


def _runs_and_trajectories(request: HttpRequest, text: str) -> Iterator[GoPlace]:
    reader = access(request)
    for run in visible_runs(reader, RunFilters(text=text), "", EACH)[0]:
        about = " · ".join(filter(None, (project_name(request, run.project_id), run.kind, run.model, run.code)))
        yield GoPlace("Runs", run.name, about, reverse("run", args=[run.code]))
    if len(text) > 1:
        newest = visible_runs(reader, RunFilters(), "", NEWEST)[0]
        for trajectory in trajectories_named(reader, newest, text, EACH):
            url = reverse("trajectory", args=[trajectory.code])
            yield GoPlace("Trajectories", trajectory.external_id, f"{trajectory.run.name} · {trajectory.code}", url)


def _pages(request: HttpRequest, text: str) -> Iterator[GoPlace]:
    names = {**(WRITER_PAGES if may_write(request) else {}), **PAGES}
    yield from _named(text, (GoPlace("Pages", title, "", reverse(name)) for name, title in names.items()))
    if text:
        yield from _named(text, (GoPlace("Docs", title, "", docs_url(name)) for name, title in docs_titles().items()))
        group, address = "Findings, explained", reverse("help-findings")
        kinds = (GoPlace(group, kind.title, slug, f"{address}#{slug}") for slug, kind in FINDING_KINDS.items())
        yield from _named(text, kinds)


def _named(text: str, places: Iterable[GoPlace]) -> list[GoPlace]:
    """The first places whose names hold every word; those that begin with the first word stand first."""
    words = text.casefold().split()
    matches = [place for place in places if all(word in f"{place.title} {place.about}".casefold() for word in words)]
    return sorted(matches, key=lambda place: not place.title.casefold().startswith(tuple(words[:1])))[:EACH]
