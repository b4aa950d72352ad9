"""One's own sessions and password."""

from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.contrib.sessions.models import Session
from django.core.cache import cache
from django.db import OperationalError
from django.test import Client
from django.utils import timezone

from inspector.team.account import device_name
from rollouts.store.models import LoginSession
from tests.team.conftest import PASSWORD, person

pytestmark = pytest.mark.django_db

FIREFOX = "Mozilla/5.0 (X11; Linux x86_64; rv:140.0) Gecko/20100101 Firefox/140.0"


def logged_in(name: str = "bob", **headers: Any) -> Client:
    client = Client(**headers)
    answer = client.post("/login", {"username": name, "password": PASSWORD})
    assert answer.status_code == 302
    return client


def sessions(client: Client) -> list[dict[str, Any]]:
    return list(client.get("/account.json").json()["sessions"])


def test_sessions_are_listed_and_end_one_by_one() -> None:
    person("bob")
    laptop = logged_in(HTTP_USER_AGENT=FIREFOX, REMOTE_ADDR="10.0.0.7")
    phone = logged_in(HTTP_USER_AGENT="curl/8 \x01 <b>", REMOTE_ADDR="10.0.0.8")
    seen = sessions(laptop)
    assert [(one["device"], one["address"], one["is_this"]) for one in seen if one["address"]] == [
        ("curl/8 \x01 <b>", "10.0.0.8", False), ("Firefox on Linux", "10.0.0.7", True),
    ]
    assert "<b>" not in laptop.get("/account").content.decode().split("<main")[1]
    assert laptop.post(f"/account/sessions/{seen[0]['id']}/end").status_code == 302
    assert phone.get("/account.json").status_code == 401 and laptop.get("/account.json").status_code == 200
    assert laptop.post(f"/account/sessions/{seen[0]['id']}/end").status_code == 404


def test_a_busy_database_refuses_no_page_because_of_the_list_of_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(*_: Any) -> None:
        raise OperationalError("database is locked")

    user, _ = person("bob")
    client = Client(raise_request_exception=False)
    with monkeypatch.context() as patch:
        patch.setattr("inspector.web.login.note_session", busy)
        client.force_login(user)
        assert client.get("/").status_code == 200
    noted = LoginSession.objects.filter(session_id=client.session.session_key)
    assert not noted.exists()
    assert client.get("/").status_code == 200 and noted.exists()


def test_nobody_ends_the_session_of_another() -> None:
    person("bob")
    eve, of_eve = person("eve")
    bobs = logged_in()
    record = LoginSession.objects.get(address="127.0.0.1", user__username="bob", device="")
    assert of_eve.post(f"/account/sessions/{record.pk}/end").status_code == 404
    assert bobs.get("/account.json").status_code == 200 and all(
        one.user_id == eve.pk for one in LoginSession.objects.filter(pk__in=[s["id"] for s in sessions(of_eve)])
    )


def test_all_others_end_at_once() -> None:
    person("bob")
    here, there = logged_in(), logged_in()
    assert here.post("/account/sessions/end-others").status_code == 302
    assert there.get("/account.json").status_code == 401 and len(sessions(here)) == 1


def test_a_new_password_ends_the_other_sessions() -> None:
    person("bob")
    here, there = logged_in(), logged_in()
    wrong = here.post("/account/password", {"old_password": "no", "new_password1": "x", "new_password2": "x"})
    assert wrong.status_code == 200 and there.get("/account.json").status_code == 200
    new = {"old_password": PASSWORD, "new_password1": "another good phrase", "new_password2": "another good phrase"}
    assert here.post("/account/password", new).status_code == 302
    assert here.get("/account.json").status_code == 200 and there.get("/account.json").status_code == 401
    assert [one["is_this"] for one in sessions(here)] == [True]


def test_guesses_of_the_old_password_count_as_tries_of_the_login() -> None:
    cache.clear()
    person("bob")
    here = logged_in()
    new = {"new_password1": "another good phrase", "new_password2": "another good phrase"}
    wrong = [here.post("/account/password", {"old_password": f"no {n}", **new}).status_code for n in range(9)]
    refused = here.post("/account/password", {"old_password": PASSWORD, **new})
    assert (wrong, refused.status_code) == ([200] * 9, 429) and "Wait five minutes" in refused.content.decode()
    assert Client().post("/login", {"username": "bob", "password": PASSWORD}).status_code == 429
    assert here.get("/account/password").status_code == 200
    cache.clear()


def test_logging_out_takes_the_session_along_and_the_use_is_noted_every_ten_minutes(
    django_assert_num_queries: Any,
) -> None:
    person("bob")
    client = logged_in()
    record = LoginSession.objects.get(session_id=client.session.session_key)
    with django_assert_num_queries(2):  # the session, the account
        client.get("/help")
    long_ago = timezone.now() - timedelta(hours=1)
    LoginSession.objects.update(last_used_at=long_ago)
    session = client.session
    session["noted"] = [session.session_key, int(long_ago.timestamp())]
    session.save()
    assert client.get("/account").status_code == 200
    record.refresh_from_db()
    assert record.last_used_at > long_ago
    client.post("/logout")
    assert not LoginSession.objects.filter(pk=record.pk).exists()
    assert not Session.objects.filter(session_key=record.session_id).exists()


def test_who_has_no_password_is_told_how_to_log_in() -> None:
    user = get_user_model().objects.create_user("linked")
    client = Client()
    client.force_login(user)
    assert "This account has no password" in client.get("/account").content.decode()


@pytest.mark.parametrize(
    ("agent", "name"),
    [
        (FIREFOX, "Firefox on Linux"),
        ("Mozilla/5.0 (Macintosh; Intel Mac OS X 10_15_7) AppleWebKit/605.1.15 Version/18.0 Safari/605.1.15",
         "Safari on macOS"),
        ("Mozilla/5.0 (Windows NT 10.0) AppleWebKit/537.36 Chrome/140.0 Safari/537.36 Edg/140.0", "Edge on Windows"),
        ("", "unknown"),
        ("python-requests/2", "python-requests/2"),
    ],
)
def test_a_device_in_words(agent: str, name: str) -> None:
    assert device_name(agent) == name
