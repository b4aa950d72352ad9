"""One-time login links, and the rule that almost every page needs a login.

The name of a file in the data folder is the hash of a token. Use of the token deletes the file, so a link works once.
"""

import hashlib
import json
import secrets
import time
from pathlib import Path
from typing import Any

from django.conf import settings
from django.contrib.auth import middleware as auth_middleware
from django.http import HttpRequest, HttpResponse, JsonResponse

from inspector.server.paths import private_folder, write_private


def _folder() -> Path:
    return private_folder(settings.INSPECTOR_DATA / "run" / "login")


def _place(token: str) -> Path:
    return _folder() / hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()


def make_token() -> str:
    """A new token that logs one browser in once within `LOGIN_LINK_SECONDS`. Expired tokens are removed."""
    now = time.time()
    for path in _folder().iterdir():
        if not path.name.startswith(".") and _expiry(path) < now:
            path.unlink(missing_ok=True)
    token = secrets.token_urlsafe(24)
    write_private(_place(token), json.dumps({"expires": now + settings.LOGIN_LINK_SECONDS}))
    return token


def _expiry(path: Path) -> float:
    try:
        return float(json.loads(path.read_text(encoding="utf-8"))["expires"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def use_token(token: str) -> bool:
    """True when a live token is used for the first time; False otherwise."""
    if not token or len(token) > 200:
        return False
    path = _place(token)
    expires = _expiry(path)
    try:
        path.unlink()
    except OSError:
        return False
    return expires >= time.time()


class LoginRequiredMiddleware(auth_middleware.LoginRequiredMiddleware):
    """Every view needs a login unless it is marked `login_not_required`; scripts get a status instead of a redirect."""

    def handle_no_permission(  # type: ignore[override]  # Django calls whatever it returns
        self, request: HttpRequest, view_func: Any
    ) -> HttpResponse:
        if request.path.endswith(".json"):
            message = "Log in first: open the link that `manage.py login_link` prints, or use a share link."
            return JsonResponse({"error": message}, status=401)
        response: HttpResponse = super().handle_no_permission(request, view_func)
        if request.headers.get("HX-Request") == "true":
            target = response["Location"]
            response = HttpResponse(status=401)
            response["HX-Redirect"] = target
        return response
