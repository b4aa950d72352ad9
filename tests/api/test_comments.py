"""Comments by the API: listed, written, settled, deleted, with the sentences of the pages."""

from typing import Any

from rollouts.store.models import AuditEvent, Run
from rollouts.store.runs.muted import mute
from tests.api.conftest import Ask


def test_comments_are_written_listed_and_settled(run: Run, ask: Ask) -> None:
    here = f"/trajectories/{run.trajectories.get(external_id='whole').code}/comments"
    assert ask(here, "viewer").json()["comments"] == []
    made = ask(here, method="post", body={"text": "why?", "start": 4, "stop": 6})
    assert made.status_code == 201 and (made.json()["row"], made.json()["start"], made.json()["stop"]) == (0, 4, 6)
    whole = ask(here, method="post", body={"text": "all of it"}).json()
    assert [one["text"] for one in ask(here).json()["comments"]] == ["all of it", "why?"]
    assert whole["author"] == "ann" and whole["may_edit"]
    one = f"{here}/{whole['code']}"
    text = {"text": "all of it, twice", "version": whole["version"]}
    assert ask(f"{one}/edit", "admin", method="post", body=text).status_code == 403
    edited = ask(f"{one}/edit", method="post", body=text).json()
    assert edited["text"] == "all of it, twice" and edited["edited_at"] and edited["version"] > whole["version"]
    assert AuditEvent.objects.filter(user_name="ann", detail__endswith=f"{whole['code']} edited").count() == 1
    late = ask(f"{one}/edit", method="post", body={**text, "text": "thrice"})
    assert late.status_code == 409 and "edited or deleted since" in late.json()["detail"]
    assert ask(f"{one}/edit", method="post", body={**text, "text": " "}).status_code == 422
    settled = ask(f"{one}/resolve", "admin", method="post", body={})
    assert settled.status_code == 200 and settled.json()["resolved_by"] == "ada"
    again = ask(f"{one}/resolve", method="post", body={})
    assert again.status_code == 409 and again.json()["detail"] == "ada has resolved this comment already."
    assert ask(f"{one}/reopen", method="post", body={}).json()["resolved_at"] is None
    assert ask(one, "launcher", method="delete").status_code == 204
    assert ask(f"{one}/resolve", method="post", body={}).status_code == 404


def test_what_cannot_be_written_is_answered_with_the_field(run: Run, ask: Ask) -> None:
    here = f"/trajectories/{run.trajectories.get(external_id='whole').code}/comments"
    for body, field in (
        ({"text": ""}, "text"),
        ({"text": "x" * 4001}, "text"),
        ({"text": "x", "row": 1}, "start"),
        ({"text": "x", "start": 3, "stop": 2}, "start"),
        ({"text": "x", "row": 9, "start": 3}, "row"),
        ({"text": "x", "start": -1}, "start"),
    ):
        answer = ask(here, method="post", body=body)
        assert answer.status_code == 422 and field in answer.json()["errors"], body
    assert ask(here, "viewer", method="post", body={"text": "x"}).status_code == 403
    assert ask(here, "reader", method="post", body={"text": "x"}).status_code == 403
    assert ask(here).json()["comments"] == []


def test_findings_say_whether_their_kind_is_muted(run: Run, ask: Ask, admin_user: Any) -> None:
    code = run.trajectories.get(external_id="broken").code
    places = (f"/trajectories/{code}/findings", f"/runs/{run.code}/findings")
    assert [ask(place).json()["items"][0]["muted"] for place in places] == [False, False]
    etag = ask(places[0])["ETag"]
    mute(run, "unclassified", "run", "known", admin_user)
    assert [ask(place).json()["items"][0]["muted"] for place in places] == [True, True]
    assert ask(places[0], **{"if-none-match": etag}).status_code == 200
    assert ask(f"{places[0]}/1").json()["finding"]["muted"] is True
    listed = ask(f"/runs/{run.code}/trajectories?flawed=true&muted=hide").json()
    assert listed["items"] == []
