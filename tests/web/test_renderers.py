"""``renderer:NAME`` on the pages of chat templates: the check, its column in the matrix, and what is refused."""

import csv
import importlib.util
import io
import json
from pathlib import Path
from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client

from rollout_inspector.text.chat_templates import kept_text
from rollout_inspector.text.chat_templates.probes.report import Purpose
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.models import ChatTemplate, Run, TemplateCheck, Tokenizer
from tests.conftest import missing
from tests.samples.chat_templates import TALK

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("installed")]


@pytest.fixture
def installed() -> None:
    if importlib.util.find_spec("renderers") is None:
        missing("the package renderers is not installed (tests/formats/requirements-trainers.txt)")


@pytest.fixture
def qwen3(corpus: Path) -> Tokenizer:
    return register_tokenizer(corpus / "tokenizers" / "qwen3", "qwen3")


def checked(web: Client, **fields: str) -> TemplateCheck:
    asked = {"tokenizer": "qwen3", "chat_template": " renderer:qwen3\r\n", **fields}
    assert web.post("/templates", asked).status_code == 302
    return TemplateCheck.objects.select_related("chat_template").latest("pk")


def test_a_renderer_is_checked_by_a_worker(web: Client, answered: None, qwen3: Tokenizer) -> None:
    check = checked(web)
    assert (check.status, check.error) == ("done", "") and check.report is not None
    assert check.chat_template.text == check.template_name == kept_text("renderer:qwen3")
    for purpose in (Purpose.PARSED_MESSAGES, Purpose.PARSED_IDS):
        assert check.report["verdicts"][purpose].startswith("safe")
    assert check.report["prefix_preserving"] is False and check.report["repair"] is None
    page = web.get(f"/templates/checks/{check.code}").content.decode()
    assert page.count("A renderer is installed code, so it has no text that could be changed.") == 2
    assert "parse(render(m)) = m" in page and "says of itself that it may not be prefix-stable" in page
    assert checked(web, chat_template=kept_text("renderer:qwen3")) == check and TemplateCheck.objects.count() == 1


def test_it_is_a_column_of_the_matrix(
    web: Client, answered: None, qwen3: Tokenizer, django_assert_num_queries: Any
) -> None:
    assert web.post("/templates/matrix").status_code == 302
    name = f"qwen3, {kept_text('renderer:qwen3')}"
    assert [one["name"] for one in web.get("/templates/matrix.json").json()["tokenizers"]] == ["qwen3"]
    check = checked(web)
    checked(web, kwargs='{"enable_thinking": false}')  # a question with arguments has no column
    with django_assert_num_queries(6):  # session, user, roles, tokenizers, checks, renderers
        matrix = web.get("/templates/matrix.json").json()
    by_template, by_code = matrix["tokenizers"]
    assert (by_code["name"], by_code["code"], by_code["status"]) == (name, check.code, "done")
    assert by_code["chat_template"] == check.chat_template_id != by_template["chat_template"]
    assert by_code["cells"]["tool_append"] == by_template["cells"]["tool_append"] == "broken"
    assert matrix["revisions"] == [] and {*Purpose} - {Purpose.FACTS} <= {*matrix["purposes"]} | {Purpose.FACTS}
    parsed = web.get("/templates/matrix.json", {"purpose": Purpose.PARSED_IDS}).json()["probes"]
    assert parsed and all(by_code["cells"][probe["name"]] == "ok" for probe in parsed)
    assert f'<a href="/templates/checks/{check.code}">{name}</a>' in web.get("/templates/matrix").content.decode()
    table = list(csv.reader(io.StringIO(web.get("/templates/matrix.csv").content.decode())))
    assert [row[0] for row in table] == ["tokenizer", "qwen3", name]
    assert [one["name"] for one in web.get("/templates/matrix.json?name=renderer").json()["tokenizers"]] == [name]
    assert web.get("/templates/matrix.json?project=none").json()["tokenizers"] == []


def test_a_stale_column_is_asked_again_with_the_rest(web: Client, answered: None, qwen3: Tokenizer) -> None:
    check = checked(web)
    TemplateCheck.objects.update(version=0)
    assert web.get("/templates/matrix.json").json()["missing"] == 2
    web.post("/templates/matrix")
    check.refresh_from_db()
    assert check.version and web.get("/templates/matrix.json").json()["missing"] == 0


def test_who_may_not_see_the_check_sees_no_column(
    web: Client, answered: None, qwen3: Tokenizer, django_user_model: Any
) -> None:
    checked(web)
    stranger = Client()
    stranger.force_login(django_user_model.objects.create_user("stranger"))
    assert stranger.get("/templates/matrix.json").json()["tokenizers"] == []


def test_a_tokenizer_is_registered_with_it_as_its_template(web: Client, answered: None, corpus: Path) -> None:
    folder = corpus / "tokenizers" / "qwen3"
    files = {
        "upload": SimpleUploadedFile("tokenizer.json", (folder / "tokenizer.json").read_bytes()),
        "chat_template": SimpleUploadedFile("renderer.txt", b"renderer:qwen3\n"),
    }
    assert web.post("/tokenizers", {"name": "coded", **files}).status_code == 302
    template = Tokenizer.objects.select_related("chat_template").get().chat_template
    assert template is not None and template.text == kept_text("renderer:qwen3")
    web.post("/templates/matrix")
    (column,) = web.get("/templates/matrix.json").json()["tokenizers"]
    assert (column["name"], column["status"]) == ("coded", "done") and column["cells"]["tool_append"] == "broken"


def test_an_own_conversation_goes_through_every_strategy(web: Client, answered: None, qwen3: Tokenizer) -> None:
    asked = {"tokenizer": "qwen3", "chat_template": "renderer:qwen3", "conversation": json.dumps(TALK)}
    assert web.post("/templates/conversation", asked).status_code == 302
    check = TemplateCheck.objects.get()
    assert check.report is not None and check.report["strategies"]["turns"]
    refused = check.report["strategies"]["refused"]
    assert refused["bridge"].startswith("The renderer qwen3 cannot extend this stream by user messages")


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"tokenizer": ""}, "A renderer writes ids: choose a tokenizer."),
        ({"chat_template": "renderer:nobody"}, "The package renderers has no renderer &#x27;nobody&#x27;. It has: "),
    ],
)
def test_what_cannot_be_checked_is_said_in_the_form(
    web: Client, qwen3: Tokenizer, fields: dict[str, str], sentence: str
) -> None:
    answer = web.post("/templates", {"tokenizer": "qwen3", "chat_template": "renderer:qwen3", **fields})
    assert answer.status_code == 400 and sentence in answer.content.decode()
    assert not TemplateCheck.objects.exists()


def test_a_renderer_of_another_vocabulary_fails_with_its_words(web: Client, answered: None, qwen3: Tokenizer) -> None:
    check = checked(web, chat_template="renderer:deepseek-v4")
    assert check.status == "failed" and "The renderer deepseek-v4 cannot be made: " in check.error


def test_without_the_package(web: Client, answered: None, qwen3: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    check = checked(web)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    answer = web.post("/templates.json", {"tokenizer": "qwen3", "chat_template": "renderer:qwen3"})
    assert answer.status_code == 400
    assert answer.json()["errors"]["chat_template"][0].startswith("The package renderers is not installed.")
    TemplateCheck.objects.update(version=0)
    web.post("/templates/matrix")
    check.refresh_from_db()
    assert check.status == "failed" and "The package renderers is not installed." in check.error
    by_template, by_code = web.get("/templates/matrix.json").json()["tokenizers"]
    assert (by_template["status"], by_code["status"]) == ("done", "failed")


def test_an_import_takes_it_as_a_file(web: Client, sent: list[int], qwen3: Tokenizer) -> None:
    line = b'{"prompt_ids": [1], "completion_ids": [2], "messages": [{"role": "user", "content": "a"}]}\n'

    def sent_with(name: str) -> Any:
        template = SimpleUploadedFile("r.txt", name.encode())
        asked = {"tokenizer": f"id:{qwen3.pk}", "chat_template": template, "format": "auto"}
        return web.post("/import", {"files": SimpleUploadedFile("a.jsonl", line), **asked})

    assert sent_with("renderer:qwen3").status_code == 302
    run = Run.objects.select_related("chat_template").get()
    assert run.chat_template is not None and run.chat_template.text == kept_text("renderer:qwen3")
    refused = sent_with("renderer:nobody")
    assert refused.status_code == 422 and "has no renderer" in refused.content.decode()
    assert Run.objects.count() == 1 and ChatTemplate.objects.count() == 2
