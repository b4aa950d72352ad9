"""Login links, passwords, the login rule, health and headers, asked for over HTTP."""

import time
from pathlib import Path

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from inspector.server import health
from inspector.web.login import make_token, use_token

pytestmark = pytest.mark.django_db


def test_a_token_works_once(settings, tmp_path: Path) -> None:
    settings.INSPECTOR_DATA = tmp_path
    token = make_token()
    stored = list((tmp_path / "run" / "login").iterdir())
    assert all(token not in path.name and token not in path.read_text() for path in stored)
    assert use_token(token)
    assert not use_token(token)
    assert not use_token("../../secret_key")


def test_a_token_expires_and_is_swept(settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.INSPECTOR_DATA = tmp_path
    old = make_token()
    later = time.time() + settings.LOGIN_LINK_SECONDS + 1
    monkeypatch.setattr("inspector.web.login.time.time", lambda: later)
    assert not use_token(old)
    old = make_token()
    monkeypatch.setattr("inspector.web.login.time.time", lambda: later + settings.LOGIN_LINK_SECONDS + 1)
    make_token()
    assert len(list((tmp_path / "run" / "login").iterdir())) == 1


def test_a_link_logs_one_browser_in(client: Client) -> None:
    token = make_token()
    answer = client.get("/login", {"token": token, "next": "/health"})
    assert (answer.status_code, answer["Location"]) == (302, "/health")
    assert client.get("/login", {"token": token})["Location"] == "/"  # a reload in the same browser does no harm
    second = Client().get("/login", {"token": token})
    assert second.status_code == 403
    assert "used already" in second.content.decode()
    assert "manage.py login_link" in second.content.decode()


def test_a_link_sends_nobody_elsewhere(client: Client) -> None:
    assert client.get("/login", {"token": make_token(), "next": "https://evil.example/"})["Location"] == "/"


def test_a_password_logs_in(client: Client) -> None:
    get_user_model().objects.create_user("ada", password="correct horse")
    assert client.post("/login", {"username": "ada", "password": "wrong"}).status_code == 200
    assert client.post("/login", {"username": "ada", "password": "correct horse"}).status_code == 302
    assert client.post("/logout").status_code == 302
    assert "_auth_user_id" not in client.session


def test_the_local_user_has_no_password(client: Client) -> None:
    client.get("/login", {"token": make_token()})
    assert not get_user_model().objects.get(username="local").has_usable_password()


@pytest.mark.urls("tests.ops.urls")
def test_a_page_needs_a_login_in_the_way_its_reader_understands(client: Client) -> None:
    answer = client.get("/page?t=1-2")
    assert (answer.status_code, answer["Location"]) == (302, "/login?next=/page%3Ft%3D1-2")
    assert client.get("/page.json").status_code == 401
    assert "login_link" in client.get("/page.json").json()["error"]
    assert client.get("/page", headers={"HX-Request": "true"})["HX-Redirect"].startswith("/login?next=")
    client.get("/login", {"token": make_token()})
    assert client.get("/page").content == b"seen"


def test_every_answer_is_strict_about_what_may_run(client: Client) -> None:
    answer = client.get("/login")
    assert "default-src 'none'" in answer["Content-Security-Policy"]
    assert "unsafe" not in answer["Content-Security-Policy"]
    assert answer["X-Frame-Options"] == "DENY"
    assert answer["X-Content-Type-Options"] == "nosniff"
    assert answer["Referrer-Policy"] == "same-origin"
    assert answer["X-Request-Id"]


def test_a_request_is_logged_without_its_query(client: Client, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", logger="inspector.request"):
        client.get("/login", {"token": "secret-token"})
    assert [record.path for record in caplog.records if record.name == "inspector.request"] == ["/login"]
    assert "secret-token" not in caplog.text


def test_health_names_what_is_missing(client: Client, live_redis: str) -> None:
    from django.core.cache import cache

    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["database"] == answer.json()["redis"] == "ok"
    assert "No worker" in answer.json()["workers"]["default"]
    for queue in health.served_queues():
        cache.set(health.heartbeat_key(queue), "w", 10)
    answer = client.get("/health")
    assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_health_says_when_redis_is_gone(client: Client, settings, tmp_path: Path) -> None:
    settings.CACHES = {
        "default": {
            "BACKEND": "django.core.cache.backends.redis.RedisCache",
            "LOCATION": f"unix://{tmp_path}/none.sock",
        }
    }
    answer = client.get("/health")
    assert answer.status_code == 503
    assert answer.json()["redis"].startswith("Redis does not answer")


@pytest.mark.urls("tests.ops.urls")
def test_an_upload_stops_at_the_limit(admin_client: Client, settings, tmp_path: Path) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.write_bytes(b"x" * 1000)
    large.write_bytes(b"x" * 200_000)
    settings.UPLOAD_MAX_BYTES = 100_000
    with small.open("rb") as file:
        assert admin_client.post("/upload", {"file": file}).content == b"1000"
    with large.open("rb") as file:
        assert admin_client.post("/upload", {"file": file}).status_code in (400, 413)
