"""A run with a teacher's column: its report beside the trainer's, the lens, the command and the columns."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client
from django.urls import reverse

from rollouts.jobs import gap_reports
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Job, Run
from rollouts.store.runs.logprob_columns import columns_of, newest_report
from rollouts.worker.jobs import do_job
from tests.samples import teacher_runs
from tests.samples.gap_runs import Made

pytestmark = pytest.mark.django_db


def slime(rows: list[Made]) -> str:
    """The rows as slime writes samples of on-policy distillation."""
    lines = []
    for n, made in enumerate(rows):
        start = int(made.mask.argmax())
        lines.append({
            "tokens": made.ids.tolist(), "response_length": len(made.ids) - start, "index": n,
            "group_index": made.group, "loss_mask": made.mask[start:].astype(int).tolist(), "status": "completed",
            "rollout_log_probs": made.sampler[start:].round(6).tolist(),
            "teacher_log_probs": made.trainer[start:].round(6).tolist(),
        })
    return "".join(json.dumps(line) + "\n" for line in lines)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    (tmp_path / "samples.jsonl").write_text(slime(teacher_runs.PLANTED["columns_shifted"](0)[:24]))
    call_command("import_rollouts", str(tmp_path), stdout=io.StringIO())
    return Run.objects.get()


def test_a_teacher_is_read_after_the_import_and_its_fault_is_on_the_page(run: Run, web: Client) -> None:
    assert [column.name for column in columns_of(run)] == ["sampler", "teacher_logprobs"]
    job = Job.objects.get(kind="gap")
    assert job.options == {"trainer": "teacher_logprobs", "teacher": True}
    do_job(job.pk)
    value: Any = web.get(f"/runs/{run.code}/gap.json").json()
    report = value["report"]
    assert [cause["cause"] for cause in report["causes"]] == ["columns_shifted"]
    assert report["teacher"]["carriers"] > 0 and report["teacher"]["noise_share"] is None and not value["has_other"]
    body = web.get(f"/runs/{run.code}/gap").content.decode()
    for words in ("Distance from the student to the teacher", "Column shifted", "Reverse KL", "Tokens that carry 80 %",
                  "<b>teacher_logprobs</b> for the teacher", "noise is not measured"):
        assert words in body, words
    report_of_page = body.split('id="weights"')[0]
    assert "Effective sample size" not in report_of_page and "trainer −" not in report_of_page
    assert f"/runs/{run.code}/gap" in web.get(f"/runs/{run.code}").content.decode()
    assert web.get(f"/runs/{run.code}.json").json()["gap_causes"] == []  # it says nothing of trainer and sampler


def test_both_reports_stand_beside_each_other(run: Run, web: Client) -> None:
    do_job(Job.objects.get(kind="gap").pk)
    assert newest_report(run) is None
    ask_job(run, "gap", gap_reports.gap_options("sampler", "teacher_logprobs") | {"teacher": True})
    do_job(Job.objects.latest("pk").pk)
    (of_teacher,) = Job.objects.filter(kind="gap")  # of a kind the newest alone is kept
    other, _ = ask_job(run, "gap", {"sampler": "sampler", "trainer": "sampler"})
    do_job(other.pk)
    assert set(Job.objects.filter(kind="gap")) == {of_teacher, other}
    url = f"/runs/{run.code}/gap"
    teacher, trainer = (web.get(url, {"teacher": asked}).content.decode() for asked in (1, 0))
    assert "Distance from the student" in teacher and 'href="?teacher=0"' in teacher
    assert "Gap between trainer and sampler" in trainer and 'href="?teacher=1"' in trainer
    assert web.get(f"/api/v1{url}", {"teacher": True}).json()["report"]["teacher"]
    assert web.get(f"/api/v1{url}").json()["report"]["teacher"] is None


def test_the_command_and_the_form_take_any_column_as_a_teacher(run: Run, web: Client) -> None:
    def printed(*arguments: str) -> str:
        out = io.StringIO()
        call_command("gap", run.code, *arguments, stdout=out)
        return out.getvalue()

    text = printed("--teacher", "teacher_logprobs")
    assert "Column shifted" in text and "carry 80 % of the loss" in text and "Not decided, noise above" in text
    assert "columns_shifted" in printed("--trainer", "teacher_logprobs", "--json")  # its name says what it is
    with pytest.raises(CommandError, match="Name one of"):
        printed("--teacher", "teacher_logprobs", "--trainer", "teacher_logprobs")
    Job.objects.all().delete()
    columns = {"sampler": "sampler", "trainer": "teacher_logprobs"}
    answer = web.post(reverse("run-gap-read", args=[run.code]), columns | {"teacher": "1"})
    assert answer.status_code == 302 and answer["location"].endswith("/gap?teacher=1")
    assert Job.objects.get().options == columns | {"teacher": True}
    compared = web.get(f"/runs/{run.code}/columns", columns)
    assert "The second is a teacher" in compared.content.decode()


def test_a_lens_shows_the_reverse_kl_of_each_token(run: Run, web: Client) -> None:
    code = run.trajectories.get(index=0).code
    value = web.get(f"/trajectories/{code}.json").json()
    assert value["lenses"][3] == "reverse_kl:teacher_logprobs"
    body = web.get(f"/trajectories/{code}", {"view": "tokens", "lens": "reverse_kl:teacher_logprobs"}).content.decode()
    assert "reverse KL to the teacher in nats" in body
