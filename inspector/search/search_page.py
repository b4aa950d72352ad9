"""A part of a search as a page shows it and as its twin and the API write it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlencode

from django.http import HttpRequest
from django.urls import reverse
from django.utils.safestring import SafeString, mark_safe

from inspector.runs.run_values import RunValues
from inspector.web.access import access
from inspector.web.twins import Page, from_columns
from rollout_inspector.text.html.text import text_html
from rollouts.jobs.search import FoundRange, SearchedPart, SearchHit, SearchQuestion, search
from rollouts.store.models import Run
from rollouts.store.runs.muted import muted_in_runs
from rollouts.store.runs.runs import RunFilters, visible_runs
from rollouts.store.trajectory_filters import TrajectoryFilters

RESULTS = 50  # The most results of one part of a page.
SHOWN = 500  # Results after which a page waits for the reader before it goes on.
SECONDS = 0.25  # About how long one request searches. Then it answers, and the page asks for the next part.
MAX_SEARCHES = 3  # Parts that this process searches at once.
MAX_RUNS = 10
MAX_DRAWN = 400  # Characters of a result that the page draws.
KINDS = {"text": "text", "ids": "token ids", "regex": "regular expression", "metadata": "names and metadata"}
"""What the form offers -> its words."""
_places = threading.BoundedSemaphore(MAX_SEARCHES)


class SearchBusy(Exception):
    """This process does enough searches already."""


@contextmanager
def search_turn() -> Iterator[None]:
    """One of the searches that this process does at once. Raises :class:`SearchBusy` where there is none left."""
    if not _places.acquire(blocking=False):
        raise SearchBusy
    try:
        yield
    finally:
        _places.release()


@dataclass(frozen=True)
class SearchResult(FoundRange, Page):
    """A range of tokens, or metadata, that a search found."""

    run: str
    """Code of its run."""
    run_name: str
    """Name of its run."""
    muted: bool
    """Whether its kind is muted in the run; false where something else was searched for."""
    url: str
    """Address of the page that shows it."""

    @classmethod
    def of(cls, found: SearchHit, is_muted: bool) -> SearchResult:
        """A result of :func:`rollouts.jobs.search.search`. ``is_muted``: the run mutes the kind of its finding."""
        run = found.run
        return from_columns(cls, found, run=run.code, run_name=run.name, muted=is_muted, url=_address(found))

    @property
    def html(self) -> SafeString:
        """The range and what stands around it; text_html escapes everything."""
        text = self.text if len(self.text) <= MAX_DRAWN else f"{self.text[:MAX_DRAWN]} …"
        before, text, after = (text_html(part) for part in (self.before, text, self.after))
        return mark_safe(f"<span>{before}</span><mark>{text}</mark><span>{after}</span>")

    @property
    def place(self) -> str:
        """Where it is, in words."""
        if self.start is None or self.stop is None:
            return "metadata"
        where = f"row {self.row}" if self.row is not None else f"step {self.step}, in no row"
        if self.stop - self.start == 1:
            return f"{where}, token {self.start:,}"
        return f"{where}, tokens {self.start:,} to {max(self.stop - 1, self.start):,}"


def _address(found: SearchHit) -> str:
    page = reverse("trajectory", args=[found.trajectory])
    if found.start is None or found.stop is None:
        return page
    if found.row is None:
        return f"{reverse('trajectory-record', args=[found.trajectory])}?step={found.step or 0}"
    return f"{page}?{urlencode({'row': found.row, 't': f'{found.start}-{max(found.stop, found.start + 1)}'})}"


@dataclass(frozen=True)
class SearchPage(Page):
    """A part of what a search finds."""

    run: str | None
    """Code of the run that is searched; null = all runs that the reader may see."""
    by: str
    """``text``, ``ids``, ``regex``, ``metadata`` or ``finding``; empty = nothing is searched for yet."""
    q: str
    """What is searched for."""
    results: list[SearchResult]
    """The newest run first, each run in its own order."""
    complete: bool
    """Everything was searched."""
    next: str | None
    """What ``cursor`` takes for the next part; null = there is none."""
    done: int
    """Trajectories that were searched, in this part and those before."""
    total: int
    """Trajectories of all the runs."""
    notes: list[str]
    """Sentences about what could not be searched."""
    runs: list[RunValues]
    """Runs by name, model or code, in the first part of a search of metadata in all runs."""


def asked_of(params: Mapping[str, str], filters: TrajectoryFilters) -> SearchQuestion | None:
    """The question of an address; None = nothing is asked yet. Raises ``Refusal`` and :class:`SearchBusy`."""
    text = params.get("q", "").replace("\0", "")
    if not text and not filters.kind:
        return None
    with search_turn():  # reading an expression takes a process and time
        return SearchQuestion.read(params.get("by") or "text", text, filters)


def search_page(
    request: HttpRequest, question: SearchQuestion, run: Run | None, cursor: str = "", limit: int = RESULTS,
    project: str = "",
) -> tuple[SearchPage, SearchedPart]:
    """A part of a search of what the caller may see. Raises ``Refusal``, ``ValueError`` for a cursor that cannot be
    read, and :class:`SearchBusy`."""
    with search_turn():
        part = search(access(request), question, run, cursor, limit, SECONDS, project)
    runs = []
    if question.by == "metadata" and run is None and not cursor:
        filters = RunFilters(text=question.text, project=project)
        runs = [RunValues.of(stored_run) for stored_run in visible_runs(access(request), filters, "", MAX_RUNS)[0]]
    return SearchPage(
        run.code if run is not None else None, question.by, question.text or question.filters.kind,
        _results(part.results), part.complete, part.next or None, part.done, part.total, part.notes, runs,
    ), part


def _results(found: Sequence[SearchHit]) -> list[SearchResult]:
    """One query for muted kinds, and none where no finding was found."""
    muted = muted_in_runs(list({hit.run.pk: hit.run for hit in found if hit.kind}.values()))
    return [SearchResult.of(hit, hit.kind in muted.get(hit.run.pk, ())) for hit in found]


def nothing_asked(run: Run | None) -> SearchPage:
    """The page before anything is searched for."""
    return SearchPage(run.code if run is not None else None, "", "", [], True, None, 0, 0, [], [])
