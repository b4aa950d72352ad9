"""Muted kinds of findings: they are met last, they count everywhere, and every page says the same of them."""

import json
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

from rollout_inspector.refusal import Refusal
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.models import AuditEvent, MutedKind, Project, Role, Run
from rollouts.store.people.shares import create_share
from rollouts.store.runs.muted import mute, muted_in, muted_in_runs, unmute
from rollouts.store.runs.runs import delete_run
from tests.people import make_member
from tests.web.samples import one_line
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db


@pytest.fixture
def run(make: Maker) -> Run:
    """A trajectory with an error, and one without a finding."""
    broken, findings = make.broken("broken")
    return make.run([broken, make.conversation("whole")], [findings, []])


def address(run: Run, rest: str = "") -> str:
    return f"/trajectories/{run.trajectories.get(external_id='broken').code}{rest}"


def again(run: Run) -> Run:
    return Run.objects.get(pk=run.pk)


def test_a_muted_finding_is_not_met_first_and_never_vanishes(web: Client, run: Run) -> None:
    before = web.get(address(run)).content.decode()
    assert web.get(address(run, ".json")).json()["mark"] is not None  # the page opens at its finding
    assert 'class="mute"' in before and "muted-findings" not in before
    form = {"kind": "unclassified", "scope": "run", "reason": " known, see\n#7 ", "trajectory": address(run)[14:]}
    answer = web.post(f"/runs/{run.code}/mute", form)
    assert answer.status_code == 302 and answer["Location"] == address(run)
    told = web.get(address(run))  # it says so once: no browser keeps this page
    assert "is muted. It still counts" in one_line(told) and told["Cache-Control"] == "no-store"
    assert "is muted. It still counts" not in one_line(web.get(address(run)))
    twin = web.get(address(run, ".json")).json()
    assert twin["mark"] is None and [one["muted"] for one in twin["findings"]] == [True]
    assert [(one["kind"], one["reason"], one["scope"]) for one in twin["muted"]] == [
        ("unclassified", "known, see #7", "run")
    ]
    page = one_line(web.get(address(run)))
    fold = page[page.index('id="muted"') :]
    assert "1 muted" in fold and "known, see #7" in fold and 'id="finding-1"' in fold and "error, muted" in fold
    assert 'id="finding-1"' not in page[: page.index('id="muted"')]
    # A list that was filtered by the kind leads to it all the same.
    assert web.get(address(run, ".json?finding=unclassified")).json()["mark"] is not None
    rule = twin["muted"][0]["id"]
    assert web.post(f"/muted/{rule}/unmute", {"run": run.code})["Location"] == f"/runs/{run.code}"
    assert web.get(address(run, ".json")).json()["mark"] is not None
    assert [one.action for one in AuditEvent.objects.filter(target="run")][-2:] == ["finding muted", "finding unmuted"]


def test_no_count_changes_and_every_page_marks_the_kind(web: Client, member: Any, run: Run) -> None:
    def counts() -> list[Any]:
        page = web.get(f"/runs/{run.code}.json").json()
        cost = web.get(f"/runs/{run.code}/cost.json").json()
        both = web.get(f"/runs/compare.json?run={run.code}&run={run.code}").json()
        listed = web.get("/runs.json").json()["runs"][0]
        return [
            page["run"]["findings"], page["summary"], [one["kinds"] for one in page["trajectories"]], page["total"],
            [{**one, "muted": None} for one in cost["kinds"]], both["runs"][0]["flawed"], listed["severities"],
            listed["findings"],
        ]

    full = counts()
    assert web.get("/runs.json").json()["runs"][0]["top_cause"] == "unclassified"
    mute(run, "unclassified", "project", "known", member)
    assert counts() == full
    listed = web.get("/runs.json").json()["runs"][0]
    assert (listed["top_cause"], listed["muted"]) == (None, ["unclassified"])
    assert "1 kind, muted" in one_line(web.get("/"))
    page = one_line(web.get(f"/runs/{run.code}"))
    assert page.count("(muted)") == 2 and "1 muted kind, counted all the same" in page and "known" in page
    assert [one["kind"] for one in web.get(f"/runs/{run.code}.json").json()["muted"]] == ["unclassified"]
    assert web.get(f"/runs/{run.code}/cost.json").json()["kinds"][0]["muted"]
    both = web.get(f"/runs/compare.json?run={run.code}&run={run.code}").json()
    assert [one["muted"] for one in both["kinds"][0]["counts"]] == [True, True]
    assert "error, muted" in one_line(web.get(f"/runs/compare?run={run.code}&run={run.code}"))
    assert "(muted)" in one_line(web.get(f"/runs/{run.code}/cost"))
    group = f"/runs/{run.code}/groups/g0"
    assert web.get(f"{group}.json").json()["muted"] == ["unclassified"] and "(muted)" in one_line(web.get(group))
    assert "(muted)" in one_line(web.get(address(run, "/record")))
    assert "known" in one_line(web.get(f"/projects/{run.project.code}"))


def test_a_search_and_the_command_mark_the_kind(web: Client, member: Any, run: Run) -> None:
    def said(*options: str, of: str = "") -> str:
        out = StringIO()
        call_command("findings", of or run.code, *options, stdout=out)
        return out.getvalue()

    asked = f"/runs/{run.code}/search"
    for is_muted in (False, True):
        shown = web.get(f"{asked}.json?finding=unclassified").json()["results"]
        assert [one["muted"] for one in shown] == [is_muted]
        for path in (asked, "/search"):
            assert ("(muted)" in one_line(web.get(f"{path}?finding=unclassified"))) is is_muted, path
        for of in (run.code, address(run)[14:]):
            assert ("unclassified (muted)" in said(of=of)) is is_muted, of
            assert [one["muted"] for one in json.loads(said("--json", of=of))] == [is_muted], of
        if not is_muted:
            mute(run, "unclassified", "project", "known", member)


def test_a_list_hides_muted_findings_when_it_is_asked_to(web: Client, member: Any, run: Run) -> None:
    def names(query: str) -> list[str]:
        shown = web.get(f"/runs/{run.code}.json?{query}").json()
        assert shown["total"] == len(shown["trajectories"])
        return [one["external_id"] for one in shown["trajectories"]]

    asked = ("severity=error", "flawed=1", "finding=unclassified", "at=1")
    assert [names(f"{one}&muted=hide") for one in asked] == [["broken"]] * 4
    mute(run, "unclassified", "run", "known", member)
    assert [names(one) for one in asked] == [["broken"]] * 4  # shown by default, and with muted=show
    assert names("muted=show") == ["broken", "whole"]
    assert [names(f"{one}&muted=hide") for one in asked] == [[]] * 4
    assert names("muted=hide") == ["whole"]  # what has nothing but muted findings is left out


def test_a_rule_reaches_as_far_as_it_says(member: Any, make: Maker, run: Run) -> None:
    alike = make.run([make.conversation("a")])
    other = make.run([make.conversation("a")], chat_template=register_chat_template("{{ messages }}", "x"))
    theirs = make.run([make.conversation("a")], project=Project.objects.create(name="theirs"))
    runs = [run, alike, other, theirs]
    for scope, reached in (("run", [run]), ("template", [run, alike]), ("project", [run, alike, other])):
        rule = mute(run, "unclassified", scope, "known", member)
        assert [one for one in runs if "unclassified" in muted_in(again(one))] == reached, scope
        assert [one for one in runs if "unclassified" in muted_in_runs(runs)[one.pk]] == reached, scope
        unmute(rule)
        unmute(rule)
    mute(run, "unclassified", "run", "known", member)
    delete_run(run)
    assert not MutedKind.objects.exists()


def test_what_cannot_be_muted_is_answered_with_a_sentence(web: Client, member: Any, run: Run) -> None:
    for form, field, sentence in (
        ({"kind": "nothing", "scope": "run", "reason": "x"}, "kind", "There is no kind of finding “nothing”"),
        ({"kind": "unclassified", "scope": "world", "reason": "x"}, "scope", "Say how far it reaches"),
        ({"kind": "unclassified", "scope": "run", "reason": " "}, "reason", "Write the reason"),
        ({"kind": "unclassified", "scope": "run", "reason": "x" * 501}, "reason", "at most 500 characters"),
    ):
        answer = web.post(f"/runs/{run.code}/mute.json", form)
        assert answer.status_code == 422 and sentence in answer.json()["errors"][field][0]
        assert web.post(f"/runs/{run.code}/mute", form).status_code == 422
    Run.objects.filter(pk=run.pk).update(chat_template=None)
    with pytest.raises(Refusal, match="names no chat template"):
        mute(again(run), "unclassified", "template", "x", member)
    mute(run, "unclassified", "run", "known", member)
    twice = web.post(f"/runs/{run.code}/mute.json", {"kind": "unclassified", "scope": "run", "reason": "me too"})
    assert twice.json()["errors"]["kind"] == ["ada has muted this already: known"]
    assert web.post("/muted/99999/unmute").status_code == 404


def test_a_visitor_sees_that_it_is_muted_and_not_why(visitor: Client, member: Any, run: Run) -> None:
    rule = mute(run, "unclassified", "run", "kestrel", member)
    _, token = create_share(member, run)
    visitor.get(f"/s/{token}")
    for page in (address(run), f"/runs/{run.code}", f"/runs/{run.code}/cost"):
        text = visitor.get(page).content.decode()
        assert "muted" in text and "kestrel" not in text and "Unmute" not in text and 'class="mute"' not in text
    twin = visitor.get(address(run, ".json")).json()
    assert (twin["mark"], twin["muted"][0]["reason"], twin["muted"][0]["author"]) == (None, None, None)
    viewer = Client()
    viewer.force_login(make_member("eve", Role.VIEWER))
    assert viewer.post(f"/muted/{rule.pk}/unmute").status_code == 403


def test_a_rule_reaches_the_browser_that_kept_the_page(web: Client, member: Any, run: Run) -> None:
    web.get(address(run))
    etag = web.get(address(run))["ETag"]
    assert web.get(address(run), headers={"if-none-match": etag}).status_code == 304
    mute(run, "unclassified", "run", "known", member)
    assert web.get(address(run), headers={"if-none-match": etag}).status_code == 200
