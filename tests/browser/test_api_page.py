"""The page of the API in a browser: it is drawn by the library under our policy, and asks with the login."""

from collections.abc import Callable
from typing import Any

import pytest
from playwright.sync_api import expect

from tests.web.trajectory_samples import Maker


def luminance(colour: str) -> float:
    red, green, blue = (float(part) for part in colour.removeprefix("rgb(").removesuffix(")").split(",")[:3])
    return 0.3 * red + 0.6 * green + 0.1 * blue


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_an_operation_is_read_and_tried(open_page: Callable[..., Any], make: Maker, scheme: str) -> None:
    run = make.run([make.conversation("whole")])
    page = open_page("/api/docs#/runs/get_run", color_scheme=scheme, width=700)
    operation = page.locator("#operations-runs-get_run")
    operation.get_by_role("button", name="Try it out").click()
    operation.get_by_placeholder("code").fill(run.code)
    operation.get_by_role("button", name="Execute").click()
    expect(operation.locator(".live-responses-table .response .response-col_status")).to_contain_text("200")
    expect(operation.locator(".live-responses-table")).to_contain_text(run.code)
    colours = operation.locator(".opblock-description p").evaluate(
        "element => [getComputedStyle(element).color, getComputedStyle(document.body).backgroundColor]"
    )
    text, ground = (luminance(colour) for colour in colours)
    assert abs(text - ground) > 110, colours
    assert page.evaluate("document.documentElement.scrollWidth") <= 700


def test_without_javascript_the_operations_are_a_list(open_page: Callable[..., Any]) -> None:
    page = open_page("/api/docs", javascript=False)
    page.locator("summary").click()
    expect(page.locator("td code", has_text="/api/v1/search")).to_be_visible()
