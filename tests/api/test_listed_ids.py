"""Every id that the API lists can be used in the calls that take such an id: none of them is unknown, none a 500."""

import json

import pytest
from django.contrib.auth import get_user_model
from django.test import Client

from inspector.api.app import schema
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job, Role
from rollouts.store.people.access import EVERYTHING
from rollouts.store.people.visible_objects import find_visible_job, visible_jobs
from rollouts.store.runs.muted import mute
from tests.api.conftest import member_of
from tests.web.trajectory_samples import Maker


@pytest.fixture
def admin(db: None, make: Maker, sent: list[int]) -> Client:
    """An admin of the server, in whose lists nothing is left out, beside one of each noun, and shards of a job."""
    broken, findings = make.broken("broken")
    run = make.run([make.conversation("whole"), broken], [[], findings])
    job, _ = ask_job(run, "export", {})
    for status in ("queued", "running", "done"):
        Job.objects.create(whole=job, kind="export", status=status)
    mute(run, findings[0].kind, "run", "known", member_of(run.project_id, "ann", Role.MEMBER))
    client = Client(raise_request_exception=False)
    client.force_login(get_user_model().objects.create_superuser("root"))
    return client


def test_a_shard_is_in_no_list_and_no_call_takes_its_code(admin: Client) -> None:
    whole, shard = Job.objects.get(whole=None), Job.objects.filter(whole__isnull=False)[0]
    assert [job.pk for job in visible_jobs(EVERYTHING, {}, "", 50)[0]] == [whole.pk]
    assert find_visible_job(EVERYTHING, whole.code) and find_visible_job(EVERYTHING, shard.code) is None
    assert admin.get("/api/v1/jobs?status=running").json()["items"] == []
    assert admin.get(f"/api/v1/jobs/{whole.code}").status_code == 200
    for method, path in (("get", ""), ("post", "/cancel"), ("get", "/file")):
        assert getattr(admin, method)(f"/api/v1/jobs/{shard.code}{path}").status_code == 404


def test_each_listed_id_can_be_used_in_every_call_that_takes_one(admin: Client) -> None:
    paths = json.loads(schema())["paths"]
    n_asked = 0
    for path, methods in paths.items():
        if "get" not in methods or "{" in path:
            continue
        listed = admin.get(path)
        assert listed.status_code < 500, path
        items = listed.json().get("items", []) if listed["Content-Type"].startswith("application/json") else []
        calls = [
            (other, method) for other, verbs in paths.items() for method in verbs
            if other.startswith((f"{path}/{{code}}", f"{path}/{{id}}")) and other.count("{") == 1 and method != "delete"
        ]
        for item in items:
            for other, method in calls:
                key = item.get("code", item.get("id"))
                address = other.replace("{code}", str(key)).replace("{id}", str(key))
                answer = getattr(admin, method)(address, **({} if method == "get" else {
                    "data": "{}", "content_type": "application/json"}))
                n_asked += 1
                assert answer.status_code < 500, (method, address, answer.status_code)
                unknown = f"no {other.split('/')[3][:-1]} "
                assert answer.status_code != 404 or unknown not in answer.content.decode(), address
    assert n_asked > 20
