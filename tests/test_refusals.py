"""A sentence for a user is a refusal that no floor below a door puts into the words of a door."""

import ast
import re
from collections.abc import Iterator
from datetime import timedelta
from importlib import import_module

import pytest
from django.utils import timezone

from inspector.api.answers import WORDS as API_WORDS, job_answer
from inspector.runs.jobs.job_values import JobValues
from inspector.web.remedies import WORDS as PAGE_WORDS
from rollout_inspector.commands.remedies import WORDS as COMMAND_WORDS, sentence_of
from rollout_inspector.refusal import Refusal, Remedy, Words, worded
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import create_run
from tests.samples.product import modules

DOORS = ("inspector", "rollouts.management", "rollout_inspector.commands", "rollout_inspector.guard.pytest_plugin")
TOOLS = ("tools.gpu_proof.",)
"""What people run who make the product."""
NO_REFUSALS = {
    "EngineError": "an engine that fails ends rollouts; who samples decides what that means",
    "PatternTooSlow": "it has no sentence; each door says what is to be done",
    "RenderFailed": "what a chat template raises, of which the check makes an answer",
    "ServerError": "the client is one file without an import of ours",
    "StorageDown": "an outage: the same may be done later",
}
"""Exceptions of ours that doors catch and that are no refusals, and why."""
FOREIGN = re.compile(r"--(no-deps|head|enable-deterministic-inference)\b")
"""Options of other programs."""
OF_A_DOOR = re.compile(r"(?<![\w-])--[a-z][a-z-]*|\b[Pp]ress\b|\bbutton\b|\bon the page of\b|\bunder “")


def caught(source: str) -> Iterator[str]:
    """The names of the exceptions that a module catches."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ExceptHandler) and node.type is not None:
            for part in node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]:
                yield part.attr if isinstance(part, ast.Attribute) else ast.unparse(part)


def exceptions_below() -> dict[str, type[BaseException]]:
    """Every exception that a module below the doors defines, by its name."""
    classes = {}
    for module, source in modules().items():
        if module.startswith(DOORS):
            continue
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef) and node.bases:
                names = [ast.unparse(base) for base in node.bases]
                if any(name.endswith(("Error", "Exception", *classes, "Refusal")) for name in names):
                    cls = getattr(import_module(module), node.name)
                    if issubclass(cls, BaseException):
                        classes[node.name] = cls
    return classes


def words_of_doors(source: str) -> list[str]:
    """The sentences of a module that name an option, a button or a section of a page."""
    tree = ast.parse(source)
    docstrings = {
        id(statement.value)
        for node in ast.walk(tree)
        for statement in (node.body if isinstance(getattr(node, "body", None), list) else [])
        if isinstance(statement, ast.Expr)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings
        if " " in node.value and OF_A_DOOR.search(FOREIGN.sub("", node.value))
    ]


def test_every_exception_that_a_door_catches_is_a_refusal() -> None:
    below = exceptions_below()
    at_doors = {
        name for module, source in modules().items() if module.startswith(DOORS) for name in caught(source)
    } & below.keys()
    assert {"LaunchRefused", "FileRefused"} <= at_doors
    others = {name for name in at_doors if not issubclass(below[name], Refusal)}
    assert others == NO_REFUSALS.keys()


def test_what_a_door_catches_would_be_found() -> None:
    source = "try: f()\nexcept (launch.LaunchRefused, OSError) as error: raise\nexcept Refusal: pass"
    assert list(caught(source)) == ["LaunchRefused", "OSError", "Refusal"]


@pytest.mark.parametrize("words", [PAGE_WORDS, API_WORDS, COMMAND_WORDS], ids=["pages", "API", "commands"])
def test_every_door_words_every_remedy(words: Words) -> None:
    assert list(words) == list(Remedy)
    assert all(sentence[0].isupper() and sentence.endswith(".") for sentence in words.values())


def test_a_remedy_follows_its_sentence() -> None:
    assert worded("No row.", "", COMMAND_WORDS) == worded("No row.", None, COMMAND_WORDS) == "No row."
    assert worded("No row.", "leave_out", {Remedy.LEAVE_OUT: "Leave it out."}) == "No row. Leave it out."


@pytest.mark.django_db
@pytest.mark.parametrize("status", ["failed", "done"])
def test_page_and_api_say_the_same_of_a_job_each_with_its_own_words(status: str) -> None:
    run = create_run(Run.Kind.IMPORT, "run")
    job = Job(
        code="abcd", run=run, kind="export", status=status, created_at=timezone.now(),
        expires_at=timezone.now() + timedelta(hours=1), notes=["1 was left out.", "Trajectory a.", "Trajectory b."],
    )
    if status == "failed":
        job.error, job.remedy, job.notes = "Row 0 is faulty.", Remedy.LEAVE_OUT, []
    line, values = JobValues.of(job, run), job_answer(job)
    assert line.notes == values.notes == job.notes[1:]
    if status == "done":
        assert line.sentence == values.sentence == "0 written. 1 was left out."
    else:
        assert line.sentence == f"Row 0 is faulty. {PAGE_WORDS[Remedy.LEAVE_OUT]}"
        assert values.sentence == values.error == f"Row 0 is faulty. {API_WORDS[Remedy.LEAVE_OUT]}"


@pytest.mark.django_db
def test_what_a_job_stored_before_there_were_remedies_is_shown_as_it_is() -> None:
    run = create_run(Run.Kind.IMPORT, "run")
    job = Job(code="abcd", run=run, kind="export", status="failed", error="Leave it out with --leave-out.")
    assert JobValues.of(job, run).sentence == job.error


def test_a_command_names_the_option_that_is_to_blame() -> None:
    assert sentence_of(Refusal("It is no number.", field="pad_to")) == "--pad-to: It is no number."
    assert sentence_of(Refusal("Faulty.", Remedy.LEAVE_OUT)).startswith("Faulty. Leave such trajectories out with --")
    assert sentence_of(OSError("No space.")) == "No space."


def test_no_sentence_below_a_door_is_in_its_words() -> None:
    found = {
        module: sentences
        for module, source in modules().items()
        if not module.startswith((*DOORS, *TOOLS)) and (sentences := words_of_doors(source))
    }
    assert found == {}


def test_words_of_a_door_would_be_found() -> None:
    assert words_of_doors('f(f"Leave {n} out with --leave-out.")')
    assert words_of_doors('raise Refusal("Then press Resume.")')
    assert words_of_doors('why = "Choose one under “Diagnose again” on the page of the run."')
    assert not words_of_doors('"""Press a button, or say --force."""\nwhy = "Start one: ray start --head."')
    assert not words_of_doors('parser.add_argument("--force")')
