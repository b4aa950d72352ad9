"""What is made is made in a project that somebody named; a template and a check are each project's own."""

import ast
from collections.abc import Iterator
from typing import Any

import pytest

from rollouts.jobs import template_checks
from rollouts.jobs.diagnosis import renderer_for
from rollouts.store.chat_templates.chat_templates import (
    chat_template_labels, chat_template_texts, find_chat_template, newest_chat_templates, register_chat_template
)
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.models import ChatTemplate, Project, ProjectTemplate, Run, StoredStep, default_project
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from tests.conftest import ROOT
from tests.people import the_default_project
from tests.samples.product import source_files
from tests.storage.build import chain

MAKERS = {
    "create_run": 3, "register_tokenizer": 4, "register_chat_template": 2, "find_tokenizer": 1, "hub_tokenizer": 2,
    "launch": 5, "model_tokenizer": 1, "template_checks.ask": 7,
}
"""What makes a row in a project -> the place of ``project`` among its arguments."""


def calls(source: str) -> Iterator[tuple[str, ast.Call]]:
    """Calls by the name of the function, with the module for a name that several modules have."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        if name != "push.create_run":  # a door, whose token names the project
            yield name if name in MAKERS else name.rpartition(".")[2], node


def without_project(source: str) -> list[str]:
    """The calls that leave the project to the default."""
    return [
        f"{name} in line {call.lineno}"
        for name, call in calls(source)
        if name in MAKERS
        and len(call.args) <= MAKERS[name]
        and not any(one.arg in ("project", None) for one in call.keywords)
    ]


def asks_a_server(source: str) -> bool:
    """The file makes runs by the client alone: there the token names the project."""
    return "from rollout_inspector.client.client import" in source and "from rollouts.store" not in source


def test_no_code_of_the_product_leaves_the_project_to_the_default() -> None:
    faults = {}
    for file in source_files():
        source = file.read_text(encoding="utf-8")
        if file.name != "client.py" and not asks_a_server(source) and (found := without_project(source)):
            faults[str(file.relative_to(ROOT))] = found
    assert faults == {}


def test_the_check_above_sees_what_it_looks_for() -> None:
    assert without_project("services.create_run(kind, name)") == ["create_run in line 1"]
    assert without_project("launch(form)\ntemplate_checks.ask(a, b)") == [
        "launch in line 1", "template_checks.ask in line 2",
    ]
    assert without_project("create_run(kind, name, project=p)\nregister_chat_template(text, label, p)\nask(x)") == []


@pytest.mark.django_db
def test_a_template_has_a_name_per_project_and_its_text_once() -> None:
    ours, theirs = the_default_project(), Project.objects.create(name="theirs")
    template = register_chat_template("{{ messages }}", "ours", ours)
    assert find_chat_template(theirs, template.sha256) is None and newest_chat_templates(theirs, 9) == []
    assert chat_template_texts(theirs, [template.sha256]) == {} == chat_template_labels(theirs, [template.sha256])
    assert register_chat_template("{{ messages }}", "theirs", theirs) == template
    assert chat_template_labels(ours, [template.sha256]) == {template.sha256: "ours"}
    assert chat_template_labels(theirs, [template.sha256]) == {template.sha256: "theirs"}
    assert ChatTemplate.objects.count() == 1 and ProjectTemplate.objects.count() == 2


@pytest.mark.django_db
def test_two_projects_have_two_checks_of_one_question_and_old_codes_stay() -> None:
    theirs = Project.objects.create(name="theirs")
    template = register_chat_template("{{ messages }}", "ours")
    register_chat_template("{{ messages }}", "theirs", theirs)
    one, _ = template_checks.ask(None, template)
    other, _ = template_checks.ask(None, template, project=theirs)
    assert one.code != other.code and (one.template_name, other.template_name) == ("ours", "theirs")
    assert (one.project_id, other.project_id) == (default_project(), theirs.pk)
    assert one.code == "vgk46c7e963v"  # a link of the days before projects opens it still
    assert template_checks.ask(None, template, project=theirs)[0] == other


@pytest.mark.django_db
def test_a_file_that_names_the_hash_of_a_foreign_template_gets_nothing_of_it(tiny_tokenizer: Any) -> None:
    theirs = Project.objects.create(name="theirs")
    secret = register_chat_template("{# their secret #}{{ messages[0].content }}", "secret", theirs)
    tokenizer = register_tokenizer(tiny_tokenizer, "demo")
    run = create_run(Run.Kind.IMPORT, "mine", tokenizer=tokenizer)
    save_trajectories(run, [chain("a")])
    StoredStep.objects.filter(trajectory__run=run).update(chat_template_sha256=secret.sha256)
    assert renderer_for(run)(secret.sha256) is None
    of_theirs = create_run(Run.Kind.IMPORT, "theirs", tokenizer=tokenizer, project=theirs)
    assert renderer_for(of_theirs)(secret.sha256) is not None
