"""The pages of alarms: what a run is above, its limits, the form, and the webhook of a project."""

from typing import Any

import pytest
from django.test import Client

from rollouts.store.models import Alarm, AlarmRule, Membership, ProjectAlarms, Role, Run
from rollouts.store.runs.alarms import take_alarms, webhook_key
from rollouts.store.runs.runs import create_run
from tests.samples.training_steps import store_steps
from tests.web.samples import one_line

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Run:
    made = create_run(Run.Kind.IMPORT, "r")
    store_steps(made, [0, 0, 3, 5])
    take_alarms(made)
    return made


def test_an_alarm_stands_on_the_run_in_the_list_and_on_its_own_page(
    web: Client, run: Run, django_assert_max_num_queries: Any
) -> None:
    sentence = "Since training step 2 the share of trajectories with an error is above 10 %: 50 % at step 3."
    with django_assert_max_num_queries(11):
        assert sentence in one_line(web.get(f"/runs/{run.code}/alarms"))
    twin = web.get(f"/runs/{run.code}/alarms.json").json()
    assert twin["steps"] == 4 and twin["alarms"][0]["sentence"].startswith(sentence)
    assert twin["alarms"][0]["url"] == f"/runs/{run.code}?severity=error&training_min=2&training_max=2"
    assert {one["figure"]: one["scope"] for one in twin["limits"]} == dict.fromkeys(
        ("broken", "gap", "truncated", "same_reward"), "default"
    )
    assert sentence in one_line(web.get(f"/runs/{run.code}"))
    assert web.get(f"/runs/{run.code}.json").json()["alarms"] == twin["alarms"]
    assert web.get("/runs.json").json()["runs"][0]["alarms"] == 1
    assert f'href="/runs/{run.code}/alarms"' in one_line(web.get("/")) and "1 alarm<" in one_line(web.get("/"))
    Alarm.objects.update(holds=False)
    assert "It no longer holds" in one_line(web.get(f"/runs/{run.code}/alarms"))
    assert sentence not in one_line(web.get(f"/runs/{run.code}"))
    assert web.get("/runs.json").json()["runs"][0]["alarms"] == 0


def test_a_limit_is_set_and_taken_back_and_what_was_typed_wrong_stays_in_the_form(web: Client, run: Run) -> None:
    address = f"/runs/{run.code}/alarms"
    wrong = web.post(f"{address}/set", {"figure": "truncated", "limit": "<b>lots", "scope": "project"})
    body = wrong.content.decode()
    assert wrong.status_code == 422 and 'value="&lt;b&gt;lots"' in body and "Write a percentage" in body
    assert web.post(f"{address}/set.json", {"figure": "x"}).json()["errors"].keys() == {"scope"}
    form = {"figure": "finding", "kind": "boundary_merge", "limit": "25", "scope": "project"}
    assert web.post(f"{address}/set", form)["Location"] == address
    assert "Trajectories with “" in one_line(web.get(address)) and "25 %" in one_line(web.get(address))
    rule = AlarmRule.objects.get()
    assert web.post(f"/alarms/{rule.pk}/drop", {"run": run.code})["Location"] == address
    assert not AlarmRule.objects.exists() and web.post(f"/alarms/{rule.pk}/drop").status_code == 404


def test_a_run_without_training_steps_says_that_it_is_not_checked(web: Client) -> None:
    bare = create_run(Run.Kind.IMPORT, "bare")
    assert "so it is not checked" in one_line(web.get(f"/runs/{bare.code}/alarms"))


def test_an_admin_says_who_is_told_and_a_member_learns_neither_address_nor_key(
    web: Client, member: Any, run: Run, settings: Any
) -> None:
    settings.WEBHOOK_HOSTS = ["hooks.example"]
    address = f"/projects/{run.project.code}/alarms"
    Membership.objects.filter(user=member).update(role=Role.MEMBER)
    assert web.get(address).status_code == 403 and web.post(address, {"webhook": ""}).status_code == 403
    Membership.objects.filter(user=member).update(role=Role.ADMIN)
    refused = web.post(address, {"webhook": "https://evil.example/x"})
    assert refused.status_code == 422 and "INSPECTOR_WEBHOOK_HOSTS" in refused.content.decode()
    assert 'value="https://evil.example/x"' in refused.content.decode() and not ProjectAlarms.objects.exists()
    assert web.post(address, {"webhook": "https://hooks.example/secret"})["Location"] == address
    key = webhook_key(ProjectAlarms.objects.get())
    twin = web.get(f"{address}.json").json()
    assert (twin["webhook"], twin["key"]) == ("https://hooks.example/secret", key)
    assert key in web.get(address).content.decode()
    Membership.objects.filter(user=member).update(role=Role.MEMBER)
    for page in (f"/runs/{run.code}/alarms", f"/runs/{run.code}", "/", f"/projects/{run.project.code}"):
        body = web.get(page).content.decode()
        assert "secret" not in body and key not in body
