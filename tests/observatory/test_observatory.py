"""The observatory of chat templates: a value for every template, whatever it is, and a site that opens anywhere."""

import json
import re
from pathlib import Path

import pytest

from tests.samples.guard import PLAIN, REWRITES
from tools.observatory.observe import family_of, main

NULL = PLAIN.replace("{{ m.content }}", "{{ m.content or '' }}")


def test_a_folder_becomes_a_site_and_its_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, site = tmp_path / "templates", tmp_path / "site"
    folder.mkdir()
    for name, text in {"plain1": PLAIN, "plain2": REWRITES, "again": PLAIN, "broken": "{% if %}",
                       "hostile<script>": "{{ '<script>alert(1)</script>' }}"}.items():
        (folder / f"{name}.jinja").write_text(text)
    assert main([str(folder), "-o", str(site), "--processes", "2"]) == 0
    found = json.loads((site / "templates.json").read_text())
    values = {value["name"]: value for value in found["templates"]}
    assert len(values) == 4 and values["again.jinja"]["same"] == ["plain1.jinja"]
    rewrites_all = values["plain2.jinja"]["purposes"]
    rewrites = rewrites_all["TITO with tool results"]
    assert rewrites["safe"] is False and rewrites["line"] == 3 and "loop.last" in rewrites["source"]
    assert {"forged_role", "turn_marks"} <= {shape["shape"] for shape in values["plain2.jinja"]["shapes"]}
    parsed = rewrites_all["parse(render(m)) = m"]["missing"]
    assert parsed.startswith("A template cannot parse")
    assert values["broken.jinja"]["error"] and values["broken.jinja"]["purposes"] == {}
    for value in values.values():
        for verdict in value["purposes"].values():
            assert (verdict["safe"] is None) is bool(verdict["missing"])  # undecided only with what is missing
    pages = [path.read_text() for path in site.glob("*.html")]
    assert len(pages) == 5 and not any("<script" in page for page in pages)
    assert all(re.search(r"<h1>.+</h1>", page) for page in pages)
    assert main([str(tmp_path / "site"), "-o", str(site)]) == 2
    assert "no file below it ends in .jinja" in capsys.readouterr().out


def test_revisions_of_one_family_are_compared(tmp_path: Path) -> None:
    for name, text in {"model1": PLAIN, "model2": REWRITES, "trl--model3": NULL}.items():
        (tmp_path / f"{name}.jinja").write_text(text)
    assert main([str(tmp_path), "-o", str(tmp_path / "site"), "--processes", "1"]) == 0
    first, second = json.loads((tmp_path / "site" / "templates.json").read_text())["revisions"]["model"]
    assert (first["lines"], first["purposes"]["TITO with tool results"]) == (1, [True, False])
    assert second["shapes"]["content_null"] == ["broken", "ok"]


@pytest.mark.parametrize(
    ("name", "family"), [("qwen3-vl.jinja", "qwen"), ("trl--qwen3.jinja", "qwen"), ("qwen3--fix.jinja", "qwen"),
                         ("a/vllm--chatml.jinja", "chatml"), ("9.jinja", "9")],
)
def test_the_family_is_in_the_name(name: str, family: str) -> None:
    assert family_of(name) == family
