"""`/login/provider`: sign-in through OpenID Connect, with Authlib: code flow, PKCE, state, nonce, signed ID token. An
account is found by issuer and subject alone, never by name or email address. docs/decisions/0036 says why."""

import asyncio
import logging
import threading
import time
from collections.abc import Mapping
from functools import lru_cache
from io import BytesIO
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from authlib.integrations.base_client import OAuthError
from authlib.integrations.django_client import DjangoOAuth2App, OAuth
from authlib.integrations.requests_client import OAuth2Session
from django.conf import settings
from django.contrib.auth import login as start_session
from django.contrib.auth.decorators import login_not_required
from django.http import Http404, HttpRequest, HttpResponse, HttpResponseRedirect
from django.urls import reverse
from django.utils.crypto import constant_time_compare, salted_hmac
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe
from joserfc.errors import JoseError
from requests import PreparedRequest, RequestException, Response
from requests.adapters import BaseAdapter
from requests.certs import where
from requests.utils import select_proxy

from inspector.team.login import BACKEND, next_page
from inspector.web.access import is_logged_in
from inspector.web.twins import error_page, told
from rollouts.store.people import activity_log
from rollouts.store.people.accounts import SignInRefused, account_of, link_identity
from rollouts.store.people.activity_log import Action

ANSWER_SECONDS = 10.0  # The whole of one answer, from the name of the host to the last byte.
MAX_ANSWER_BYTES = 1 << 20
MAX_WAITING = 8
"""Threads of a process that wait for the provider at once: half of them, so that one that hangs stops no page."""

_places = threading.BoundedSemaphore(MAX_WAITING)


class _BoundedAdapter(BaseAdapter):
    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, verify: bool | str = True,
        cert: Any = None, proxies: Any = None,
    ) -> Response:
        if not _places.acquire(blocking=False):
            raise RequestException(f"{MAX_WAITING} threads wait for the provider already", request=request)
        authorities = verify if isinstance(verify, str) else where()
        try:
            return asyncio.run(_answer(request, authorities, select_proxy(str(request.url), proxies)))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise RequestException(f"{type(error).__name__}: {error}", request=request) from error
        finally:
            _places.release()

    def close(self) -> None:
        pass


async def _answer(request: PreparedRequest, authorities: str, proxy: str | None) -> Response:
    import ssl

    headers = {name: value if isinstance(value, str) else value.decode() for name, value in request.headers.items()}
    limit, tls = aiohttp.ClientTimeout(total=ANSWER_SECONDS), ssl.create_default_context(cafile=authorities)
    async with (
        aiohttp.ClientSession(timeout=limit, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False) as session,
        session.request(
            str(request.method), str(request.url), data=request.body, headers=headers, ssl=tls,
            proxy=proxy, allow_redirects=False,
        ) as answer,
    ):
        body = bytearray()
        async for piece in answer.content.iter_any():
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"the provider answers more than {MAX_ANSWER_BYTES:,} bytes")
        response = Response()
        response.status_code, response.url, response.request = answer.status, str(request.url), request
        response.headers.update(answer.headers)
        response.raw = BytesIO(body)
        return response


class ProviderSession(OAuth2Session):
    """A session of Authlib that asks within these bounds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.max_redirects = 0  # what is asked may hold a code and the secret
        self.headers["Accept-Encoding"] = "identity"
        for scheme in ("https://", "http://"):
            self.mount(scheme, _BoundedAdapter())


class ProviderClient(DjangoOAuth2App):
    """Authlib's client of the provider, with such sessions."""

    client_cls = ProviderSession


NEXT = "provider next"  # In the session: where somebody goes after the sign-in.
LINKS = "provider links"  # In the session: the key of the account that asked for a link to an account of the provider.
ENDPOINTS = ("authorization_endpoint", "token_endpoint", "jwks_uri")
SIGNED_WITH = {"RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"}
"""Signatures with the provider's own key. A secret that the client knows as well proves nothing more."""

log = logging.getLogger(__name__)


def link_key(request: HttpRequest) -> str:
    """What the button *Link* of this session's account page names, so that no other site can press it."""
    return salted_hmac("inspector.team.provider.link", f"{request.session.session_key} {request.user.pk}").hexdigest()


class _ProviderRefused(Exception):
    """What the provider said cannot be used, with a sentence for the log of the server."""


@lru_cache(maxsize=4)
def _registered(issuer: str, client_id: str, client_secret: str, hour: int) -> Any:
    """The client of a provider as it describes itself in this hour, with what is used of the description alone."""
    with ProviderSession() as session:
        answer = session.request("GET", f"{issuer}/.well-known/openid-configuration", withhold_token=True)
        answer.raise_for_status()
        description = answer.json()
    if not isinstance(description, dict) or str(description.get("issuer", "")).rstrip("/") != issuer:
        raise _ProviderRefused(f"who answers at {issuer} does not call itself so")
    schemes = {"https", urlsplit(issuer).scheme}
    for name in ENDPOINTS:
        address = urlsplit(str(description.get(name)))
        if address.scheme not in schemes or not address.hostname:
            raise _ProviderRefused(f"its {name} is no address of {' or '.join(sorted(schemes))}")
    offered = description.get("id_token_signing_alg_values_supported", ["RS256"])
    algorithms = [name for name in offered if isinstance(name, str) and name in SIGNED_WITH]
    if not algorithms:
        raise _ProviderRefused("it offers no signature with a key of its own")
    return OAuth().register(
        "provider",
        client_cls=ProviderClient,
        client_id=client_id,
        client_secret=client_secret or None,
        client_kwargs={
            "scope": "openid email profile",
            "code_challenge_method": "S256",
            # Without a secret the client is public, and PKCE alone binds the code to this browser.
            **({} if client_secret else {"token_endpoint_auth_method": "none"}),
        },
        id_token_signing_alg_values_supported=algorithms,
        **{name: description[name] for name in ("issuer", *ENDPOINTS)},
    )


def _client() -> Any:
    """The client of the provider. Raises ``Http404`` where no provider is set."""
    if not settings.OIDC_ISSUER:
        raise Http404("This server has no provider to sign in through. Log in with name and password.")
    hour = int(time.time() // 3600)
    return _registered(settings.OIDC_ISSUER, settings.OIDC_CLIENT_ID, settings.OIDC_CLIENT_SECRET, hour)


def _unusable(request: HttpRequest, error: Exception) -> HttpResponse:
    log.warning("the provider cannot be used: %s", error)
    activity_log.record(Action.LOGIN_FAILED, detail=f"provider: {type(error).__name__}")
    sentence = (
        "The provider did not confirm who you are. Begin again on the login page; when it happens again, "
        "the log of the server says more to its administrator."
    )
    return error_page(request, 502 if isinstance(error, RequestException) else 403, "The sign-in failed", sentence)


SHAPE = (ValueError, LookupError, RuntimeError, TypeError, AttributeError)
FAULTS = (OAuthError, JoseError, RequestException, _ProviderRefused, *SHAPE)
"""What Authlib, its parser of tokens, and the network raise; also where the JSON has another shape."""


@login_not_required
@require_safe
@never_cache
def begin(request: HttpRequest) -> HttpResponse:
    """Go to the provider. `?link=KEY`: links the account that is logged in here with the one at the provider."""
    request.session[NEXT] = next_page(request)
    request.session.pop(LINKS, None)
    if key := request.GET.get("link", ""):
        if not is_logged_in(request) or not constant_time_compare(key, link_key(request)):
            sentence = "Nothing was linked. Log in, go to Your account, and press Link there."
            return error_page(request, 403, "The page that led here is old, or not of this server", sentence)
        request.session[LINKS] = request.user.pk
    try:
        address = request.build_absolute_uri(reverse("provider-callback"))
        response: HttpResponse = _client().authorize_redirect(request, address)
    except FAULTS as error:
        return _unusable(request, error)
    return response


@login_not_required
@require_safe
@never_cache
def callback(request: HttpRequest) -> HttpResponse:
    """The way back from the provider. The session must have begun this very sign-in."""
    target, links = request.session.pop(NEXT, settings.LOGIN_REDIRECT_URL), request.session.pop(LINKS, None)
    try:
        client = _client()
        issuer = request.GET.get("iss")
        if issuer is not None and issuer.rstrip("/") != settings.OIDC_ISSUER:
            raise _ProviderRefused("the answer names another issuer")
        names = {"iss": {"value": client.server_metadata["issuer"]}, "aud": {"value": client.client_id}}
        token = client.authorize_access_token(request, claims_options=names)
        claims: Mapping[str, Any] | None = token.get("userinfo")
        if not claims or not isinstance(claims.get("sub"), str) or not claims["sub"]:
            raise _ProviderRefused("there is no ID token with a subject")
    except FAULTS as error:
        if isinstance(error, JoseError):
            _registered.cache_clear()  # the provider may have another key under the same name
        return _unusable(request, error)
    try:
        if links is not None:
            if not is_logged_in(request) or request.user.pk != links:
                raise SignInRefused("You were logged out meanwhile. Log in, and link your account again.")
            link_identity(request.user, settings.OIDC_ISSUER, claims)
            detail = f"{request.user.get_username()}: linked with the provider"
            activity_log.record(Action.ACCOUNT_CHANGED, detail=detail)
            return told(request, f"From now on you can sign in through {settings.OIDC_NAME}.", "account")
        user, is_new = account_of(settings.OIDC_ISSUER, claims)
    except SignInRefused as refusal:
        activity_log.record(Action.LOGIN_FAILED, user=refusal.name, detail="provider: refused here")
        return error_page(request, 403, "You cannot sign in here", str(refusal))
    start_session(request, user, backend=BACKEND)
    if is_new:
        activity_log.record(Action.ACCOUNT_MADE, detail="through the provider")
    activity_log.record(Action.LOGIN, detail="through the provider")
    return HttpResponseRedirect(target)
