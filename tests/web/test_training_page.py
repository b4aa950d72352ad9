"""The page *Over training*: the stored figures, since when, and what it says where nothing is known."""

import re
from typing import Any

import pytest
from django.test import Client

from inspector.html.inspector_tags import decimal, setting_words
from inspector.runs.training.training_charts import charts_of, value_at
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.store.models import Run, StoredFinding
from rollouts.store.runs.muted import mute
from rollouts.store.runs.runs import create_run, take_figures
from rollouts.store.runs.training_steps import over_training, take_training_steps
from tests.people import make_member
from tests.samples.training_steps import of_versions, save, world
from tests.storage.build import chain

pytestmark = pytest.mark.django_db


@pytest.fixture
def run() -> Run:
    made = create_run(Run.Kind.IMPORT, "r")
    save(made, world())
    take_training_steps(made)
    return made


def test_page_and_twin_tell_the_stored_figures(web: Client, run: Run, django_assert_max_num_queries: Any) -> None:
    with django_assert_max_num_queries(14):
        body = web.get(f"/runs/{run.code}/training").content.decode()
    steps, first_steps = over_training(run)
    said = web.get(f"/runs/{run.code}/training.json").json()
    assert said["began"] == first_steps and [line["training_step"] for line in said["steps"]] == [0, 1, 2, 3]
    assert said["without"] == 1 and said["steps"][2]["findings"] == steps[2].findings
    kind = next(kind for kind, step in first_steps.items() if step == 2)
    assert f"?finding={kind}&amp;training_min=2&amp;training_max=2" in body
    assert "4 training steps" in body and "1 trajectory of this run is in no chart" in body
    for field in ("broken/trajectories", "truncated/trajectories", "gap.p99", "same_reward/groups"):
        assert field in body
    assert said["muted"] == [] and "(muted)" not in body
    mute(run, kind, "run", "known", make_member("ben"))
    assert web.get(f"/runs/{run.code}/training.json").json()["muted"] == [kind]
    assert "(muted)" in web.get(f"/runs/{run.code}/training").content.decode()


def test_a_kind_has_the_severity_of_its_findings_here(web: Client, run: Run) -> None:
    kind = next(kind for kind, step in over_training(run)[1].items() if step == 2)
    StoredFinding.objects.filter(run=run, kind=kind).update(severity="info")
    body = web.get(f"/runs/{run.code}/training").content.decode()
    (line,) = (one for one in body.split("<li>") if f"?finding={kind}&amp;" in one)
    assert "glyph-info" in line and "info:" in line


def test_a_link_leads_to_the_trajectories_that_it_counts(web: Client, run: Run) -> None:
    body = web.get(f"/runs/{run.code}/training").content.decode()
    for address, n in re.findall(r'href="(/runs/[^"]+training_max=\d+)">training step \d+</a>,\s+in (\d+) traj', body):
        found = web.get(address.replace("&amp;", "&").replace("?", ".json?"))
        assert len(found.json()["trajectories"]) == int(n)


def test_a_part_of_the_steps(web: Client, run: Run) -> None:
    said = web.get(f"/runs/{run.code}/training.json?training_min=1&training_max=2").json()
    assert [line["training_step"] for line in said["steps"]] == [1, 2] and said["began"] == over_training(run)[1]
    for query in ("training_min=9", "training_min=x", "training_min=-1&training_max=99999999999"):
        assert web.get(f"/runs/{run.code}/training?{query}").status_code == 200
    assert "in this range" in web.get(f"/runs/{run.code}/training?training_min=9").content.decode()
    assert "“x” is no training step" in web.get(f"/runs/{run.code}/training?training_min=x").content.decode()


def test_each_chart_has_its_numbers_beside_it(web: Client, run: Run) -> None:
    body = web.get(f"/runs/{run.code}/training").content.decode()
    charts = {chart.id: chart for chart in charts_of(over_training(run)[0])}
    assert {"kinds", "gap", "largest", "tails", "groups"} <= set(charts)
    for name, chart in charts.items():
        beside = body.split(f'id="plot-{name}"')[1].split("</section>")[0]
        cells = re.findall(r'<t[hd][^>]*class="right">([^<]*)</t[hd]>', beside)
        expected = ["Step", *(label[0].upper() + label[1:] for label, _ in chart.series)]
        for line in over_training(run)[0]:
            expected += [str(line.training_step), *(decimal(value_at(line, path)) for _, path in chart.series)]
        assert cells == expected


def test_steps_that_are_missing_or_out_of_order_are_named(web: Client) -> None:
    run = create_run(Run.Kind.IMPORT, "odd")
    save(run, [chain(f"{n}", seed=n, training_step=step) for n, step in enumerate((3, 3, 1, 2, 9))])
    take_training_steps(run)
    notices = web.get(f"/runs/{run.code}/training.json").json()["notices"]
    assert [one.split(".")[0] for one in notices] == [
        "No trajectory has training step 4 to 8",
        "The steps did not come in order: step 3 was stored before step 2",
    ]
    assert notices[0] in web.get(f"/runs/{run.code}/training").content.decode()


def test_what_is_not_known_is_not_shown_as_none(web: Client) -> None:
    rows_alone = create_run(Run.Kind.IMPORT, "rows")
    save(rows_alone, [Trajectory("a", rows=world(1)[0].rows, training_step=1)])
    take_training_steps(rows_alone)
    line = web.get(f"/runs/{rows_alone.code}/training.json").json()["steps"][0]
    assert (line["truncated"], line["repaid"], line["lost"], line["rows_per_call"]) == (None, None, None, None)
    assert "cut by length" not in web.get(f"/runs/{rows_alone.code}/training").content.decode()


def test_a_run_without_steps_says_where_they_come_from(web: Client) -> None:
    bare = create_run(Run.Kind.IMPORT, "bare")
    save(bare, [chain("a")])
    take_training_steps(bare)
    body = web.get(f"/runs/{bare.code}/training").content.decode()
    assert "nothing can be said over training" in body and "data-plots" not in body


def test_the_same_by_policy_version(web: Client, django_assert_max_num_queries: Any) -> None:
    run = create_run(Run.Kind.IMPORT, "versions")
    save(run, of_versions(world(), lambda one: f"v{10 - one.training_step}" if one.training_step is not None else ""))
    take_figures(run)
    said = web.get(f"/runs/{run.code}/training.json?by=version").json()
    assert said["by"] == "version" and said["steps"] == [] and said["without"] == 1
    assert [one["version"] for one in said["versions"]] == ["v7", "v8", "v9", "v10"]
    by_step = {line.training_step: line for line in over_training(run)[0]}
    for line in said["versions"]:
        step = 10 - int(line["version"][1:])
        assert (line["first_training_step"], line["last_training_step"]) == (step, step)
        assert {name: line[name] for name in vars(by_step[step]) if name != "training_step"} == {
            name: value for name, value in vars(by_step[step]).items() if name != "training_step"
        }
    with django_assert_max_num_queries(13):
        body = web.get(f"/runs/{run.code}/training?by=version").content.decode()
    assert "4 policy versions" in body
    links = re.findall(r'href="(/runs/[^"]+)">policy version (v\d+)</a>,\s+in (\d+) traj', body)
    assert links
    for address, version, n in links:
        listed = web.get(address.replace("&amp;", "&").replace("?", ".json?")).json()["trajectories"]
        assert f"policy={version}" in address and len(listed) == int(n)
    assert "?by=version" in web.get(f"/runs/{run.code}/training").content.decode()


def test_a_run_without_versions_says_where_they_come_from(web: Client, run: Run) -> None:
    assert "No figures by policy version" in web.get(f"/runs/{run.code}/training?by=version").content.decode()
    assert "?by=version" not in web.get(f"/runs/{run.code}/training").content.decode()


def test_the_pages_of_a_run_lead_to_each_other(web: Client, run: Run) -> None:
    here = f"/runs/{run.code}"
    pages = [here, *(f"{here}/{name}" for name in ("training", "gap", "columns", "cost", "alarms"))]
    for page in pages:
        nav = re.findall(r'<nav class="tabs".*?</nav>', web.get(page).content.decode(), re.DOTALL)
        assert len(nav) == 1 and re.findall(r'href="([^"]*)"', nav[0]) == pages
        (current,) = re.findall(r'href="([^"]*)"[^>]*aria-current="page"', nav[0])
        assert current == page


def test_the_value_of_a_setting_is_a_word() -> None:
    values = (None, True, False, 0, 0.0, 1.5, "", [], {}, ["a", "b"], "text")
    words = ["not recorded", "yes", "no", "0", "0.0", "1.5", "none", "none", "none", "a, b", "text"]
    assert [setting_words(value) for value in values] == words
