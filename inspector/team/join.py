"""`/join/<token>`: somebody joins a project by an invitation, with a new account or the one that is logged in."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from django.contrib.auth import login as start_session
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.forms import UserCreationForm
from django.contrib.auth.models import User
from django.db import IntegrityError, transaction
from django.http import Http404, HttpRequest, HttpResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_http_methods

from inspector.team.login import BACKEND
from inspector.web.access import guessed_too_often, is_logged_in
from inspector.web.twins import Page, error_page, page, told
from rollout_inspector.refusal import Refusal
from rollouts.store.models import Invitation
from rollouts.store.people import activity_log
from rollouts.store.people.accounts import make_account
from rollouts.store.people.activity_log import Action
from rollouts.store.people.members import find_invitation, invitation_fault, join
from rollouts.store.people.shares import token_hash


@dataclass(frozen=True)
class JoinPage(Page):
    """What an invitation opens, for the person who got it."""

    project: str
    """Name of the project."""
    role: str
    """That the person gets."""
    expires_at: datetime
    """Until when it works."""
    account: str
    """The name of the account that is logged in; empty for a new person."""
    errors: dict[str, list[str]]
    """Field of the form -> what is wrong with it."""


@login_not_required
@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "HEAD", "POST"])
def index(request: HttpRequest, token: str) -> HttpResponse:
    """The invitation; a POST joins, and makes the account of a new person."""
    if guessed_too_often(request, "invitation"):
        return too_many_guesses(request)
    record = find_invitation(token_sha256=token_hash(token))
    if record is None:
        guessed_too_often(request, "invitation", again=True)
        raise Http404("There is no such invitation. It may be cut short: copy the whole address.")
    if fault := invitation_fault(record):
        return error_page(request, 410, "This invitation is over", fault)
    has_account = is_logged_in(request)
    form: UserCreationForm[User] | None = (
        None if has_account else UserCreationForm(request.POST if request.method == "POST" else None)
    )
    if request.method == "POST":
        answer = _join(request, record, form)
        if answer is not None:
            return answer
    errors = (
        {} if form is None else {name: [str(error) for error in errors_of] for name, errors_of in form.errors.items()}
    )
    name = request.user.get_username() if has_account else ""
    data = JoinPage(record.project.name, record.role, record.expires_at, name, errors)
    response = page(request, "team/join.html", data, 422 if errors else 200, form=form)
    response["Referrer-Policy"] = "no-referrer"
    return response


def too_many_guesses(request: HttpRequest) -> HttpResponse:
    """Answers 429 to an address that tries tokens."""
    sentence = "Too many links that do not exist were opened from this address. Wait five minutes and try again."
    response = error_page(request, 429, "Too many links", sentence)
    response["Retry-After"] = "300"
    return response


def _join(request: HttpRequest, record: Invitation, form: UserCreationForm[User] | None) -> HttpResponse | None:
    """Join, with a new account where there is a form. None: the form has errors."""
    user: Any = request.user
    try:
        with transaction.atomic():  # no account without a role, and no role without an account
            if form is not None:
                if not form.is_valid():
                    return None
                user = make_account(form.cleaned_data["username"], form.cleaned_data["password1"])
            join(record, user)
    except Refusal as refusal:
        return error_page(request, 410, "This invitation is over", str(refusal))
    except IntegrityError:
        assert form is not None
        form.add_error("username", "This name was taken a moment ago. Choose another.")
        return None
    if form is not None:
        start_session(request, user, backend=BACKEND)
        activity_log.record(Action.ACCOUNT_MADE, record, user=user)
    activity_log.record(Action.JOINED, record, user=user, detail=f"role {record.role}")
    return told(request, f"You are in the project “{record.project.name}” now.", "runs")
