"""A provider of OpenID Connect that lies, hangs, floods or leads elsewhere: nobody is let in, and no page waits."""

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import requests
from django.contrib.auth import get_user_model
from django.test import Client

from inspector.team import provider
from tests.attack import hostile_provider as hostile
from tests.attack.hostile_provider import DISCOVERY, KEYS, TOKEN, Provider
from tests.conftest import wait_until

pytestmark = pytest.mark.django_db

PUBLIC_KEY = hostile.OWN_KEY.as_pem(private=False)
NOW = int(time.time())


@pytest.fixture
def lying(settings: Any) -> Iterator[Provider]:
    with hostile.serving(Provider) as server:
        settings.OIDC_ISSUER, settings.OIDC_NAME = server.issuer, "the lab"
        settings.OIDC_CLIENT_ID, settings.OIDC_CLIENT_SECRET = "inspector", "secret"
        provider._registered.cache_clear()
        yield server


def sign_in(lying: Provider) -> int:
    """The status of the last answer of a sign-in: 302 = somebody is logged in."""
    browser = Client(raise_request_exception=False)
    answer = browser.get("/login/provider")
    if answer.status_code == 302:
        answer = browser.get(lying.begin(answer["Location"]))
    assert (answer.status_code == 302) == (browser.get("/account").status_code == 200)
    if answer.status_code != 302:
        assert answer.status_code in (403, 502)
        assert re.search("The sign-in failed|You cannot sign in here", answer.content.decode())
    return int(answer.status_code)


@pytest.mark.parametrize(
    "claims",
    [
        {"iss": "https://evil.example"}, {"iss": ["x"]}, {"iss": None}, {"aud": "another"}, {"aud": None},
        {"aud": "another", "azp": "inspector"}, {"aud": ["another", "a third"], "azp": "inspector"},
        {"aud": {"inspector": 1}, "azp": "inspector"}, {"aud": "inspector-2", "azp": "inspector"},
        {"aud": ["inspector", "another"]}, {"azp": "another"}, {"nonce": "another"}, {"nonce": None}, {"nonce": [""]},
        {"exp": NOW - 1000}, {"exp": None}, {"exp": "never"}, {"exp": True}, {"exp": float("inf")}, {"iat": NOW + 9999},
        {"nbf": NOW + 9999}, {"sub": 1}, {"sub": ["1"]}, {"sub": ""}, {"sub": "x" * 300}, {"at_hash": 5},
    ],
    ids=str,
)  # fmt: skip
def test_a_token_that_is_not_for_this_sign_in_lets_nobody_in(claims: dict[str, Any], lying: Provider) -> None:
    """A token for another service passed, if only it said that it was made for this one."""
    lying.claims = claims
    assert sign_in(lying) == 403 and not get_user_model().objects.exists()


@pytest.mark.parametrize(
    "claims",
    [
        {}, {"aud": ["inspector"]}, {"aud": ["inspector", "another"], "azp": "inspector"},
        {"groups": {"a": [1]}, "email": {"x": 1}, "preferred_username": ["a", {"b": 1}]}, {"sub": "\0"},
    ],
    ids=str,
)  # fmt: skip
def test_a_token_that_is_right_lets_in_whatever_else_it_says(claims: dict[str, Any], lying: Provider) -> None:
    lying.claims = claims
    assert sign_in(lying) == 302


@pytest.mark.parametrize(
    ("header", "secret", "key"),
    [
        ({"alg": "none"}, b"", None), ({"alg": "None"}, b"", None),
        ({"alg": "HS256", "kid": "first"}, PUBLIC_KEY, None), ({"alg": "HS256", "kid": "first"}, b"secret", None),
        ({"alg": "RS256", "kid": "../../../dev/null"}, b"", None), ({"alg": "RS256", "kid": {"a": 1}}, b"", None),
        ({"alg": "RS256", "kid": "first", "crit": ["x"], "x": 1}, b"", None),
        ({"alg": "RS256", "kid": "first"}, None, hostile.OTHER_KEY),
        ({"alg": "RS256", "jwk": hostile.OTHER_KEY.as_dict(private=False)}, None, hostile.OTHER_KEY),
        ({"alg": "RS256", "kid": "zzz", "jku": "http://127.0.0.1:1/keys"}, None, hostile.OTHER_KEY),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("offered", [["RS256"], ["RS256", "HS256", "none"]])
def test_no_token_passes_without_the_signature_of_the_provider(
    header: dict[str, Any], secret: bytes | None, key: Any, offered: list[str], lying: Provider
) -> None:
    lying.header, lying.secret, lying.key = header, secret, key or lying.key
    lying.metadata = {"id_token_signing_alg_values_supported": offered}
    assert sign_in(lying) in (403, 502) and not get_user_model().objects.exists()


@pytest.mark.parametrize("new_name", [False, True])
def test_a_provider_with_another_key_is_believed_again_at_the_second_try(new_name: bool, lying: Provider) -> None:
    """A new key under the name of the old one was refused until the server was started again."""
    assert sign_in(lying) == 302
    lying.key = hostile.RSAKey.generate_key(2048, {"kid": "second"}) if new_name else hostile.OTHER_KEY
    lying.keys, lying.header = [lying.key], {"alg": "RS256", "kid": lying.key.kid}
    assert sign_in(lying) == (302 if new_name else 403) and sign_in(lying) == 302


@pytest.mark.parametrize(
    "metadata",
    [
        {"issuer": "https://evil.example"}, {"issuer": ["x"]}, {"authorization_endpoint": None},
        {"authorization_endpoint": 5}, {"authorization_endpoint": "javascript:alert(1)"}, {"token_endpoint": None},
        {"token_endpoint": "file:///etc/passwd"}, {"token_endpoint": "http://[::1"}, {"jwks_uri": ["x"]},
        {"jwks_uri": "http:///keys"}, {"id_token_signing_alg_values_supported": 5},
        {"id_token_signing_alg_values_supported": [{}]}, {"id_token_signing_alg_values_supported": ["none", "HS256"]},
    ],
    ids=str,
)  # fmt: skip
def test_a_description_that_cannot_be_used_is_refused(metadata: dict[str, Any], lying: Provider) -> None:
    lying.metadata = metadata
    assert sign_in(lying) == 403


@pytest.mark.parametrize("name", ["authorization_endpoint", "token_endpoint", "jwks_uri"])
def test_a_description_leads_from_https_to_https_alone(
    name: str, settings: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lying: Provider
) -> None:
    """Nothing inside the network that answers without a certificate is asked."""
    pem = hostile.certificate(tmp_path)
    with hostile.serving(Provider, pem) as server:
        settings.OIDC_ISSUER = server.issuer
        assert sign_in(server) == 502  # nobody vouches for its certificate
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(pem))
        assert sign_in(server) == 302
        provider._registered.cache_clear()
        server.metadata = {name: f"{lying.issuer}/inside"}
        assert sign_in(server) == 403 and lying.asked == []


@pytest.mark.parametrize(
    "metadata",
    [
        {"verify": False}, {"proxies": {"http": "http://127.0.0.1:1"}}, {"client_id": "another"}, {"hooks": 5},
        {"default_timeout": 1e9}, {"code_challenge_method": "plain"}, {"scope": ["all"]}, {"jwks": {"keys": []}},
        {"token_endpoint_auth_method": "none"}, {"token": {"access_token": "x"}}, {"cert": "/etc/passwd"},
    ],
    ids=str,
)  # fmt: skip
def test_a_description_does_not_say_how_it_is_asked(metadata: dict[str, Any], lying: Provider) -> None:
    """Each field of the description became an option of the session: no check of certificates, another proxy."""
    lying.metadata = metadata
    assert sign_in(lying) == 302
    (body,) = [body for path, body in lying.asked if path == TOKEN]
    assert b"code_verifier=" in body and b"client_id=another" not in body


SHAPES = (
    [], None, "x", 5, {"keys": 5}, {"keys": [5]}, {"id_token": None}, {"id_token": 5}, {"id_token": "a.b.c"}, b"<html>",
    b"[" * 100_000, b"1" * 10_000, b"\xff\xfe", b"", {"error": ["x"]}, {"access_token": {}, "expires_in": "x"},
)  # fmt: skip


@pytest.mark.parametrize("path", [DISCOVERY, TOKEN, KEYS])
def test_an_answer_of_another_shape_is_refused_with_a_sentence(path: str, lying: Provider) -> None:
    """Eight of them were errors of the server."""
    for shape in SHAPES:
        provider._registered.cache_clear()
        lying.answers[path] = hostile.as_json(shape)
        assert sign_in(lying) in (403, 502), shape


@pytest.mark.parametrize("path", [DISCOVERY, TOKEN, KEYS])
def test_no_redirect_of_the_provider_is_followed(path: str, lying: Provider) -> None:
    """The code and its verifier went to whatever address the provider named."""
    with hostile.serving(Provider) as elsewhere:
        lying.answers[path] = hostile.redirect_to(f"{elsewhere.issuer}/taken")
        assert sign_in(lying) == 502
        assert elsewhere.asked == []


@pytest.mark.parametrize("path", [DISCOVERY, TOKEN, KEYS])
@pytest.mark.parametrize(
    "answer",
    [hostile.hang, hostile.drip_body, hostile.drip_head, hostile.endless_head, hostile.endless, hostile.reset],
)
def test_an_answer_without_an_end_is_given_up(
    path: str, answer: hostile.Answer, lying: Provider, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was waited for without an end where bytes came now and then, and kept in memory whole."""
    monkeypatch.setattr(provider, "ANSWER_SECONDS", 0.3)
    lying.answers[path] = answer
    assert sign_in(lying) == 502


def test_a_provider_that_hangs_holds_half_of_the_threads(lying: Provider, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each visitor of the button held a thread, and sixteen of them the whole process."""
    monkeypatch.setattr(provider, "ANSWER_SECONDS", 240.0)
    freed = threading.Event()
    lying.answers["/hang"] = lambda request: (freed.wait(240), hostile.as_json({})(request))[0]  # type: ignore[return-value]

    def ask() -> None:
        with provider.ProviderSession() as session:
            session.request("GET", f"{lying.issuer}/hang", withhold_token=True)

    waiting = [threading.Thread(target=ask) for _ in range(provider.MAX_WAITING)]
    for thread in waiting:
        thread.start()
    try:
        wait_until(lambda: len(lying.asked) == len(waiting), 240, "all of them wait")
        with pytest.raises(requests.RequestException, match="wait for the provider already"):
            ask()
    finally:
        freed.set()
        for thread in waiting:
            thread.join()
    assert sign_in(lying) == 302
