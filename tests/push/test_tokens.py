"""API keys from the page and from the command line."""

import io
import json
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from rollouts.store.models import ApiToken
from rollouts.store.people.shares import find_api_key
from tests.people import make_member

pytestmark = pytest.mark.django_db


@pytest.fixture
def page(client: Any) -> Any:
    client.force_login(make_member("ann"))
    return client


def command(*args: str) -> str:
    out = io.StringIO()
    call_command("api_token", *args, stdout=out, stderr=io.StringIO())
    return out.getvalue()


def test_the_page_shows_a_token_once(page: Any) -> None:
    made = page.post("/tokens.json", {"name": "trainer <b>"}).json()["made"]
    assert find_api_key(made["token"]) is not None
    listed = page.get("/tokens")
    assert listed.status_code == 200 and made["token"] not in listed.content.decode()
    assert "trainer &lt;b&gt;" in listed.content.decode()
    assert not ApiToken.objects.filter(token_sha256__contains=made["token"]).exists()
    shown = page.post("/tokens", {"name": "x"})
    assert shown.status_code == 201 and "ri_" in shown.content.decode()


def test_revoking_on_the_page(page: Any) -> None:
    made = page.post("/tokens.json", {"name": "x"}).json()["made"]
    assert page.post(f"/tokens/{made['id']}/revoke").status_code == 302
    assert find_api_key(made["token"]) is None
    assert page.get("/tokens.json").json()["tokens"][0]["state"] == "revoked"
    assert page.post("/tokens/999999/revoke").status_code == 404


def test_the_page_needs_a_login_and_few_queries(client: Any, page: Any, django_assert_max_num_queries: Any) -> None:
    for n in range(30):
        page.post("/tokens.json", {"name": str(n)})
    with django_assert_max_num_queries(5):
        page.get("/tokens")
    page.logout()
    assert page.get("/tokens").status_code == 302 and page.post("/tokens", {"name": "x"}).status_code == 302
    assert ApiToken.objects.count() == 30


def test_the_command_makes_lists_and_revokes() -> None:
    token = command("my trainer").strip()
    assert find_api_key(token) is not None
    (listed,) = json.loads(command("--list", "--json"))
    assert (listed["name"], listed["user"], listed["revoked_at"]) == ("my trainer", "local", None)
    assert token not in command("--list") and "my trainer" in command("--list")
    command("--revoke", str(listed["id"]))
    assert find_api_key(token) is None
    with pytest.raises(CommandError, match="--list"):
        command("--revoke", "999999")
    with pytest.raises(CommandError, match="createsuperuser"):
        command("x", "--user", "nobody")
