"""`/go`: runs, trajectories, pages and docs by name. Ctrl-K opens it in a dialog, which asks for the list alone."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from django.http import HttpRequest, HttpResponse
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from inspector.search.docs_page import docs_titles, docs_url
from inspector.web.access import access, may_write, project_name
from inspector.web.twins import Page, is_fragment, page
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.store.runs.runs import RunFilters, visible_runs
from rollouts.store.trajectories.search_queries import trajectories_named

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


@dataclass(frozen=True)
class GoPage(Page):
    """The places whose names hold what was typed."""

    q: str
    """What was typed; without it the newest runs and the pages are listed."""
    places: list[GoPlace]
    """At most six of a group."""


@require_safe
@never_cache
def go(request: HttpRequest) -> HttpResponse:
    """`?q=`: parts of a name, in any order. At most three queries beside those of the login."""
    text = " ".join(request.GET.get("q", "").replace("\0", "").split())[:MAX_TEXT]
    value = GoPage(text, [*_runs_and_trajectories(request, text), *_pages(request, text)])
    template = "search/_go.html" if is_fragment(request, "go-list") else "search/go.html"
    return page(request, template, value)


def _runs_and_trajectories(request: HttpRequest, text: str) -> Iterator[GoPlace]:
    reader = access(request)
    for run in visible_runs(reader, RunFilters(text=text), "", EACH).items:
        about = " · ".join(filter(None, (project_name(request, run.project_id), run.kind, run.model, run.code)))
        yield GoPlace("Runs", run.name, about, reverse("run", args=[run.code]))
    if len(text) > 1:
        newest = visible_runs(reader, RunFilters(), "", NEWEST).items
        for trajectory in trajectories_named(reader, newest, text, EACH):
            url = reverse("trajectory", args=[trajectory.code])
            yield GoPlace("Trajectories", trajectory.external_id, f"{trajectory.run.name} · {trajectory.code}", url)


def _pages(request: HttpRequest, text: str) -> Iterator[GoPlace]:
    names = {**(WRITER_PAGES if may_write(request) else {}), **PAGES}
    yield from _named(text, (GoPlace("Pages", title, "", reverse(name)) for name, title in names.items()))
    if text:
        yield from _named(text, (GoPlace("Docs", title, "", docs_url(name)) for name, title in docs_titles().items()))
        group, address = "Findings, explained", reverse("help-findings")
        yield from _named(text, (GoPlace(group, kind.title, slug, f"{address}#{slug}") for slug, kind in KINDS.items()))


def _named(text: str, places: Iterable[GoPlace]) -> list[GoPlace]:
    """The first places whose names hold every word; those that begin with the first word stand first."""
    words = text.casefold().split()
    matches = [place for place in places if all(word in f"{place.title} {place.about}".casefold() for word in words)]
    return sorted(matches, key=lambda place: not place.title.casefold().startswith(tuple(words[:1])))[:EACH]
