"""Who calls the API: a program with a token, or the browser of a user; what they may do, and how often."""

from typing import Any

from django.conf import settings
from django.http import Http404, HttpRequest
from django_ratelimit.core import get_usage
from ninja.security import APIKeyCookie, HttpBearer
from ninja.throttling import BaseThrottle
from ninja.utils import check_csrf

from inspector.web.access import access, guessed_too_often, too_low, visible_projects
from inspector.web.twins import ApiProblem
from rollout_inspector.refusal import Refusal
from rollouts.store.chat_templates.tokenizers import tokenizer_named
from rollouts.store.models import ApiToken, Project, Role, Tokenizer
from rollouts.store.people.access import Access, access_of, access_of_api_key
from rollouts.store.people.shares import api_key_fault, find_api_key


def api_key_of(request: HttpRequest, token: str) -> ApiToken:
    """The record of a token that works; from now on the request is its maker's, with the access of the token. Raises
    :class:`ApiProblem` 401 with the reason, or 429 when wrong tokens came from the address too often."""
    record = find_api_key(token.strip())
    if record is None:
        # A right token always passes: programs of one address must not lock each other out.
        if guessed_too_often(request, "token", again=True):
            raise ApiProblem(429, "Too many wrong API keys came from this address. Try again in five minutes.")
        raise ApiProblem(401, api_key_fault(token.strip()))
    request.user = record.created_by  # the lines of the logs name who asks
    request.access = access_of_api_key(record)  # type: ignore[attr-defined]
    return record


SAFE = ("GET", "HEAD", "OPTIONS")


class ApiTokenAuth(HttpBearer):
    """An API key with the scope for the request: ``read`` for GET, ``launch`` for everything else."""

    def __call__(self, request: HttpRequest) -> Any:
        if not request.headers.get("Authorization"):
            return None
        if (caller := super().__call__(request)) is None:
            raise ApiProblem(401, "Send an API key as `Authorization: Bearer TOKEN`; the page /tokens makes one.")
        return caller

    def authenticate(self, request: HttpRequest, token: str) -> Access:
        record = api_key_of(request, token)
        scope = ApiToken.Scope.READ if request.method in SAFE else ApiToken.Scope.LAUNCH
        if scope not in record.scopes:
            raise ApiProblem(403, f"This API key lacks the scope {scope.value}. Make one that has it on /tokens.")
        return _known(request, access(request), f"token {record.pk}")


class SessionAuth(APIKeyCookie):
    """The login of a browser; a request that changes something also needs the header `X-CSRFToken`."""

    param_name = settings.SESSION_COOKIE_NAME

    def __call__(self, request: HttpRequest) -> Any:
        return self.authenticate(request, None) if request.user.is_authenticated else None

    def authenticate(self, request: HttpRequest, key: str | None) -> Access:
        if check_csrf(request):
            raise ApiProblem(
                403, "A browser sends its CSRF token in the header X-CSRFToken. A program sends an API key instead."
            )
        return _known(request, access_of(request.user), f"user {request.user.pk}")


def _known(request: HttpRequest, held: Access, name: str) -> Access:
    request.access = held  # type: ignore[attr-defined]
    request.caller_name = name  # type: ignore[attr-defined]
    return held


class CallerThrottle(BaseThrottle):
    """At most ``INSPECTOR_API_RATE`` requests of one token or user."""

    def allow_request(self, request: HttpRequest) -> bool:
        self.seconds = None
        usage = get_usage(
            request, "api", key=lambda _, asked: asked.caller_name, rate=settings.API_RATE, increment=True
        )
        if usage is None or not usage["should_limit"]:
            return True
        self.seconds = max(usage["time_left"], 1)  # 0 at the end of a window would say: at once
        return False

    def wait(self) -> float | None:
        return self.seconds


def project_for(request: HttpRequest, code: str) -> Project:
    """The project in which the caller makes something: the one with the code, or the first by name. One query.

    Raises ``Http404`` for a code that is unknown or hidden, and ``PermissionDenied`` for a role below member.
    """
    visible = visible_projects(request)
    chosen = [project for project in visible if project.code == code] if code else visible
    if not chosen:
        lack = "There is no such project here. Leave it out, or name one of yours."
        raise Http404(lack if visible else "You are in no project. Ask an admin of a project to invite you.")
    for project in chosen:
        if access(request).may(project.pk, Role.MEMBER):
            return project
    raise too_low(chosen[0], access(request).role_in(chosen[0].pk) or Role.VIEWER, Role.MEMBER)


def named_tokenizer(project: Project | int | None, name: str) -> Tokenizer:
    """The tokenizer of a project with that name. Raises :class:`Refusal`."""
    if (tokenizer := tokenizer_named(project, name)) is None:
        raise Refusal(f"There is no tokenizer {name!r} in this project. Register it first.", field="tokenizer")
    return tokenizer
