"""The template-check pages: asking, waiting, the verdict, what may be shared, and hostile input."""

from typing import Any

import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.test import Client
from pytest_django import DjangoAssertNumQueries

from rollouts.store.models import ChatTemplate, Job, TemplateCheck, Tokenizer
from rollouts.store.people.accounts import local_user
from rollouts.store.people.shares import create_share
from rollouts.worker.jobs import do_job

pytestmark = pytest.mark.django_db

SAFE = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ m.tool_calls }}\n{% endfor %}"
BROKEN = SAFE.replace("]", "{% if loop.last %} last{% endif %}]")


@pytest.fixture
def client() -> Client:
    client = Client()
    client.force_login(local_user())
    return client


def ask(client: Client, **fields: Any) -> Any:
    return client.post("/templates", fields, follow=True)


def test_a_pasted_template_that_rewrites_its_past(client: Client, answered: None) -> None:
    response = ask(client, chat_template=BROKEN)
    page = response.content.decode()
    assert response.redirect_chain[0][0].startswith("/templates/checks/")
    assert "Not prefix-preserving for tool messages." in page
    assert "before appending" in page and "after appending" in page and '<tr class="site">' in page
    assert '<tr id="L1" class="decides">' in page or '<tr id="L1" class="named">' in page


def test_a_pasted_template_that_keeps_its_past(client: Client, answered: None) -> None:
    response = ask(client, chat_template=SAFE)
    assert "Prefix-preserving for tool messages." in response.content.decode()
    twin = client.get(response.redirect_chain[0][0] + ".json").json()
    assert twin["report"]["prefix_preserving"] is True and twin["status"] == "done"


def test_a_registered_tokenizer_with_its_own_template(client: Client, answered: None, tokenizer: Tokenizer) -> None:
    response = ask(client, tokenizer="demo")
    assert "with the tokenizer demo" in response.content.decode()
    check = TemplateCheck.objects.get()
    assert check.tokenizer == tokenizer and check.report is not None and check.report["prefix_preserving"] is True


def test_the_same_question_has_the_same_address_and_is_answered_once(client: Client, answered: None) -> None:
    first = ask(client, chat_template=SAFE).redirect_chain[0][0]
    Job.objects.update(error="kept")
    assert ask(client, chat_template=SAFE.replace("\n", "\r\n")).redirect_chain[0][0] == first
    assert Job.objects.get().error == "kept"
    assert ask(client, chat_template=SAFE, kwargs='{"a": 1}').redirect_chain[0][0] != first


def test_a_check_of_an_older_version_is_answered_again(client: Client, answered: None) -> None:
    ask(client, chat_template=SAFE)
    TemplateCheck.objects.update(version=0, report={})
    ask(client, chat_template=SAFE)
    assert TemplateCheck.objects.get().report


def test_a_waiting_check_polls_and_an_answered_one_does_not(client: Client, sent: list[int]) -> None:
    address = ask(client, chat_template=SAFE).redirect_chain[0][0]
    assert 'hx-trigger="every 1s"' in client.get(address).content.decode()
    do_job(sent[0])
    assert 'hx-trigger="every' not in client.get(address).content.decode()


def test_without_a_broker_the_page_says_so(client: Client, no_broker: None) -> None:
    assert "Redis does not answer" in ask(client, chat_template=SAFE).content.decode()


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(10**9) %}{{ i }}{% endfor %}",
        "{{ 'x' * 10**10 }}",
        "{{ ''.__class__.__mro__ }}",
        "{% if %}",
        "{{ raise_exception('<script>alert(1)</script>') }}",
    ],
)
def test_a_hostile_template_ends_in_a_sentence(client: Client, answered: None, template: str) -> None:
    response = ask(client, chat_template=template)
    page = response.content.decode()
    assert response.status_code == 200 and "<script>alert" not in page
    assert "could not be checked" in page or "cannot be checked" in page


def test_a_check_is_changed_and_asked_again(client: Client, answered: None) -> None:
    response = ask(client, chat_template="{% for m in messages %}{{ m.content", kwargs='{"a": 1}')
    page, code = response.content.decode(), TemplateCheck.objects.get().code
    assert "The template could not be checked" in page and "Launch with this template" not in page
    assert f'href="/templates?check={code}"' in page
    form = client.get(f"/templates?check={code}").context["form"]
    assert form["chat_template"].value() == "{% for m in messages %}{{ m.content" and '"a": 1' in form["kwargs"].value()
    assert not form["conversation"].value()


def test_a_template_that_renders_nothing_is_not_listed_as_safe(client: Client, answered: None) -> None:
    ask(client, chat_template="hello")
    page = client.get("/templates").content.decode()
    assert "only because nothing is rendered" in page and "● yes" not in page


def test_what_a_template_writes_is_escaped(client: Client, answered: None) -> None:
    page = ask(client, chat_template=BROKEN.replace("[", "<img src=x onerror=alert(1)>")).content.decode()
    assert "<img src=x" not in page and "&lt;img src=x" in page


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "Paste a chat template, or choose a tokenizer that has one."),
        ({"chat_template": SAFE, "tools": "[1,"}, "This is not JSON (line 1, column 4: "),
        ({"chat_template": SAFE, "tools": "{}"}, "This has to be a JSON list."),
        ({"chat_template": SAFE, "tools": '[{"type": "function"}]'}, "Tool 1 is not a function with a “name”"),
        ({"chat_template": SAFE, "kwargs": "[" * 50_000}, "This is not JSON"),
        ({"chat_template": SAFE, "tokenizer": "nobody"}, "“nobody” is not offered here"),
    ],
)
def test_a_bad_form_is_answered_beside_the_field(client: Client, fields: dict[str, str], sentence: str) -> None:
    response = client.post("/templates", fields)
    assert response.status_code == 400 and sentence in response.content.decode()
    assert not TemplateCheck.objects.exists()


def test_an_uploaded_template(client: Client, answered: None) -> None:
    response = ask(client, chat_template_file=SimpleUploadedFile("mine.jinja", SAFE.encode()))
    assert "mine.jinja" in response.content.decode() and ChatTemplate.objects.get().text == SAFE
    bad = client.post("/templates", {"chat_template_file": SimpleUploadedFile("x.jinja", b"\xff\xfe\x00")})
    assert "not UTF-8 text" in bad.content.decode()


def test_a_share_link_opens_the_check_and_nothing_else(client: Client, answered: None) -> None:
    address = ask(client, chat_template=SAFE).redirect_chain[0][0]
    _, token = create_share(local_user(), TemplateCheck.objects.get())
    visitor = Client()
    assert visitor.get(address).status_code == 302
    page = visitor.get(f"/s/{token}", follow=True)
    assert page.redirect_chain[-1][0] == address and "Prefix-preserving" in page.content.decode()
    assert visitor.get("/templates").status_code == 302


def test_query_counts(client: Client, answered: None, django_assert_num_queries: DjangoAssertNumQueries) -> None:
    address = ask(client, chat_template=SAFE).redirect_chain[0][0]
    for n in range(3):
        ask(client, chat_template=SAFE + str(n))
    with django_assert_num_queries(4):  # session, user, check, projects (of an admin of the server)
        client.get(address)
    with django_assert_num_queries(5):  # session, user, checks, tokenizers of the form, projects
        client.get("/templates")
