"""What the pages of one trajectory share: the first fields of each JSON twin, the header and the tabs."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any
from urllib.parse import urlencode

from django.http import HttpRequest, QueryDict
from django.urls import reverse
from django.utils import timezone

from inspector.html.inspector_tags import kind_words
from inspector.runs.filters import ORDERS, ListQuery
from inspector.runs.group_page import group_url
from inspector.server.health import PATIENCE_SECONDS, has_worker
from inspector.web.access import may_write, reader_of
from inspector.web.remedies import WORDS
from inspector.web.twins import Page
from rollout_inspector.refusal import Refusal, worded
from rollout_inspector.streams.figures import trained_as_sampled, trained_otherwise
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Job, Run, StoredTrajectory
from rollouts.store.runs.imports import PROVISIONAL
from rollouts.store.trajectories.groups import group_stats
from rollouts.store.trajectories.trajectory_list import (
    MAX_COUNTED, count_before, count_trajectories, neighbours, passes
)
from rollouts.store.trajectory_filters import PARAMETERS

FILTER_FIELDS = (*PARAMETERS.values(), "sort")  # Parameters of a run's list that the address of a trajectory keeps.


@dataclass(frozen=True)
class Siblings:
    """The addresses that the keys ``h`` and ``l`` open, and the filter. Empty for the visitor of a share link to one
    trajectory, who may not open its neighbours."""

    previous_url: str = ""
    next_url: str = ""
    at: str = ""
    keep_query: str = ""  # The filter as a query string, for the other pages of the same trajectory.
    filter_text: str = ""
    clear_url: str = ""
    list_url: str = ""
    group_url: str = ""  # The trajectories of the same prompt; empty = it has no group.


def find_siblings(trajectory: StoredTrajectory, params: QueryDict, here: str, reader: int | None) -> Siblings:
    """The trajectories before and after it in the list that led to it, and its place there. ``reader``: the key of the
    user who asks; None = a visitor. Two queries in the run's own order, at most eleven in a filtered and sorted
    list."""
    filters = ListQuery.read(params, reader)
    before, after = neighbours(trajectory, filters, filters.sort)
    name = "trajectory" if here == "tokens" else f"trajectory-{here}"
    # The links keep the view and the lens. They drop the place, because it belongs to this trajectory.
    stay = {field: str(params.get(field, "")) for field in ("view", "lens") if here == "tokens"}
    query = filters.query(**stay)
    run = trajectory.run
    words = ", ".join(f"{field.replace('_', ' ')} {value}" for field, value in filters.pairs() if field != "sort")
    is_sorted = filters.sort != "index"
    if is_sorted:
        words = ", ".join(filter(None, [words, f"order: {ORDERS.get(filters.sort, filters.sort)}"]))
    # The parts of a large import are read side by side.
    is_numbered = trajectory.index < PROVISIONAL
    place = _place(trajectory, filters) if is_numbered else "numbered when the import has ended"
    return Siblings(
        previous_url=reverse(name, args=[before.code]) + query if before else "",
        next_url=reverse(name, args=[after.code]) + query if after else "", at=place, keep_query=filters.query(),
        filter_text=words, clear_url=reverse(name, args=[trajectory.code]),
        list_url=reverse("run", args=[run.code]) + filters.query(),
        group_url=group_url(run.code, trajectory.group) if trajectory.group else "",
    )


def _place(trajectory: StoredTrajectory, wanted: ListQuery) -> str:
    """`5 of 252`: its place among those that pass the filter."""
    if not passes(trajectory, wanted):
        return "not in the filtered list"
    place = count_before(trajectory, wanted, wanted.sort) + 1
    total = max(count_trajectories(trajectory.run, wanted), place)
    most = MAX_COUNTED
    if wanted.pass_all and total > most:
        return f"{place:,} of {total:,}" if wanted.sort == "index" or place <= most else f"of {total:,}"
    return (f"{place:,} of " if place <= most else "of ") + (f"{total:,}" if total <= most else f"more than {most:,}")


@dataclass(frozen=True)
class TrajectoryHead(Page):
    """The first fields of the JSON of each page of a trajectory."""

    trajectory: str
    """The code of the trajectory, as in the address."""
    external_id: str
    """The name of the trajectory in the source."""
    run: str
    """The code of its run."""
    status: str
    """``queued``, ``running``, ``done``, ``failed`` ..."""
    reward: float | None
    """The reward of the whole trajectory; None when there is none."""
    reward_parts: dict[str, Any] | None
    """Name of each part of the reward -> its value."""
    stop_reason: str
    """Why the trajectory ended, in the word of the source."""
    tokenizer: str | None
    """The name of the run's tokenizer; None when the run has none."""
    training_step: int | None
    """The step of the trainer; None = not recorded."""


def head_of(trajectory: StoredTrajectory) -> dict[str, Any]:
    """The values of :class:`TrajectoryHead` by name."""
    run = trajectory.run
    other = {"trajectory": trajectory.code, "run": run.code, "tokenizer": run.tokenizer.name if run.tokenizer else None}
    names = [field.name for field in fields(TrajectoryHead)]
    return {name: other[name] if name in other else getattr(trajectory, name) for name in names}


Build = Callable[[HttpRequest, StoredTrajectory], tuple[TrajectoryHead, dict[str, Any]]]
"""Makes a page: the value that is its JSON, and the variables that only its template needs. In the template, a variable
of the second takes the place of a field of the first with the same name."""


@dataclass(frozen=True)
class Tab:
    """A page of a trajectory. ``inspector.trajectories.tabs.TABS`` lists them all."""

    slug: str  # The end of the address, and the name of the template: ``trajectories/SLUG.html``.
    label: str  # The words of the tab.
    here: str = ""  # The words in the path above the header; empty for the tokens page.
    build: Build | None = None  # None: the tokens page, which has its own view.
    is_kept: bool = True  # A browser may keep the page of an ended trajectory, because it follows from what is stored.
    is_offered: Callable[[StoredTrajectory], bool] = lambda trajectory: True
    """Whether the header of this trajectory shows the tab."""

    @property
    def url_name(self) -> str:
        return f"trajectory-{self.slug}" if self.build else "trajectory"


@dataclass(frozen=True)
class PageLink:
    """A choice among several, such as a tab of the header."""

    name: str
    url: str
    current: bool
    slug: str = ""  # The value that stands for it in an address.
    note: str = ""
    tone: str = ""  # The worst severity behind it, or ``breaks`` or ``drifts``.
    heading: str = ""  # The heading above it.


@dataclass(frozen=True)
class HeaderField:
    """A field of the header: a label, a value, and a note that may follow."""

    label: str
    meaning: str  # What it is, in words that follow the label.
    value: str
    note: str = ""
    tone: str = ""  # ``good``, ``bad`` or neither.
    url: str = ""
    is_more: bool = False  # It stands in the menu of the head, and not beside the tabs.


def base_url(trajectory: StoredTrajectory) -> str:
    return reverse("trajectory", args=[trajectory.code])


def fingerprint(trajectory: StoredTrajectory) -> str:
    """A text that changes when the trajectory changes."""
    moment = trajectory.finished_at.timestamp() if trajectory.finished_at else 0
    counts = f"{trajectory.n_steps}.{trajectory.n_tokens}.{trajectory.n_findings}"
    # The place in the run changes when the parts of a large import are put together, and the id with it.
    return f"{trajectory.status}.{trajectory.attempt}.{trajectory.index}.{counts}.{moment}"


def shows_one(request: HttpRequest) -> bool:
    """True for the visitor of a share link to one trajectory, who may not see other trajectories."""
    share = getattr(request, "share", None)
    return share is not None and share.run_id is None


PLACE_FIELDS = ("row", "view", "lens", "t", "w", "find", "solo", "top")
"""The parameters of the tokens page that the tabs beside it keep, in one parameter ``place``, to lead back there. The
page hands them to the script that fills a tab's ``place`` with what is read."""

MAX_PLACE = 500


def _with(query: str, more: str) -> str:
    return query + ("&" if query else "?") + more if more else query


def frame_of(request: HttpRequest, trajectory: StoredTrajectory, tab: Tab, tabs: Sequence[Tab]) -> dict[str, Any]:
    """The variables of the header around the page ``tab``. At most three queries."""
    run = trajectory.run
    is_alone = shows_one(request)
    siblings = Siblings() if is_alone else find_siblings(trajectory, request.GET, tab.slug, reader_of(request))
    keep = siblings.keep_query
    # The query of the tokens page that one reads, or came from; empty when it is at its default.
    source = request.GET if tab.build is None else QueryDict(request.GET.get("place", "")[:MAX_PLACE])
    place = urlencode([(name, source[name]) for name in PLACE_FIELDS if source.get(name)])[:MAX_PLACE]
    beside = _with(keep, urlencode({"place": place}) if place else "")
    return {
        "trajectory": trajectory,
        "run": run,
        "tokenizer": run.tokenizer,
        "here": tab.here,
        "tab_slug": tab.slug if tab.build else "",
        "facts": header_fields(trajectory, run, siblings.group_url),
        "place_fields": " ".join(PLACE_FIELDS),
        "tabs": [
            PageLink(
                page_tab.label,
                reverse(page_tab.url_name, args=[trajectory.code]) + (beside if page_tab.build else _with(keep, place)),
                page_tab.slug == tab.slug,
            )
            for page_tab in tabs
            if page_tab.is_offered(trajectory)
        ],
        "siblings": siblings,
        # The visitor of a share link to this trajectory alone sees no other.
        "has_siblings": not is_alone,
        "run_url": siblings.list_url,
        "trajectory_url": base_url(trajectory) + _with(keep, place),
    }


def waiting_words(job: Job) -> str:
    """Why a job still waits, as a sentence; empty while it waits for a moment only, or is under way."""
    waited = (timezone.now() - job.created_at).total_seconds()
    if job.status != Job.Status.QUEUED or waited < PATIENCE_SECONDS:
        return ""
    if has_worker("default"):
        return "A worker is there but busy with something else."
    return "No worker has taken it: start the product (make run) or celery -A inspector worker -Q default."


def work_state(
    trajectory: StoredTrajectory, missing: Callable[[StoredTrajectory], Refusal | None], find: Callable[[], Any],
    live: str, unasked: str,
) -> tuple[str, Any, str]:
    """How far what a worker makes for a page is, its record, and a sentence. ``missing``: tells why it cannot be made.
    ``live``, ``unasked``: the sentences before the end of the trajectory, and where nobody has asked for it."""
    if is_active(trajectory):
        return "live", None, live
    if refusal := missing(trajectory):
        return "missing", None, worded(refusal.sentence, refusal.remedy, WORDS)
    record = find()
    if record is None:
        return "unasked", None, unasked
    job = record.job
    failed = job.status == Job.Status.FAILED
    return job.status, record, worded(job.error, job.remedy, WORDS) if failed else waiting_words(job)


def asking(request: HttpRequest, trajectory: StoredTrajectory, state: str) -> dict[str, Any]:
    """What a page needs to ask a worker for a replay, and to follow the work. ``state``: as of :func:`work_state`."""
    return {
        "is_pending": state in ("queued", "running"), "may_write": may_write(request),
        "can_ask": state in ("unasked", "failed", "cancelled") and may_write(request),
        "ask_url": f"{reverse('trajectory-replay', args=[trajectory.code])}?{request.GET.urlencode()}",
    }


def header_fields(trajectory: StoredTrajectory, run: Run, group_url: str) -> list[HeaderField]:
    """What the head of a page says of a trajectory. At most one query, where it has a group."""
    reward = trajectory.reward
    parts = ", ".join(f"{name} {value:g}" for name, value in list((trajectory.reward_parts or {}).items())[:6]
                      if isinstance(value, int | float))
    tone = "" if reward is None else "good" if reward > 0 else "bad"
    facts = [HeaderField("reward", "of the trajectory", "none" if reward is None else f"{reward:.4g}", parts, tone)]
    if trajectory.status == "done":
        stop = kind_words(trajectory.stop_reason) or "not recorded"
        facts.append(HeaderField("stopped by", "why it ended, in the word of the source", stop))
    else:
        facts.append(HeaderField("status", "it waits, works, failed or was cancelled", trajectory.status))
    if trajectory.group:
        facts.append(HeaderField("group", "the trajectories of one prompt", trajectory.group, *_group_note(trajectory),
                                 url=group_url, is_more=True))
    if trajectory.training_step is not None:
        facts.append(HeaderField("training step", "of the trainer", f"{trajectory.training_step:,}", is_more=True))
    facts.append(HeaderField("steps", "engine calls", f"{trajectory.n_steps:,}"))
    broken = trajectory.n_rows > 1 and trajectory.n_tokens  # without token ids, nobody knows whether they are
    facts.append(HeaderField("rows", "what a trainer gets", f"{trajectory.n_rows:,}", tone="bad" if broken else ""))
    # Rows without steps rarely tell which of their tokens were sampled. A loss mask does not tell it.
    sampled = f"{trajectory.n_sampled:,} sampled" if trajectory.n_steps else ""
    facts.append(HeaderField("tokens", "what the steps or rows add", f"{trajectory.n_tokens:,}", sampled))
    facts.append(HeaderField("trained", "under the loss mask", f"{trajectory.n_trained:,}", *_trained_note(trajectory)))
    damage = "not measured" if trajectory.damage is None else f"{trajectory.damage:.3g}"
    facts.append(HeaderField("damage", "the relative error of the gradient of its rows", damage, is_more=True))
    if run.model:
        facts.append(HeaderField("model", "what sampled it, and its engine", run.model, run.engine, is_more=True))
    tokenizer = run.tokenizer.name if run.tokenizer else "none"
    facts.append(HeaderField("tokenizer", "what makes text of ids", tokenizer, is_more=True))
    return facts


def _trained_note(trajectory: StoredTrajectory) -> tuple[str, str]:
    """How many sampled tokens the rows train as they were sampled, how many others they train, and its tone."""
    if trajectory.n_lost is None or is_active(trajectory):
        return "", ""
    n_kept = trained_as_sampled(trajectory.n_sampled, trajectory.n_lost)
    others = trained_otherwise(trajectory.n_trained, trajectory.n_sampled, trajectory.n_lost)
    note = f"{n_kept:,} of {trajectory.n_sampled:,} sampled" + (f", and {others:,} not as sampled" if others else "")
    return note, "bad" if trajectory.n_lost or others else ""


def _group_note(trajectory: StoredTrajectory) -> tuple[str, str]:
    """A sentence about the rewards of the group, and its tone."""
    stats = group_stats(trajectory.run, [trajectory.group]).get(trajectory.group)
    if stats is None or stats.n < 2 or stats.mean is None:
        return "", ""
    if stats.has_no_signal:
        return f"{stats.n} trajectories, all rewards {stats.mean:.3g}: no learning signal", "bad"
    return f"{stats.n} trajectories, rewards {stats.low:.3g} to {stats.high:.3g}, mean {stats.mean:.3g}", ""
