"""Pages, lists and twins keep apart what was checked, what failed and what could not be decided."""

import random
from dataclasses import replace

import pytest
from django.test import Client

from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.text.chat_templates import renderer
from rollouts.jobs.diagnosis import diagnose_run
from rollouts.store.models import StoredTrajectory
from rollouts.store.runs import figures
from rollouts.store.runs.run_summary import run_summary
from tests.samples.planted.plant import PLANTERS, ModelSetup
from tests.web.samples import finding, one_line, stored_run
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db


def test_rows_without_steps_are_not_called_clean(make: Maker, web: Client) -> None:
    value = make.conversation("a", turns=2)
    (row,) = merged_rows(value.steps)
    run = make.run([replace(value, steps=(), rows=(replace(row, step_indices=(), origin=None),))])
    list(diagnose_run(run))
    stored = run.trajectories.get()
    page = one_line(web.get(f"/trajectories/{stored.code}"))
    assert "not decidable: no calls in the file" in page and "Passed all" not in page
    checks = {one["name"]: one for one in web.get(f"/trajectories/{stored.code}.json").json()["checks"]}
    assert (checks["prefix"]["outcome"], checks["prefix"]["needs"]) == ("not decidable", ["steps"])
    assert (checks["lengths"]["outcome"], checks["lengths"]["needs"]) == ("passed", [])
    page = one_line(web.get(f"/runs/{run.code}"))
    assert "not decidable: no calls in the file" in page and "Passed all" not in page
    assert "checks not decidable" in page  # in the list
    assert "no steps to check" in one_line(web.get("/"))


def test_steps_that_were_checked_are(make: Maker, web: Client) -> None:
    template = renderer(make.tokenizer, make.tokenizer.chat_template or "")
    setup = ModelSetup("demo", make.tokenizer, template, random.Random(3), system=False)
    run = make.run([PLANTERS["clean"](setup).trajectory])
    stored = run.trajectories.get()
    assert "What was checked is not known" in one_line(web.get(f"/trajectories/{stored.code}"))
    assert web.get(f"/trajectories/{stored.code}.json").json()["checks"] is None
    assert "none known" in one_line(web.get(f"/runs/{run.code}"))
    list(diagnose_run(run))
    for address in (f"/trajectories/{stored.code}", f"/runs/{run.code}"):
        page = one_line(web.get(address))
        assert "None. Passed 9 of 10 checks; 1 not decidable: no policy versions." in page, address


def test_a_trajectory_that_failed_was_not_checked(web: Client) -> None:
    run = stored_run(1, findings=[[]])
    run.trajectories.update(status=StoredTrajectory.Status.FAILED, checks=None)
    page = one_line(web.get(f"/trajectories/{run.trajectories.get().code}"))
    assert "Not checked: the trajectory did not reach its end." in page
    assert run_summary(run).checks == []


def test_a_run_counts_the_three_apart(web: Client) -> None:
    run = stored_run(4, findings=[[finding()], [], [], []])
    run.trajectories.filter(index=3).update(checks=None)
    summary = web.get(f"/runs/{run.code}.json").json()["summary"]
    checks = {one["name"]: one for one in summary["checks"]}
    assert {name: checks["prefix"][name] for name in ("checked", "failed", "not_decidable", "needs")} == {
        "checked": 3, "failed": 1, "not_decidable": 0, "needs": [],
    }
    assert (checks["canonical"]["checked"], checks["canonical"]["not_decidable"]) == (0, 3)
    assert checks["canonical"]["needs"] == ["tokenizer"] and summary["checks_unknown"] == 1
    page = one_line(web.get(f"/runs/{run.code}"))
    assert "3 without a finding in what was checked" in page
    assert "Of 1 trajectory it is not known what was checked" in page
    assert figures.summary_in(figures.count(run)) == run_summary(run)
