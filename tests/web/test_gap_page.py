"""The gap of a run: the command, the job, the page and its twin."""

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from rollouts.jobs import gap_reports
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job, Run, StoredTrajectory
from rollouts.store.runs.logprob_columns import begin_column, end_column, keep_scores, load_compared
from rollouts.store.runs.muted import mute
from rollouts.store.runs.runs import create_run
from rollouts.worker.jobs import do_job
from tests.people import make_member
from tests.samples import gap_runs
from tests.samples.training_steps import save, world

pytestmark = pytest.mark.django_db


def printed(*arguments: str) -> str:
    out = io.StringIO()
    call_command("gap", *arguments, stdout=out)
    return out.getvalue()


def test_the_command_names_the_cause_of_imported_files(tmp_path: Path, web: Client) -> None:
    rows = gap_runs.ToyRun(0, steps=6, groups=1).rows(lambda step: 0)
    gap_runs.write_steps(tmp_path, rows)
    call_command("import_rollouts", str(tmp_path), stdout=io.StringIO())
    run = Run.objects.get()
    found = json.loads(printed(run.code, "--json"))
    assert found["tokens"] == sum(int(made.mask.sum()) for made in rows) and 0 < found["k3"] < found["mean_abs"]
    (cause,) = found["causes"]
    assert (cause["cause"], cause["from_step"]) == ("weights_not_delivered", 1) and "grows with the step" in cause[
        "evidence"
    ]
    worst = found["worst"][0]
    assert {"trajectory", "row", "offset", "sampler", "trainer"} <= worst.keys() and len(found["worst"]) == 50
    place = f"?row={worst['row']}&view=tokens&t={worst['offset']}-{worst['offset'] + 1}"
    assert web.get(f"/trajectories/{worst['trajectory']}{place}").status_code == 200
    assert "Weights not delivered, since training step 1: " in printed(run.code)


def test_the_causes_of_an_import_are_named_without_a_press(tmp_path: Path, web: Client) -> None:
    gap_runs.write_steps(tmp_path, gap_runs.ToyRun(0, steps=6, groups=1).rows(lambda step: 0))
    call_command("import_rollouts", str(tmp_path), stdout=io.StringIO())
    run, job = Run.objects.get(), Job.objects.get(kind="gap")
    assert web.get(f"/runs/{run.code}.json").json()["gap_causes"] == []
    do_job(job.pk)
    named = {
        "cause": "weights_not_delivered", "title": "Weights not delivered", "from_step": 1,
        "url": f"/runs/{run.code}?training_min=1",
    }
    assert web.get("/runs.json").json()["runs"][0]["gap_causes"] == [named]
    assert "gap: weights not delivered" in web.get("/").content.decode()
    for page in ("", "/training"):
        assert web.get(f"/runs/{run.code}{page}.json").json()["gap_causes"] == [named]
        body = web.get(f"/runs/{run.code}{page}").content.decode()
        assert "Trainer and sampler disagree: weights not delivered" in body and named["url"] in body
    gap_reports.ask_for_gap(run)  # nothing has changed
    assert list(Job.objects.filter(kind="gap")) == [job]


def test_a_run_that_grows_is_read_again_by_and_by(run: Run) -> None:
    def n_waiting() -> int:
        return Job.objects.filter(kind="gap", status=Job.Status.QUEUED).count()

    gap_reports.ask_for_gap(run, grows=True)
    do_job(Job.objects.get().pk)
    run.refresh_from_db()
    read = run.n_finished
    for n_finished, n_asked in ((read + 1, 0), (int(1.5 * read) + 1, 1)):
        Run.objects.update(n_finished=n_finished)
        run.refresh_from_db()
        gap_reports.ask_for_gap(run, grows=True)
        assert n_waiting() == n_asked
    do_job(Job.objects.latest("pk").pk)
    Run.objects.update(n_finished=n_finished + 1)
    run.refresh_from_db()
    gap_reports.ask_for_gap(run)  # no more is pushed
    assert n_waiting() == 1


def test_a_push_asks_the_end_of_the_run_alone_for_a_gap(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap_reports, "RECENT", 1)
    last = run.trajectories.order_by("-index").first()
    assert last is not None and run.trajectories.exclude(gap=None).count() > 1
    gap, last.gap = last.gap, None
    last.save()
    gap_reports.ask_for_gap(run, grows=True)
    assert not Job.objects.exists()
    last.gap = gap or {"n": 1}
    last.save()
    gap_reports.ask_for_gap(run, grows=True)
    assert Job.objects.get().kind == "gap"


def test_two_columns_that_somebody_compared_are_left_alone(run: Run, web: Client) -> None:
    job, _ = ask_job(run, "gap", {"sampler": "trainer_logprobs", "trainer": "sampler"})
    do_job(job.pk)
    Run.objects.update(n_tokens=1)
    run.refresh_from_db()
    gap_reports.ask_for_gap(run)
    assert Job.objects.get() == job and web.get(f"/runs/{run.code}.json").json()["gap_causes"] == []


def test_the_parts_of_a_replay_are_bars_and_the_page_says_whose_limits_hold(run: Run, web: Client) -> None:
    ask_and_do(run)
    body = web.get(f"/runs/{run.code}/gap").content.decode()
    assert "Parts of the gap by token class" not in body and "limits of the docs" in body
    records = list(run.trajectories.order_by("index"))
    replay_by(run, records, "vllm", 0.25)
    assert "has changed since these figures were made" in web.get(f"/runs/{run.code}/gap").content.decode()
    ask_and_do(run)
    body = web.get(f"/runs/{run.code}/gap").content.decode()
    assert "Parts of the gap by token class" in body and 'class="part2"' in body and "decode against prefill" in body
    lines = web.get(f"/runs/{run.code}/gap.json").json()["report"]["parts"]["parts of the gap, all tokens"]
    means = {line["name"]: line["mean"] for line in lines}
    assert means["rest"] == 0 and means["decode against prefill"] == pytest.approx(-0.25)
    whole = web.get(f"/runs/{run.code}/gap.json").json()["report"]
    assert sum(means.values()) == pytest.approx(-whole["k1"], abs=1e-6)
    worst = max((record for record in records if record.gap), key=lambda record: record.gap["abs"])
    parts_sum_up_at_each_token(f"/trajectories/{worst.code}", web)
    replay_by(run, records, "sglang", 0.75)
    parts_sum_up_at_each_token(f"/trajectories/{worst.code}", web, "engine against engine")


def replay_by(run: Run, records: list[StoredTrajectory], name: str, lower: float) -> None:
    """An engine that decodes what was sampled, and reads it at once so many nats lower."""
    for engine, nats in ((name, lower), (f"{name} decode", 0.0)):
        column = begin_column(run, "m", engine, "1", "w")
        keep_scores(column, [
            (record.pk, value.rows, [row.logprobs - np.float32(nats) for row in value.rows])  # type: ignore[operator]
            for record, value in zip(records, load_compared(records), strict=True)
            if all(row.logprobs is not None for row in value.rows)
        ])
        end_column(column)


def parts_sum_up_at_each_token(address: str, web: Client, *more: str) -> None:
    """Each part is a lens of the tokens, and they add up to the difference that the lens *mismatch* shows."""

    def shown(lens: str) -> list[float | None]:
        twin = web.get(f"{address}.json", {"lens": lens}).json()
        return [token["columns"].get(lens) for token in twin["window"]["tokens"]]

    lenses = [lens for lens in web.get(f"{address}.json").json()["lenses"] if lens.startswith("part:")]
    assert lenses == [f"part:{name}" for name in ("rest", "kept set", "decode against prefill", *more, "trainer")]
    parts, differences = [shown(lens) for lens in lenses], shown("mismatch")
    assert any(differences)
    for n, difference in enumerate(differences):
        values = [part[n] for part in parts if part[n] is not None]
        assert sum(values) == pytest.approx(difference, abs=1e-6) if difference is not None else not values
    body = web.get(address, {"lens": "part:trainer"}).content.decode()
    assert "part of the gap: trainer" in body and "the same thresholds in every row" in body


def ask_and_do(run: Run) -> None:
    job, _ = ask_job(run, "gap")
    do_job(job.pk)


def test_verdict_causes_and_figures_come_first_and_detail_is_folded(run: Run, web: Client) -> None:
    ask_and_do(run)
    body = web.get(f"/runs/{run.code}/gap").content.decode()
    causes = web.get(f"/runs/{run.code}/gap.json").json()["report"]["causes"]
    assert f"{len(causes)} named cause" in body.partition('class="tab-head"')[2].partition("</p>")[0]
    page = body.partition('<div id="gap"')[2].partition('<section id="weights"')[0]
    places = [page.index(part) for part in ("causes-title", "figures-title", "The gap by part", "worst-title")]
    assert places == sorted(places)
    is_open = re.sub("<details.*?</details>", "", page, flags=re.DOTALL)
    assert is_open.count("&amp;view=tokens") == len(causes) + 5 and is_open.count("<table") == 1
    assert page.count("&amp;view=tokens") == len(causes) + 50 and page.count("<table") > 4  # without a script as well


def test_files_that_agree_name_no_cause(tmp_path: Path) -> None:
    gap_runs.write_steps(tmp_path, gap_runs.ToyRun(1, steps=4, groups=1).rows())
    call_command("import_rollouts", str(tmp_path), stdout=io.StringIO())
    run = Run.objects.get()
    assert json.loads(printed(run.code, "--json"))["causes"] == []
    assert "No cause is named: sampler and trainer agree to rounding." in printed(run.code)


def test_a_run_without_a_side_says_which_column_is_missing(web: Client) -> None:
    run = create_run(Run.Kind.IMPORT, "r", status=Run.Status.DONE)
    save(run, [one for one in world() if one.training_step is None])
    found = json.loads(printed(run.code, "--json"))
    assert [found[name] for name in ("tokens", "mean_abs", "k3", "causes", "worst")] == [0, None, None, [], []]
    assert "such as prev_logprobs" in printed(run.code)
    assert "such as prev_logprobs" in web.get(f"/runs/{run.code}/gap").content.decode()
    said = web.post(f"/runs/{run.code}/gap/read.json")
    assert said.status_code == 422 and "such as prev_logprobs" in said.json()["error"] and not Job.objects.exists()
    with pytest.raises(CommandError, match="There is no run with the code 'none'"):
        printed("none")


def test_columns_of_another_length_are_not_compared_and_the_report_says_how_many() -> None:
    run = create_run(Run.Kind.IMPORT, "r", status=Run.Status.DONE)
    made = [value for value, _ in gap_runs.trajectories(gap_runs.ToyRun(0, steps=1, groups=1).rows())]
    assert len(made) == 4
    for n in (0, 1):
        (row,) = made[n].rows
        made[n] = replace(
            made[n], rows=(replace(row, columns={"trainer_logprobs": row.ids[n:].astype(np.float32)[:-1]}),)
        )
    (row,) = made[2].rows
    made[2] = replace(made[2], rows=(row, replace(row, logprobs=row.ids[:-1].astype(np.float32))))
    save(run, made)
    said = printed(run.code)
    assert "2 trajectories have no row with log-probabilities of both sides, each as long as its ids" in said
    assert "1 row lacks a side or holds it in another length, and is not compared." in said
    assert json.loads(printed(run.code, "--json"))["rows"] == 2


@pytest.fixture
def run() -> Run:
    made = create_run(Run.Kind.IMPORT, "r", status=Run.Status.DONE)
    save(made, world())
    return made


def test_a_worker_reads_the_gap_and_the_page_shows_it(
    web: Client, run: Run, django_assert_max_num_queries: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = f"/runs/{run.code}/gap"
    assert "Name the causes of the gap" in web.get(page).content.decode()
    assert page in web.get(f"/runs/{run.code}").content.decode()
    monkeypatch.setattr("inspector.runs.jobs.ask_for_job.send_job", lambda job: "")
    job = web.post(f"{page}/read.json").json()["job"]
    assert web.post(f"{page}/read.json").json()["job"]["code"] == job["code"]  # one at a time
    live = web.get(page).content.decode()
    assert 'hx-trigger="every 1s"' in live and "It waits for a worker." in live and "Name the causes" not in live
    do_job(Job.objects.get().pk)
    with django_assert_max_num_queries(13):
        body = web.get(page).content.decode()
    said = web.get(f"{page}.json").json()
    assert said["report"]["tokens"] == 64 and not said["live"] and not said["stale"] and "key" not in said["report"]
    assert said["report"]["worst"] == json.loads(printed(run.code, "--json"))["worst"]
    assert "64 trained tokens compared" in body and 'hx-trigger="every' not in body
    assert all(cause["evidence"].replace("'", "&#x27;") in body for cause in said["report"]["causes"])
    worst = said["report"]["worst"][0]
    assert f"/trajectories/{worst['trajectory']}?row={worst['row']}&amp;view=tokens" in body
    places = body.count("&amp;view=tokens&amp;t=") - len(said["report"]["causes"])
    assert places == len(said["report"]["worst"]) == 50 and "Importance ratio, mean" in body
    assert "16 trajectories read" in web.get(f"/runs/{run.code}").content.decode()


def test_a_report_of_an_older_state_is_stale_and_the_next_takes_its_place(web: Client, run: Run) -> None:
    for _ in range(2):
        job, _ = ask_job(run, "gap")
        do_job(job.pk)
    assert Job.objects.get().pk == job.pk
    mute(run, "boundary_merge", "run", "known", make_member("ben"))
    assert not web.get(f"/runs/{run.code}/gap.json").json()["stale"]
    Run.objects.update(n_tokens=1)
    assert "has changed since these figures were made" in web.get(f"/runs/{run.code}/gap").content.decode()


def test_a_run_that_is_too_large_is_read_in_part_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = gap_reports.read_gap(run)
    monkeypatch.setattr(gap_reports, "MAX_TOKENS", whole["tokens"] // 2)
    half = gap_reports.read_gap(run)
    assert (whole["every"], half["every"]) == (1, 2) and half["tokens"] == whole["tokens"] // 2
    assert "one trajectory of 2 was read" in " ".join(half["notes"])


def test_it_can_be_cancelled(web: Client, run: Run) -> None:
    job, _ = ask_job(run, "gap")
    answer = web.post(f"/runs/{run.code}/jobs/{job.code}/cancel")
    assert answer.headers["Location"] == f"/runs/{run.code}/gap"
    do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "cancelled" and "Name the causes" in web.get(f"/runs/{run.code}/gap").content.decode()


def test_any_two_columns_are_held_against_each_other(web: Client, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = gap_reports.read_gap(run)
    monkeypatch.setattr("inspector.runs.jobs.ask_for_job.send_job", lambda job: "")
    two = {"sampler": "trainer_logprobs", "trainer": "sampler"}
    page = web.get(f"/runs/{run.code}/columns", two).content.decode()
    assert "Name the causes of this gap" in page and f'action="/runs/{run.code}/gap/read"' in page
    web.post(f"/runs/{run.code}/gap/read", two)
    do_job(Job.objects.get().pk)
    report = web.get(f"/runs/{run.code}/gap.json").json()["report"]
    assert report["compared"] == ["trainer_logprobs", "sampler"] and report["tokens"] == recorded["tokens"]
    assert report["k1"] == pytest.approx(-recorded["k1"])
    body = web.get(f"/runs/{run.code}/gap").content.decode()
    assert "<b>trainer_logprobs</b> stands for the sampler" in body and 'name="trainer" value="sampler"' in body
    named = ("--sampler", "trainer_logprobs", "--trainer", "sampler")
    assert json.loads(printed(run.code, *named, "--json"))["worst"] == report["worst"]
    said = web.post(f"/runs/{run.code}/gap/read.json", {"sampler": "sampler", "trainer": "scored:none"})
    assert said.status_code == 422 and "no column of log-probabilities named 'scored:none'" in said.json()["error"]
    with pytest.raises(CommandError, match="It has: sampler, trainer_logprobs"):
        printed(run.code, "--trainer", "other")
