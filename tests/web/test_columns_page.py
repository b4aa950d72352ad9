"""The page *Log-probabilities* of a run: its columns, two of them compared, and the button that makes one."""

from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.management import call_command
from django.core.management.base import CommandError
from django.test import Client

from inspector.runs.training import columns_page
from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from rollouts.jobs import rescore
from rollouts.sampling.engines import ENGINES
from rollouts.sampling.engines.scripted import ScriptedEngine
from rollouts.store.jobs.jobs import cancel_job
from rollouts.store.models import AuditEvent, Job, Run, ScoredColumn
from rollouts.store.runs.runs import create_run, end_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.worker import jobs
from tests.samples.shard_work import change_kind
from tests.web.samples import one_line

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(tiny_tokenizer: Path, settings: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Two trajectories whose sampler says 0.5 nats less than the scripted engine, which the model `words` has."""

    class Owner:
        def call(self, work: Any) -> Future[Any]:
            future: Future[Any] = Future()
            future.set_result(work(ScriptedEngine()))
            return future

    monkeypatch.setitem(ENGINES, "scripted", replace(ENGINES["scripted"], is_offered=True))
    settings.INSPECTOR_MODELS = {"words": {"engine": "scripted", "path": str(tiny_tokenizer)}}
    do: Any = partial(rescore.do_job, engine_of=lambda model, engine: Owner())
    change_kind(monkeypatch, "rescore", handler=do)
    made = create_run("import", "r")
    values = [
        Trajectory(name, (Step(ids_array([1, 2]), ids_array([3, 4]), np.float32([-0.75, -0.7])),))
        for name in ("a", "b")
    ]
    save_trajectories(made, values, [[], []])
    end_run(made, Run.Status.DONE)
    made.refresh_from_db()
    return made


def test_a_member_has_a_run_scored_and_compares_the_columns(
    web: Client, run: Run, sent: list[int], django_assert_max_num_queries: Any
) -> None:
    here = f"/runs/{run.code}/columns"
    assert f'action="/runs/{run.code}/rescore"' in one_line(web.get(f"/runs/{run.code}"))
    assert [one["name"] for one in web.get(f"{here}.json").json()["columns"]] == ["sampler"]
    answer = web.post(f"/runs/{run.code}/rescore", {"model": "words", "engine": ""})
    assert (
        answer["Location"] == here and web.post(f"/runs/{run.code}/rescore.json", {"model": "words"}).status_code == 202
    )
    assert Job.objects.count() == 1 == len(set(sent))
    live = one_line(web.get(here))
    assert "Scored with words on scripted" in live and "It waits for a worker" in live and "every 1s" in live
    part = web.get(here, headers={"HX-Request": "true", "HX-Target": "run-jobs"})
    assert part.content.decode().count("<section") == 0 and "Scored with words" in part.content.decode()
    jobs.do_job(sent[0])
    part = web.get(here, headers={"HX-Request": "true", "HX-Target": "run-jobs"})
    assert part["HX-Refresh"] == "true"
    _, scored = web.get(f"{here}.json").json()["columns"]
    assert (scored["title"], scored["trajectories"], scored["tokens"]) == ("words on scripted 1", 2, 6)
    assert scored["against_sampler"]["mean"] == scored["against_sampler"]["mean_abs"] == pytest.approx(0.5)
    with django_assert_max_num_queries(20):
        page = one_line(web.get(here, {"sampler": scored["name"], "trainer": "sampler"}))
    assert "sampler, as recorded, minus words on scripted 1, over 4 tokens" in page and "−0.5" in page
    told = web.get(f"{here}.json", {"sampler": scored["name"], "trainer": "sampler"}).json()["compared"]
    assert told["mean"] == pytest.approx(-0.5) and told["tokens"] == 4
    assert "2 trajectories are scored" in one_line(web.get(f"/runs/{run.code}"))
    assert "2 trajectories are scored" in page and scored["name"] in page


def test_what_cannot_be_compared_or_scored_is_a_sentence(
    web: Client, run: Run, sent: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    here = f"/runs/{run.code}/columns.json"
    for query, sentence in (
        ({"sampler": "sampler", "trainer": "sampler"}, "does not differ from itself"),
        ({"sampler": "sampler", "trainer": "scored:\0nobody<b>"}, "has no column named"),
        ({"sampler": "sampler"}, "Choose two columns"),
    ):
        answer = web.get(here, query)
        assert answer.status_code == 200 and sentence in answer.json()["problem"] and answer.json()["compared"] is None
    page = web.get(f"/runs/{run.code}/columns", {"sampler": "<b>x</b>", "trainer": "sampler"}).content.decode()
    assert "<b>x" not in page and "has no column named" in page
    for form, sentence in (
        ({"model": "nobody\0"}, "serves no model named"),
        ({"model": "words", "engine": "<script>"}, "no engine named"),
        ({"model": "words", "temperature": "hot"}, "“hot” is no temperature"),
        ({"model": "words", "temperature": "0,7"}, "scores at temperature 1 alone"),
        ({"model": "words", "temperature": "nan"}, "at temperatures from 0.01 to 10"),
    ):
        answer = web.post(f"/runs/{run.code}/rescore.json", form)
        assert answer.status_code == 422 and sentence in answer.json()["error"]
        assert web.post(f"/runs/{run.code}/rescore", form).status_code == 302
    assert not Job.objects.exists() and not sent
    ScoredColumn.objects.create(run=run, model="m", engine="e")
    whole = web.get(here).json()["columns"][-1]
    assert not whole["whole"] and "not whole" in one_line(web.get(f"/runs/{run.code}/columns"))
    assert "no column named" in web.get(here, {"sampler": "sampler", "trainer": whole["name"]}).json()["problem"]
    ScoredColumn.objects.update(finished_at=run.finished_at)
    assert "No token under" in web.get(here, {"sampler": "sampler", "trainer": whole["name"]}).json()["problem"]
    monkeypatch.setattr(columns_page, "MAX_COMPARED_TOKENS", 3)
    assert "manage.py rescore" in web.get(here, {"sampler": "sampler", "trainer": whole["name"]}).json()["problem"]


def test_a_column_is_deleted_unless_the_run_is_being_scored(web: Client, run: Run, sent: list[int]) -> None:
    web.post(f"/runs/{run.code}/rescore", {"model": "words"})
    jobs.do_job(sent[0])
    held = ScoredColumn.objects.get()
    address = f"/runs/{run.code}/columns/{held.code}/delete"
    web.post(f"/runs/{run.code}/rescore", {"model": "words"})
    assert web.post(f"{address}.json").status_code == 409 and ScoredColumn.objects.exists()
    cancel_job(Job.objects.latest("pk"))
    assert web.post(f"{address}.json").status_code == 200 and not ScoredColumn.objects.exists()
    assert held.code in AuditEvent.objects.get(action="scores deleted").detail
    assert web.post(f"{address}.json").status_code == 404


def test_the_command_scores_here_and_compares(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    call_command("rescore", run.code, "--model", "words")
    said = capsys.readouterr().out
    assert "2 trajectories are scored." in said and "over 4 tokens: 0.5 nats on average" in said
    name = f"scored:{ScoredColumn.objects.get().code}"
    call_command("rescore", run.code, "--compare", "sampler", name)
    assert f"{name} against sampler, over 4 tokens: 0.5 nats" in capsys.readouterr().out
    for arguments, sentence in (
        (("nobody", "--model", "words"), "no run with the code"),
        ((run.code,), "Name the model"),
        ((run.code, "--model", "x"), "serves no model named 'x'"),
        ((run.code, "--compare", "sampler", "y"), f"has no column named 'y'; it has sampler, {name}"),
    ):
        with pytest.raises(CommandError, match=sentence):
            call_command("rescore", *arguments)
