"""M11: each write is logged with its user and its object; an API key is revoked by its maker or the staff."""

import logging
from typing import Any

import pytest
from django.test import Client

from inspector.server.logs import TextLineFormatter
from rollouts.store.models import ApiToken, Role, Run, ShareLink
from rollouts.store.people.shares import create_api_key, create_share
from rollouts.store.runs.runs import create_run
from tests.people import make_member

pytestmark = pytest.mark.django_db


def member(name: str, **flags: Any) -> tuple[Any, Client]:
    user, client = make_member(name, **flags), Client()
    client.force_login(user)
    return user, client


def test_m11_who_deletes_revokes_or_pushes_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    ada, _ = member("ada")
    _, bob = member("bob", is_staff=True)
    run = create_run(Run.Kind.IMPORT, "a", status=Run.Status.DONE)
    link, token = create_share(ada, run, query="", note="", days=1)
    record, api_token = create_api_key(ada, "trainer")
    with caplog.at_level(logging.INFO):
        bob.post(f"/shares/{link.pk}/revoke")
        bob.post(f"/runs/{run.code}/cancel")
        Client().post(
            f"/api/runs/{run.code}/trajectories", b"{}", "text/plain", HTTP_AUTHORIZATION=f"Bearer {api_token}"
        )
        bob.post(f"/tokens/{record.pk}/revoke")
        bob.post(f"/runs/{run.code}/delete")
        bob.post(f"/runs/{run.code}/delete", {"sure": "yes"})
        bob.get("/runs")
        Client().get(f"/s/{token}")
    assert not Run.objects.exists() and not ShareLink.objects.exists() and ApiToken.objects.get().revoked_at
    lines = [TextLineFormatter().format(one) for one in caplog.records if one.name == "inspector.request"]
    for path, user in (
        (f"/shares/{link.pk}/revoke", "bob"), (f"/runs/{run.code}/cancel", "bob"),
        (f"/tokens/{record.pk}/revoke", "bob"), (f"/runs/{run.code}/delete", "bob"),
        (f"/api/runs/{run.code}/trajectories", "ada"),
    ):
        assert any(f"method=POST path={path} user={user} status=" in line for line in lines), (path, lines)
    done = [vars(one) for one in caplog.records if one.name == "inspector.audit"]
    assert [(one["message"], one["object"], one["user"]) for one in done if one["user"] == "bob"] == [
        ("share link revoked", f"{link.pk} {link.hint}", "bob"),
        ("API token revoked", f"{record.pk} {record.hint}: {record.name}", "bob"),
        ("run deleted", f"{run.code} a", "bob"),
    ]
    assert not any("user=" in line for line in lines if "method=GET" in line)
    assert not any(secret in line for line in lines for secret in (token, api_token))


def test_m11_an_api_token_is_revoked_by_its_maker_or_an_admin() -> None:
    ada, of_ada = member("ada", role=Role.MEMBER)
    _, of_bob = member("bob", role=Role.MEMBER)
    _, of_admin = member("eve", role=Role.ADMIN)
    for client, status in ((of_bob, 403), (of_ada, 200), (of_admin, 200)):
        record, _ = create_api_key(ada, "trainer")
        answer = client.post(f"/tokens/{record.pk}/revoke", headers={"Accept": "application/json"})
        assert answer.status_code in (status, 302 if status == 200 else status)
        record.refresh_from_db()
        assert bool(record.revoked_at) == (status == 200)
    create_api_key(ada, "trainer")
    assert b"/revoke" in of_ada.get("/tokens").content and b"/revoke" not in of_bob.get("/tokens").content
    assert "Only its maker" in of_bob.post(f"/tokens/{record.pk}/revoke").content.decode()
