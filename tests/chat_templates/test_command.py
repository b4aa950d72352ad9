"""manage.py check_template: its JSON, its exit status, its sentences."""

import json
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.text.tokenizers import load
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.models import TemplateCheck
from tests.samples.template_command import run

PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{{ m.tool_calls }}<|im_end|>\n{% endfor %}"
POSITIONED = PLAIN.replace("<|im_start|>", "{% if loop.last %}{{ '' }}{% else %}~{% endif %}<|im_start|>")


@pytest.fixture
def template(tmp_path: Path) -> Any:
    def write(text: str) -> str:
        path = tmp_path / "chat_template.jinja"
        path.write_text(text)
        return str(path)

    return write


KEYS = {
    "name", "passed", "status", "index", "expected_ids", "actual_ids", "expected_text", "actual_text", "line", "source",
    "detail",
}


@pytest.mark.django_db
def test_json_and_exit_status(tiny_tokenizer: Path, template: Any) -> None:
    status, out, err = run("--tokenizer", str(tiny_tokenizer), "--chat-template", template(PLAIN), "--json")
    found = json.loads(out)
    assert (status, err, found["prefix_preserving"], found["repair"]) == (0, "", True, None)
    assert all(set(check) >= KEYS for check in found["checks"])
    assert {check["status"] for check in found["checks"]} <= {"ok", "broken", "raises", "unsupported"}
    status, out, _ = run(
        "--tokenizer", str(tiny_tokenizer), "--chat-template", template(POSITIONED), "--json", "--repair"
    )
    found = json.loads(out)
    assert (status, found["prefix_preserving"]) == (1, False)
    assert found["checks"][0]["name"] == "tool_append" and found["checks"][0]["index"] is not None


@pytest.mark.django_db
def test_a_void_pass_is_no_pass(tiny_tokenizer: Path, template: Any) -> None:
    deaf = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}", 1)
    status, out, err = run("--tokenizer", str(tiny_tokenizer), "--chat-template", template(deaf), "--json")
    found = json.loads(out)
    assert (status, found["prefix_preserving"], found["checks"][0]["void"]) == (2, None, True)
    assert "is not rendered" in err


@pytest.mark.django_db
def test_a_void_pass_is_no_pass_in_the_words_of_the_post_nor_of_all(tiny_tokenizer: Path, template: Any) -> None:
    # The post's content is a string and its call has no arguments. Here the one vanishes, and other calls are refused.
    parts = "{% set last = loop.last %}{% for p in m.content %}{{ p.text }}{{ last }}{% endfor %}"
    assert run("--chat-template", template(PLAIN.replace("{{ m.content }}", parts)))[0] == 1
    no_arguments = PLAIN.replace(
        "{{ m.tool_calls }}",
        "{% for c in m.tool_calls or [] if c.function.arguments %}{{ raise_exception('no') }}{% endfor %}",
    )
    status, _, err = run("--chat-template", template(no_arguments))
    assert status == 2 and "raises" in err
    deaf = register_tokenizer(tiny_tokenizer, "deaf")
    deaf.chat_template = register_chat_template(PLAIN.replace("{{ m.tool_calls }}", ""))
    deaf.save()
    assert run("--all")[0] == 2


def test_qwen3_is_repaired(corpus: Path, db: None) -> None:
    folder = str(corpus / "tokenizers" / "qwen3")
    status, out, _ = run("--tokenizer", folder, "--repair", "--json")
    found = json.loads(out)
    assert status == 1
    assert found["repair"]["verified"] is True and "+            {%- if true %}" in found["repair"]["diff"]
    status, out, _ = run("--tokenizer", folder, "--repair")
    assert status == 1
    assert "TITO with tool results: not safe, an empty think block disappears" in out
    assert "decided on line 44" in out and "+            {%- if true %}" in out
    assert found["repair"]["wider"]["diff"] in out


@pytest.mark.django_db
def test_what_cannot_be_checked_says_why(tiny_tokenizer: Path, template: Any, tmp_path: Path) -> None:
    loops = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"
    for arguments, said in [
        ([], "Name what to check"),
        (["--tokenizer", "nobody"], "no registered tokenizer"),
        (["--tokenizer", str(tmp_path)], "no tokenizer.json"),
        (["--chat-template", str(tmp_path / "none")], "none cannot be read: No such file"),
        (["--chat-template", str(tiny_tokenizer)], "cannot be read: Is a directory"),
        (["--all"], "No tokenizer is registered"),
    ]:
        status, _, err = run(*arguments)
        assert (status, said in err) == (2, True), (arguments, err)
    for text, more, said in [
        ("{{ raise_exception('never') }}", [], "never"),
        ("{% if %}", [], "syntax error on line 1"),
        (loops, [], "than"),  # longer than it may, or more computing time than it may: whichever limit is hit first
        (PLAIN, ["--kwargs", "[]"], "one JSON object"),
    ]:
        status, _, err = run("--chat-template", template(text), *more)
        assert (status, said in err) == (2, True), (text, err)


@pytest.mark.django_db
def test_what_is_given_as_json_names_the_entry_and_what_it_lacks(template: Any, tmp_path: Path) -> None:
    given = tmp_path / "given.json"
    for option, value, said in [
        ("--tools", {}, "must hold a JSON list of objects"),
        ("--tools", [{"type": "function", "function": {"name": "f"}}, 5], "given.json: Tool 2 is not an object: 5."),
        ("--tools", [{"function": "f"}], 'Tool 1 is not an object: {"function": "f"}.'),
        ("--tools", [{"type": "function", "function": {"parameters": {}}}], "Tool 1 is not a function with a “name”"),
        ("--conversation", [{"role": "user", "content": "x"}, {"content": "y"}], "Message 2 is not an object with a"),
    ]:
        given.write_text(json.dumps(value))
        status, _, err = run("--chat-template", template(PLAIN), option, str(given))
        assert (status, said in err) == (2, True), (value, err)
    for schema in ({"name": "f", "parameters": {}}, {"type": "function", "function": {"name": "f"}}):
        given.write_text(json.dumps([schema]))
        assert run("--chat-template", template(PLAIN), "--tools", str(given))[0] == 0


@pytest.mark.django_db
def test_a_registered_name_and_all(tiny_tokenizer: Path) -> None:
    loaded = load(tiny_tokenizer)
    register_tokenizer(tiny_tokenizer, "demo")
    status, out, _ = run("--tokenizer", "demo", "--json")
    found = json.loads(out)["tokenizer"]
    assert (status, found["sha256"], found["name"]) == (0, loaded.sha256, "demo")
    status, out, _ = run("--all")
    assert status == 0 and out.startswith("demo") and "ooo" in out and "The answers are stored" in out
    (stored,) = TemplateCheck.objects.all()
    assert stored.status == "done" and stored.cells and stored.tokenizer is not None and stored.tokenizer.name == "demo"
    status, out, _ = run("--all", "--json")
    (line,) = json.loads(out)["tokenizers"]
    assert line["prefix_preserving"] is True and line["repair_detail"] == ""
    # What is answered is not rendered again, unless a repair is asked for that nobody has looked for.
    TemplateCheck.objects.update(report=stored.report | {"form": "stored"})  # type: ignore[operator]
    _, out, _ = run("--all", "--json")
    assert json.loads(out)["tokenizers"][0]["form"] == "stored"
    _, out, _ = run("--all", "--json", "--repair")
    (line,) = json.loads(out)["tokenizers"]
    assert line["form"] != "stored" and "nothing to repair" in line["repair_detail"]
    assert TemplateCheck.objects.get().report == {key: line[key] for key in line if key != "name"}


@pytest.mark.django_db
def test_all_says_which_could_not_be_checked(tiny_tokenizer: Path) -> None:
    broken = register_tokenizer(tiny_tokenizer, "broken")
    broken.chat_template = register_chat_template("{% if %}")
    broken.save()
    status, out, _ = run("--all")
    assert status == 2 and "syntax error on line 1" in out and TemplateCheck.objects.get().status == "failed"
    broken.chat_template = None
    broken.save()
    status, out, _ = run("--all")
    assert status == 2 and "The tokenizer has no chat template." in out
    status, _, err = run("--all", "--kwargs", "{}")
    assert status == 2 and "leave --kwargs out" in err


@pytest.mark.django_db
def test_without_a_tokenizer_it_says_so(template: Any) -> None:
    status, out, _ = run("--chat-template", template(PLAIN))
    assert status == 0 and "without a tokenizer" in out
