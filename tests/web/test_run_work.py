"""The cost of a run, its export and its second diagnosis, and the script of a finding."""

import json
import threading
from datetime import timedelta
from typing import Any

import pytest
from django.test import Client
from django.utils import timezone

from inspector.runs.jobs import job_views
from rollout_inspector.diagnose import VERSION
from rollout_inspector.diagnose.finding import Axis, Cost, Finding as Value, Severity
from rollouts.jobs.exports.exports import WRITERS, drop_files, key_of
from rollouts.store import files
from rollouts.store.models import Job, Run, StoredFinding
from rollouts.store.runs.runs import start_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.worker.jobs import do_job
from tests.storage.build import chain
from tests.web.samples import finding, stored_run

pytestmark = pytest.mark.django_db


def costly(step: int) -> Value:
    return Value(
        Axis.STREAM, "history_rewritten", Severity.ERROR, step=step, start=1, stop=2, evidence="It was cut.",
        cost=Cost(trained_tokens_lost=5, rows=3, prompt_tokens_repaid=7, lost_in_one_row=3),
    )


def test_cost_adds_up_by_kind_step_and_place(web: Client) -> None:
    run = stored_run(4, findings=[[], [finding()], [finding(), costly(0)], [costly(1)]])
    body = web.get(f"/runs/{run.code}/cost.json").json()
    kinds = {kind["kind"]: kind for kind in body["kinds"]}
    assert kinds["history_rewritten"]["trained_tokens_lost"] == 10
    assert kinds["history_rewritten"]["prompt_tokens_repaid"] == 14
    assert kinds["history_rewritten"]["rows_more"] == 4
    assert kinds["history_rewritten"]["lost_percent"] == "62.5 %"  # of the 16 sampled
    assert kinds["history_rewritten"]["wrong_percent"] == ""
    assert kinds["history_rewritten"]["lost_in_one_row"] == 6
    assert body["totals"] == {"sampled": 16, "trained": 16, "lost": 0, "unknown": 0, "foreign": 0}
    held = StoredFinding.objects.filter(run=run, kind="history_rewritten").first()
    StoredFinding.objects.filter(pk=held.pk).update(trained_tokens_lost=None)
    (unsure,) = (one for one in web.get(f"/runs/{run.code}/cost.json").json()["kinds"] if one["lost_in_one_row"])
    assert unsure["trained_tokens_lost"] is None  # of one finding it is not known, so the sum is not known
    assert "tokens lost or wrong: not known" in web.get(f"/runs/{run.code}").content.decode()
    twice = stored_run(1, "twice", findings=[[costly(0), costly(1), finding(severity=Severity.INFO)]])
    (kind,) = (one for one in web.get(f"/runs/{twice.code}/cost.json").json()["kinds"] if one["findings"] == 2)
    assert kind["rows_more"] == 2  # three rows instead of one, said twice
    assert kinds["boundary_merge"]["share"] == 0.5
    said = "an earlier row has forwarded already"
    assert all(said in web.get(page).content.decode() for page in (f"/runs/{run.code}/cost", "/help"))
    assert body["by_step"] == [{"step": 0, "trajectories": 1}, {"step": 1, "trajectories": 3}]
    assert [part["trajectories"] for part in body["along"]] == [0, 1, 1, 1]


def test_a_bar_opens_as_many_trajectories_as_it_counts(web: Client) -> None:
    run = stored_run(45, findings=[[costly(i % 2)] if i % 3 == 0 else [] for i in range(45)])
    for query in ("", "?finding=history_rewritten"):
        page = web.get(f"/runs/{run.code}/cost{query}")
        for chart in page.context["charts"]:
            assert chart["bars"]
            for bar in chart["bars"]:
                address = bar.url.replace(run.code, f"{run.code}.json", 1)
                assert len(web.get(address).json()["trajectories"]) == bar.trajectories, bar


def test_cost_asks_the_same_for_four_as_for_forty(web: Client, django_assert_num_queries: Any) -> None:
    for n in (4, 40):
        run = stored_run(n)
        with django_assert_num_queries(16):  # session, user, run, roles, kinds, muted, rows, damage, steps, ...
            assert web.get(f"/runs/{run.code}/cost").status_code == 200


def test_a_run_without_findings_says_so(web: Client) -> None:
    run = stored_run(2, findings=[[], []])
    assert "Nothing was found in this run" in web.get(f"/runs/{run.code}/cost").content.decode()


def test_a_run_is_exported_whole_or_refused_with_the_reason(web: Client) -> None:
    run = stored_run(3)
    answer = web.get(f"/runs/{run.code}/export", {"format": "own_jsonl"})
    lines = b"".join(answer.streaming_content).decode().splitlines()
    assert answer.status_code == 200 and len(lines) >= 3 and all(json.loads(line) for line in lines)
    refused = web.get(f"/runs/{run.code}/export", {"format": "verl"})
    assert refused.status_code == 422 and "cannot be exported as verl" in refused.content.decode()
    assert f'href="/runs/{run.code}#work">Back to the run' in refused.content.decode()
    assert "Back to the run" not in web.get("/runs/zzzzzzzz").content.decode()
    forced = web.get(f"/runs/{run.code}/export", {"format": "sft"})
    assert forced.status_code == 200 and b"".join(forced.streaming_content)
    assert web.get(f"/runs/{run.code}/export", {"format": "pickle"}).status_code == 422


def test_few_exports_are_written_at_once(web: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """M3: two hundred clients that ask for an export take the processor from all pages."""
    address = f"/runs/{stored_run(1).code}/export"
    monkeypatch.setattr(job_views, "_places", threading.BoundedSemaphore(1))
    refused = web.get(address, {"format": "pickle"})
    for _ in range(2):  # each answer returns its place
        assert web.get(address).status_code == 200 and refused.status_code == 422
    job_views._places.acquire()
    busy = web.get(address)
    assert (busy.status_code, busy["Retry-After"]) == (503, "5") and "Ask again" in busy.content.decode()


def test_a_large_run_is_written_by_a_worker(web: Client, monkeypatch: pytest.MonkeyPatch, sent: list[int]) -> None:
    run = stored_run(2)
    monkeypatch.setattr(job_views, "MAX_TOKENS_IN_REQUEST", 3)
    answer = web.get(f"/runs/{run.code}/export")
    assert answer.status_code == 413 and "manage.py export_rollouts" in answer.content.decode()
    answer = web.post(f"/runs/{run.code}/exports", {"format": "sft", "pad_to": "40", "pad_id": "7"}, follow=True)
    (job,) = run.jobs.all()
    assert sent == [job.pk] and job.options == {"format": "sft", "pad_to": 40, "pad_id": 7}
    assert "padded to 40 with id 7" in answer.content.decode() and "It waits for a worker." in answer.content.decode()
    do_job(job.pk)
    page = web.get(f"/runs/{run.code}")
    address = f"/runs/{run.code}/jobs/{job.code}/file"
    assert f'href="{address}"' in page.content.decode()
    lines = b"".join(web.get(address).streaming_content).decode().splitlines()
    assert [len(json.loads(line)["input_ids"]) for line in lines] == [40, 40]
    Job.objects.update(expires_at=timezone.now())
    assert web.get(address).status_code == 410
    assert "Its file has expired" in web.get(f"/runs/{run.code}").content.decode()
    drop_files()
    assert not files.exists(key_of(job))
    assert web.get(f"/runs/{run.code}/jobs/2345/file").status_code == 404


def test_a_padded_export_of_a_short_run_may_be_a_large_one(web: Client, sent: list[int]) -> None:
    """Each row is as long as the request says, so that few tokens could take the memory of the web server."""
    run = stored_run(2)
    asked = {"format": "sft", "pad_to": "250001"}
    assert web.get(f"/runs/{run.code}/export", asked).status_code == 413
    assert web.post(f"/runs/{run.code}/exports", asked).status_code == 302 and len(sent) == 1
    assert web.get(f"/runs/{run.code}/export", asked | {"pad_to": "250000"}).status_code == 200


def test_an_export_holds_what_passes_the_filter(web: Client, monkeypatch: pytest.MonkeyPatch, sent: list[int]) -> None:
    run = stored_run(6)
    page = web.get(f"/runs/{run.code}?finding=boundary_merge&max=1").content.decode()
    assert (
        "3 that pass the filter" in page
        and "all 6" in page
        and "x-which" not in web.get(f"/runs/{run.code}").content.decode()
    )
    asked = {"finding": "boundary_merge", "max": "1", "which": "list"}

    def ids_in(answer: Any) -> list[str]:
        return [json.loads(line)["external_id"] for line in b"".join(answer.streaming_content).decode().splitlines()]

    address = web.post(f"/runs/{run.code}/exports", asked).url
    assert "finding=boundary_merge" in address and "which=list" in address
    answer = web.get(address)
    assert ids_in(answer) == ["t001", "t003", "t005"] and "_part" in answer["Content-Disposition"]
    assert len(ids_in(web.get(f"/runs/{run.code}/export?finding=boundary_merge"))) == 6, "without which=list all"
    for nothing in ({"group": "none"}, {"min": "x"}):
        assert web.get(f"/runs/{run.code}/export", {"which": "list", **nothing}).status_code == 422
    monkeypatch.setattr(job_views, "MAX_TOKENS_IN_REQUEST", 3)
    web.post(f"/runs/{run.code}/exports", asked)
    (job,) = run.jobs.all()
    assert job.options == {"only": {"kind": "boundary_merge", "reward_max": 1.0}} and sent == [job.pk]
    do_job(job.pk)
    page = web.get(f"/runs/{run.code}")
    assert "only kind boundary merge, reward max 1.0" in page.content.decode()
    assert ids_in(web.get(f"/runs/{run.code}/jobs/{job.code}/file")) == ["t001", "t003", "t005"]
    web.post(f"/runs/{run.code}/exports", {"group": "none", "which": "list"})
    empty = run.jobs.get(status="queued")
    do_job(empty.pk)
    empty.refresh_from_db()
    assert empty.status == "failed" and "passes the filter" in empty.error


def test_a_small_export_is_downloaded_at_once(web: Client, sent: list[int]) -> None:
    run = stored_run(2)
    answer = web.post(f"/runs/{run.code}/exports", {"format": "sft", "force": "1", "strategy": "", "pad_to": ""})
    assert answer.url == f"/runs/{run.code}/export?format=sft&force=True" and not sent and not run.jobs.exists()
    assert web.get(answer.url).status_code == 200


@pytest.mark.parametrize(
    ("asked", "sentence"),
    [
        ({"format": "pickle"}, "There is no format"),
        ({"format": "sft", "strategy": "wish"}, "There is no strategy"),
        ({"format": "sft", "force": "1", "faulty": "leave_out"}, "choose one of the two"),
        ({"format": "verl", "pad_to": "9"}, "goes with the format sft alone"),
        ({"format": "sft", "pad_to": "٣"}, "is no whole number"),
        ({"format": "sft", "pad_to": "1048577"}, "at most 1,048,576 tokens"),
    ],
)
def test_an_export_that_makes_no_sense_is_refused(web: Client, asked: dict[str, str], sentence: str) -> None:
    run = stored_run(1)
    for answer in (web.post(f"/runs/{run.code}/exports", asked), web.get(f"/runs/{run.code}/export", asked)):
        assert answer.status_code == 422 and sentence in answer.content.decode()
    assert not run.jobs.exists()


def test_a_refused_row_ends_the_job_with_the_finding(web: Client, sent: list[int]) -> None:
    run = stored_run(2)
    job = web.post(f"/runs/{run.code}/exports.json", {"format": "verl"}).json()["job"]
    do_job(Job.objects.get(code=job["code"]).pk)
    (line,) = web.get(f"/runs/{run.code}.json").json()["jobs"]
    assert line["status"] == "failed" and "cannot be exported as verl" in line["sentence"] and line["file"] is None
    assert "by choosing “leave out”" in line["sentence"] and "--" not in line["sentence"]


def test_a_worker_names_what_it_left_out(web: Client, sent: list[int]) -> None:
    run = stored_run(0)
    save_trajectories(run, [chain("whole"), chain("broken", broken_at=1)], [[], []])
    asked = {"format": "skyrl", "faulty": "leave_out"}
    assert '<option value="leave_out"' in web.get(f"/runs/{run.code}").content.decode()
    assert web.get(f"/runs/{run.code}/export", asked).status_code == 413
    page = web.post(f"/runs/{run.code}/exports", asked, follow=True).content.decode()
    assert "faulty trajectories left out" in page
    do_job(sent[0])
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "1 written. 1 of 2 trajectories was left out." in page and "1 note<" in page
    assert (
        "Trajectory &#x27;broken&#x27; cannot be exported as skyrl" in page and "--" not in page.split('id="work"')[1]
    )


def test_a_run_is_diagnosed_again_by_a_worker(web: Client, visitor: Client, sent: list[int]) -> None:
    run = stored_run(2)
    assert visitor.post(f"/runs/{run.code}/diagnose").status_code in (302, 403) and not sent
    assert web.get(f"/runs/{run.code}/diagnose").status_code == 405
    web.post(f"/runs/{run.code}/diagnose", {"tokenizer": "unheard of"})
    assert not sent
    web.post(f"/runs/{run.code}/diagnose")
    (job,) = run.jobs.all()
    assert sent == [job.pk]
    again = web.post(f"/runs/{run.code}/diagnose.json")
    assert again.status_code == 200 and "being diagnosed already" in again.json()["message"] and len(sent) == 1
    live = web.get(f"/runs/{run.code}", headers={"HX-Request": "true", "HX-Target": "run-jobs"})
    assert 'hx-trigger="every 1s"' in live.content.decode() and "Cancel" in live.content.decode()
    do_job(job.pk)
    ended = web.get(f"/runs/{run.code}", headers={"HX-Request": "true", "HX-Target": "run-jobs"})
    assert ended.headers["HX-Refresh"] == "true"
    assert "2 trajectories diagnosed." in web.get(f"/runs/{run.code}").content.decode()
    start_run(run)
    web.post(f"/runs/{run.code}/diagnose")
    assert len(sent) == 1


def test_work_is_cancelled_from_the_page(web: Client, visitor: Client, sent: list[int]) -> None:
    run = stored_run(2)
    web.post(f"/runs/{run.code}/diagnose")
    (job,) = run.jobs.all()
    address = f"/runs/{run.code}/jobs/{job.code}/cancel"
    assert visitor.post(address).status_code in (302, 403) and web.get(address).status_code == 405
    web.post(address)
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "Cancelled after 0 trajectories" in page and address not in page
    do_job(job.pk)
    job.refresh_from_db()
    assert job.status == "cancelled" and job.attempt == 0


def test_a_lost_worker_is_told_and_the_next_press_goes_on(web: Client, sent: list[int]) -> None:
    run = stored_run(2)
    web.post(f"/runs/{run.code}/diagnose")
    long_ago = timezone.now() - timedelta(minutes=5)
    Job.objects.update(status="running", attempt=1, n_done=1, n_total=2, reached=0, heartbeat_at=long_ago)
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "It stopped after 1 of 2 trajectories" in page and "Press the button again" in page
    web.post(f"/runs/{run.code}/diagnose")
    (job,) = run.jobs.all()
    assert sent == [job.pk, job.pk]


def test_without_redis_the_page_says_so(web: Client, no_broker: None) -> None:
    page = web.post(f"/runs/{stored_run(1).code}/diagnose", follow=True)
    assert "Redis does not answer" in page.content.decode() and Job.objects.get().status == "failed"


def test_the_run_page_offers_all_of_it_and_tells_old_findings(web: Client) -> None:
    run = stored_run(2)
    page = web.get(f"/runs/{run.code}").content.decode()
    assert f"/runs/{run.code}/cost" in page and f"/runs/{run.code}/export" in page and "older version" not in page
    assert web.get(f"/runs/{run.code}.json").json()["run"]["diagnosis_version"] == VERSION
    Run.objects.filter(pk=run.pk).update(diagnosis_version=0)
    assert "older version" in web.get(f"/runs/{run.code}").content.decode()


def test_formats_are_offered_by_their_titles(web: Client) -> None:
    page = web.get(f"/runs/{stored_run(1).code}").content.decode()
    whole, rows = page[page.index("whole trajectories") :].split('label="training rows"')
    assert '<option value="own_jsonl">Rollout Inspector JSONL (lossless) · own_jsonl</option>' in whole
    assert '<option value="verl">verl AgentLoopOutput · verl</option>' in rows and "verl" not in whole
    for name in WRITERS:
        assert page.count(f'<option value="{name}">') == 1


def test_a_finding_has_its_script(web: Client, visitor: Client) -> None:
    run = stored_run(2, findings=[[costly(1)], []])
    code = run.trajectories.get(index=0).code
    assert "findings/1.py" in web.get(f"/trajectories/{code}").content.decode()
    answer = web.get(f"/trajectories/{code}/findings/1.py")
    # The sample's finding names a place but no ids: nothing can be asserted of it, and the answer says so.
    assert answer.status_code == 404 and "nothing that a script could assert" in answer.content.decode()
    StoredFinding.objects.filter(run=run).update(expected_ids=[9], actual_ids=[2])
    answer = web.get(f"/trajectories/{code}/findings/1.py")
    assert answer.status_code == 200 and "assert (PROMPT + COMPLETION)[START:STOP] == ACTUAL" in answer.content.decode()
    exec(compile(answer.content, "finding.py", "exec"), {})
    assert web.get(f"/trajectories/{code}/findings/2.py").status_code == 404
    assert visitor.get(f"/trajectories/{code}/findings/1.py").status_code in (302, 401, 403)
