"""Which sessions an account is logged in with: noted at the login, and every ten minutes of use."""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from django.contrib.auth import SESSION_KEY
from django.contrib.auth.signals import user_logged_in
from django.db import OperationalError
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse

from rollouts.store.people.accounts import NOTED_EVERY, note_session

NOTED = "noted"
"""In the session: its own key and the time (Unix) when it was noted. A session that got another key is noted again."""


def _note(request: HttpRequest, user: Any) -> None:
    session = request.session
    if session.session_key is None:  # it is made at the end of this request; the next one notes it
        return
    address = request.META.get("REMOTE_ADDR", "")
    with suppress(OperationalError):  # the database is busy: a page is not refused for this; the next one notes it
        if note_session(session.session_key, user, request.META.get("HTTP_USER_AGENT", ""), address):
            session[NOTED] = [session.session_key, int(time.time())]


@receiver(user_logged_in)
def _note_login(request: HttpRequest, user: Any, **_: Any) -> None:
    _note(request, user)


class LoginSessionMiddleware:
    """Writes down which sessions are in use. It asks the database once in ten minutes for each session."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        session = request.session
        # A page that did not look at the session, such as /health, does not load it here either.
        if session.accessed and SESSION_KEY in session and request.user.is_authenticated:
            key, at = session.get(NOTED) or ("", 0)
            if key != session.session_key or time.time() - at > NOTED_EVERY.total_seconds():
                _note(request, request.user)
        return response
