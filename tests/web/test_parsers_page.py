"""The page of parsers: what the message lost comes first, then who read what; asked once and cancelled."""

import json
from dataclasses import replace
from io import StringIO
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.test import Client

from rollout_inspector.streams.trajectory import Trajectory
from rollouts.jobs import diagnosis, parser_comparison
from rollouts.sampling.engines import vllm_parsers
from rollouts.store import models
from rollouts.worker import jobs
from tests.people import make_member
from tests.web.samples import one_line
from tests.web.trajectory_samples import Maker, own_row

pytestmark = pytest.mark.django_db
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": "<i>1</i>"}}\n</tool_call>'
TOLD = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": "<i>1</i>"}}}],
}


class _FakeParsers:
    """Three parsers, as vLLM's would answer."""

    version, names = "9.9", {"tool": ("one", "two", "three"), "reasoning": ("four",)}

    def __init__(self, folder: Any) -> None: ...

    def close(self) -> None: ...

    def read_all(self, text: str, tools: Any, say: Any) -> Any:
        calls = [{"name": "add", "arguments": '{"a": "<i>1</i>"}'}]
        say("parser 1 of 4: one")
        yield "tool", "one", {"content": text.partition("\n")[0], "reasoning": "", "calls": calls}
        yield "tool", "two", {"content": "", "reasoning": "", "calls": calls}
        yield "tool", "three", {"error": "It has no <b>token</b>: \0\ud800."}
        yield "reasoning", "four", {"content": text, "reasoning": "", "calls": []}


@pytest.fixture
def trajectory(make: Maker, monkeypatch: pytest.MonkeyPatch) -> models.StoredTrajectory:
    """A reply whose message lacks the text before its call."""
    monkeypatch.setattr(parser_comparison, "VllmParsers", _FakeParsers)
    monkeypatch.setattr("inspector.trajectories.views.send_job", lambda job: None)
    first = make.conversation("a", 2).steps[0]
    said = make.ids(f"Now we <look> over here.\n{CALL}<|im_end|>")
    lossy = replace(first, completion_ids=said, logprobs=None, reply=TOLD)
    run = make.run([Trajectory("a", (lossy,), reward=1.0)])
    list(diagnosis.diagnose_run(run))
    return run.trajectories.get()


def address(one: models.StoredTrajectory, rest: str = "") -> str:
    return f"/trajectories/{one.code}/parsers{rest}"


def do(one: models.StoredTrajectory) -> models.ParserAudit:
    made = one.parser_audits.get()
    jobs.do_job(made.job.pk)
    made.refresh_from_db()
    return made


def test_a_reply_is_read_once_and_what_was_lost_is_said_first(
    web: Client, trajectory: models.StoredTrajectory, django_assert_max_num_queries: Any
) -> None:
    before = one_line(web.get(address(trajectory)))
    assert "Not computed yet." in before and "Replies whose message lost text" in before
    assert web.post(address(trajectory, "/again?step=0")).status_code == 302
    assert web.get(address(trajectory, ".json")).json()["state"] == "queued"
    web.post(address(trajectory, "/again?step=0"))
    assert models.Job.objects.count() == 1
    made = do(trajectory)
    with django_assert_max_num_queries(15):
        html = one_line(web.get(address(trajectory)))
    order = [
        html.index(words) for words in ("The message lost 1 stretch", ">two<", "form, one<", "1 could not read it")
    ]
    assert order == sorted(order) and "vLLM 9.9" in html
    assert "&lt;i&gt;1&lt;/i&gt;" in html and "<i>1</i>" not in html and "<b>token</b>" not in html
    page = web.get(address(trajectory, ".json")).json()
    assert (page["state"], page["step"], page["lossy_steps"], page["reply_check"]) == ("done", 0, [0], "failed")
    (lost,) = page["audit"]["message"]["lost"]
    assert f"t={lost['tokens'][0]}-{lost['tokens'][1]}" in html and "over here" in lost["text"]
    by_name = {reading["parsers"][-1]: reading for reading in page["audit"]["readings"]}
    assert (by_name["two"]["differs"], by_name["two"]["n_lost"]) == ([], 1)
    assert (by_name["one"]["differs"], by_name["one"]["n_lost"]) == (["content"], 0)
    assert made.key == parser_comparison.key_of(trajectory)


def test_the_run_counts_such_replies_and_lists_their_trajectories(
    web: Client, trajectory: models.StoredTrajectory
) -> None:
    run = trajectory.run
    run.refresh_from_db()
    assert run.finding_counts["reply_text_lost"] == 1
    totals = {one["name"]: one for one in web.get(f"/runs/{run.code}.json").json()["summary"]["checks"]}
    assert (totals["reply"]["checked"], totals["reply"]["failed"]) == (1, 1)
    listed = one_line(web.get(f"/runs/{run.code}?finding=reply_text_lost"))
    assert trajectory.code in listed and "Message lost sampled text" in listed
    conversation = one_line(web.get(f"/trajectories/{trajectory.code}/record"))
    assert "No message holds this sampled text" in conversation and address(trajectory, "?step=0") in conversation


def test_work_is_cancelled_and_what_failed_is_told_and_tried_again(
    web: Client, trajectory: models.StoredTrajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.post(address(trajectory, "/again?step=0"))
    assert ">Cancel<" in one_line(web.get(address(trajectory)))
    web.post(address(trajectory, "/again?step=0"), {"do": "cancel"})
    assert "Cancelled." in one_line(web.get(address(trajectory)))
    monkeypatch.setattr(parser_comparison, "MAX_CHARACTERS", 3)
    web.post(address(trajectory, "/again?step=0"))
    do(trajectory)
    assert "parsers are given at most 3" in one_line(web.get(address(trajectory)))
    web.post(address(trajectory, "/again?step=7"))
    assert models.ParserAudit.objects.count() == 1
    assert "There is no step 7 here" in one_line(web.get(address(trajectory, "?step=7")))


def test_a_viewer_reads_and_does_not_ask(client: Client, trajectory: models.StoredTrajectory) -> None:
    client.force_login(make_member("someone", models.Role.VIEWER))
    assert client.post(address(trajectory, "/again?step=0")).status_code == 403
    assert "Log in to read it" in one_line(client.get(address(trajectory)))


def test_without_vllm_tokenizer_or_steps_the_page_says_so(
    web: Client, make: Maker, trajectory: models.StoredTrajectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parser_comparison, "VllmParsers", vllm_parsers.VllmParsers)
    monkeypatch.setattr(vllm_parsers, "find_spec", lambda name: None)
    web.post(address(trajectory, "/again?step=0"))
    do(trajectory)
    html = one_line(web.get(address(trajectory)))
    assert "vLLM is not installed" in html and "the chat template" in html
    rows = make.run([own_row()]).trajectories.get()
    assert "training rows without steps" in one_line(web.get(address(rows)))
    models.Run.objects.update(tokenizer=None)
    assert "The run has no tokenizer" in one_line(web.get(address(trajectory)))


def test_the_command_prints_the_same(web: Client, trajectory: models.StoredTrajectory) -> None:
    trajectory.run.settings["tool_calls"] = "vLLM's parser hermes"
    trajectory.run.save()
    web.post(address(trajectory, "/again?step=0"))
    do(trajectory)
    assert "The run read calls with vLLM&#x27;s parser hermes." in one_line(web.get(address(trajectory)))
    out = StringIO()
    call_command("parser_audit", trajectory.code, "--json", stdout=out)
    (found,) = json.loads(out.getvalue())
    assert found["message"]["n_lost"] == 1 and found["vllm_version"] == "9.9"
    out = StringIO()
    call_command("parser_audit", trajectory.code, "--step", "0", stdout=out)
    assert "loses 'Now we" in out.getvalue() and "three: not usable" in out.getvalue()
    assert "message (reply, read with vLLM's parser hermes): " in out.getvalue()
    with pytest.raises(CommandError, match="no step 4"):
        call_command("parser_audit", trajectory.code, "--step", "4")
    with pytest.raises(CommandError, match="no trajectory"):
        call_command("parser_audit", "nothing")
