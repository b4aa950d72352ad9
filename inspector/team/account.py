"""`/account`: one's own roles, password and sessions."""

import re
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Self

from django.conf import settings
from django.contrib import messages
from django.contrib.auth.views import PasswordChangeView
from django.http import Http404, HttpRequest, HttpResponse
from django.urls import reverse_lazy
from django.utils.decorators import method_decorator
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_POST, require_safe

from inspector.team.login import tried_too_often
from inspector.team.provider import link_key
from inspector.web.access import access
from inspector.web.twins import Page, from_columns, page, told
from rollouts.store.models import LoginSession
from rollouts.store.people import activity_log
from rollouts.store.people.accounts import end_sessions, live_sessions
from rollouts.store.people.activity_log import Action
from rollouts.store.people.members import memberships_of

BROWSERS = (("Edg", "Edge"), ("OPR", "Opera"), ("Firefox", "Firefox"), ("Chrom", "Chrome"), ("Safari", "Safari"))
SYSTEMS = (("Android", "Android"), ("iPhone", "iPhone"), ("iPad", "iPad"), ("Windows", "Windows"), ("Mac OS", "macOS"),
           ("Linux", "Linux"))


def device_name(user_agent: str) -> str:
    """What a browser says of itself in words, such as "Firefox on Linux"; else its first 60 characters."""
    browser = next((name for sign, name in BROWSERS if sign in user_agent), "")
    system = next((name for sign, name in SYSTEMS if sign in user_agent), "")
    if browser:
        return f"{browser} on {system}" if system else browser
    return re.sub(r"\s+", " ", user_agent)[:60] or "unknown"


@dataclass(frozen=True)
class SessionLine(Page):
    """A session that the account is logged in with."""

    id: int
    """Names it in addresses. The key of the session itself is shown nowhere."""
    device: str
    """Browser and system, as the browser says."""
    address: str
    """The address it was used from last."""
    created_at: datetime
    """When it began."""
    last_used_at: datetime
    """To ten minutes."""
    is_this: bool
    """Whether it is the session of the request."""

    @classmethod
    def of(cls, record: LoginSession, key: str | None) -> Self:
        """The session; ``key`` is that of the request."""
        return from_columns(cls, record, device=device_name(record.device), is_this=record.session_id == key)


@dataclass(frozen=True)
class AccountPage(Page):
    """One's own account."""

    name: str
    """The name to log in with."""
    is_server_admin: bool
    """May do everything in every project, and manages accounts."""
    has_password: bool
    """False: the account logs in by a link or through the provider."""
    roles: dict[str, str]
    """Name of a project -> the role in it."""
    sessions: list[SessionLine]
    """The one used last first."""


@require_safe
@never_cache
def account(request: HttpRequest) -> HttpResponse:
    """One's own account."""
    user: Any = request.user
    key = request.session.session_key
    data = AccountPage(
        name=user.get_username(),
        is_server_admin=access(request).is_server_admin,
        has_password=user.has_usable_password(),
        roles={record.project.name: record.role for record in memberships_of(user)},
        sessions=[SessionLine.of(record, key) for record in live_sessions(user)],
    )
    provider = settings.OIDC_NAME if settings.OIDC_ISSUER else ""
    return page(request, "team/account.html", data, provider=provider, link_key=link_key(request))


@require_POST
def end_session(request: HttpRequest, pk: int) -> HttpResponse:
    """Log one device out."""
    if not end_sessions(request.user, pk):
        raise Http404("You are not logged in with such a session. It may have ended already.")
    activity_log.record(Action.SESSION_ENDED)
    return told(request, "That device is logged out.", "account")


@require_POST
def end_other_sessions(request: HttpRequest) -> HttpResponse:
    """Log every device out but this one."""
    n = end_sessions(request.user, but=request.session.session_key)
    activity_log.record(Action.SESSION_ENDED, detail=f"{n} other sessions")
    sentence = f"{n} other session{'s' * (n != 1)} ended." if n else "There is no other session."
    return told(request, sentence, "account")


@method_decorator(never_cache, name="dispatch")
class PasswordPage(PasswordChangeView):
    """Django's change of one's own password. Every other session ends. Tries count as those of the login do."""

    template_name = "team/password.html"
    success_url = reverse_lazy("account")

    def post(self, request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        if tried_too_often(request, self.request.user.get_username()):
            kwargs = {**self.get_form_kwargs(), "data": None}
            return self.render_to_response(
                self.get_context_data(form=self.form_class(**kwargs), refused=True), status=429
            )
        return super().post(request, *args, **kwargs)

    def form_valid(self, form: Any) -> HttpResponse:
        response = super().form_valid(form)
        end_sessions(self.request.user, but=self.request.session.session_key)
        activity_log.record(Action.PASSWORD_CHANGED)
        messages.success(self.request, "The password is changed, and your other sessions ended.")
        return response
