"""Damage on pages and in the API: what was measured, and what was not."""

from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

from rollouts.store.models import Run
from rollouts.worker import jobs
from tests.samples.damage import damaged_run
from tests.web.samples import one_line

DAMAGE = {"measured", "mean", "largest", "cosine", "norm_ratio"}
pytestmark = pytest.mark.django_db(transaction=True)  # a slow job has a heartbeat beside it


@pytest.fixture
def run(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    return damaged_run(settings, monkeypatch)


def test_pages_and_the_api_say_what_was_measured_and_what_was_not(
    web: Client, run: Run, sent: list[int], django_assert_max_num_queries: Any
) -> None:
    cost = f"/runs/{run.code}/cost"
    before = web.get(f"{cost}.json").json()
    assert before["damage"] == {name: 0 if name == "measured" else None for name in DAMAGE}
    assert {kind["damage"] for kind in before["kinds"]} == {None} and "Not measured." in one_line(web.get(cost))
    code = run.trajectories.get(external_id="b").code
    said = one_line(web.get(f"/trajectories/{code}"))
    # In the head, which says all figures, and once above the findings; on no card.
    assert said.count("not measured") == 2 and "Their damage to the gradient is not measured. <a" in said
    assert "<span>Damage</span>" not in said
    assert web.post(f"/runs/{run.code}/damage", {"model": "none"}).status_code == 302 and not sent
    answer = web.post(f"/runs/{run.code}/damage", {"model": "demo"})
    assert answer["Location"] == cost and len(sent) == 1
    jobs.do_job(sent[0])
    after = web.get(f"{cost}.json").json()
    assert after["damage"]["measured"] == 3 and after["damage"]["largest"] > after["damage"]["mean"] > 0
    assert set(after["damage"]) == DAMAGE and -1 <= after["damage"]["cosine"] < 1 and after["damage"]["norm_ratio"] > 0
    assert f"to that of what was sampled is {after['damage']['cosine']:.3f}," in one_line(web.get(cost))
    errors = {kind["kind"]: kind["damage"] for kind in after["kinds"]}
    assert errors["observation_trained"] > errors["sampled_masked"] and errors["length_mismatch"] is None
    with django_assert_max_num_queries(20):
        page = one_line(web.get(cost))
    assert "3 measured trajectories" in page and "not measured" in page
    listed = web.get(f"/runs/{run.code}.json?sort=-damage&damage_min=0.0001").json()["trajectories"]
    assert len(listed) == 2 and listed[0]["damage"] > listed[1]["damage"] > 0
    names = [line["external_id"] for line in web.get(f"/runs/{run.code}.json?sort=-damage").json()["trajectories"]]
    assert names[2:] == ["a", "d"]
    assert "not measured" in one_line(web.get(f"/runs/{run.code}?sort=-damage&columns=damage"))
    findings = web.get(f"/api/v1/trajectories/{code}/findings").json()
    assert [line["damage_share"] for line in findings["items"]] == [1.0]
    said = one_line(web.get(f"/trajectories/{code}"))
    assert said.count("1.00 of what this trajectory’s gradient is off") == 1 and "not measured" not in said


def test_the_gradient_is_a_lens(web: Client, run: Run) -> None:
    code = run.trajectories.get(external_id="b").code
    assert "gradient_norm" not in web.get(f"/trajectories/{code}.json").json()["lenses"]
    call_command("damage", run.code, "--json")
    twin = web.get(f"/trajectories/{code}.json?lens=gradient_norm").json()
    assert "gradient_norm" in twin["lenses"]
    norms = [token["columns"]["gradient_norm"] for token in twin["window"]["tokens"]]
    assert [n for n, norm in enumerate(norms) if norm] == [*range(6, 18)]
    assert "the same thresholds in every row" in one_line(web.get(f"/trajectories/{code}?lens=gradient_norm"))
