"""One-time login links, and the rule that almost every page needs a login. The name of a file in the data folder is the
hash of a token. Use of the token deletes the file, so a link works once."""

import hashlib
import json
import secrets
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import SESSION_KEY, middleware as auth_middleware
from django.contrib.auth.signals import user_logged_in
from django.db import OperationalError
from django.dispatch import receiver
from django.http import HttpRequest, HttpResponse, JsonResponse

from inspector.server.paths import private_folder, write_private
from inspector.web.middleware import Middleware
from rollouts.store.people.accounts import LOCAL_USER, NOTED_EVERY, note_session


def _folder() -> Path:
    return private_folder(settings.INSPECTOR_DATA / "run" / "login")


def _place(token: str) -> Path:
    return _folder() / hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def make_token(name: str = LOCAL_USER) -> str:
    """A new token that logs one browser in once, as the account of that name, within `LOGIN_LINK_SECONDS`. Expired
    tokens are removed."""
    now = time.time()
    for path in _folder().iterdir():
        if not path.name.startswith(".") and _expiry(path) < now:
            path.unlink(missing_ok=True)
    token = secrets.token_urlsafe(24)
    write_private(_place(token), json.dumps({"expires": now + settings.LOGIN_LINK_SECONDS, "user": name}))
    return token


def _expiry(path: Path) -> float:
    try:
        return float(_content(path)["expires"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _content(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def use_token(token: str) -> str:
    """The name of the account that a live token logs in, the first time that it is used; empty otherwise."""
    if not token or len(token) > 200:
        return ""
    path = _place(token)
    expires = _expiry(path)
    try:
        name = str(_content(path).get("user", LOCAL_USER))  # links of an older version name nobody
        path.unlink()
    except (OSError, ValueError, TypeError):
        return ""
    return name if expires >= time.time() else ""


class LoginRequiredMiddleware(auth_middleware.LoginRequiredMiddleware):
    """Every view needs a login unless it is marked `login_not_required`; scripts get a status instead of a redirect."""

    def handle_no_permission(  # type: ignore[override]  # Django calls whatever it returns
        self, request: HttpRequest, view_func: Any
    ) -> HttpResponse:
        if request.path.endswith(".json"):
            way = "log in on /login" if settings.TEAM_MODE else "open the link that `manage.py login_link` prints"
            message = f"Log in first: {way}, or use a share link."
            return JsonResponse({"error": message}, status=401)
        response: HttpResponse = super().handle_no_permission(request, view_func)
        if request.headers.get("HX-Request") == "true":
            target = response["Location"]
            response = HttpResponse(status=401)
            response["HX-Redirect"] = target
        return response


NOTED = "noted"
"""In the session: its own key and the time (Unix) when it was noted. A session that got another key is noted again."""


@receiver(user_logged_in)
def _note(request: HttpRequest, user: Any, **_: Any) -> None:
    session = request.session
    if session.session_key is None:  # it is made at the end of this request; the next one notes it
        return
    address = request.META.get("REMOTE_ADDR", "")
    with suppress(OperationalError):  # the database is busy: a page is not refused for this; the next one notes it
        if note_session(session.session_key, user, request.META.get("HTTP_USER_AGENT", ""), address):
            session[NOTED] = [session.session_key, int(time.time())]


class LoginSessionMiddleware(Middleware):
    """Writes down which sessions are in use. It asks the database once in ten minutes for each session."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        session = request.session
        # A page that did not look at the session, such as /health, does not load it here either.
        if session.accessed and SESSION_KEY in session and request.user.is_authenticated:
            key, at = session.get(NOTED) or ("", 0)
            if key != session.session_key or time.time() - at > NOTED_EVERY.total_seconds():
                _note(request, request.user)
        return response
