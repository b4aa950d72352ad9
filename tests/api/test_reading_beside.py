"""Lanes, parsers, the saved file, *seen* and muted kinds by the API, with the sentences of the pages."""

import pytest

from rollouts.sampling.engines import vllm_parsers
from rollouts.store.models import Run
from rollouts.worker.jobs import do_job
from tests.api.conftest import Ask
from tests.web.trajectory_samples import Maker


def code_of(run: Run, name: str) -> str:
    return run.trajectories.get(external_id=name).code


def test_lanes_are_told_and_kept(run: Run, ask: Ask) -> None:
    told = ask(f"/trajectories/{code_of(run, 'broken')}/lanes", "viewer")
    assert [(one["kind"], one["row"], one["steps"]) for one in told.json()["items"]] == [
        ("first", 0, [0]), ("unnamed", 1, [1]),
    ]
    assert told.json()["sentence"].startswith("2 engine calls made 2 rows") and told["ETag"]
    again = ask(f"/trajectories/{code_of(run, 'broken')}/lanes", **{"if-none-match": told["ETag"]})
    assert again.status_code == 304
    alone = ask(f"/trajectories/{code_of(run, 'whole')}/lanes").json()
    assert (alone["n_lanes"], alone["items"]) == (0, [])


def test_a_reply_is_read_by_every_parser_when_asked(
    run: Run, ask: Ask, sent: list[int], make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_parsers, "find_spec", lambda name: None)
    here = f"/trajectories/{code_of(run, 'whole')}/steps/1/parsers"
    assert ask(here, "viewer").json()["state"] == "unasked"
    assert ask(here, "viewer", method="post", body={}).status_code == 403
    asked = ask(here, method="post", body={})
    assert asked.status_code == 202 and asked.json()["state"] == "queued" and len(sent) == 1
    assert ask(f"/jobs/{asked.json()['job']['code']}").json()["trajectory"] == code_of(run, "whole")
    do_job(sent[0])
    done = ask(here).json()
    assert done["state"] == "done" and done["job"]["status"] == "done" and done["audit"]["step"] == 1
    assert any("vLLM is not installed" in note for note in done["audit"]["notes"])
    assert ask(here.replace("/1/", "/9/")).status_code == 404
    rows = make.run([make.conversation("bare")], tokenizer=None, chat_template=None)
    refused = ask(f"/trajectories/{code_of(rows, 'bare')}/steps/0/parsers", method="post", body={})
    assert refused.status_code == 409 and "The run has no tokenizer" in refused.json()["detail"]


def test_a_trajectory_is_saved_as_one_file(run: Run, ask: Ask) -> None:
    here = f"/trajectories/{code_of(run, 'broken')}"
    ask(f"{here}/comments", method="post", body={"text": "Look here."})
    made = ask(f"{here}/file", "viewer")
    html = made.content.decode()
    assert made["Content-Type"].startswith("text/html") and html.startswith("<!doctype html>") and "Look here." in html
    assert made["Content-Disposition"].startswith("attachment; ") and "<script" not in html
    alone = ask(f"{here}/file?finding=1&comments=no").content.decode()
    assert "Look here." not in alone and "finding 1 of" in alone
    assert "numbered from 1 to 1" in ask(f"{here}/file?finding=3").json()["detail"]
    wrong = ask(f"{here}/file?view=words")
    assert wrong.status_code == 422 and "view" in wrong.json()["errors"]
    assert ask(f"{here}/file", "foreign").status_code == 404


def test_seen_is_a_mark_of_the_caller_alone(run: Run, ask: Ask, make: Maker) -> None:
    here = f"/trajectories/{code_of(run, 'whole')}/seen"
    assert ask(here, "viewer").json()["seen"] is False
    assert ask(here, "viewer", method="post", body={}).json() == {"trajectory": code_of(run, "whole"), "seen": True}
    assert [ask(here, name).json()["seen"] for name in ("viewer", "member")] == [True, False]
    listed = ask(f"/runs/{run.code}/trajectories?seen=no", "viewer").json()["items"]
    assert [one["external_id"] for one in listed] == ["broken"]
    ask(here, "viewer", method="post", body={"seen": False})
    assert ask(here, "viewer").json()["seen"] is False
    assert ask(here, "reader", method="post", body={}).status_code == 403
    run.trajectories.filter(external_id="whole").update(status="running", finished_at=None)
    growing = ask(here, method="post", body={})
    assert growing.status_code == 409 and "still grows" in growing.json()["detail"]


def test_kinds_are_muted_and_taken_back(run: Run, ask: Ask) -> None:
    here = f"/runs/{run.code}/muted"
    made = ask(here, method="post", body={"kind": "unclassified", "reason": "known since the spring"})
    assert (made.status_code, made.json()["scope"], made.json()["author"]) == (201, "run", "ann")
    (rule,) = ask(here, "viewer").json()["items"]
    assert rule == made.json() and ask(f"/runs/{run.code}/findings").json()["items"][0]["muted"]
    for body, field in (
        ({"kind": "unclassified", "reason": "x"}, "kind"),
        ({"kind": "smell", "reason": "x"}, "kind"),
        ({"kind": "branch", "reason": " "}, "reason"),
        ({"kind": "branch", "reason": "x", "scope": "world"}, "scope"),
        ({"kind": "branch"}, "reason"),
    ):
        refused = ask(here, method="post", body=body)
        assert refused.status_code == 422 and field in refused.json()["errors"], body
    place = f"/muted/{rule['id']}"
    assert [ask(place, name, method="delete").status_code for name in ("foreign", "viewer")] == [404, 403]
    assert [ask(place, method="delete").status_code for _ in range(2)] == [204, 404]
    assert ask(here).json()["items"] == []
    assert ask(here, "viewer", method="post", body={"kind": "branch", "reason": "x"}).status_code == 403
