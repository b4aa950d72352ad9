"""Runs on the same axes: what is drawn of each, and the sentence that says what differs."""

from itertools import pairwise
from typing import Any

import pytest
from django.test import Client

from inspector.runs.training.overlay import difference, overlay, table
from inspector.runs.training.training_charts import MAX_TABLE_ROWS, value_at
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run
from rollouts.store.runs.training_steps import TrainingStepLine, take_training_steps
from tests.samples.training_steps import save, world


def line(step: int, **more: Any) -> TrainingStepLine:
    shown: dict[str, Any] = {
        "trajectories": 10, "broken": 0, "findings": {}, "tokens_per_trajectory": 5.0, "sampled": 100, "lost": 0,
        "repaid": 0, "rows_per_call": 1.0, "truncated": None, "reward_mean": None, "groups": 0, "same_reward": 0,
        "gap": None, "first": None, "last": None,
    }
    return TrainingStepLine(training_step=step, **shown | more)


def test_a_path_is_a_share_a_field_or_a_number_and_unknown_is_not_zero() -> None:
    one = line(3, lost=25, findings={"boundary_merge": 4}, gap={"p99": 0.5, "mean_abs": None})
    assert value_at(one, "lost/sampled") == 0.25 and value_at(one, "rows_per_call") == 1.0
    assert value_at(one, "findings.boundary_merge/trajectories") == 0.4
    assert value_at(one, "findings.template_rewrites/trajectories") == 0.0
    assert (value_at(one, "gap.p99"), value_at(one, "gap.mean_abs"), value_at(line(1), "gap.p99")) == (0.5, None, None)
    assert value_at(one, "same_reward/groups") is None and value_at(one, "truncated/trajectories") is None


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]], "The same at the 3 steps that they share."),
        ([[0.1, None, 0.3], [None, 0.2, None]],
         "a and b have no training step in common at which this is known."),
        ([[None] * 3, [0.1, 0.2, 0.3]], "Only b has this figure."),
        ([[0.1, None, None], [0.4, 0.2, 0.3]],
         ("Over the one step that they share, the mean is 0.4 in b and 0.1 in a; they are furthest apart at step 0, "
          "0.4 against 0.1.")),
        ([[0.0, 0.5, 0.9], [0.1, 0.1, 0.1]],
         ("Over the 3 steps that they share, the mean is 0.467 in a and 0.1 in b; they are furthest apart at step 20, "
          "0.9 against 0.1. a is higher at every step from 10 on.")),
        ([[0.2, 0.3, 0.4], [0.1, 0.1, 0.1]],
         ("Over the 3 steps that they share, the mean is 0.3 in a and 0.1 in b; they are furthest apart at step 20, "
          "0.4 against 0.1. a is higher at every step.")),
        ([[0.1, 0.3], [0.3, 0.1]],
         ("Over the 2 steps that they share, the mean is 0.2 in a and 0.2 in b; they are furthest apart at step 0, 0.1 "
          "against 0.3.")),
    ],
)
def test_the_sentence_says_what_differs(values: list[list[float | None]], said: str) -> None:
    assert difference(["a", "b"], [0, 10, 20][: len(values[0])], values) == said


def test_of_three_runs_the_sentence_names_the_outer_ones_and_who_lacks_the_figure() -> None:
    said = difference(["a", "b", "c", "d"], [1, 2], [[0.2, 0.2], [0.9, 0.9], [None, None], [0.5, 0.5]])
    assert "0.9 in b and 0.2 in a" in said and said.endswith("b is higher at every step. Not known of c.")


def test_the_axis_holds_the_steps_of_all_runs_and_names_are_told_apart() -> None:
    shown = overlay(["x", "x"], [[line(0, truncated=5), line(2)], [line(1)]])
    assert shown.names == ["x", "x (2)"] and shown.steps == [0, 1, 2]
    cut = next(chart for chart in shown.charts if chart.title.endswith("cut by length"))
    assert cut.values == [[0.5, None, None], [None, None, None]] and cut.difference == "Only “x” has this figure."
    assert not any("Reward" in chart.title for chart in shown.charts)
    assert len({chart.id for chart in shown.charts}) == len(shown.charts)


def test_the_table_of_many_steps_is_evenly_spaced_and_holds_both_ends() -> None:
    shown = overlay(["a", "b"], [[line(step) for step in range(1000)], [line(5)]])
    rows = table(shown, shown.charts[0])
    assert len(rows) == MAX_TABLE_ROWS and (rows[0][0], rows[-1][0]) == (0, 999)
    assert {b[0] - a[0] for a, b in pairwise(rows)} <= {52, 53}


@pytest.mark.django_db
def test_up_to_six_runs_stand_on_the_same_axes(web: Client, django_assert_max_num_queries: Any) -> None:
    runs = []
    for n in range(3):
        run = create_run(Run.Kind.IMPORT, f"run {n}")
        save(run, world(2 + n))
        take_training_steps(run)
        runs.append(run)
    query = "&".join(f"run={run.code}" for run in runs)
    said = web.get(f"/runs/compare.json?{query}").json()
    assert said["overlay"]["steps"] == [0, 1, 2, 3] and [one["run"]["name"] for one in said["runs"]] == [
        "run 0", "run 1", "run 2",
    ]
    gap = next(chart for chart in said["overlay"]["charts"] if chart["title"].endswith("sampler: mean"))
    assert gap["values"][0][2:] == [None, None] and gap["values"][2][3] == pytest.approx(0.3, abs=1e-6)
    with django_assert_max_num_queries(40):
        body = web.get(f"/runs/compare?{query}").content.decode()
    assert body.count("data-chart=") == len(said["overlay"]["charts"]) and gap["difference"] in body
    part = web.get(f"/runs/compare.json?{query}&training_min=1&training_max=2").json()
    assert part["overlay"]["steps"] == [1, 2]
    assert web.get(f"/runs/compare.json?{query}&training_min=90").json()["overlay"] is None
    eight = web.get(f"/runs/compare.json?{'&'.join([query] * 3)}").json()
    assert len(eight["runs"]) == 6 and "names 9 runs" in eight["notices"][0]
    alone = web.get(f"/runs/compare.json?run={runs[0].code}").json()
    assert alone["runs"] == [] and "Name a second one" in alone["notices"][0]
    assert f'value="{runs[1].code}"' in web.get(f"/runs/{runs[0].code}/training").content.decode()
