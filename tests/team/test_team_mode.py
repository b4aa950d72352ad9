"""Team mode: what it refuses to start with, who gets in by a link, and which address a client has."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.test import Client

from inspector.server.team_checks import check_provider, check_team, is_public, refuse_unsafe_team, team_errors
from tests.conftest import ROOT
from tests.team.conftest import person

SAFE = {
    "TEAM_MODE": True, "ALLOWED_HOSTS": ["inspector.example"], "HTTPS": True,
    "CSRF_TRUSTED_ORIGINS": ["https://inspector.example"],
}


@pytest.fixture
def safe(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in SAFE.items():
        setattr(settings, name, value)
    monkeypatch.setenv("SECRET_KEY", "x" * 50)
    return settings


def test_a_server_with_all_settings_starts(safe: Any) -> None:
    refuse_unsafe_team("0.0.0.0")
    assert list(check_team()) == []


@pytest.mark.parametrize(
    ("name", "value", "found", "says"),
    [
        ("SECRET_KEY", "", "inspector.E020", "SECRET_KEY"),
        ("ALLOWED_HOSTS", ["*"], "inspector.E021", "ALLOWED_HOSTS"),
        ("ALLOWED_HOSTS", ["localhost"], "inspector.E021", "ALLOWED_HOSTS"),
        ("HTTPS", False, "inspector.E022", "INSPECTOR_HTTPS"),
        ("CSRF_TRUSTED_ORIGINS", [], "inspector.E023", "CSRF_TRUSTED_ORIGINS"),
        ("CSRF_TRUSTED_ORIGINS", ["http://inspector.example"], "inspector.E023", "CSRF_TRUSTED_ORIGINS"),
    ],
)
def test_each_setting_that_lacks_is_named(
    safe: Any, monkeypatch: pytest.MonkeyPatch, name: str, value: Any, found: str, says: str
) -> None:
    if name == "SECRET_KEY":
        monkeypatch.delenv("SECRET_KEY")
    else:
        setattr(safe, name, value)
    (error,) = team_errors("0.0.0.0")
    assert error.id == found and says in error.msg and error.hint
    with pytest.raises(Exception, match=says):
        refuse_unsafe_team("0.0.0.0")


def test_this_machine_alone_needs_none_of_it(safe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SECRET_KEY")
    safe.ALLOWED_HOSTS, safe.HTTPS, safe.CSRF_TRUSTED_ORIGINS = ["localhost", "127.0.0.1"], False, []
    assert team_errors("127.0.0.1") == [] and not is_public("::1") and len(team_errors("0.0.0.0")) == 4


def test_local_mode_on_a_public_address_is_said(safe: Any) -> None:
    safe.TEAM_MODE = False
    (warning,) = check_team()
    assert warning.id == "inspector.W020" and "INSPECTOR_TEAM=1" in str(warning.hint)


def test_the_web_server_and_serve_do_not_start(tmp_path: Path) -> None:
    environment = {
        **{name: value for name, value in os.environ.items() if name not in ("SECRET_KEY", "DATABASE_URL")},
        "INSPECTOR_TEAM": "1", "INSPECTOR_DATA": str(tmp_path), "DJANGO_SETTINGS_MODULE": "inspector.settings",
    }
    named = {**environment, "ALLOWED_HOSTS": "inspector.example"}
    gunicorn = ["-m", "gunicorn", "-c", "python:inspector.server.gunicorn_conf", "inspector.wsgi:application"]
    for arguments, env in (
        (["-c", "import inspector.wsgi"], named),
        ([*gunicorn, "--bind", "0.0.0.0:0"], environment),
        (["manage.py", "serve", "--host", "0.0.0.0"], environment),
        (["manage.py", "check"], named),
    ):
        done = subprocess.run(
            [sys.executable, *arguments], cwd=ROOT, env=env, capture_output=True, text=True, timeout=120
        )
        said = done.stdout + done.stderr
        assert done.returncode and "SECRET_KEY" in said and "INSPECTOR_HTTPS" in said, (arguments, said[-2000:])
        assert "Traceback" not in said, said


@pytest.mark.django_db
def test_in_team_mode_a_login_link_names_its_account(settings: Any) -> None:
    settings.TEAM_MODE = True
    person("ada")

    def link(*args: str) -> str:
        out = io.StringIO()
        call_command("login_link", "--url", "http://testserver", *args, stdout=out)
        return out.getvalue().strip().removeprefix("http://testserver")

    with pytest.raises(CommandError, match="--user NAME"):
        link()
    with pytest.raises(CommandError, match="createsuperuser"):
        link("--user", "nobody")
    client, path = Client(), link("--user", "ada")
    assert client.get(path).status_code == 302 and client.get("/account.json").json()["name"] == "ada"
    assert Client().get(path).status_code == 403
    late = link("--user", "ada")
    get_user_model().objects.update(is_active=False)
    assert Client().get(late).status_code == 403


@pytest.mark.django_db
def test_what_needs_no_login(settings: Any) -> None:
    settings.TEAM_MODE = True
    visitor = Client()
    assert visitor.get("/account").status_code == 302 and visitor.get("/runs.json").status_code == 401
    assert visitor.get("/help").status_code == 200 and visitor.get("/health").status_code in (200, 503)
    page = visitor.get("/login").content.decode()
    assert "invitation" in page and "login_link" not in page and "createsuperuser" not in page


@pytest.mark.django_db
def test_each_page_leads_to_the_pages_of_people_and_names_the_account_in_team_mode(settings: Any) -> None:
    _, client = person("ada")
    header = client.get("/help").content.decode().split("<main")[0]
    assert ">Account<" in header and ">ada<" not in header
    settings.TEAM_MODE = True
    header = client.get("/help").content.decode().split("<main")[0]
    assert 'href="/account"' in header and ">ada<" in header
    menu = client.get("/account").content.decode().split('aria-label="People"')[1].split("</nav>")[0]
    assert all(f'href="{address}"' in menu for address in ("/projects", "/tokens", "/api/docs"))
    assert "/audit" not in menu and "/accounts" not in menu, "ada is no admin"


@pytest.mark.django_db
def test_proxies_name_the_address_of_their_client(settings: Any) -> None:
    person("bob")

    def address(forwarded: str) -> str:
        client = Client()
        client.post(
            "/login", {"username": "bob", "password": "correct horse battery"}, REMOTE_ADDR="10.0.0.1",
            headers={"X-Forwarded-For": forwarded},
        )
        (here,) = [one for one in client.get("/account.json").json()["sessions"] if one["is_this"]]
        return str(here["address"])

    assert address("6.6.6.6") == "10.0.0.1"
    settings.PROXIES = 1
    assert address("6.6.6.6, 192.0.2.9") == "192.0.2.9"
    assert address("6.6.6.6, <script>") == "10.0.0.1" and address("") == "10.0.0.1"
    settings.PROXIES = 2
    assert address("6.6.6.6, 192.0.2.9, 10.0.0.2") == "192.0.2.9" and address("192.0.2.9") == "10.0.0.1"


def test_the_settings_of_a_provider_belong_together(settings: Any) -> None:
    assert list(check_provider()) == []
    settings.OIDC_ISSUER = "http://login.example"
    assert [one.id for one in check_provider()] == ["inspector.E024", "inspector.E025"]
    settings.OIDC_ISSUER, settings.OIDC_CLIENT_ID = "http://127.0.0.1:9000", "inspector"
    assert list(check_provider()) == []
