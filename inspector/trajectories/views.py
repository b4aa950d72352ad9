"""The views of a trajectory: its tokens, one view for each tab of ``tabs.TABS``, and the request of a replay."""

import hashlib
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from django.conf import settings
from django.contrib.messages import get_messages
from django.contrib.staticfiles.storage import staticfiles_storage
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import redirect, render
from django.template.loader import get_template
from django.urls import reverse
from django.utils.cache import get_conditional_response
from django.views.decorators.cache import cache_control
from django.views.decorators.http import require_POST

from inspector.server.machines import code_version
from inspector.trajectories import forks_page, tabs
from inspector.trajectories.discussion import Discussion, discussion_of
from inspector.trajectories.find_page import alternatives_page, find_page
from inspector.trajectories.frame import Tab, fingerprint, frame_of, shows_one
from inspector.trajectories.place import read_place
from inspector.trajectories.tokens.findings import kinds_in_run
from inspector.trajectories.tokens.reader import Reader
from inspector.trajectories.tokens.token_view import PagePart, read_token_view
from inspector.trajectories.tokens.tokens_page import card_columns, trajectory_page
from inspector.web.access import (
    found_or_404, reads_trajectory, role_of, sees_several_projects, visible, writes_trajectory
)
from inspector.web.twins import error_page, is_fragment, json_page, page, page_in_parts, wants_json, whole_number
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs import parser_comparison
from rollouts.jobs.broker import send_job
from rollouts.jobs.exports.reproduce import script
from rollouts.jobs.forks import fork
from rollouts.jobs.replays import trajectory_replays
from rollouts.store import models
from rollouts.store.chat_templates.chat_templates import chat_template_texts
from rollouts.store.jobs.jobs import cancel_job, is_active
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories import trajectory_parts
from rollouts.store.trajectories.comments import mark_seen
from rollouts.store.trajectories.trajectories import find_trajectory, load_trajectories

PAGE_VERSION = code_version()  # A part of the ETag, so that no browser keeps a page of an older version.

IN_PARTS = 20_000  # A page of at least so many tokens is sent in parts: its head is drawn before its turns are written.

View = Callable[..., HttpResponse]


def conditional(view: View) -> View:
    """Answers 304 for a page that the browser has, because an ended trajectory does not change."""

    @wraps(view)
    def wrapped(request: HttpRequest, trajectory: StoredTrajectory, *args: Any, **kwargs: Any) -> HttpResponse:
        # A page that says something once is not kept, or it would say it again; nor is one that shows work.
        if is_active(trajectory) or len(get_messages(request)) or request.GET.get("side") == "repair":
            response = view(request, trajectory, *args, **kwargs)
            response["Cache-Control"] = "no-store"
            return response
        etag = _etag(request, trajectory)
        response = get_conditional_response(request, etag=etag) or view(request, trajectory, *args, **kwargs)
        if response.status_code == 200:
            response["ETag"] = etag
        # The browser asks each time, because access may be revoked. The 304 reads no tokens.
        response["Cache-Control"] = "private, no-cache"
        return response

    return wrapped


def _part(request: HttpRequest) -> PagePart:
    fragments = (PagePart.READER, PagePart.WINDOW, PagePart.MORE)
    return next((part for part in fragments if is_fragment(request, part)), PagePart.PAGE)


def _etag(request: HttpRequest, trajectory: StoredTrajectory) -> str:
    user = getattr(request, "user", None)
    run = trajectory.run
    is_part = _part(request) != PagePart.PAGE  # it names no project
    parts = (
        # The addresses of style sheets and scripts hold their hashes.
        PAGE_VERSION, getattr(staticfiles_storage, "manifest_hash", ""),
        trajectory.pk, fingerprint(trajectory), run.n_trajectories, run.n_finished, run.name,
        run.tokenizer_id, run.chat_template_id, sorted(run.finding_counts.items()), trajectory.worst_severity,
        trajectory.checks, discussion_of(request, trajectory, is_part),
        request.get_full_path(), request.COOKIES.get("theme", ""),
        # What a role may do, and whether a page names its project.
        user.pk if user is not None else "", role_of(request), run.project_id,
        not is_part and sees_several_projects(request),
        getattr(getattr(request, "share", None), "pk", ""), request.headers.get("HX-Request", ""),
        request.headers.get("HX-Target", ""),
        # Forms carry a token of the CSRF secret, and belong to one session.
        request.COOKIES.get(settings.CSRF_COOKIE_NAME, ""), request.COOKIES.get(settings.SESSION_COOKIE_NAME, ""),
    )
    return f'"{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"'


def _frame(request: HttpRequest, trajectory: StoredTrajectory, tab: Tab) -> dict[str, Any]:
    """The header around a page, and what people say of the trajectory."""
    frame, discussion = frame_of(request, trajectory, tab, tabs.TABS), discussion_of(request, trajectory)
    is_text_only = tabs.is_text_only(trajectory)
    home = "trajectory-record" if is_text_only else "trajectory"
    there = "" if tab.url_name == home else reverse(home, args=[trajectory.code])
    return frame | {"discussion": discussion, "is_text_only": is_text_only, "comments_url": f"{there}#comments"}


@reads_trajectory
@conditional
def trajectory(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    if "have" in request.GET and request.GET["have"] == fingerprint(trajectory):
        # The live page asks every two seconds. Without a change there is nothing to swap.
        return HttpResponse(status=204)
    part = _part(request)
    discussion = discussion_of(request, trajectory, part != PagePart.PAGE)
    if wants_json(request):
        return json_page(trajectory_page(read_token_view(trajectory, request.GET, PagePart.TWIN, discussion)))
    if part != PagePart.PAGE:
        # Another window or lens, or the next part of a row: header and lists stay as they are.
        reader = Reader(read_token_view(trajectory, request.GET, part, discussion))
        return page(request, "trajectories/_reader.html", {"reader": reader, "place": reader.place})
    if tabs.is_text_only(trajectory) and not request.headers.get("HX-Request"):
        query = request.GET.urlencode()
        return redirect(reverse("trajectory-record", args=[trajectory.code]) + (f"?{query}" if query else ""))
    view = read_token_view(trajectory, request.GET, part, discussion)
    kinds = sorted({item.kind for item in view.findings})
    reader = Reader(view, {} if shows_one(request) else kinds_in_run(trajectory, kinds))
    html = _frame(request, trajectory, tabs.TOKENS) | {"reader": reader, "place": reader.place}
    if reader.stop - reader.start < IN_PARTS:
        return page(request, "trajectories/detail.html", html)
    return page_in_parts(  # type: ignore[return-value]
        request, "trajectories/detail.html", html, "drawn_turns", _drawn_turns(reader)
    )


def _drawn_turns(reader: Reader) -> Iterator[str]:
    turn = get_template("trajectories/_turn.html")
    for section in reader.sections:
        yield turn.render({"section": section, "reader": reader, "place": reader.place})


@require_POST
def seen(request: HttpRequest, code: str) -> HttpResponse:
    """Mark a trajectory as seen by the user, with ``seen=no`` as not seen. A viewer may: nobody else sees the mark."""
    trajectory = found_or_404(visible(request, find_trajectory(code)), "trajectory", code)
    is_now = request.POST.get("seen") != "no"
    try:
        mark_seen(trajectory, request.user, is_now)
    except ValueError as refusal:
        if wants_json(request):
            return json_page({"errors": {"form": [str(refusal)]}}, 422)
        return error_page(request, 422, "It was not marked", str(refusal), run=trajectory.run.code)
    if wants_json(request):
        return json_page({"trajectory": code, "seen": is_now})
    if request.headers.get("HX-Request") == "true":
        context = {"trajectory": trajectory, "discussion": Discussion([], False, is_now)}
        return render(request, "trajectories/_seen.html", context)
    query = request.POST.get("query", "")[:500]
    return redirect(reverse("trajectory", args=[code]) + (f"?{query}" if query else ""))


@reads_trajectory
@conditional
def card(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    """The fields of the tokens in a window, which the page fetches for its cards. Scripts read the page's twin."""
    return json_page(card_columns(read_token_view(trajectory, request.GET, PagePart.CARD)))


@reads_trajectory
@conditional
def find(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    """Every place of the text ``q`` in the row that the address names."""
    rows, _ = trajectory_parts.rows_and_steps(trajectory)
    place = read_place(request.GET, [row.n_tokens for row in rows])
    row = rows[place.row] if rows else None
    return json_page(find_page(trajectory, row, request.GET.get("q", "")))


@reads_trajectory
@conditional
def alternatives(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    """The alternatives of the token that the address marks, which the page fetches for its card."""
    rows, steps = trajectory_parts.rows_and_steps(trajectory)
    place = read_place(request.GET, [row.n_tokens for row in rows])
    return json_page(alternatives_page(trajectory, rows[place.row] if rows else None, steps, place))


def tab_view(tab: Tab) -> View:
    """The view of a tab that has a builder."""

    def view(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
        assert tab.build is not None
        value, html = tab.build(request, trajectory)
        if wants_json(request):
            return json_page(value)
        frame = _frame(request, trajectory, tab)
        return page(request, f"trajectories/{tab.slug}.html", value, **frame, **html)

    return reads_trajectory((conditional if tab.is_kept else cache_control(private=True, no_store=True))(view))


@writes_trajectory
def new_fork(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    """Continue a trajectory from a token, or from both sides of a finding."""
    form = forks_page.ForkForm(trajectory.run, request.POST)
    if form.is_valid():
        try:
            runs = fork(trajectory, form.settings(), request.user)
        except Refusal as refusal:
            for name, sentence in getattr(refusal, "problems", {"": refusal.sentence}).items():
                form.add_error(name if name in form.fields else None, sentence)
        else:
            address = reverse("trajectory-forks", args=[trajectory.code]) + "#forks"
            twin = {"runs": [run.code for run in runs]}
            return json_page(twin, 201) if wants_json(request) else redirect(address)
    if wants_json(request):
        return json_page({"errors": form.sentences()}, 422)
    request.share = None  # type: ignore[attr-defined]
    value, html = forks_page.forks_page(request, trajectory, form)
    tab = next(tab for tab in tabs.TABS if tab.slug == "forks")
    return page(request, "trajectories/forks.html", value, 422, **_frame(request, trajectory, tab), **html)


@writes_trajectory
def strategies_again(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    """Send a worker for the replay of a trajectory, unless it is there or under way; with ``do=cancel``, stop it. With
    ``side=repair`` it is also replayed under the repaired chat template, which *Side by side* shows."""
    is_repair = request.GET.get("side") == "repair"
    if request.POST.get("do") == "cancel":
        if (current := trajectory_replays.current(trajectory)) is not None:
            cancel_job(current.job)
    elif not is_active(trajectory) and not trajectory_replays.missing(trajectory):
        replay, is_new = trajectory_replays.ask(trajectory, again=True, user=request.user, repair=is_repair)
        if is_new:
            send_job(replay.job)
    address = reverse("trajectory-compare" if is_repair else "trajectory-strategies", args=[trajectory.code])
    return redirect(f"{address}?{request.GET.urlencode()}".rstrip("?"))


@writes_trajectory
def parsers_again(request: HttpRequest, trajectory: StoredTrajectory) -> HttpResponse:
    """Send a worker to read a reply with every parser, unless one is at it; with ``do=cancel``, ask it to stop."""
    step = whole_number(request.GET.get("step", "")) or 0
    if request.POST.get("do") == "cancel":
        audit = parser_comparison.current(trajectory, step)
        if audit is not None:
            cancel_job(audit.job)
    elif step < trajectory.n_steps and not is_active(trajectory) and not parser_comparison.missing(trajectory):
        audit, is_new = parser_comparison.ask(trajectory, step, request.user)
        if is_new:
            send_job(audit.job)
    return redirect(f"{reverse('trajectory-parsers', args=[trajectory.code])}?{request.GET.urlencode()}".rstrip("?"))


@reads_trajectory
def finding_script(request: HttpRequest, trajectory: StoredTrajectory, number: int) -> HttpResponse:
    """The script as plain text, so that the browser shows it and the copy button can fetch it."""
    stored = trajectory_parts.numbered_finding(trajectory, number)
    if stored is None:
        raise Http404(f"This trajectory has {trajectory.n_findings} findings; there is no number {number}.")
    run = trajectory.run
    tokenizer = run.tokenizer
    from_hub = tokenizer is not None and bool(tokenizer.revision)
    name = f"finding_{trajectory.code}_{number}.py"
    (value,) = load_trajectories([trajectory])
    try:
        text = script(
            _value(stored), value, tokenizer=tokenizer.source if tokenizer is not None and from_hub else "",
            revision=tokenizer.revision if tokenizer is not None else "",
            named=(tokenizer.name, tokenizer.sha256) if tokenizer is not None and not from_hub else None,
            chat_template=_template(run, value, stored), name=name, title=title_of(stored.kind),
        )
    except Refusal as error:
        raise Http404(str(error)) from error
    response = HttpResponse(text, content_type="text/plain; charset=utf-8")
    how = "attachment" if "download" in request.GET else "inline"
    response["Content-Disposition"] = f'{how}; filename="{name}"'
    response["X-Content-Type-Options"] = "nosniff"
    return response


def _template(run: models.Run, value: Trajectory, stored: models.StoredFinding) -> str | None:
    """The chat template of the step or the rows, else of the run; None: the tokenizer's own."""
    on_step = stored.step_index is not None and stored.step_index < len(value.steps)
    sha256 = value.steps[stored.step_index or 0].chat_template_sha256 if on_step else run.rows_chat_template_id
    if sha256 and sha256 != run.chat_template_id:
        return chat_template_texts(run.project_id, [sha256]).get(sha256)
    return run.chat_template.text if run.chat_template is not None else None


def _value(stored: models.StoredFinding) -> Finding:
    return Finding(
        Axis(stored.axis), stored.kind, Severity(stored.severity), step=stored.step_index, row=stored.row_index,
        start=stored.start, stop=stored.stop, expected_ids=stored.expected_ids, actual_ids=stored.actual_ids,
        evidence=stored.evidence,
    )
