"""Launching, importing and registering from a form: defaults that work, and a sentence for everything that does not."""

import io
import json
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from rollout_inspector.streams.strategies import STRATEGIES
from rollouts.store.models import Run, Tokenizer
from tests.samples.pages import form_of
from tests.web.samples import stored_run

pytestmark = pytest.mark.django_db


# --- new run --------------------------------------------------------------------------------------------------------


def test_the_form_sent_unchanged_makes_a_run(web: Client, sent: list[int], tiny_tokenizer: Path) -> None:
    answer = web.post("/runs/new", form_of(web, "/runs/new"))
    run = Run.objects.get()
    assert answer.status_code == 302 and answer["Location"] == f"/runs/{run.code}"
    assert sent == [run.pk] and run.n_expected == 64 and run.created_by is not None
    assert web.get(answer["Location"]).status_code == 200


def test_every_strategy_is_offered_and_explained(web: Client) -> None:
    page = web.get("/runs/new").content.decode()
    field = web.get("/runs/new.json").json()["fields"]["strategy"]
    assert set(field["choices"]) == set(STRATEGIES) == set(field["choices_help"])
    assert all(f'value="{slug}"' in page and slug.replace("_", " ") in page for slug in STRATEGIES)
    assert "ends in the same tool call" in page


def test_environments_of_a_family_are_grouped_behind_the_calculator(web: Client) -> None:
    choices = web.get("/runs/new").content.decode().split('id="id_environment"')[1].split("</select>")[0]
    assert choices.index('value="calculator"') < choices.index("<optgroup")
    labels = re.findall(r'<optgroup label="([^"]*)"', choices)
    assert labels == list(dict.fromkeys(labels)) and all(":" not in label for label in labels)
    assert max(heading.count("<option") for heading in choices.split("<optgroup")) < 30, "no list of ninety"


def test_a_first_launch_sees_four_fields_and_the_rest_is_folded_until_it_is_needed(web: Client) -> None:
    page = web.get("/runs/new").content.decode()
    before, folded = page.split('id="more"')
    assert re.findall(r'<(?:select|input type="number")[^>]* id="id_(\w+)"', before) == [
        "model",
        "strategy",
        "environment",
        "prompts",
    ]
    assert not folded.startswith(" open") and 'id="id_temperature"' in folded
    for wrong in ({"temperature": "-1"}, {"seed": "x"}):
        assert 'id="more" open' in web.post("/runs/new", wrong).content.decode()
    again = stored_run(1, kind="launch", settings={"temperature": 0.5})
    assert 'id="more" open' in web.get(f"/runs/new?again={again.code}").content.decode()


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("prompts", "0", "at least 1"),
        ("prompts", "many", "whole number"),
        ("group", "", "Fill this in"),
        ("temperature", "-1", "at least 0"),
        ("temperature", "nan", "Write a number"),
        ("top_p", "0", "above 0"),
        ("top_p", "2", "at most 1"),
        ("seed", "-5", "at least 0"),
        ("model", "gpt-9", "gpt-9"),
        ("strategy", "magic", "magic"),
        ("environment", "moon", "moon"),
    ],
)
def test_a_wrong_value_is_named_beside_its_field(
    web: Client, sent: list[int], field: str, value: str, sentence: str
) -> None:
    answer = web.post("/runs/new", {**form_of(web, "/runs/new"), field: value})
    page = answer.content.decode()
    assert answer.status_code == 422 and not Run.objects.exists() and not sent
    assert f'id="id_{field}_error"' in page and 'aria-invalid="true"' in page
    assert sentence in str(answer.context["form"].errors[field])
    twin = web.post("/runs/new.json", {**form_of(web, "/runs/new"), field: value})
    assert twin.status_code == 422 and field in twin.json()["errors"]


def test_too_many_trajectories_are_refused_by_the_launch_itself(web: Client, sent: list[int]) -> None:
    answer = web.post("/runs/new", {**form_of(web, "/runs/new"), "prompts": "20000", "group": "1024"})
    assert answer.status_code == 422 and "at most" in str(answer.context["form"].errors["group"])


def test_a_broker_that_does_not_answer_fails_the_run_with_a_sentence(
    web: Client, no_broker: None, tiny_tokenizer: Path
) -> None:
    page = web.post("/runs/new", form_of(web, "/runs/new"), follow=True).content.decode()
    assert "Redis does not answer" in page and Run.objects.get().status == Run.Status.FAILED


def test_a_file_of_prompts_becomes_the_tasks(web: Client, sent: list[int], tiny_tokenizer: Path) -> None:
    lines = [{"messages": [{"role": "user", "content": f"{n} + {n}"}], "answer": str(2 * n)} for n in range(3)]
    file = SimpleUploadedFile("p.jsonl", "\n".join(map(json.dumps, lines)).encode())
    values = {**form_of(web, "/runs/new"), "environment": "prompts", "prompts": "3", "group": "1"}
    answer = web.post("/runs/new", {**values, "prompts_file": file})
    assert answer.status_code == 302, answer.context and answer.context["form"].errors
    assert Run.objects.get().n_expected == 3
    bad = SimpleUploadedFile("p.jsonl", b'{"messages": []}\nnot json\n')
    answer = web.post("/runs/new", {**values, "prompts_file": bad})
    assert answer.status_code == 422 and "Line 2" in str(answer.context["form"].errors["prompts_file"])


# --- import ---------------------------------------------------------------------------------------------------------


def own_lines(n: int) -> bytes:
    """Lines of this program's own format, written by its own writer."""
    from rollout_inspector.formats import FORMATS
    from tests.web.samples import trajectory

    write = FORMATS["own_jsonl"].write
    assert write is not None
    out = io.BytesIO()
    write([trajectory(f"t{i}") for i in range(n)], out)
    return out.getvalue()


def test_a_dropped_file_is_imported_and_its_run_shown(web: Client, answered: None) -> None:
    file = SimpleUploadedFile("rollouts.jsonl", own_lines(3))
    answer = web.post("/import", {"files": [file], "format": "auto"}, follow=True)
    run = Run.objects.get()
    assert answer.redirect_chain[-1][0] == f"/runs/{run.code}"
    assert run.status == Run.Status.DONE and run.n_trajectories == 3 and run.name == "rollouts.jsonl"


def test_many_files_make_one_run_and_two_of_a_name_are_both_read(web: Client, answered: None) -> None:
    files = [SimpleUploadedFile("a.jsonl", own_lines(2)), SimpleUploadedFile("a.jsonl", own_lines(2))]
    web.post("/import", {"files": files, "name": "both"})
    run = Run.objects.get()
    assert run.name == "both" and run.n_trajectories == 4 and len(set(run.jobs.get().options["files"])) == 2


def test_the_training_step_of_an_import_is_said_or_found_in_the_name_of_each_file(web: Client, answered: None) -> None:
    def steps(**said: str) -> list[int | None]:
        names = ("epoch_7.jsonl", "epoch_9.jsonl")
        web.post("/import", {"files": [SimpleUploadedFile(name, own_lines(1)) for name in names], **said})
        return list(Run.objects.latest("pk").trajectories.order_by("index").values_list("training_step", flat=True))

    assert steps(training_step_from="epoch_([0-9]+)") == [7, 9]
    assert steps(training_step="3") == [3, 3] and steps() == [None, None]
    for said in (
        {"training_step_from": "("},
        {"training_step_from": "a"},
        {"training_step": "1", "training_step_from": "(1)"},
    ):
        answer = web.post("/import.json", {"files": [SimpleUploadedFile("a.jsonl", own_lines(1))], **said})
        assert answer.status_code == 422 and answer.json()["errors"]["training_step_from"]
    assert Run.objects.count() == 3


def test_broken_lines_of_an_import_are_listed(web: Client, answered: None) -> None:
    file = SimpleUploadedFile("a.jsonl", own_lines(1) + b"{broken\n")
    page = web.post("/import", {"files": [file]}, follow=True).content.decode()
    assert "1 rejected" in page and "a.jsonl" in page


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.pkl", b"\x80\x04\x95abc", "is a pickle"),
        ("innocent.jsonl", b"\x80\x05\x95abc", "is a pickle"),
        ("weights.pt", b"PK\x03\x04....archive/data.pkl", "a pickle inside a zip"),
        ("empty.jsonl", b"", "empty"),
        ("junk.jsonl", b"\x00\x01\x02", "binary"),
    ],
)
def test_what_is_never_read_is_refused_with_a_sentence(
    web: Client, answered: None, name: str, content: bytes, sentence: str
) -> None:
    answer = web.post("/import", {"files": [SimpleUploadedFile(name, content)]})
    assert answer.status_code == 422 and not Run.objects.exists()
    assert sentence in str(answer.context["form"].errors["files"])


def test_an_import_without_files_is_refused(web: Client) -> None:
    answer = web.post("/import", {})
    assert answer.status_code == 422 and "at least one file" in answer.content.decode()


def test_a_name_that_climbs_stays_in_the_folder(web: Client, answered: None) -> None:
    web.post("/import", {"files": [SimpleUploadedFile("..\\..\\evil\u202e.jsonl", own_lines(1))]})
    (key,) = Run.objects.get().jobs.get().options["files"]
    assert key == f"uploads/{Run.objects.get().code}/evil.jsonl"


def test_an_import_takes_the_tokenizer_that_was_chosen(web: Client, answered: None, tiny_tokenizer: Path) -> None:
    web.post("/tokenizers", {"folder": str(tiny_tokenizer), "name": "tiny"})
    tokenizer = Tokenizer.objects.get()
    for choice, expected in ((f"id:{tokenizer.pk}", tokenizer), ("none", None)):
        Run.objects.all().delete()
        web.post("/import", {"files": [SimpleUploadedFile("a.jsonl", own_lines(1))], "tokenizer": choice})
        assert Run.objects.get().tokenizer == expected
    answer = web.post("/import", {"files": [SimpleUploadedFile("a.jsonl", own_lines(1))], "tokenizer": "id:999"})
    assert answer.status_code == 422


def test_an_import_brings_its_own_tokenizer_and_template(web: Client, answered: None, tiny_tokenizer: Path) -> None:
    web.post(
        "/import",
        {
            "files": [SimpleUploadedFile("a.jsonl", own_lines(1))],
            "tokenizer_file": SimpleUploadedFile("tokenizer.json", (tiny_tokenizer / "tokenizer.json").read_bytes()),
            "chat_template": SimpleUploadedFile("t.jinja", b"{{ messages }}"),
        },
    )
    run = Run.objects.get()
    assert run.tokenizer is not None and run.chat_template is not None and run.chat_template.text == "{{ messages }}"


def test_a_chat_template_that_cannot_render_is_refused_with_its_line(web: Client, tiny_tokenizer: Path) -> None:
    for address, more in (
        ("/import", {"files": [SimpleUploadedFile("a.jsonl", own_lines(1))]}),
        ("/tokenizers", {"folder": str(tiny_tokenizer), "name": "broken"}),
    ):
        template = SimpleUploadedFile("t.jinja", b"{{ messages }}\n{% endif %}")
        answer = web.post(address, more | {"chat_template": template})
        assert answer.status_code == 422 and "syntax error on line 2" in answer.content.decode(), address
    assert not Run.objects.exists() and not Tokenizer.objects.filter(name="broken").exists()


def test_an_upload_beyond_the_limit_is_413(web: Client, settings: Any) -> None:
    settings.UPLOAD_MAX_BYTES = 1000
    answer = web.post("/import", {"files": [SimpleUploadedFile("a.jsonl", b"x" * 5000)]})
    assert answer.status_code == 413 and "INSPECTOR_UPLOAD_MAX_MB" in answer.content.decode()


# --- tokenizers -----------------------------------------------------------------------------------------------------


def zipped(folder: Path, *extra: tuple[str, bytes]) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            archive.write(folder / name, f"model/{name}")
        for name, content in extra:
            archive.writestr(name, content)
    return out.getvalue()


def by_folder(tokenizer: Path) -> dict[str, Any]:
    return {"folder": str(tokenizer)}


def by_zip(tokenizer: Path) -> dict[str, Any]:
    return {"upload": SimpleUploadedFile("model.zip", zipped(tokenizer))}


def by_file(tokenizer: Path) -> dict[str, Any]:
    return {"upload": SimpleUploadedFile("model.json", (tokenizer / "tokenizer.json").read_bytes())}


@pytest.mark.parametrize("way", [by_folder, by_zip, by_file])
def test_a_tokenizer_is_registered_by_each_way(
    web: Client, tiny_tokenizer: Path, way: Callable[[Path], dict[str, Any]]
) -> None:
    answer = web.post("/tokenizers", way(tiny_tokenizer))
    assert answer.status_code == 302, answer.context["form"].errors
    line = web.get("/tokenizers.json").json()["tokenizers"][0]
    assert line["name"] == "model" and line["vocab_size"] > 1000 and line["encoder"] in ("fastokens", "tokenizers")
    assert bool(line["chat_template"]) == (way is not by_file)
    assert line["sha256"][:12] in web.get("/tokenizers").content.decode()


def test_a_template_of_ones_own_replaces_the_tokenizers(web: Client, tiny_tokenizer: Path) -> None:
    template = SimpleUploadedFile("t.jinja", b"{{ messages }}")
    web.post("/tokenizers", {"folder": str(tiny_tokenizer), "chat_template": template, "name": "mine"})
    chosen = Tokenizer.objects.get(name="mine").chat_template
    assert chosen is not None and chosen.text == "{{ messages }}"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({}, "nothing to register"),
        ({"folder": "relative/path"}, "whole path"),
        ({"folder": "/nowhere/at/all"}, "no tokenizer.json"),
        ({"folder": "/etc\0"}, ""),
        ({"hub_id": "Qwen/Qwen3-4B"}, "revision"),
    ],
)
def test_a_tokenizer_that_cannot_be_is_refused(
    web: Client, settings: Any, values: dict[str, str], sentence: str
) -> None:
    settings.HUB_ALLOWED = True
    answer = web.post("/tokenizers", values)
    assert (
        answer.status_code == 422 and sentence in str(answer.context["form"].errors) and not Tokenizer.objects.exists()
    )


def test_the_hub_is_asked_only_where_it_is_allowed(web: Client, settings: Any) -> None:
    settings.HUB_ALLOWED = False
    answer = web.post("/tokenizers", {"hub_id": "Qwen/Qwen3-4B", "revision": "main"})
    assert answer.status_code == 422 and "hub_id" not in answer.context["form"].fields


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.json", b"{}", "vocabulary"),
        ("a.json", b"not json", "JSON"),
        ("a.zip", b"PK\x03\x04 not a zip", ""),
    ],
)
def test_an_upload_that_is_no_tokenizer_is_refused(web: Client, name: str, content: bytes, sentence: str) -> None:
    answer = web.post("/tokenizers", {"upload": SimpleUploadedFile(name, content)})
    assert (
        answer.status_code == 422 and sentence in str(answer.context["form"].errors) and not Tokenizer.objects.exists()
    )


def test_code_in_a_zip_is_refused(web: Client, tiny_tokenizer: Path) -> None:
    upload = SimpleUploadedFile("m.zip", zipped(tiny_tokenizer, ("model/tokenization_evil.py", b"import os")))
    answer = web.post("/tokenizers", {"upload": upload})
    assert answer.status_code == 422 and "carry code" in str(answer.context["form"].errors)
