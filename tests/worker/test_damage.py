"""Measuring damage: a job stores it for trajectories and findings; lists, pages, API and the command show it."""

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.core.management.base import CommandError

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from rollouts.jobs import damage
from rollouts.store.models import Run, TrajectoryDamage
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from tests.samples.damage import damaged_run

pytestmark = pytest.mark.django_db(transaction=True)  # a slow job has a heartbeat beside it


@pytest.fixture
def run(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    return damaged_run(settings, monkeypatch)


def measured(run: Run, *more: str) -> dict[str, Any]:
    out = StringIO()
    call_command("damage", run.code, "--json", *more, stdout=out)
    report: dict[str, Any] = json.loads(out.getvalue())
    return report


def test_the_command_tells_each_trajectory_and_finding(run: Run) -> None:
    report = measured(run)
    assert report["exact"] is True and report["layers"] == []
    clean, wide, both, unknown = report["trajectories"]
    assert (clean["cosine"], clean["relative_error"], clean["norm_ratio"], clean["findings"]) == (1, 0, 1, [])
    assert wide["relative_error"] > 0 and wide["cosine"] < 1
    assert wide["findings"] == [{"number": 1, "kind": "observation_trained", "share": 1.0}]
    assert [line["kind"] for line in both["findings"]] == ["sampled_masked", "observation_trained"]
    assert sum(line["share"] for line in both["findings"]) == pytest.approx(1, abs=0.05)
    assert unknown["relative_error"] is None and unknown["findings"][0]["share"] is None
    assert "another length" in unknown["missing"]
    one = json.loads(_call(run.trajectories.get(external_id="b").code, "--layers", "2"))
    (line,) = one["trajectories"]
    assert one["exact"] is False and line["relative_error"] != wide["relative_error"]


def _call(*arguments: str, as_json: bool = True) -> str:
    out = StringIO()
    call_command("damage", *arguments, *(["--json"] if as_json else []), stdout=out)
    return out.getvalue()


def test_words_of_the_command_and_its_refusals(run: Run, settings: Any) -> None:
    words = _call(run.code, "--layers", "2", as_json=False)
    assert "not measured. A loss mask has another length" in words
    assert "1 observation_trained: 100.0% of it" in words and "Not exact: over the last 2 of 4 layers." in words
    for arguments in (("--model", "none"), ("--layers", "0")):
        with pytest.raises(CommandError, match=r"serves no model|At least one layer"):
            _call(run.code, *arguments)
    with pytest.raises(Refusal, match="no rule"):
        damage.ask(run, "demo", rule="x")
    with pytest.raises(Refusal, match="nothing to measure"):
        damage.ask(create_run("import", "empty"), "demo")


def test_a_second_measurement_takes_the_place_of_the_first(run: Run) -> None:
    first = measured(run)["trajectories"][1]["relative_error"]
    other = measured(run, "--layers", "1")
    assert other["exact"] is False and other["trajectories"][1]["relative_error"] != first
    assert TrajectoryDamage.objects.count() == 4
    assert run.trajectories.get(external_id="b").damage == other["trajectories"][1]["relative_error"]


def test_a_model_of_another_vocabulary_is_refused(run: Run) -> None:
    value = Trajectory("big", (Step(ids_array([1, 2]), ids_array([999_999])),))
    save_trajectories(run, [value], [[]])
    with pytest.raises(CommandError, match="another vocabulary"):
        _call(run.trajectories.get(external_id="big").code)
