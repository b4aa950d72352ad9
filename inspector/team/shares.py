"""`/shares`: make, list and revoke links; `/s/<token>`: open one without a login."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect, QueryDict
from django.urls import reverse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_http_methods, require_POST, require_safe

from inspector.team.api_keys import TokenLine
from inspector.team.join import too_many_guesses
from inspector.trajectories.place import VIEW_NAMES, View, read_place
from inspector.trajectories.tabs import TABS, TOKENS
from inspector.trajectories.tokens.lenses import column_label, find
from inspector.trajectories.tokens.page_queries import read_tokens, table_of
from inspector.trajectories.tokens.tokens_page import TokenFields, window_tokens
from inspector.web.access import (
    access, found_or_404, guessed_too_often, is_live, may_delete, remember_grant, require, share_is_over, visible
)
from inspector.web.forms import ShareForm
from inspector.web.twins import Page, error_page, from_columns, page, told
from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.text.html.tokens import painter_of
from rollouts.store.chat_templates.template_checks import find_check
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import Role, ShareLink, StoredTrajectory
from rollouts.store.people import activity_log, shares
from rollouts.store.people.activity_log import Action
from rollouts.store.people.shares import count_opening, create_share, find_share, maker_left, newest_shares, token_hash
from rollouts.store.runs.runs import find_run
from rollouts.store.trajectories.trajectories import find_trajectory
from rollouts.store.trajectories.trajectory_parts import rows_and_steps

SIDES = {"prompt": "its prompt and what it should have been", "trained": "sampled and trained"}


def target_of(link: ShareLink) -> tuple[str, str, str]:
    """Kind, name and address (query included) of what a link opens."""
    query = f"?{link.query}" if link.query else ""
    if link.run is not None:
        return "run", link.run.name, f"/runs/{link.run.code}{query}"
    if link.trajectory is not None:
        # The parameter `page` names a tab; the others are those of its address.
        params = QueryDict(link.query, mutable=True)
        page = (params.pop("page", None) or [""])[-1]
        tab = next((tab for tab in TABS if tab.slug == page), TOKENS)
        query = f"?{params.urlencode()}" if params else ""
        return "trajectory", link.trajectory.external_id, reverse(tab.url_name, args=[link.trajectory.code]) + query
    if link.check_result is not None:
        return "check", link.check_result.template_name, f"/templates/checks/{link.check_result.code}{query}"
    raise Http404("What this link opened has been deleted.")


def view_words(link: ShareLink) -> str:
    """What a link shows of its target, such as ``side by side, step 3``; empty = its page as it opens by itself."""
    words: list[str] = []
    for name, values in QueryDict(link.query).lists():
        value = values[-1]
        if name == "page":
            words += [tab.here for tab in TABS if tab.slug == value and tab.here]
        elif name == "open":
            words.append(f"{len(values)} fold{'s' * (len(values) != 1)} open")
        elif name not in ("place", "w", "top", "after") and value:
            words.append(_words(name, value))
    return ", ".join(words)


def _words(name: str, value: str) -> str:
    if name == "view":
        return VIEW_NAMES[View.TOKENS if value == View.TOKENS else View.RUNS]
    if name == "lens":
        lens = find(value)
        return f"lens {lens.label if lens else column_label(value)}"
    if name == "t":
        return f"tokens {value}"
    if name == "find":
        return f"find “{value}”"
    if name == "solo":
        return f"turn {value} alone"
    if name == "side":
        return SIDES.get(value, f"side {value}")
    if name == "finding":
        return f"finding “{title_of(value)}”"
    return f"{name.replace('_', ' ')} {value}"


MAX_SHARED_TOKENS = 4096  # The most tokens of such a link: one window of the token view.


@dataclass(frozen=True)
class SharedTokensPage(Page):
    """Tokens ``[start, stop)`` of a row of a trajectory that is not named."""

    note: str
    """What the person who shared it wrote."""
    expires_at: datetime
    """Until when the link works."""
    start: int
    """The offset of the first token in its row."""
    stop: int
    """The offset behind the last one."""
    tokens: list[TokenFields]
    """Each token with its fields; those that speak of the rest of the trajectory are empty."""


def marked_window(trajectory: StoredTrajectory, params: Mapping[str, str]) -> tuple[int, int, int] | None:
    """Row, start and stop of the tokens that the query of a tokens page marks; None = none, or too many."""
    rows, _ = rows_and_steps(trajectory)
    if not params.get("t"):
        return None
    place = read_place(params, [row.n_tokens for row in rows])
    if place.mark is None or place.notices or place.mark[1] - place.mark[0] > MAX_SHARED_TOKENS:
        return None
    return place.row, *place.mark


def shared_tokens(request: HttpRequest, link: ShareLink) -> HttpResponse:
    """The page of such a link, or the same as JSON. Reads nothing but these tokens."""
    trajectory, start, stop = link.trajectory, link.start, link.stop
    assert trajectory is not None and start is not None and stop is not None
    rows, _ = rows_and_steps(trajectory)
    row = next((row for row in rows if row.index == link.row_index and row.n_tokens >= stop), None)
    if row is None:
        raise Http404("These tokens are no longer stored. Ask the person who sent the link for another.")
    table, _ = table_of(trajectory.run.tokenizer)
    tokens = read_tokens(trajectory, row, start, stop)
    value = SharedTokensPage(link.note, link.expires_at, start, stop, window_tokens(tokens, table))
    request.share = link  # type: ignore[attr-defined]  # the line on top says until when
    return page(request, "shares/tokens.html", value, html=painter_of(table).window(tokens))


MAX_OPENINGS = "300/5m"  # How often share links are opened from one address.
MAX_LISTED = 200
FIND: dict[str, Callable[[str], Any]] = {
    "run": lambda code: find_run(code=code), "trajectory": find_trajectory, "check": find_check,
}
"""Kind of a target -> how it is found by its code."""


@dataclass(frozen=True)
class ShareLine(TokenLine):
    """A share link as a line of the list."""

    kind: str
    """Of its target: `run`, `trajectory` or `check`."""
    name: str
    """Of its target."""
    url: str
    """Of its target, query included."""
    query: str
    """The view that it opens, as parameters of an address."""
    view: str
    """The same in words; empty: the page as it opens by itself."""
    tokens: str
    """The tokens that it shows alone, such as `row 0, 12-48`; empty: everything of the target."""
    note: str
    """Shown to everybody who opens it."""
    expires_at: datetime
    """Until when it works."""
    revoked_at: datetime | None
    """When it was revoked."""
    n_opened: int
    """How often it was opened."""
    opened_at: datetime | None
    """When it was opened last."""
    project: str
    """Name of the project of its target."""
    may_revoke: bool
    """Whether the reader of the page may revoke it."""
    link: str | None = None
    """The whole address, shown once: where this request made it."""

    @classmethod
    def of(cls, record: ShareLink, request: HttpRequest, link: str | None = None) -> Self:
        """The link with its target. Raises ``Http404`` when the target was deleted."""
        kind, name, url = target_of(record)
        over = "revoked" if record.revoked_at else "maker left" if maker_left(record) else "expired"
        state = "live" if is_live(record) else over
        made_by = record.created_by.get_username()
        window = f"row {record.row_index}, {record.start}-{record.stop}" if record.row_index is not None else ""
        return from_columns(
            cls, record, kind=kind, name=name, url=url, view=view_words(record), made_by=made_by, state=state,
            tokens=window, n_opened=record.n_opened, project=record.project.name,
            may_revoke=may_delete(request, record), link=link,
        )


@require_http_methods(["GET", "HEAD", "POST"])
@never_cache
def index(request: HttpRequest) -> HttpResponse:
    """The list of links, newest first; a POST makes one and shows its address, once. `?target=run&code=CODE` lists the
    links to one object."""
    if request.method == "POST":
        return _create(request)
    kind, code = request.GET.get("target", ""), request.GET.get("code", "")[:64]
    target = None
    if kind:
        if kind not in FIND:
            raise Http404(f"Links lead to one of: {', '.join(FIND)}.")
        target = found_or_404(visible(request, FIND[kind](code)), kind, code)
    lines = [ShareLine.of(link, request) for link in newest_shares(access(request), MAX_LISTED, target)]
    return page(request, "shares/index.html", {"shares": lines, "of": f"{kind} {code}" if target is not None else ""})


def _create(request: HttpRequest) -> HttpResponse:
    form = ShareForm(request.POST)
    if not form.is_valid():
        return page(request, "shares/refused.html", {"errors": form.sentences()}, 422, form=form)
    fields = form.cleaned_data
    candidate = FIND[fields["target"]](fields["code"])
    target = found_or_404(visible(request, candidate), fields["target"], fields["code"])
    require(request, target, Role.MEMBER)
    query, window = fields["query"].lstrip("?"), None
    if fields["only"] and isinstance(target, StoredTrajectory) and is_active(target):
        sentence = "This trajectory still grows, and its rows may change. Share some of its tokens when it has ended."
        return page(request, "shares/refused.html", {"errors": {"only": [sentence]}}, 422, form=form)
    if fields["only"]:
        window = marked_window(target, QueryDict(query)) if isinstance(target, StoredTrajectory) else None
        if window is None:
            sentence = f"Mark the tokens on the page of a trajectory first, at most {MAX_SHARED_TOKENS:,} of one row."
            return page(request, "shares/refused.html", {"errors": {"only": [sentence]}}, 422, form=form)
    link, token = create_share(
        request.user, target, query=query, note=fields["note"], days=fields["days"], window=window
    )
    activity_log.record(Action.SHARED, link, detail=" ".join(target_of(link)[:2]))
    address = request.build_absolute_uri(f"/s/{token}")
    template = "shares/_made.html" if request.headers.get("HX-Request") == "true" else "shares/made.html"
    link.project = target.run.project if isinstance(target, StoredTrajectory) else target.project
    return page(request, template, {"share": ShareLine.of(link, request, address)}, 201)


@require_POST
def revoke(request: HttpRequest, pk: int) -> HttpResponse:
    """From now on the link opens nothing."""
    link = find_share(pk=pk)
    if link is None or access(request).role_in(link.project_id) is None:
        raise Http404("There is no such share link.")
    if not may_delete(request, link):
        sentence = "Only its maker or an admin of its project revokes a share link. Ask them."
        return error_page(request, 403, "This link is not yours", sentence)
    shares.revoke(link)
    sentence = f"The link {link.hint}… was revoked; the link now says so."
    return told(request, sentence, "shares", twin=ShareLine.of(link, request))


@login_not_required
@require_safe
@never_cache
def open_link(request: HttpRequest, token: str) -> HttpResponse:
    """Remember the link in this browser and go to its target. 410 when the link is over, 404 when there is none. A link
    to some tokens shows them here, at its own address, and opens nothing else."""
    wanted_json = token.endswith(".json")
    if guessed_too_often(request, "share") or guessed_too_often(request, "opened", again=True, rate=MAX_OPENINGS):
        return too_many_guesses(request)
    link = find_share(token_sha256=token_hash(token.removesuffix(".json")))
    if link is None:
        guessed_too_often(request, "share", again=True)
        raise Http404("There is no such share link. It may be cut short: copy the whole address.")
    if not is_live(link):
        return share_is_over(request)
    _, _, url = target_of(link)
    count_opening(link)
    activity_log.record(Action.SHARE_OPENED, link)
    if link.row_index is not None:
        response = shared_tokens(request, link)
    else:
        if wanted_json:
            path, _, query = url.partition("?")
            url = f"{path}.json{'?' + query if query else ''}"
        response = HttpResponseRedirect(url)
        # Who has a role in the project needs no grant, and the page then offers what the role may do.
        if access(request).role_in(link.project_id) is None:
            remember_grant(request, response, link)
    response["Referrer-Policy"] = "no-referrer"
    return response
