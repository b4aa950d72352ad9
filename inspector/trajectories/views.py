"""The trajectory pages: tokens, side by side, template deltas, the mask explained. Each has a `.json` twin."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.conf import settings
from django.contrib.staticfiles.storage import staticfiles_storage
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect
from django.utils.cache import get_conditional_response
from django.views.decorators.http import require_POST

from inspector.trajectories import tokens_page
from inspector.trajectories.compare_page import compare_page
from inspector.trajectories.deltas_page import deltas_page
from inspector.trajectories.mask_page import mask_page
from inspector.trajectories.record_page import recorded_page
from inspector.trajectories.strategies_page import strategies_page
from inspector.trajectories.tokens_json import tokens_json
from inspector.web.access import may_write, reads_trajectory
from inspector.web.twins import page, wants_json
from rollouts.models import StoredTrajectory
from rollouts.selectors import parts
from rollouts.tasks.replays import order
from rollouts.work import replays

PAGE_VERSION = 12
"""Part of the ETag: raise it when a page's HTML changes, so that no browser keeps the old one."""

View = Callable[..., HttpResponse]


def conditional(view: View) -> View:
    """A finished trajectory does not change: the same page is answered with 304."""

    @wraps(view)
    def wrapped(request: HttpRequest, trajectory: StoredTrajectory, *args: Any, **kwargs: Any) -> HttpResponse:
        if tokens_page.is_live(trajectory):
            response = view(request, trajectory, *args, **kwargs)
            response["Cache-Control"] = "no-store"
            return response
        etag = _etag(request, trajectory)
        response = get_conditional_response(request, etag=etag) or view(request, trajectory, *args, **kwargs)
        if response.status_code == 200:
            response["ETag"] = etag
        # Ask again each time (access may have been revoked), and be answered without the tokens being read.
        response["Cache-Control"] = "private, no-cache"
        return response

    return wrapped


def _etag(request: HttpRequest, trajectory: StoredTrajectory) -> str:
    user = getattr(request, "user", None)
    run = trajectory.run
    parts = (
        # A page names its style sheets and scripts by their hashes.
        PAGE_VERSION, getattr(staticfiles_storage, "manifest_hash", ""),
        trajectory.pk, tokens_page.fingerprint(trajectory), run.n_trajectories, run.n_finished, run.name,
        run.tokenizer_id, run.chat_template_id, sorted(run.finding_counts.items()), trajectory.worst_severity,
        request.get_full_path(), request.COOKIES.get("theme", ""),
        user.pk if user is not None and may_write(request) else "",
        getattr(getattr(request, "share", None), "pk", ""), request.headers.get("HX-Request", ""),
        # Forms carry a token of this secret, and belong to this session.
        request.COOKIES.get(settings.CSRF_COOKIE_NAME, ""), request.COOKIES.get(settings.SESSION_COOKIE_NAME, ""),
    )  # fmt: skip
    return f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"'


@reads_trajectory
@conditional
def trajectory(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    if "have" in request.GET and request.GET["have"] == tokens_page.fingerprint(trajectory):
        # The live page asks every two seconds: nothing new is nothing to swap.
        return HttpResponse(status=204)
    found = tokens_page.read_page(request, trajectory)
    if wants_json(request):
        return page(request, "", tokens_json(trajectory, found))
    return page(request, "trajectories/detail.html", tokens_page.html_context(request, trajectory, found))


def _answer(
    request: HttpRequest,
    trajectory: StoredTrajectory,
    here: str,
    template: str,
    built: tuple[dict[str, Any], dict[str, Any]],
) -> HttpResponse:
    report, drawn = built
    if wants_json(request):
        return page(request, "", {**tokens_page.names(trajectory), **report})
    frame = tokens_page.frame(request, trajectory, here)
    return page(request, template, {**frame, "report": report, **drawn})


@reads_trajectory
@conditional
def compare(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    built = compare_page(request.GET, trajectory, tokens_page.shows_one(request))
    return _answer(request, trajectory, "compare", "trajectories/compare.html", built)


@reads_trajectory
@conditional
def deltas(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    return _answer(request, trajectory, "deltas", "trajectories/deltas.html", deltas_page(request.GET, trajectory))


@reads_trajectory
@conditional
def mask(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    return _answer(request, trajectory, "mask", "trajectories/mask.html", mask_page(request.GET, trajectory))


@reads_trajectory
@conditional
def record(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    return _answer(request, trajectory, "record", "trajectories/record.html", recorded_page(request.GET, trajectory))


@reads_trajectory
def strategies(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    built = strategies_page(request, trajectory)
    response = _answer(request, trajectory, "strategies", "trajectories/strategies.html", built)
    response["Cache-Control"] = "private, no-store"
    return response


@require_POST
def strategies_again(request: HttpRequest, code: str) -> HttpResponse:
    """Send a worker once more for a replay that failed."""
    found = parts.find_trajectory(code)
    if found is None:
        raise Http404(f"There is no trajectory with the code {code}.")
    if not tokens_page.is_live(found) and not replays.missing(found):
        made, is_new = replays.ask(found, again=True)
        if is_new:
            order(made)
    return redirect("trajectory-strategies", code=code)
