"""What a share link to some tokens of a trajectory shows: these tokens, and nothing else of the trajectory."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from django.http import Http404, HttpRequest, HttpResponse

from inspector.trajectories.place import read_place
from inspector.trajectories.tokens.page_queries import read_tokens, table_of
from inspector.trajectories.tokens.tokens_page import TokenFields, window_tokens
from inspector.web.twins import Page, page
from rollout_inspector.text.html.tokens import painter_of
from rollouts.store.models import ShareLink, StoredTrajectory
from rollouts.store.trajectories.trajectory_parts import rows_and_steps

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
