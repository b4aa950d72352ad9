"""The chat-template lab in a real browser: narrow windows, both themes, copying, links to probes and lines, polling."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import expect

from rollouts.jobs import template_checks
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.models import ChatTemplate, TemplateCheck, Tokenizer
from rollouts.worker.jobs import do_job
from tests.samples.chat_templates import BROKEN, SAFE, TALK

pytestmark = pytest.mark.django_db(transaction=True)
Open = Callable[..., Any]


def checked(text: str, tokenizer: Tokenizer | None = None, **question: Any) -> TemplateCheck:
    check, _ = template_checks.ask(tokenizer, register_chat_template(text), **question)
    do_job(check.job.pk)
    check.refresh_from_db()
    return check


@pytest.mark.parametrize(("width", "scheme"), [(1400, "light"), (700, "dark"), (360, "light")])
def test_no_page_of_the_lab_is_wider_than_its_window(
    open_page: Open, tiny_tokenizer: Path, width: int, scheme: str
) -> None:
    demo = register_tokenizer(tiny_tokenizer, name="demo-" + "long" * 20)
    assert demo.chat_template is not None
    own, broken = checked(demo.chat_template.text, demo), checked(BROKEN, demo, conversation=TALK)
    page = open_page("/templates", width=width, color_scheme=scheme)
    origin = page.evaluate("location.origin")
    both = "a={}&b={}".format(*ChatTemplate.objects.order_by("created_at").values_list("sha256", flat=True))
    ways = ("/templates", "/templates/matrix", f"/templates/compare?{both}", f"/templates/checks/{own.code}")
    for path in (*ways, f"/templates/checks/{broken.code}"):
        page.goto(origin + path)
        assert page.evaluate("document.documentElement.scrollWidth") <= width, path


def test_the_repair_is_copied_as_it_is(open_page: Open) -> None:
    check = checked(BROKEN)
    assert check.report is not None
    page = open_page(f"/templates/checks/{check.code}")
    holds = "async (text) => await navigator.clipboard.readText() === text"
    page.click("text=Copy the diff")
    expect(page.locator("#announcer")).to_have_text("Copied")
    page.wait_for_function(holds, arg=check.report["repair"]["diff"])
    page.click("text=Copy the template")
    page.wait_for_function(holds, arg=check.report["repair"]["template"])


def test_a_link_opens_the_probe_and_the_probe_leads_to_its_line(open_page: Open) -> None:
    check = checked(BROKEN)
    page = open_page(f"/templates/checks/{check.code}#probe-tool_append")
    expect(page.locator("#probe-tool_append")).to_be_visible()
    expect(page.locator("#probe-user_append")).to_be_hidden()
    page.click("#probe-tool_append a[href^='#L']")
    page.locator("tr:target .line-probes").wait_for()
    way = page.locator("tr:target .line-probes a").last
    probe = way.get_attribute("href")
    assert probe != "#probe-tool_append"
    expect(page.locator(probe)).to_be_hidden()
    way.click()
    page.locator(probe).wait_for()


def test_the_search_ends_on_the_page_without_closing_what_is_open(open_page: Open) -> None:
    check, _ = template_checks.ask(None, register_chat_template(BROKEN), repair=False)
    do_job(check.job.pk)
    check.refresh_from_db()
    assert template_checks.ask_for_repair(check)
    page = open_page(f"/templates/checks/{check.code}#probe-user_append")
    page.wait_for_selector("#repair >> text=A worker looks for a repair")
    do_job(check.job.pk)
    page.wait_for_selector("#diff-repair")
    expect(page.locator("#probe-user_append")).to_be_visible()
    expect(page.locator("text=Copy the template").first).to_be_visible()


def test_the_matrix_fills_while_it_is_watched(open_page: Open, tiny_tokenizer: Path) -> None:
    demo = register_tokenizer(tiny_tokenizer, name="demo")
    assert demo.chat_template is not None
    check, _ = template_checks.ask(demo, demo.chat_template, repair=False)
    page = open_page("/templates/matrix")
    page.wait_for_selector("text=0 of 1 checked.")
    do_job(check.job.pk)
    page.wait_for_selector("table.matrix a.cell-ok")
    expect(page.locator("#matrix")).not_to_have_attribute("hx-get", re.compile(""))
    page.select_option("#m-show", "failing")
    page.click("text=Apply")
    page.wait_for_url("**show=failing**")


def test_the_form_works_without_javascript(open_page: Open, answered: None) -> None:
    page = open_page("/templates", javascript=False)
    page.fill("#id_chat_template", SAFE)
    page.click("button:has-text('Check')")
    page.wait_for_selector("text=Prefix-preserving for tool messages.")
