"""API keys of a project: what they may do, until when, and who sees and revokes them."""

import io
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from django.contrib.auth import get_user_model
from django.core.management import CommandError, call_command
from django.test import Client
from django.utils import timezone

from rollouts.store.models import ApiToken, AuditEvent, Membership, Project, Role
from rollouts.store.people.shares import api_key_fault, create_api_key, find_api_key
from tests.team.conftest import person

pytestmark = pytest.mark.django_db


def made(client: Client, **asked: Any) -> dict[str, Any]:
    answer = client.post("/tokens.json", {"name": "trainer", **asked})
    assert answer.status_code == 201, answer.content
    return dict(answer.json()["made"])


def test_the_form_chooses_project_scopes_and_days(ours: Project, admin: Client) -> None:
    one = made(admin, project=ours.code, scopes=["read", "launch"], days="7")
    assert (one["project"], one["scopes"], one["state"]) == ("maths", ["read", "launch"], "live")
    left = ApiToken.objects.get().expires_at - timezone.now()  # type: ignore[operator]
    assert timedelta(days=6, hours=23) < left <= timedelta(days=7)
    plain = made(admin)
    assert plain["scopes"] == ["push"] and plain["expires_at"] is not None
    assert made(admin, days="0")["expires_at"] is None
    assert AuditEvent.objects.filter(action="API token made", detail__contains="read, launch").exists()


@pytest.mark.parametrize("wrong", [{"days": "4000"}, {"scopes": ["root"]}, {"name": "x" * 201}])
def test_a_form_that_makes_no_sense_makes_no_token(admin: Client, wrong: dict[str, Any]) -> None:
    assert admin.post("/tokens.json", {"name": "x", **wrong}).status_code == 422 and not ApiToken.objects.exists()


def test_a_viewer_makes_tokens_that_read(ours: Project, theirs: Project) -> None:
    _, viewer = person("vic", ours, Role.VIEWER)
    assert made(viewer, scopes=["read"])["scopes"] == ["read"]
    assert viewer.post("/tokens.json", {"scopes": ["push"]}).status_code == 403
    assert viewer.post("/tokens.json", {"scopes": ["read"], "project": theirs.code}).status_code == 404
    assert ApiToken.objects.count() == 1


def test_a_token_ends_with_its_time_its_maker_and_the_makers_role(ours: Project) -> None:
    user, _ = person("bob", ours, Role.MEMBER)
    record, token = create_api_key(user, "x", project=ours, days=1)
    assert find_api_key(token) == record
    ApiToken.objects.update(expires_at=timezone.now() - timedelta(days=1))
    assert find_api_key(token) is None and "expired on 20" in api_key_fault(token)
    ApiToken.objects.update(expires_at=None)
    Membership.objects.all().delete()
    assert find_api_key(token) is None and "no longer" in api_key_fault(token)
    user.is_superuser = True
    user.save()
    assert find_api_key(token) == record
    user.is_active = False
    user.save()
    assert find_api_key(token) is None
    assert "unknown" in api_key_fault("ri_nothing") and "unknown" in api_key_fault("x" * 10_000)


def test_one_sees_ones_own_and_an_admin_those_of_the_project(ours: Project, theirs: Project, admin: Client) -> None:
    bob, of_bob = person("bob", ours, Role.MEMBER)
    _, of_eve = person("eve", ours, Role.MEMBER)
    Membership.objects.create(project=theirs, user=bob, role=Role.MEMBER)
    mine, _ = create_api_key(bob, "of bob", project=ours)
    create_api_key(bob, "elsewhere", project=theirs)

    def names(client: Client) -> set[str]:
        return {one["name"] for one in client.get("/tokens.json").json()["tokens"]}

    assert names(of_bob) == {"of bob", "elsewhere"} and names(of_eve) == set() and names(admin) == {"of bob"}
    assert of_eve.post(f"/tokens/{mine.pk}/revoke").status_code == 403
    _, stranger = person("sid", theirs, Role.ADMIN)
    assert stranger.post(f"/tokens/{mine.pk}/revoke").status_code == 404
    assert admin.post(f"/tokens/{mine.pk}/revoke").status_code == 302
    mine.refresh_from_db()
    assert mine.revoked_at and b"elsewhere" not in admin.get("/tokens").content


def test_a_program_is_told_why_and_guesses_are_limited_at_both_doors_together(ours: Project) -> None:
    user, _ = person("bob", ours, Role.MEMBER)
    _, token = create_api_key(user, "x", project=ours, days=1)
    ApiToken.objects.update(expires_at=timezone.now() - timedelta(days=1))
    trainer, reader = partial(Client().post, "/api/runs"), partial(Client().get, "/api/v1/runs")
    told = [
        ask(HTTP_AUTHORIZATION=f"Bearer {token}", REMOTE_ADDR=f"10.8.8.{n}") for n, ask in enumerate((trainer, reader))
    ]
    assert [one.status_code for one in told] == [401, 401]
    assert "expired on" in told[0].json()["error"] and "expired on" in told[1].json()["detail"]
    found = [
        (trainer, reader)[n % 2](HTTP_AUTHORIZATION=f"Bearer ri_{n}", REMOTE_ADDR="10.8.8.0").status_code
        for n in range(32)
    ]
    assert found == [401] * 29 + [429] * 3
    _, good = create_api_key(user, "x", project=ours)
    body = {"data": '{"name": "a"}', "content_type": "application/json", "REMOTE_ADDR": "10.8.8.0"}
    assert trainer(HTTP_AUTHORIZATION=f"Bearer {good}", **body).status_code == 201, "a right one always passes"


def test_the_command_takes_project_scopes_and_days(ours: Project) -> None:
    def command(*args: str) -> str:
        out = io.StringIO()
        call_command("api_token", *args, stdout=out, stderr=io.StringIO())
        return out.getvalue()

    get_user_model().objects.create_superuser("root")
    token = command("x", "--user", "root", "--project", "maths", "--scope", "read", "--scope", "push", "--days", "3")
    record = find_api_key(token.strip())
    assert record is not None and record.project == ours and record.scopes == ["read", "push"] and record.expires_at
    assert "in maths (read, push)" in command("--list")
    for wrong in (("--project", "nothing"), ("--days", "0")):
        with pytest.raises(CommandError):
            command("x", *wrong)
