"""Sign-in through a real provider of OpenID Connect on loopback: who gets an account, and what is refused."""

import base64
import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs, urlencode, urlsplit

import pytest
import requests
from django.contrib.auth import get_user_model
from django.test import Client

from inspector.team import provider
from rollouts.store.models import AuditEvent, ExternalIdentity, Membership, Project
from rollouts.store.people.accounts import account_of, is_allowed
from tests.conftest import wait_until
from tests.ports import HeldPort
from tests.team.conftest import PASSWORD, person

pytestmark = pytest.mark.django_db

PEOPLE = [
    {"sub": "1", "email": "ada@lab.example", "email_verified": True, "groups": ["rl"]},
    {"sub": "2", "email": "bob@lab.example", "email_verified": False},
    {"sub": "3", "preferred_username": "root"},
]


@pytest.fixture(scope="session")
def issuer() -> Iterator[str]:
    """The address of a provider that three people can sign in at. It runs in a process of its own."""
    people = [part for one in PEOPLE for part in ("--user-claims", json.dumps(one))]
    with HeldPort() as port:
        command = [sys.executable, "-m", "oidc_provider_mock", "--port", str(port.number), *people]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(port.is_served, 240, "the provider listens")
            yield f"http://localhost:{port.number}"
        finally:
            server.terminate()
            server.wait(60)


@pytest.fixture(autouse=True)
def oidc(settings: Any, issuer: str) -> Any:
    settings.OIDC_ISSUER, settings.OIDC_CLIENT_ID, settings.OIDC_CLIENT_SECRET = issuer, "inspector", "a secret"
    settings.OIDC_NAME = "the lab"
    provider._registered.cache_clear()
    return settings


def begin(client: Client, query: str = "") -> str:
    """The address at the provider to which the login page leads."""
    answer = client.get(f"/login/provider{query}")
    assert answer.status_code == 302, answer.content
    return str(answer["Location"])


def at_provider(address: str, sub: str) -> str:
    """The way back, after somebody signed in at the provider."""
    answer = requests.post(address, data={"sub": sub}, allow_redirects=False, timeout=120)
    assert answer.status_code == 302, answer.text
    back = urlsplit(answer.headers["Location"])
    assert back.path == "/login/provider/callback"
    return f"{back.path}?{back.query}"


def sign_in(client: Client, sub: str, query: str = "") -> Any:
    return client.get(at_provider(begin(client, query), sub))


def link_of(client: Client) -> str:
    """The query of the button *Link* on the page of the account."""
    found = re.search(r"/login/provider(\?link=\w+)", client.get("/account").content.decode())
    assert found is not None
    return found[1]


def test_a_new_person_gets_an_account_without_a_project_and_later_the_same_one() -> None:
    browser = Client()
    assert sign_in(browser, "1", "?next=/projects")["Location"] == "/projects"
    me = browser.get("/account.json").json()
    assert (me["name"], me["roles"], me["has_password"]) == ("ada", {}, False)
    again = Client()
    sign_in(again, "1")
    assert again.get("/account.json").json()["name"] == "ada" and get_user_model().objects.count() == 1
    assert [one[0] for one in AuditEvent.objects.order_by("pk").values_list("action")] == [
        "account made", "login", "login"
    ]
    assert "the lab" in Client().get("/login").content.decode()


def test_the_request_has_pkce_state_and_nonce() -> None:
    asked = parse_qs(urlsplit(begin(Client())).query)
    assert asked["code_challenge_method"] == ["S256"] and asked["code_challenge"] and asked["state"] and asked["nonce"]
    assert "openid" in asked["scope"][0].split()


def test_no_account_is_taken_over_by_its_name_or_email() -> None:
    root = get_user_model().objects.create_superuser("root", "bob@lab.example", PASSWORD)
    for sub, name in (("3", "root-2"), ("2", "bob")):
        browser = Client()
        sign_in(browser, sub)
        me = browser.get("/account.json").json()
        assert me["name"] == name and not me["is_server_admin"]
    assert not root.external_identities.exists()
    assert get_user_model().objects.get(username="bob").email == ""  # the provider has not verified it


def test_a_default_project_takes_new_people_in(oidc: Any) -> None:
    project = Project.objects.create(name="open")
    oidc.OIDC_DEFAULT_PROJECT, oidc.OIDC_DEFAULT_ROLE = project.code, "viewer"
    browser = Client()
    sign_in(browser, "1")
    assert browser.get("/account.json").json()["roles"] == {"open": "viewer"}
    Membership.objects.all().delete()
    sign_in(browser, "1")
    assert not Membership.objects.exists()  # removed stays removed


@pytest.mark.parametrize(
    ("allowed", "who_may"),
    [(["@lab.example"], {"1"}), (["@LAB.example", "other"], {"1"}), (["rl"], {"1"}), (["@example"], set())],
)
def test_who_is_let_in(oidc: Any, allowed: list[str], who_may: set[str]) -> None:
    oidc.OIDC_ALLOWED = allowed
    for sub in ("1", "2"):
        assert sign_in(Client(), sub).status_code == (302 if sub in who_may else 403)
    assert ExternalIdentity.objects.count() == len(who_may)


def test_who_left_the_group_is_refused_at_the_next_login(oidc: Any) -> None:
    assert sign_in(Client(), "1").status_code == 302
    oidc.OIDC_ALLOWED = ["another group"]
    assert sign_in(Client(), "1").status_code == 403


def test_a_closed_account_stays_closed() -> None:
    sign_in(Client(), "1")
    get_user_model().objects.update(is_active=False)
    browser = Client()
    refused = sign_in(browser, "1")
    assert refused.status_code == 403 and "closed" in refused.content.decode()
    assert browser.get("/account").status_code == 302 and get_user_model().objects.count() == 1


def test_a_foreign_state_is_refused() -> None:
    victim, attacker = Client(), Client()
    begin(victim)
    way_back = at_provider(begin(attacker), "3")
    for browser in (victim, Client()):
        assert browser.get(way_back).status_code == 403
        assert browser.get("/account").status_code == 302
    assert attacker.get(way_back).status_code == 302 and attacker.get(way_back).status_code == 403  # once
    assert victim.get("/login/provider/callback").status_code == 403
    assert victim.get("/login/provider/callback?error=access_denied&state=x").status_code == 403


def test_a_foreign_nonce_is_refused() -> None:
    browser = Client()
    way_back = at_provider(begin(browser), "1")
    session = browser.session
    (key,) = [key for key in dict(session.items()) if key.startswith("_state_provider_")]
    session[key]["data"]["nonce"] = "another"
    session.save()
    assert browser.get(way_back).status_code == 403 and not get_user_model().objects.exists()


def test_the_code_comes_with_the_verifier_of_the_challenge(monkeypatch: pytest.MonkeyPatch) -> None:
    browser, bodies = Client(), []
    address = begin(browser)
    way_back = at_provider(address, "1")
    send = requests.Session.send

    def watched(self: Any, request: Any, **more: Any) -> Any:
        bodies.append(str(request.body))
        return send(self, request, **more)

    monkeypatch.setattr(requests.Session, "send", watched)
    assert browser.get(way_back).status_code == 302
    (verifier,) = [parse_qs(body)["code_verifier"][0] for body in bodies if "code_verifier" in body]
    challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
    assert parse_qs(urlsplit(address).query)["code_challenge"] == [challenge]


def test_another_issuer_is_refused(oidc: Any, issuer: str) -> None:
    browser = Client()
    way_back = at_provider(begin(browser), "1")
    assert browser.get(f"{way_back}&{urlencode({'iss': 'https://evil.example'})}").status_code == 403
    # The provider calls itself localhost.
    oidc.OIDC_ISSUER = issuer.replace("localhost", "LOCALHOST")
    assert Client().get("/login/provider").status_code == 403
    # A token of one issuer, signed with the right key, is no token of another.
    oidc.OIDC_ISSUER = issuer.replace("localhost", "127.0.0.1")
    way_back = at_provider(begin(browser), "1")
    provider._client().server_metadata["token_endpoint"] = f"{issuer}/oauth2/token"
    assert browser.get(way_back).status_code == 403
    assert not get_user_model().objects.exists()


def test_a_provider_that_does_not_answer_is_said(oidc: Any) -> None:
    oidc.OIDC_ISSUER = "http://127.0.0.1:1"
    answer = Client().get("/login/provider")
    assert answer.status_code == 502 and "127.0.0.1" not in answer.content.decode()


def test_without_a_provider_there_is_no_such_address(oidc: Any) -> None:
    oidc.OIDC_ISSUER = ""
    assert Client().get("/login/provider").status_code == 404
    assert "Sign in through" not in Client().get("/login").content.decode()


def test_an_account_that_exists_is_linked_by_its_owner_alone() -> None:
    bob, browser = person("bob")
    assert sign_in(browser, "1", link_of(browser))["Location"] == "/account"
    assert ExternalIdentity.objects.get().user == bob
    later = Client()
    sign_in(later, "1")
    assert later.get("/account.json").json()["name"] == "bob"
    _, eve = person("eve")
    assert sign_in(eve, "1", link_of(eve)).status_code == 403 and ExternalIdentity.objects.get().user == bob
    _, sid = person("sid")
    way_back = at_provider(begin(sid, link_of(sid)), "2")
    sid.logout()
    assert sid.get(way_back).status_code == 403 and ExternalIdentity.objects.count() == 1


def test_another_site_cannot_have_an_account_linked() -> None:
    """Its page would send the browser here after it had logged it in at the provider as somebody else."""
    _, bob = person("bob")
    _, eve = person("eve")
    link_of(bob)
    for query in ("?link=1", "?link=%C3%A9", link_of(eve)):
        answer = bob.get(f"/login/provider{query}")
        assert answer.status_code == 403 and "Your account" in answer.content.decode()
        assert Client().get(f"/login/provider{query}").status_code == 403
    assert sign_in(bob, "1")["Location"] == "/" and ExternalIdentity.objects.get().user.username == "ada"


def test_a_group_is_no_domain(oidc: Any) -> None:
    oidc.OIDC_ALLOWED = ["@lab.example"]
    claims = {"sub": "9", "email": "eve@evil.example", "email_verified": True, "groups": ["@lab.example"]}
    assert not is_allowed(claims) and is_allowed({**claims, "email": "eve@lab.example"})


def test_nobody_gets_the_name_of_the_local_account() -> None:
    user, is_new = account_of("https://issuer.example", {"sub": "9", "preferred_username": "local"})
    assert is_new and user.username == "local-2"
