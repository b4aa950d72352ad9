"""The client reads from a live server what the API returns, part by part, and waits for jobs."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inspector.api import tokens
from rollout_inspector.client.client import Client, ServerError
from rollouts.sampling.engines import vllm_parsers
from rollouts.store.models import Run, default_project
from rollouts.store.trajectories.rows import row_window
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.api.conftest import member_of, token_for
from tests.web.trajectory_samples import Maker, own_row


@pytest.fixture
def server(transactional_db: None, live_server: Any) -> Client:
    project = default_project()
    return Client(live_server.url, token_for(member_of(project, "eve", "member"), project), tries=1)


@pytest.mark.django_db(transaction=True)
def test_lists_and_values(server: Client, make: Maker) -> None:
    broken, findings = make.broken("broken")
    run = make.run([make.conversation("whole"), broken], [[], findings])
    others = [make.run([own_row(8)]) for _ in range(2)]
    assert [one["code"] for one in server.runs(kind="import")] == [one.code for one in (*others[::-1], run)]
    assert server.get_run(run.code)["trajectories"] == 2 and server.summary(run.code)["by_status"] == {"done": 2}
    server.run = run.code
    assert [one["external_id"] for one in server.trajectories(flawed=True)] == ["broken"]
    assert [one["external_id"] for one in server.trajectories(sort="-reward", from_=0)] == ["whole", "broken"]
    (finding,) = server.findings(kind="unclassified")
    assert [one["kind"] for one in server.findings(trajectory=finding["trajectory"])] == ["unclassified"]
    assert [one["index"] for one in server.steps(finding["trajectory"])] == [0, 1]
    assert server.trajectory(finding["trajectory"])["external_id"] == "broken"
    assert [one["external_id"] for one in server.search("brok")] == ["broken"] and list(server.checks()) == []


@pytest.mark.django_db(transaction=True)
def test_token_columns_are_joined_from_windows(server: Client, make: Maker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_JSON_TOKENS", 50)
    run = make.run([make.conversation("long"), own_row(60, advantages=np.ones(60, np.float32))])
    long, row = run.trajectories.order_by("index")
    n = server.rows(long.code)[0]["n_tokens"]
    window = row_window(long, 0, 0, n)
    found = server.tokens(long.code)
    assert n > 100 and found["ids"] == window.ids.tolist() and found["loss_mask"] == window.loss_mask.tolist()
    assert server.tokens(long.code, start=10, stop=130, columns=["ids"]) == {"ids": window.ids[10:130].tolist()}
    assert server.tokens(row.code)["advantages"] == [1.0] * 60
    step = load_trajectory(long).steps[1]
    assert server.tokens(long.code, step=1)["ids"] == step.stream.tolist()


@pytest.mark.django_db(transaction=True)
def test_jobs_are_waited_for(server: Client, make: Maker, answered: None, tmp_path: Path) -> None:
    run = make.run([make.conversation("whole")])
    written = server.export(tmp_path / "run.jsonl", run.code, format="own_jsonl")
    assert b"whole" in written.read_bytes()
    assert server.wait(server.diagnose(run.code), every=0.05)["status"] == "done"
    assert {one["kind"] for one in server.jobs(run=run.code)} == {"export", "diagnose"}
    trajectory = run.trajectories.get()
    assert server.replay(trajectory.code)["strategies"]
    kept = server.rows(trajectory.code, strategy="tool_delta")
    assert len(server.tokens(trajectory.code, strategy="tool_delta")["ids"]) == kept[0]["n_tokens"]


@pytest.mark.django_db(transaction=True)
def test_refusals_carry_the_sentence(server: Client, sent: list[int], make: Maker) -> None:
    with pytest.raises(ServerError, match="There is no run 'zzzzzzzzzzzz'") as refused:
        server.get_run("zzzzzzzzzzzz")
    assert refused.value.status == 404
    with pytest.raises(ServerError, match="status: There is no 'ended' here"):
        list(server.runs(status="ended"))
    run = make.run([own_row(8)])
    with pytest.raises(ServerError, match="not done after 0 s"):
        server.wait(server.diagnose(run.code), seconds=0)
    assert Run.objects.get().jobs.count() == 1


@pytest.mark.django_db(transaction=True)
def test_what_people_say_is_written_and_read(server: Client, make: Maker, tmp_path: Path) -> None:
    broken, findings = make.broken("broken")
    server.run = make.run([make.conversation("whole"), broken], [[], findings]).code
    (place, *_) = server.find("84", run=server.run)
    broken_code = next(server.trajectories(flawed=True))["code"]
    assert (
        {one["trajectory"] for one in server.find("84", finding="unclassified")}
        == {broken_code}
        != {place["trajectory"]}
    )
    here, span = place["trajectory"], (place["row"], place["start"], place["stop"])
    assert server.tokens(here, place["row"], start=place["start"], stop=place["stop"])["ids"]
    made = server.comment(here, "Why 84?", *span)
    assert (made["row"], made["start"], made["stop"]) == span
    whole = server.comment(here, "All of it.")
    assert server.edit_comment(here, whole, "All of it!")["text"] == "All of it!"
    assert server.resolve(here, whole["code"])["resolved_by"] == "eve"
    assert server.reopen(here, whole["code"])["resolved_at"] is None
    server.delete_comment(here, whole["code"])
    assert [one["text"] for one in server.comments(here)] == ["Why 84?"]
    assert "Why 84?" in server.save(tmp_path / "t.html", here).read_text()
    assert "Why 84?" not in server.save(tmp_path / "t.html", here, comments="no").read_text()
    server.mark_seen(here)
    assert [one["code"] for one in server.trajectories(seen="yes")] == [here]
    server.mark_seen(here, False)
    assert not list(server.trajectories(seen="yes"))
    rule = server.mute("unclassified", "known")
    assert [one["kind"] for one in server.muted()] == ["unclassified"]
    server.unmute(rule["id"])
    assert server.muted() == []
    with pytest.raises(ServerError, match="Write something: the comment is empty") as refused:
        server.comment(here, " ")
    assert refused.value.status == 422
    assert [lane["row"] for lane in server.lanes(broken_code)] == [0, 1] and server.lanes(here) == []


@pytest.mark.django_db(transaction=True)
def test_a_reply_is_read_by_every_parser(
    server: Client, make: Maker, answered: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_parsers, "find_spec", lambda name: None)
    one = make.run([make.conversation("whole")]).trajectories.get()
    audit = server.parsers(one.code, 1)
    assert audit["step"] == 1 and audit["readings"] and server.parsers(one.code, 1) == audit
    with pytest.raises(ServerError, match="There is no step '9' here"):
        server.parsers(one.code, 9)
