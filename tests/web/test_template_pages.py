"""The lab's further pages: the repair, own conversations, uploads, the matrix, the comparison, the ways from a run."""

import csv
import io
import json
import re
import zipfile
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.core.management import call_command
from django.test import Client
from django.utils import timezone
from django.utils.html import escape

from inspector.chat_templates.check_values import failing_probe
from inspector.chat_templates.repair_page import message_words
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.streams.trajectory import Request, Step, Trajectory
from rollout_inspector.text import chat_templates
from rollouts import gallery
from rollouts.jobs import template_checks
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.models import ChatTemplate, Job, Run, TemplateCheck, Tokenizer
from rollouts.store.people.shares import create_share
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.worker.jobs import do_job
from tests.samples.chat_templates import BROKEN, SAFE, TALK
from tests.web.samples import one_line

pytestmark = pytest.mark.django_db


def ask(web: Client, **fields: Any) -> tuple[str, str]:
    """The address of the check, and its page."""
    response = web.post("/templates", fields, follow=True)
    assert response.redirect_chain, response.content.decode()
    return response.redirect_chain[-1][0], response.content.decode()


def test_the_twin_of_a_refused_form_says_what_is_wrong(web: Client) -> None:
    refused = web.post("/templates.json", {"chat_template": "", "tools": "{}"})
    assert refused.status_code == 400 and set(refused.json()["errors"]) == {"tools"}
    assert refused.json()["errors"]["tools"][0].startswith("This has to be a JSON list.")
    assert (
        web.post("/templates.json").json()["errors"]["chat_template"]
        and not web.get("/templates.json").json()["errors"]
    )


# --- the repair ---
def test_a_repair_is_found_shown_and_handed_out(web: Client, answered: None) -> None:
    address, page = ask(web, chat_template=BROKEN)
    repair = TemplateCheck.objects.get().report["repair"]  # type: ignore[index]
    assert "verified" in page and 'data-copy="template-repair"' in page and 'data-copy="diff-repair"' in page
    file = web.get(address + "/repair.jinja")
    assert file.content.decode() == repair["template"] and "attachment" in file["Content-Disposition"]
    assert web.get(address + "/repair.diff").content.decode() == repair["diff"]
    assert chat_templates.check(None, file.content.decode()).prefix_preserving
    assert chat_templates.check(None, BROKEN).prefix_preserving is False
    assert f"The render of {repair['changed_conversations']} conversations changes" in page


def test_what_fails_comes_first_and_both_renders_meet_again_after_a_gap(
    web: Client, answered: None, tokenizer: Tokenizer
) -> None:
    _, page = ask(web, tokenizer="demo", chat_template=BROKEN)
    report: Any = TemplateCheck.objects.get().report
    failing, passing = page[page.index("All probes") : page.index('id="source"')].split('id="passing"')
    for check in report["checks"]:
        part = failing if check["status"] in ("broken", "raises") or check["void"] else passing
        other = passing if part is failing else failing
        anchor = f'id="probe-{check["name"]}"'
        assert anchor in part and anchor not in other, check["name"]
    summaries = re.findall(r"<summary>(.*?)</summary>", passing, re.DOTALL)
    assert all(
        any(escape(one["title"]) in said for said in summaries) for one in report["checks"] if one["status"] == "ok"
    )
    assert "≠</span> differs" in page and len(re.findall(r'<a class="btn primary"[^>]*>Use for a run<', page)) == 1
    check = next(one for one in report["checks"] if one["name"] == "user_append")
    body = page[page.index(f'id="probe-{check["name"]}"') :]
    rows = re.findall(r'<tr class="(\w+)">(.*?)</tr>', body[: body.index("</table>")], re.DOTALL)
    assert [kind for kind, _ in rows] == ["equal", "site", "equal", "new"]
    said = [re.sub(r"<[^>]*>", "", html) for _, html in rows]
    assert "(last)" in said[1] and not any("(last)" in text for text in (said[0], said[2], said[3]))
    assert re.search(r'<i class="x" title="id \d+, template line 2">&lt;\|im_end\|&gt;', rows[2][1])


def test_generation_tags_are_offered_and_handed_out(web: Client, answered: None, tokenizer: Tokenizer) -> None:
    address, page = ask(web, tokenizer="demo", chat_template=SAFE)
    marks = TemplateCheck.objects.get().report["marks"]  # type: ignore[index]
    assert marks["verified"] and 'id="template-marks"' in page and "{% generation %}" in marks["template"]
    file = web.get(address + "/marks.jinja")
    assert file.content.decode() == marks["template"] and "attachment" in file["Content-Disposition"]
    assert web.get(address + "/marks.diff").content.decode() == marks["diff"]
    other, page = ask(web, tokenizer="demo", chat_template=marks["template"])
    assert "generation tags of its own" in page and web.get(other + "/marks.jinja").status_code == 404


def test_the_repaired_template_is_checked_with_one_press(web: Client, answered: None) -> None:
    ask(web, chat_template=BROKEN)
    template = TemplateCheck.objects.get().report["repair"]["template"]  # type: ignore[index]
    _, page = ask(web, chat_template=template, label="mine, repaired")
    assert "<h1>mine, repaired</h1>" in page
    assert "Prefix-preserving for tool messages." in page and "template-repair" not in page


def test_a_template_that_drops_reasoning_is_not_called_prefix_preserving(web: Client, answered: None) -> None:
    """The probe of the TITO post passes, and others with tool results fail: no page says yes alone."""
    address, page = ask(web, chat_template=gallery.chat_templates()["thinking"])
    assert "Prefix-preserving for some tool messages, not for all." in page and "tone-warning" in page
    assert web.get(f"{address}.json").json()["prefix_preserving"] is True, "the answer of the twelve lines stays"
    said = web.get("/templates.json").json()["checks"][0]
    assert said["broken_for_tools"] == 2
    listed = web.get("/templates").content.decode()
    assert f"for some tool messages; {said['broken_for_tools']} probe" in listed and "Recent checks" in listed


def test_without_a_repair_the_page_says_what_stays_broken(web: Client, answered: None) -> None:
    address, page = ask(web, chat_template="{{ messages | length }}" + SAFE)
    assert "No verified repair" in page and "No repair was found" in page
    assert web.get(address + "/repair.jinja").status_code == 404


def test_the_verdict_is_shown_while_the_repair_is_searched(web: Client, sent: list[int]) -> None:
    check, _ = template_checks.ask(None, register_chat_template(BROKEN), repair=False)
    do_job(check.job.pk)
    address = f"/templates/checks/{check.code}"
    assert "Search for a repair" in web.get(address).content.decode()
    page = web.post(address + "/search", follow=True).content.decode()
    assert "A worker looks for a repair" in page and "Not prefix-preserving" in page and 'hx-trigger="every 1s"' in page
    part = web.get(address, headers={"HX-Request": "true", "HX-Target": "repair"}).content.decode()
    assert part.lstrip().startswith("<section") and "<html" not in part
    do_job(sent[-1])
    part = web.get(address, headers={"HX-Request": "true", "HX-Target": "repair"}).content.decode()
    assert "verified" in part and "hx-trigger" not in part


def test_a_visitor_with_a_link_may_take_the_repair_and_start_nothing(
    web: Client, visitor: Client, member: Any, answered: None
) -> None:
    address, _ = ask(web, chat_template=BROKEN)
    _, token = create_share(member, TemplateCheck.objects.get())
    assert visitor.get(address + "/repair.jinja").status_code == 302
    page = visitor.get(f"/s/{token}", follow=True).content.decode()
    assert "Check the repaired template" not in page and "Download the template" in page
    assert visitor.get(address + "/repair.jinja").status_code == 200
    assert visitor.post(address + "/search").status_code in (302, 403)
    assert visitor.get("/templates/matrix").status_code == 302 == visitor.get("/templates/compare").status_code


# --- the form ---
def test_an_own_conversation_is_probed_and_goes_through_every_strategy(
    web: Client, answered: None, tokenizer: Tokenizer
) -> None:
    assert "And 3+3?" in web.get("/templates/conversation").content.decode()
    response = web.post("/templates/conversation", {"tokenizer": "demo", "conversation": json.dumps(TALK)}, follow=True)
    way, page = response.redirect_chain[-1][0], response.content.decode()
    address = way.removesuffix("/conversation")
    assert way == address + "/conversation" and "After message 1" in page and "fixed_base" in page
    assert f'href="{way}"' in web.get(address).content.decode()
    strategies = web.get(way + ".json").json()["strategies"]
    assert strategies == web.get(address + ".json").json()["report"]["strategies"]
    # Its own probes are among those that a repair is searched for.
    _, page = ask(web, tokenizer="demo", chat_template=BROKEN, conversation=json.dumps(TALK))
    repair = TemplateCheck.objects.get(chat_template__text=BROKEN).report["repair"]  # type: ignore[index]
    assert "conversation_2" in repair["fixes"] and "Still broken" not in page
    again = web.get(f"/templates/conversation?check={address.rpartition('/')[2]}").content.decode()
    assert "It is 4." in again and "And 3+3?" not in again
    told = {slug for turn in strategies["turns"] for delta in turn["deltas"] for slug in delta["strategies"]}
    assert told | set(strategies["refused"]) >= {"tool_delta", "fixed_base", "per_message", "reconcile"}
    appended = next(d for d in strategies["turns"][0]["deltas"] if "fixed_base" in d["strategies"])
    assert appended["shared"] == appended["stream"] and "thanks" in "".join(t["text"] for t in appended["tokens"])
    other, _ = ask(web, tokenizer="demo")
    assert other != address and ask(web, tokenizer="demo", conversation=json.dumps(TALK, indent=1))[0] == address


def test_a_template_that_rewrites_history_has_step_wise_rows(web: Client, answered: None, tokenizer: Tokenizer) -> None:
    talk = [*TALK, {"role": "assistant", "content": "Any time."}, {"role": "user", "content": "and 3+3?"}]
    asked = {"tokenizer": "demo", "conversation": json.dumps(talk)}
    found = {}
    for name, template in (("safe", SAFE), ("broken", BROKEN)):
        way, page = ask(web, chat_template=template, **asked)
        found[name] = web.get(way + "/conversation.json").json()["strategies"]
        page = one_line(web.get(way + "/conversation"))
        assert "<code>step_wise</code></dt> <dd> 2 rows" in page, name
    broken, safe = found["broken"], found["safe"]
    assert "tool_delta" in broken["refused"] and not {"step_wise", "step_wise_merged"} & set(broken["refused"])
    first = next(d for d in broken["turns"][0]["deltas"] if "step_wise" in d["strategies"])
    assert first["shared"] < first["stream"] and "step_wise_merged" in first["strategies"]
    assert [row["messages"] for row in broken["rows"]["step_wise"]] == [[1], [3]]
    assert [row["messages"] for row in broken["rows"]["step_wise_merged"]] == [[1], [3]]
    assert [row["messages"] for row in safe["rows"]["step_wise_merged"]] == [[1, 3]]
    for rows in (broken["rows"], safe["rows"]):
        assert all(0 < row["trained"] < row["tokens"] for made in rows.values() for row in made)
    assert sum(row["trained"] for row in safe["rows"]["step_wise"]) == safe["rows"]["step_wise_merged"][0]["trained"]


@pytest.mark.parametrize(
    ("conversation", "sentence"),
    [
        ('[{"role": "user"},\n {"role": }]', "line 2, column 11"),
        ('["hello"]', "Message 1 is not an object with a “role”"),
        ('[{"role": "user"}, {"content": "x"}]', "Message 2 is not an object"),
        ("[" + " " * 200_001 + "]", "at most 200,000 characters"),
    ],
)
def test_a_conversation_that_is_none_is_told_by_its_line(web: Client, conversation: str, sentence: str) -> None:
    for way in ("/templates", "/templates/conversation"):
        response = web.post(way, {"chat_template": SAFE, "conversation": conversation})
        page = response.content.decode()
        assert sentence in page and response.status_code == 400 and not TemplateCheck.objects.exists()
        assert ("2 ▶ " in page) == ("line 2" in sentence)


@pytest.mark.parametrize(
    "conversation",
    [[{"role": "assistant", "content": "x"}], [{"role": "user", "content": 3}, {"role": "assistant", "tool_calls": 5}]],
)
def test_an_odd_conversation_ends_in_a_page(
    web: Client, answered: None, tokenizer: Tokenizer, conversation: list[Any]
) -> None:
    address, _ = ask(web, tokenizer="demo", conversation=json.dumps(conversation))
    assert web.get(address).status_code == 200


def test_an_uploaded_tokenizer_is_registered_and_asked_once(web: Client, answered: None, tiny_tokenizer: Path) -> None:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for file in tiny_tokenizer.iterdir():
            if file.suffix in (".json", ".jinja"):
                archive.write(file, file.name)

    def upload() -> str:
        return ask(web, tokenizer_file=SimpleUploadedFile("mine.zip", packed.getvalue()))[0]

    assert upload() == upload()
    assert Tokenizer.objects.count() == 1 and TemplateCheck.objects.get().tokenizer is not None
    bad = web.post("/templates", {"tokenizer_file": SimpleUploadedFile("x.zip", b"PK\x03\x04junk")})
    assert bad.status_code == 400 and "errors" in bad.content.decode()


# --- from a run and from a finding ---
def test_a_run_leads_to_the_check_of_its_template(web: Client, answered: None, tokenizer: Tokenizer) -> None:
    run = create_run(Run.Kind.LAUNCH, "mine", tokenizer=tokenizer, chat_template=tokenizer.chat_template)
    way = f"/templates?run={run.code}"
    assert f'href="{way}"' in web.get(f"/runs/{run.code}").content.decode()
    page = web.get(way + "&probe=seam").content.decode()
    assert "This is the chat template of the run" in page and 'name="probe" value="seam"' in page
    address, _ = ask(web, tokenizer="demo")
    assert web.get(way + "&probe=seam").url == f"{address}#probe-seam"  # type: ignore[attr-defined]
    assert web.get(way + "&probe=%22%3E").url == address  # type: ignore[attr-defined]


def test_a_finding_leads_to_the_check_with_the_tools_and_kwargs_of_its_step(
    web: Client, answered: None, tokenizer: Tokenizer
) -> None:
    tools = [{"type": "function", "function": {"name": "calc", "parameters": {}}}]
    plain = Step(np.arange(3, dtype=np.int32), np.arange(2, dtype=np.int32), request=Request(({"role": "user"},)))
    tooled = Step(np.arange(5, dtype=np.int32), np.arange(2, dtype=np.int32), request=Request(
        ({"role": "user"},), tools=tools, chat_template_kwargs={"enable_thinking": False}))
    run = create_run(Run.Kind.IMPORT, "mine", tokenizer=tokenizer, chat_template=tokenizer.chat_template)
    trajectory = save_trajectories(run, [Trajectory("a", (plain, tooled))])[0]
    way = f"/templates?trajectory={trajectory.code}&step=1&probe=tool_append"
    page = web.get(way).content.decode()
    assert "enable_thinking" in page and "calc" in page
    address, _ = ask(web, tokenizer="demo", tools=json.dumps(tools), kwargs=json.dumps({"enable_thinking": False}))
    assert web.get(way).url == f"{address}#probe-tool_append"  # type: ignore[attr-defined]
    # The first step had neither, and asks another question.
    assert web.get(f"/templates?run={run.code}").status_code == 200
    for odd in ("trajectory=none&step=x", f"trajectory={trajectory.code}&step=99", "run=%00", "step=²"):
        assert web.get(f"/templates?{odd}").status_code == 200


def test_a_link_goes_to_a_probe_that_fails() -> None:
    probes = {
        "tool_append": {"purpose": "p", "status": "ok", "decisive": True},
        "other": {"purpose": "q", "status": "broken", "decisive": True},
        "tool_append_one_by_one": {"purpose": "p", "status": "broken", "decisive": False},
        "tool_append_parallel": {"purpose": "p", "status": "broken", "decisive": True},
    }
    assert failing_probe({"probes": probes}, "tool_append") == "tool_append_parallel"
    assert failing_probe({"probes": probes}, "other") == "other"
    assert failing_probe(None, "seam") == "seam"


def test_every_probe_that_a_finding_leads_to_exists(web: Client, answered: None, tokenizer: Tokenizer) -> None:
    ask(web, tokenizer="demo")
    names = set((TemplateCheck.objects.get().cells or {})["probes"])
    assert {kind.probe for kind in KINDS.values()} - {""} <= names


# --- the matrix, the comparison ---
def test_the_matrix_is_made_filtered_and_given_as_csv(
    web: Client, answered: None, tokenizer: Tokenizer, django_assert_num_queries: Any
) -> None:
    other = register_chat_template(BROKEN, "broken")
    Tokenizer.objects.create(
        name="=cmd()", sha256="0" * 64, files_sha256=tokenizer.files_sha256, source="x", vocab_size=1,
        encoder="tokenizers", chat_template=other,
    )
    assert "Check the 2 that are missing" in web.get("/templates/matrix").content.decode()
    page = web.post("/templates/matrix", follow=True).content.decode()
    assert 'class="cell cell-broken"' in page and "missing" not in page
    with django_assert_num_queries(6):  # session, user, roles, tokenizers, checks, renderers
        twin = web.get("/templates/matrix.json").json()
    assert [one["prefix_preserving"] for one in twin["tokenizers"]] == [False, True]
    failing = web.get("/templates/matrix.json?show=failing&name=demo").json()
    assert len(failing["tokenizers"]) == 1 and len(failing["probes"]) < len(twin["probes"])
    table = list(csv.reader(io.StringIO(web.get("/templates/matrix.csv").content.decode())))
    assert [row[0] for row in table] == ["tokenizer", "'=cmd()", "demo"]
    assert table[1][table[0].index("tool_append")] == "broken" and table[2][table[0].index("tool_append")] == "ok"


def test_the_matrix_shows_what_the_command_answered(web: Client, tokenizer: Tokenizer) -> None:
    call_command("check_template", "--all", stdout=io.StringIO())
    twin = web.get("/templates/matrix.json").json()
    assert (twin["missing"], twin["answered"]) == (0, 1)
    assert twin["tokenizers"][0]["prefix_preserving"] is True and twin["tokenizers"][0]["cells"]["tool_append"] == "ok"


def test_the_words_of_a_message() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image"}, "b"]
    assert message_words({"role": "user", "content": parts})["text"] == "a {'type': 'image'} b"
    assert message_words({"role": "tool", "content": {"value": 1}})["text"] == "{'value': 1}"
    assert message_words({"role": "user", "content": "a"})["text"] == "a"


def test_the_matrix_keeps_what_an_earlier_version_of_the_checks_answered(
    web: Client, answered: None, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    web.post("/templates/matrix")
    check = TemplateCheck.objects.get()
    assert check.cells is not None and web.get("/templates/matrix.json").json()["versions"] == []
    check.cells["probes"]["tool_append"]["status"] = "broken"
    check.version = chat_templates.VERSION - 1
    check.save()
    web.post("/templates/matrix")
    (found,) = web.get("/templates/matrix.json").json()["versions"]
    assert (found["before"], found["after"]) == (chat_templates.VERSION - 1, chat_templates.VERSION)
    assert [(one["name"], one["before"], one["after"]) for one in found["turned"]] == [("tool_append", "broken", "ok")]
    assert "1 probe comes out differently" in web.get("/templates/matrix").content.decode()
    monkeypatch.setattr(chat_templates, "VERSION", chat_templates.VERSION + 1)
    web.post("/templates/matrix")
    assert [one["turned"] for one in web.get("/templates/matrix.json").json()["versions"]] == [[], found["turned"]]


def test_the_matrix_tells_how_far_it_is(web: Client, tokenizer: Tokenizer, sent: list[int]) -> None:
    page = web.post("/templates/matrix", follow=True).content.decode()
    assert "0 of 1 checked." in page and 'hx-trigger="every 1s"' in page


def test_two_templates_are_compared_by_text_and_by_probe(web: Client, answered: None) -> None:
    a, b = (register_chat_template(text, name) for text, name in ((BROKEN, "old"), (SAFE, "<new>")))
    way = f"/templates/compare?a={a.sha256}&b={b.sha256}"
    page = one_line(web.get(way))
    assert "Neither template has been checked" in page and "+++ &lt;new&gt;" in page
    assert 'hx-trigger="load, submit"' in page  # the page asks for the checks once, not again where that was refused
    assert "load, submit" not in one_line(web.get(way, headers={"HX-Request": "true"}))
    page = web.post("/templates/compare", {"a": a.sha256, "b": b.sha256, "tokenizer": ""}, follow=True).content.decode()
    assert "broken → ok" in page and "ok → ok" not in page
    opened = re.findall(r"<details( open)?>", page.split('class="probes"')[1])
    assert opened[0] == " open" and opened == sorted(opened, reverse=True), "what comes out differently stands first"
    twin = web.get(way.replace("compare", "compare.json")).json()
    turned = {probe["name"]: (probe["a"], probe["b"]) for probe in twin["probes"] if probe["turned"]}
    assert turned["tool_append"] == ("broken", "ok")
    same = web.get(f"/templates/compare.json?a={a.sha256}&b={a.sha256}").json()
    assert same["same"] and not any(probe["turned"] or probe["render_differs"] for probe in same["probes"])
    assert web.get("/templates/compare?a=nothing&b=nothing").status_code == 404
    offered = web.get("/templates/compare").content.decode()
    assert ChatTemplate.objects.count() == 2
    # Two that differ are chosen beforehand: the first of the one list, another of the other.
    one, other = offered.split('id="c-b"')
    (first, *_), (chosen,) = re.findall(r'<option value="(\w+)"', one), re.findall(r'value="(\w+)"\s+selected', other)
    assert "selected" not in one.split('id="c-a"')[1] and first != chosen


def test_a_question_that_got_lost_says_so_and_can_be_asked_again(web: Client, sent: list[int]) -> None:
    _, page = ask(web, chat_template=SAFE)
    assert "No worker has answered" not in page
    ask(web, chat_template=SAFE)
    assert len(sent) == 1
    Job.objects.update(heartbeat_at=timezone.now() - timedelta(minutes=6))
    assert "No worker has answered" in web.get(f"/templates/checks/{TemplateCheck.objects.get().code}").content.decode()
    ask(web, chat_template=SAFE)
    assert len(sent) == 2
