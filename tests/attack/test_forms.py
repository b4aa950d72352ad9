"""Junk in the fields of forms: JSON that no database can keep is refused with a sentence."""

import pytest
from django.test import Client

from rollouts.store.models import TemplateCheck

pytestmark = pytest.mark.django_db

TEMPLATE = "{{ messages[0].content }}"
JUNK = {
    "a number of 5,000 digits": "9" * 5000,
    "not a number": "NaN",
    "infinite": "1e999",
    "U+0000": '"\\u0000"',
    "U+0000 after a backslash": '"\\\\\\u0000"',
    "half a character": '"\\ud800"',
    "920 lists in lists": "[" * 920 + "]" * 920,
}


@pytest.mark.parametrize("junk", JUNK.values(), ids=JUNK.keys())
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kwargs", '{"a": JUNK}'),
        ("tools", '[{"name": "f", "parameters": JUNK}]'),
        ("conversation", '[{"role": "user", "content": JUNK}]'),
    ],
)
def test_json_that_no_database_can_keep_is_refused(field: str, value: str, junk: str, member: Client) -> None:
    form = {"chat_template": TEMPLATE, field: value.replace("JUNK", junk)}
    answer = member.post("/templates", form)
    assert answer.status_code == 400 and not TemplateCheck.objects.exists()
    assert answer.context["form"].errors[field]


def test_json_that_names_an_escape_is_kept(member: Client) -> None:
    assert member.post("/templates", {"chat_template": TEMPLATE, "kwargs": '{"a": "\\\\u0000"}'}).status_code == 302
    assert TemplateCheck.objects.get().question["kwargs"] == {"a": "\\u0000"}


def test_the_form_of_a_launch_refuses_them_as_well(member: Client) -> None:
    for junk in JUNK.values():
        answer = member.post("/runs/new.json", {"model": "demo", "template_kwargs": f'{{"a": {junk}}}'})
        assert answer.status_code == 422 and answer.json()["errors"]["template_kwargs"]
