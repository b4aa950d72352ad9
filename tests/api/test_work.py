"""Work that the API asks for: launches, imports, checks, exports; who may ask, and what is refused with which words."""

import json
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from rollouts.jobs.exports.exports import ExportOptions
from rollouts.store.models import AuditEvent, Job, Project, Run, TemplateCheck
from tests.api.conftest import Ask
from tests.push.conftest import episodes
from tests.samples.problems import assert_problem
from tests.web.trajectory_samples import Maker

LINES = "\n".join(json.dumps(call) for call in episodes(1)).encode()
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def upload(client: Client, token: str, *files: tuple[str, bytes], **fields: str) -> Any:
    held = [SimpleUploadedFile(name, body) for name, body in files]
    return client.post("/api/v1/imports", {**fields, "files": held}, headers={"authorization": f"Bearer {token}"})


def test_a_launch_with_the_defaults(ask: Ask, sent: list[int]) -> None:
    answer = ask("/launches", "member", "post", {"name": "mine", "settings": {"prompts": 2, "group": 1}})
    assert answer.status_code == 201
    run = Run.objects.get()
    assert answer.json()["settings"]["prompts"] == 2 and sent == [run.pk]
    assert (run.name, run.n_trajectories, run.project.code) == ("mine", 2, "default")
    assert run.created_by is not None and run.created_by.get_username() == "ann"
    assert AuditEvent.objects.filter(action="run launched", code=run.code).exists()


@pytest.mark.parametrize(
    "settings, field",
    [
        ({"model": "none"}, "model"), ({"prompts": 10**30}, "prompts"), ({"prompts": 0}, "prompts"),
        ({"temprature": 1}, "temprature"), ({"stop": ["\0"]}, "stop"), ({"seed": -1}, "seed"),
        ({"template_kwargs": {"a": "\0"}}, "template_kwargs"), ({"chat_template": "\0"}, "chat_template"),
        ({"environment": "\0"}, "environment"), ({"temperature": "hot"}, "temperature"),
    ],
)
def test_a_launch_that_makes_no_sense(ask: Ask, settings: Any, field: str, sent: list[int]) -> None:
    found = assert_problem(ask("/launches", "member", "post", {"settings": settings}), 422)
    assert f"settings.{field}" in found["errors"], found
    assert sent == [] and not Run.objects.exists()


def test_an_import_is_read_by_a_worker(
    client: Client, ask: Ask, callers: dict[str, str], make: Maker, answered: None
) -> None:
    answer = upload(client, callers["member"], ("a.jsonl", LINES), tokenizer=make.record.name, name="from afar")
    assert answer.status_code == 202, answer.content
    run = Run.objects.get()
    assert (run.name, run.tokenizer, run.status) == ("from afar", make.record, "done")
    assert ask(f"/jobs/{answer.json()['job']['code']}").json()["status"] == "done"
    assert [one["external_id"] for one in ask(f"/runs/{run.code}/trajectories").json()["items"]] == ["s0"]


def test_an_import_that_is_refused(client: Client, callers: dict[str, str], sent: list[int]) -> None:
    token, line = callers["member"], ("a.jsonl", LINES)
    assert "files" in assert_problem(upload(client, token), 422)["errors"]
    assert "files" in assert_problem(upload(client, token, ("a.pkl", b"\x80\x04\x95")), 422)["errors"]
    assert "tokenizer" in assert_problem(upload(client, token, line, tokenizer="none such"), 422)["errors"]
    assert "format" in assert_problem(upload(client, token, line, format="none such"), 422)["errors"]
    assert_problem(upload(client, token, line, project="zzzz"), 404)
    assert_problem(upload(client, callers["viewer"], line), 403)
    assert_problem(upload(client, callers["reader"], line), 403)
    broken = client.post("/api/v1/imports", b"--x\r\nnothing", content_type="multipart/form-data; boundary=",
                         headers={"authorization": f"Bearer {token}"})
    assert_problem(broken, 400)
    assert sent == [] and not Run.objects.exists()


def test_a_check_is_asked_once(ask: Ask, make: Maker, sent: list[int]) -> None:
    question = {"tokenizer": make.record.name, "tools": [], "kwargs": {"enable_thinking": False}, "repair": False}
    first = ask("/checks", "member", "post", question)
    assert first.status_code == 202 and first.json()["status"] == "queued"
    again = ask("/checks", "member", "post", question)
    assert again.json()["code"] == first.json()["code"] and len(sent) == TemplateCheck.objects.count() == 1


@pytest.mark.parametrize(
    "question, field",
    [
        ({}, "chat_template"), ({"tokenizer": "none"}, "tokenizer"), ({"chat_template": "a\0"}, "chat_template"),
        ({"chat_template": CHATML, "tools": [{"a": "\0"}]}, "tools"),
        ({"chat_template": CHATML, "conversation": [{"role": 1}]}, "conversation"),
        ({"chat_template": CHATML, "conversation": {}}, "conversation"),
    ],
)
def test_a_check_that_makes_no_sense(ask: Ask, question: Any, field: str, sent: list[int]) -> None:
    assert field in assert_problem(ask("/checks", "member", "post", question), 422)["errors"]
    assert sent == [] and not TemplateCheck.objects.exists()


def test_an_answered_check_has_its_verdict_and_an_etag(ask: Ask, make: Maker, answered: None) -> None:
    code = ask("/checks", "member", "post", {"tokenizer": make.record.name, "repair": False}).json()["code"]
    answer = ask(f"/checks/{code}")
    assert answer.json()["status"] == "done" and answer.json()["verdicts"] and answer.json()["probes"]
    assert ask(f"/checks/{code}", **{"if-none-match": answer["ETag"]}).status_code == 304


def test_work_on_a_run(run: Run, ask: Ask, sent: list[int]) -> None:
    begun = ask(f"/runs/{run.code}/exports", "member", "post", {"format": "sft", "pad_to": 64})
    assert begun.status_code == 202 and begun.json()["what"].startswith("Export as sft")
    assert ask(f"/runs/{run.code}/exports", "member", "post", {"format": "sft", "pad_to": 64}).status_code == 200
    assert_problem(ask(f"/runs/{run.code}/exports", "member", "post", {"format": "sft"}), 409)
    job = begun.json()["code"]
    assert_problem(ask(f"/jobs/{job}/file"), 410)
    assert ask(f"/jobs/{job}/cancel", "member", "post").json()["status"] == "cancelled"
    assert ask(f"/runs/{run.code}/diagnose", "member", "post", {}).status_code == 202
    assert_problem(ask(f"/runs/{run.code}/diagnose", "member", "post", {"tokenizer": "none"}), 422)
    assert_problem(ask(f"/runs/{run.code}/resume", "member", "post"), 409)
    assert len(sent) == 2 == Job.objects.count()


def test_an_export_takes_the_filter_of_the_list(run: Run, ask: Ask, sent: list[int]) -> None:
    only = {"finding": "observation_trained", "from": 1, "min": 0, "tokens_max": None, "flawed": False, "stop": ""}
    begun = ask(f"/runs/{run.code}/exports", "member", "post", {"only": only})
    assert begun.status_code == 202 and "kind observation trained" in begun.json()["what"]
    held = {"kind": "observation_trained", "first": 1, "reward_min": 0.0}
    assert Job.objects.get().options == {"only": held} and ExportOptions(only=held).filters.first == 1
    wrong = ask(f"/runs/{run.code}/exports", "member", "post", {"only": {"sort": "reward"}})
    assert "sort" in str(assert_problem(wrong, 422)["errors"])
    assert ask(f"/jobs/{begun.json()['code']}/cancel", "member", "post").status_code == 200
    assert ask(f"/runs/{run.code}/exports", "member", "post", {"only": {}}).status_code == 202
    assert Job.objects.latest("pk").options == {}


def test_without_a_broker_the_answer_says_so(run: Run, ask: Ask, no_broker: None) -> None:
    assert "Redis" in assert_problem(ask(f"/runs/{run.code}/exports", "member", "post", {}), 503)["detail"]


def test_what_is_made_goes_to_the_project_that_is_named(ask: Ask, callers: dict[str, str], sent: list[int]) -> None:
    theirs = Project.objects.get(name="Theirs")
    settings = {"prompts": 1, "group": 1}
    assert_problem(ask("/launches", "member", "post", {"settings": settings, "project": theirs.code}), 404)
    assert ask("/launches", "foreign", "post", {"settings": settings}).json()["project"] == theirs.code
    assert Run.objects.get().project == theirs
