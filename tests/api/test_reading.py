"""What the API returns: values as stored, parts of lists, token columns in both forms, 304 and sentences."""

import io
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from django.core.management import call_command

from rollout_inspector.streams.trajectory import Origin
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job, Run
from rollouts.store.trajectories.rows import row_window
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.api.conftest import Ask
from tests.web.trajectory_samples import Maker, own_row

ARROW = "application/vnd.apache.arrow.stream"


def test_runs_are_listed_part_by_part(make: Maker, run: Run, ask: Ask) -> None:
    others = [make.run([make.conversation("one")]) for _ in range(3)]
    seen, cursor = [], ""
    while cursor is not None:
        answer = ask(f"/runs?limit=2&cursor={cursor}")
        assert answer.status_code == 200 and len(answer.json()["items"]) <= 2
        seen += [one["code"] for one in answer.json()["items"]]
        cursor = answer.json()["next"]
    assert seen == [one.code for one in (*others[::-1], run)]
    assert [one["code"] for one in ask(f"/runs?text={run.code}").json()["items"]] == [run.code]
    assert ask("/runs?kind=launch").json() == {"items": [], "next": None}


def test_a_run_and_its_summary(run: Run, ask: Ask) -> None:
    whole = ask(f"/runs/{run.code}").json()
    assert (whole["code"], whole["trajectories"], whole["project"]) == (run.code, 2, "default")
    assert ask(f"/runs/{run.code}/summary").json()["finding_counts"] == {"unclassified": 1}


def test_the_gap_is_the_stored_report_or_says_why_there_is_none(run: Run, ask: Ask) -> None:
    none = ask(f"/runs/{run.code}/gap").json()
    assert none["report"] is None and none["why_not"].startswith("No row of this run") and none["job"] is None
    job, _ = ask_job(run, "gap", {}, None)
    report = {"tokens": 7, "causes": [], "key": "of another state"}
    Job.objects.filter(pk=job.pk).update(status=Job.Status.DONE, report=report)
    held = ask(f"/runs/{run.code}/gap").json()
    assert held["report"] == {"tokens": 7, "causes": []} and held["stale"] and not held["why_not"]


def test_runs_are_compared_in_the_order_that_was_asked_for(make: Maker, run: Run, ask: Ask) -> None:
    other = make.run([make.conversation("whole")])
    said = ask(f"/compare?run={other.code}&run={run.code}").json()
    assert [one["run"]["code"] for one in said["runs"]] == [other.code, run.code]
    (kind,) = said["kinds"]
    assert (kind["kind"], [one["trajectories"] for one in kind["counts"]]) == ("unclassified", [0, 1])
    assert [one["external_id"] for one in said["questions"]] == ["whole"]
    alone = ask(f"/compare?run={run.code}")
    assert alone.status_code == 422 and "run" in alone.json()["errors"]
    assert ask(f"/compare?run={run.code}&run=zzzzzzzzzzzz").status_code == 404
    assert ask(f"/compare?run={run.code}&run={other.code}", "foreign").status_code == 404


def test_trajectories_take_the_filters_and_orders_of_the_page(run: Run, ask: Ask) -> None:
    def names(query: str) -> list[str]:
        return [one["external_id"] for one in ask(f"/runs/{run.code}/trajectories?{query}").json()["items"]]

    assert names("") == ["whole", "broken"] and names("sort=-index") == ["broken", "whole"]
    assert names("finding=unclassified") == names("flawed=true") == names("max=0.5") == ["broken"]
    assert names("from=0&to=0") == ["whole"]
    first = ask(f"/runs/{run.code}/trajectories?sort=-reward&limit=1").json()
    assert names(f"sort=-reward&cursor={first['next']}") == ["broken"]
    wrong = ask(f"/runs/{run.code}/trajectories?sort=reward&cursor={first['next']}")
    assert wrong.status_code == 422 and "cursor" in wrong.json()["errors"]


def test_steps_with_what_was_recorded(run: Run, ask: Ask) -> None:
    trajectory = run.trajectories.get(external_id="broken")
    here = f"/trajectories/{trajectory.code}"
    first = ask(f"{here}/steps?limit=1").json()
    second = ask(f"{here}/steps?limit=1&cursor={first['next']}").json()
    assert [first["items"][0]["index"], second["items"][0]["index"], second["next"]] == [0, 1, None]
    assert second["items"][0]["breaks"] is True and second["items"][0]["parent"] == 0
    step = ask(f"{here}/steps/0").json()
    assert step["recorded"]["messages"][0]["role"] == "user" and step["step"] == first["items"][0]
    assert ask(f"{here}/steps/2").status_code == 404


def test_token_columns_of_a_row_are_the_stored_ones(run: Run, ask: Ask) -> None:
    trajectory = run.trajectories.get(external_id="whole")
    (row,) = ask(f"/trajectories/{trajectory.code}/rows").json()["items"]
    window = row_window(trajectory, 0, 5, 40)
    found = ask(f"/trajectories/{trajectory.code}/rows/0/tokens?start=5&stop=40").json()
    assert (found["start"], found["stop"], found["n_tokens"], found["next"]) == (5, 40, row["n_tokens"], 40)
    assert found["ids"] == window.ids.tolist() and found["loss_mask"] == window.loss_mask.tolist()
    assert window.logprobs is not None
    np.testing.assert_array_equal(np.array(found["logprobs"], np.float32), window.logprobs)
    assert found["step"] == window.step_index.tolist()
    some = ask(f"/trajectories/{trajectory.code}/rows/0/tokens?columns=ids&stop=3").json()
    assert len(some["ids"]) == 3 and some["logprobs"] is None
    unknown = ask(f"/trajectories/{trajectory.code}/rows/0/tokens?columns=ids,entropy")
    assert unknown.status_code == 422 and "Known: ids" in unknown.json()["detail"]


def test_an_arrow_stream_holds_the_same_columns(make: Maker, ask: Ask) -> None:
    values = np.linspace(0, 1, 30, dtype=np.float32)  # shorter than the row
    run = make.run([own_row(40, advantages=values)])
    here = f"/trajectories/{run.trajectories.get().code}/rows/0/tokens"
    plain, answer = ask(here).json(), ask(here, accept=ARROW)
    assert answer["Content-Type"] == ARROW
    table = pa.ipc.open_stream(io.BytesIO(answer.content)).read_all()
    assert table.column_names == ["ids", "loss_mask", "logprobs", "step", "column.advantages"]
    assert table["ids"].type == pa.int32() and table["ids"].to_pylist() == plain["ids"]
    assert table["loss_mask"].to_pylist() == plain["loss_mask"]
    assert table["column.advantages"].to_pylist() == plain["columns"]["advantages"] == [*values.tolist(), *[None] * 10]
    assert table.schema.metadata[b"n_tokens"] == b"40"


def test_what_an_engine_told_is_a_column(make: Maker, ask: Ask) -> None:
    value = make.conversation("a", 1)
    (step,) = value.steps
    assert step.logprobs is not None
    told = replace(step, alternative_ids=step.completion_ids, alternative_logprobs=step.logprobs / 2)
    run = make.run([replace(value, steps=(told,))])
    here = f"/trajectories/{run.trajectories.get().code}/rows"
    (row,) = ask(here).json()["items"]
    assert row["columns"] == ["entropy_at_least", "behind_likeliest"]
    found = ask(f"{here}/0/tokens?columns=behind_likeliest").json()
    n = len(step.prompt_ids)
    (behind,) = found["columns"].values()
    assert behind[:n] == [None] * n and found["ids"] is None
    np.testing.assert_allclose(behind[n:], -step.logprobs / 2, rtol=1e-5)
    table = pa.ipc.open_stream(io.BytesIO(ask(f"{here}/0/tokens?start={n}", accept=ARROW).content)).read_all()
    assert table["column.behind_likeliest"].to_pylist() == behind[n:]


def test_the_stream_of_a_step(run: Run, ask: Ask) -> None:
    trajectory = run.trajectories.get(external_id="whole")
    step = load_trajectory(trajectory).steps[1]
    here = f"/trajectories/{trajectory.code}/steps/1/tokens"
    found = ask(here).json()
    assert found["ids"] == step.stream.tolist()
    assert found["loss_mask"] == [False] * len(step.prompt_ids) + [True] * len(step.completion_ids)
    assert found["logprobs"][: len(step.prompt_ids)] == [None] * len(step.prompt_ids)
    table = pa.ipc.open_stream(io.BytesIO(ask(here, accept=ARROW).content)).read_all()
    assert table["origin"].to_pylist()[-1] == Origin.SAMPLED.slug and table["ids"].to_pylist() == found["ids"]


def test_findings_of_a_trajectory_and_of_a_run(run: Run, ask: Ask) -> None:
    trajectory = run.trajectories.get(external_id="broken")
    (listed,) = ask(f"/trajectories/{trajectory.code}/findings").json()["items"]
    assert (listed["number"], listed["kind"], listed["step"]) == (1, "unclassified", 1)
    one = ask(f"/trajectories/{trajectory.code}/findings/1").json()
    assert {name: listed["cost"][name] for name in ("trained_tokens_lost", "trained_tokens_wrong")} == {
        name: listed[name] for name in ("trained_tokens_lost", "trained_tokens_wrong")
    }
    told = io.StringIO()
    call_command("findings", trajectory.code, "--json", stdout=told)
    assert json.loads(told.getvalue())[0]["cost"] == listed["cost"]
    assert one["finding"] == listed and len(one["expected_ids"]) == len(one["actual_ids"]) == 2
    (of_run,) = ask(f"/runs/{run.code}/findings?kind=unclassified").json()["items"]
    assert of_run == listed
    assert ask(f"/runs/{run.code}/findings?severity=info").json()["items"] == []


def test_a_search_finds_places_part_by_part(run: Run, ask: Ask) -> None:
    trajectory = run.trajectories.get(external_id="broken")
    ids = ask(f"/trajectories/{trajectory.code}/rows/0/tokens?columns=ids").json()["ids"]
    asked = f"/search?by=ids&q={ids[0]}+*+{ids[2]}&run={run.code}&limit=1"
    part = ask(asked).json()
    assert (part["runs"], part["trajectories"], len(part["results"])) == ([], [], 1)
    found, cursor = part["results"], part["next_results"]
    while cursor:
        part = ask(f"{asked}&cursor={cursor}").json()
        found, cursor = found + part["results"], part["next_results"]
    places = [(one["trajectory"], one["row"], one["start"], one["stop"]) for one in found]
    assert (trajectory.code, 0, 0, 3) in places and len(places) == len(set(places))
    assert "character 1" in ask("/search?by=regex&q=*").json()["errors"]["q"][0]
    assert ask("/search?by=ids&q=1&run=zzzzzzzzzzzz").status_code == 404
    for asked in ("/search", "/search?text=a&by=ids&q=1", "/search?by=ids&q=1&cursor=AAAA"):
        assert ask(asked).status_code == 422


def test_a_search_finds_runs_and_trajectories(run: Run, ask: Ask) -> None:
    found = ask("/search?text=brok").json()
    assert [one["external_id"] for one in found["trajectories"]] == ["broken"] and found["runs"] == []
    assert [one["code"] for one in ask(f"/search?text={run.code}").json()["runs"]] == [run.code]
    part = ask("/search?text=e&kind=trajectories&limit=1").json()
    more = ask(f"/search?text=e&kind=trajectories&limit=1&cursor={part['next_trajectories']}").json()
    assert {part["trajectories"][0]["external_id"], more["trajectories"][0]["external_id"]} == {"whole", "broken"}


@pytest.mark.parametrize("path", ["", "/steps", "/steps/0", "/steps/0/tokens", "/rows", "/rows/0/tokens", "/findings"])
def test_what_has_ended_is_answered_304(run: Run, ask: Ask, path: str, django_assert_num_queries: Any) -> None:
    trajectory = run.trajectories.get(external_id="broken")
    first = ask(f"/trajectories/{trajectory.code}{path}")
    assert first.status_code == 200 and first["Cache-Control"] == "private, no-cache"
    with django_assert_num_queries(4 if path.startswith(("/steps/", "/findings")) else 3):
        again = ask(f"/trajectories/{trajectory.code}{path}", **{"if-none-match": first["ETag"]})
    assert again.status_code == 304 and again.content == b""
    trajectory.worst_severity = "info"
    trajectory.save()
    assert ask(f"/trajectories/{trajectory.code}{path}", **{"if-none-match": first["ETag"]}).status_code == 200


def test_queries_and_bytes_do_not_grow_with_the_tokens(make: Maker, ask: Ask, django_assert_num_queries: Any) -> None:
    run = make.run([make.conversation("long", turns=6, size=4000)])
    trajectory = run.trajectories.get()
    here = f"/trajectories/{trajectory.code}"
    known = {
        "/runs": 3, f"/runs/{run.code}": 3, f"/runs/{run.code}/trajectories": 7, here: 3, f"{here}/steps": 4,
        f"{here}/rows": 6, f"{here}/rows/0/tokens?start=100&stop=200": 6,
    }
    for path, queries in known.items():
        ask(path)
        with django_assert_num_queries(queries):
            answer = ask(path)
        assert answer.status_code == 200 and len(answer.content) < 6_000, path
    whole = ask(f"{here}/rows/0/tokens?columns=ids").json()
    assert len(whole["ids"]) == whole["n_tokens"] > 20_000
