"""The launch form beyond its defaults: chat templates, sampling, what is stored, and what bad input gets to hear."""

import json
import random
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollouts.jobs import template_checks
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.models import ChatTemplate, Job, ProjectTemplate, Run, TemplateCheck
from rollouts.store.runs.runs import end_run
from rollouts.store.trajectories.launched_trajectories import fail_trajectory
from tests.samples.pages import form_of

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("sent", "tiny_tokenizer")]

PLAIN = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"


def post(web: Client, address: str = "/runs/new", **changes: Any) -> Any:
    return web.post(address, {**form_of(web, "/runs/new"), **changes})


def test_everything_that_is_sampled_with_is_stored_and_shown(web: Client) -> None:
    asked = {
        "temperature": "0.7", "top_p": "0.9", "top_k": "40", "min_p": "0.05", "seed": "11", "max_tokens": "33",
        "alternatives": "5",
        "stop": "</answer>\r\n\\n\\n", "environment_seconds": "2.5", "compare": "strict",
        "template_kwargs": '{"enable_thinking": false}',
    }
    assert post(web, **asked).status_code == 302
    run = Run.objects.get()
    assert {name: run.settings[name] for name in asked} == {
        "temperature": 0.7, "top_p": 0.9, "top_k": 40, "min_p": 0.05, "seed": 11, "max_tokens": 33, "alternatives": 5,
        "stop": ["</answer>", "\n\n"], "environment_seconds": 2.5, "compare": "strict",
        "template_kwargs": {"enable_thinking": False},
    }
    page = web.get(f"/runs/{run.code}").content.decode()
    for name, value in (
        ("top_k", "40"),
        ("min_p", "0.05"),
        ("Seconds per tool call", "2.5"),
        ("Compare with a full render", "strict"),
    ):
        assert f"<dt>{name}</dt><dd>{value}</dd>" in page
    assert "&lt;/answer&gt;" in page and "enable_thinking" in page and "The same seed gives the same tokens" in page
    assert web.get(f"/runs/{run.code}.json").json()["run"]["settings"]["stop"] == ["</answer>", "\n\n"]


def test_a_form_without_the_newer_fields_still_works(web: Client) -> None:
    older = {"model", "strategy", "environment", "prompts", "group", "max_turns", "max_tokens", "temperature", "top_p"}
    values = {name: value for name, value in form_of(web, "/runs/new").items() if name in older}
    assert web.post("/runs/new.json", values).status_code == 201
    assert Run.objects.get().settings["compare"] == "ignore_whitespace"


def label_of(template: ChatTemplate) -> str:
    return ProjectTemplate.objects.get(chat_template=template).label


def test_templates_are_chosen_pasted_or_uploaded(web: Client) -> None:
    known = register_chat_template(PLAIN, "plain")
    upload = SimpleUploadedFile("rows.jinja", (PLAIN + "{# rows #}").encode())
    assert post(web, chat_template=known.sha256, rows_chat_template_file=upload).status_code == 302
    run = Run.objects.select_related("chat_template", "rows_chat_template").get()
    assert run.chat_template == known and run.rows_chat_template is not None
    assert run.rows_chat_template.text == PLAIN + "{# rows #}" and label_of(run.rows_chat_template) == "rows.jinja"
    page, twin = web.get(f"/runs/{run.code}").content.decode(), web.get(f"/runs/{run.code}.json").json()["run"]
    assert "Chat template of the rows" in page and known.sha256 in page and run.rows_chat_template_id in page
    assert (twin["chat_template"], twin["rows_chat_template"]) == (known.sha256, run.rows_chat_template_id)
    pasted = post(web, chat_template_text=PLAIN.replace("\n", "\r\n"))
    assert pasted.status_code == 302 and Run.objects.order_by("-pk")[0].chat_template == known


@pytest.mark.parametrize(
    ("changes", "field", "sentence"),
    [
        ({"chat_template_text": "{% for %}"}, "chat_template", "cannot render the first prompt"),
        ({"chat_template_text": "{{ raise_exception('not me') }}"}, "chat_template", "not me"),
        ({"rows_chat_template_text": "{% if %}"}, "rows_chat_template", "cannot render the first prompt"),
        ({"chat_template": "f" * 64}, "chat_template", "not offered"),
        ({"chat_template_text": PLAIN, "chat_template_file": b"{{ x }}"}, "chat_template_file", "not several"),
        ({"chat_template_file": b"\xff\xfe\x00\x01"}, "chat_template_file", "not UTF-8"),
        ({"template_kwargs": "{1: 2}"}, "template_kwargs", "not JSON"),
        ({"template_kwargs": "[1]"}, "template_kwargs", "JSON object"),
        ({"template_kwargs": '{"x": NaN}'}, "template_kwargs", "NaN"),
        ({"template_kwargs": '{"x": "\\ud800"}'}, "template_kwargs", "half a character"),
        ({"template_kwargs": '{"x": ' + "[" * 200 + "]" * 200 + "}"}, "template_kwargs", "nested"),
        ({"template_kwargs": "[" * 100_000}, "template_kwargs", "not JSON"),
        ({"stop": "x" * 300}, "stop", "1 to 200"),
        ({"stop": "\n".join("abcdefghijklmnopqrstuvwxyz")}, "stop", "at most 16"),
        ({"min_p": "2"}, "min_p", "at most 1"),
        ({"alternatives": "21"}, "alternatives", "at most 20"),
        ({"top_k": "1e400"}, "top_k", "whole number"),
        ({"temperature": "1e400"}, "temperature", "Write a number"),
        ({"environment_seconds": "0"}, "environment_seconds", "above 0"),
        ({"compare": "loosely"}, "compare", "not offered"),
        ({"seed": "9" * 60}, "seed", "at most"),
        ({"prompts": "9" * 5000}, "prompts", ""),
        ({"prompts_file": b'{"messages": ' + b"[" * 50_000}, "prompts_file", "nested too deeply"),
        ({"prompts_file": b'{"messages": [{"role": "user", "content": "\\u0000"}]}'}, "prompts_file", "U+0000"),
        ({"prompts_file": bytes(range(256)) * 40}, "prompts_file", "Line 1"),
    ],
)
def test_what_cannot_be_launched_is_said_beside_its_field(
    web: Client, sent: list[int], changes: dict[str, Any], field: str, sentence: str
) -> None:
    files = {name: SimpleUploadedFile("x.jinja", value) for name, value in changes.items() if isinstance(value, bytes)}
    answer = post(web, **{**changes, **files})
    assert answer.status_code == 422 and not Run.objects.exists() and not sent
    assert sentence in str(answer.context["form"].errors[field])
    assert f'id="id_{field}_error"' in answer.content.decode()
    for file in files.values():
        file.seek(0)
    twin = post(web, "/runs/new.json", **{**changes, **files})
    assert twin.status_code == 422 and field in twin.json()["errors"]


HOSTILE = (
    "", " ", "nan", "-inf", "1e400", "9" * 400, "-0", "0x10", "１６", "\0", "\ud7ff", "<script>", "true", "{}", "[[]]",
    "{{ 7*7 }}", "../../etc/passwd", "a" * 5000, "null", "1_000",
)


def test_no_value_of_any_field_is_an_error_of_the_program(web: Client) -> None:
    more = ("chat_template_text", "rows_chat_template_text", "prompts_file", "seed")
    names = [*form_of(web, "/runs/new"), *more]
    values = form_of(web, "/runs/new") | {"prompts": "2", "group": "1"}
    rng = random.Random(5)
    for _ in range(60):
        changed = {name: rng.choice(HOSTILE) for name in rng.sample(names, rng.randint(1, 3))}
        answer = web.post("/runs/new.json", {**values, **changed})
        assert answer.status_code in (201, 422), changed
        assert answer.status_code == 201 or all(answer.json()["errors"].values()), changed
    for query in ("?again=%00", "?again=zz", f"?chat_template={'z' * 64}", "?chat_template=%ff", "?repaired=x"):
        assert web.get(f"/runs/new{query}").status_code == 200


def test_an_earlier_run_fills_the_form_in(web: Client) -> None:
    known = register_chat_template(PLAIN, "plain")
    post(web, rows_chat_template=known.sha256, stop="\\n", seed="4", name="first", template_kwargs='{"a": 1}')
    first = Run.objects.get()
    again = web.get(f"/runs/new?again={first.code}")
    assert "settings of an earlier run" in again.content.decode()
    initial = again.context["form"].initial
    values = {
        name: initial.get(name) or "" for name in again.context["form"].fields if not name.endswith("_file")
    }
    values["template_kwargs"] = json.dumps(values["template_kwargs"])
    assert web.post("/runs/new", values).status_code == 302
    second = Run.objects.order_by("-pk")[0]
    assert second.settings == first.settings and second.rows_chat_template == known and second.name == "first"
    assert f"/runs/new?again={first.code}" in web.get(f"/runs/{first.code}").content.decode()


def checked(run: Run | None = None, **report: Any) -> TemplateCheck:
    template = register_chat_template(PLAIN, "plain") if run is None else run.chat_template
    assert template is not None
    check, _ = template_checks.ask(None if run is None else run.tokenizer, template)
    Job.objects.filter(template_check=check).update(status="done", n_done=1)
    check.report, check.version = report, template_checks.chat_templates.VERSION
    check.cells = {"prefix_preserving": False, "probes": {}}
    check.save()
    return check


def test_a_check_leads_to_the_form_with_its_template_or_its_repair(web: Client) -> None:
    check = checked(repair={"template": PLAIN + "{# repaired #}", "wider": None}, repair_detail="found")
    chosen = web.get(f"/runs/new?chat_template={check.code}").context["form"]
    assert chosen.initial["chat_template"] == check.chat_template_id and chosen.opens_templates()
    page = web.get(f"/runs/new?chat_template={check.code}&repaired=repair").content.decode()
    assert PLAIN.split("%}")[0] in page and "{# repaired #}" in page
    repaired = web.get(f"/runs/new?chat_template={check.code}&repaired=repair").context["form"].initial
    for text, label in (
        (repaired["chat_template_text"], "plain, repaired"),
        (PLAIN + "{# mine #}", "pasted for a run"),
    ):
        post(web, chat_template_text=text, chat_template_label=repaired["chat_template_label"])
        run = Run.objects.select_related("chat_template").order_by("-pk")[0]
        assert run.chat_template is not None and (run.chat_template.text, label_of(run.chat_template)) == (text, label)
    missing = web.get(f"/runs/new?rows_chat_template={check.code}&repaired=wider").content.decode()
    assert "There is no such chat template here" in missing
    by_hash = web.get(f"/runs/new?rows_chat_template={check.chat_template_id}").context["form"]
    assert by_hash.initial["rows_chat_template"] == check.chat_template_id


def test_each_repair_of_a_check_leads_to_itself(web: Client) -> None:
    repair: dict[str, Any] | None = None
    for name in ("widest", "wider", "repair"):
        repair = {"template": f"{PLAIN}{{# {name} #}}", "wider": repair}
    check = checked(repair=repair, repair_detail="found")
    for name in ("repair", "wider", "widest"):
        form = web.get(f"/runs/new?chat_template={check.code}&repaired={name}").context["form"]
        assert form.initial["chat_template_text"] == f"{PLAIN}{{# {name} #}}"


def refused_run(web: Client) -> Run:
    post(web, prompts="1", group="1")
    run = Run.objects.get()
    trajectory = run.trajectories.get()
    run.trajectories.update(status="running")
    finding = Finding(Axis.STREAM, "empty_think_toggled", Severity.ERROR, evidence="Not prefix-preserving.", remedy="R")
    assert fail_trajectory(
        TrajectoryEnd(trajectory.pk, trajectory.attempt, error="refused", findings=(finding,))
    )
    end_run(run, Run.Status.FAILED, "refused")
    return Run.objects.select_related("tokenizer", "chat_template").get()


def test_a_refused_run_says_so_and_offers_the_repaired_template(web: Client) -> None:
    run = refused_run(web)
    page = web.get(f"/runs/{run.code}").content.decode()
    assert "The chat template was refused" in page and f"/templates?run={run.code}" in page
    assert "again-repaired" not in page
    check = checked(run, repair={"template": PLAIN + "{# repaired #}"}, repair_detail="found")
    page = web.get(f"/runs/{run.code}").content.decode()
    assert f"/templates/checks/{check.code}" in page and "Launch again with the repaired template" in page
    told = web.get(f"/runs/{run.code}.json").json()["refusal"]
    assert told["repair"] == "found" and told["kind"] == "empty_think_toggled"
    form = web.get(told["again_url"]).context["form"]
    assert form.initial["chat_template_text"].endswith("{# repaired #}") and form.initial["prompts"] == 1
    trajectory = web.get(f"/trajectories/{run.trajectories.get().code}")
    assert trajectory.status_code == 200 and "the template’s probe" in trajectory.content.decode()


def test_a_run_that_was_not_refused_says_nothing_of_it(web: Client) -> None:
    post(web)
    run = Run.objects.get()
    assert web.get(f"/runs/{run.code}.json").json()["refusal"] is None
    assert ChatTemplate.objects.count() == 1
