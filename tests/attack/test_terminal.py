"""L11: no command sends an escape sequence of foreign text to a terminal, in its output or in an error."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command, get_commands, load_command_class
from django.core.management.base import CommandError

from rollouts.management import TerminalCommand
from rollouts.management.commands.findings import Command as Findings
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.models import Run
from tests.web.trajectory_samples import Maker

HOSTILE = "a\x1b]0;owned\x07\x9b2J\u202eb"


def test_l11_every_command_writes_through_the_filter() -> None:
    names = [name for name, app in get_commands().items() if app == "rollouts"]
    assert len(names) > 8
    assert not [name for name in names if not isinstance(load_command_class("rollouts", name), TerminalCommand)]


@pytest.mark.django_db
def test_l11_output_and_errors_are_filtered(capsys: Any) -> None:
    command = Findings(stdout=io.StringIO(), stderr=io.StringIO())
    for out in (command.stdout, command.stderr):
        out.write(f"\r{HOSTILE}\tb\nc")
        assert out.getvalue() == "\\ra\\x1b]0;owned\\x07\\x9b2J\\u202eb\tb\nc\n"  # type: ignore[attr-defined]
    with pytest.raises(SystemExit):
        Findings().run_from_argv(["manage.py", "findings", HOSTILE])
    said = capsys.readouterr().err
    assert "\x1b" not in said and "There is no run" in said


@pytest.mark.django_db
def test_l11_each_command_that_reads_foreign_data(tiny_tokenizer: Path, tmp_path: Path) -> None:
    make = Maker(tiny_tokenizer)
    trajectory, (finding,) = make.broken(HOSTILE)
    run = make.run([trajectory], [[finding]])
    Run.objects.filter(pk=run.pk).update(name=HOSTILE)
    template, lines = tmp_path / "t.jinja", tmp_path / "a.jsonl"
    template.write_text(
        "{# "
        + HOSTILE
        + " #}{% for m in messages %}"
        + HOSTILE
        + "{{ m.role + m.content[:loop.revindex] }}{% endfor %}"
    )
    broken = {
        "format": "rollout-inspector",
        "version": 1,
        "external_id": HOSTILE,
        "steps": [{"finish_reason": HOSTILE}],
    }
    lines.write_text(json.dumps(broken) + "\n" + json.dumps({HOSTILE: HOSTILE}) + f'\n{{"a": "{HOSTILE}"\n')
    register_tokenizer(tiny_tokenizer, name=HOSTILE)
    for arguments in (
        ["findings", run.code], ["findings", run.code, "--checks"], ["diagnose", run.code], ["replay", run.code],
        ["check_template", "--chat-template", str(template), "--repair"], ["check_template", "--matrix"],
        ["import_rollouts", str(lines), "--format", "own_jsonl", "--name", HOSTILE], ["import_rollouts", HOSTILE],
        ["register_tokenizer", HOSTILE], ["export_rollouts", run.code, "--format", HOSTILE], ["api_token", "--list"],
        ["record", "--upstream", f"http://{HOSTILE}"], ["diagnose", run.code, "--tokenizer", HOSTILE + "x"],
    ):
        out, err = io.StringIO(), io.StringIO()
        try:
            call_command(*arguments, stdout=out, stderr=err)
        except CommandError:
            pass  # its text is written by the filter, see above
        except SystemExit:
            pass
        said = out.getvalue() + err.getvalue()
        assert all(char.isprintable() or char in "\n\t\r" for char in said), (arguments, said)
