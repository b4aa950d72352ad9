"""A difference in a real browser: its signs are told apart without colour, and no line break is an empty box."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout_inspector.streams.trajectory import Row
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db(transaction=True)

DRAWN = """() => Object.fromEntries(["del", "ins"].map(name => {
  const element = document.querySelector(`.side-by-side ${name}`), token = element.querySelector("i");
  const boxes = [...element.querySelectorAll("i")].flatMap(one => [...one.getClientRects()]);
  return [name, {
    sign: getComputedStyle(element, "::before").content, fill: getComputedStyle(token).backgroundColor,
    outline: getComputedStyle(token).outlineStyle, empty: boxes.filter(box => box.width > 0 && box.width < 3).length,
  }];
}))"""


def compared(make: Maker) -> str:
    """A row that lacks the break of a line where it was sampled, and has one more at its end."""
    whole = make.conversation("a", turns=1)
    step = whole.steps[0]
    line = make.ids("\n")
    sampled = np.concatenate([step.completion_ids[:5], line, step.completion_ids[5:]]).astype(np.int32)
    ids = np.concatenate([step.stream, line]).astype(np.int32)
    row = Row(ids, np.arange(len(ids)) >= len(step.prompt_ids), step_indices=(0,))
    step = replace(step, completion_ids=sampled, logprobs=None, logprobs_mode="")
    run = make.run([replace(whole, steps=(step,), rows=(row,))])
    return f"/trajectories/{run.trajectories.get().code}/compare?row=0&side=trained"


def test_both_signs_are_told_apart_without_colour(make: Maker, open_page: Callable[..., Any]) -> None:
    address = compared(make)
    drawn = open_page(address).evaluate(DRAWN)
    assert drawn["del"]["sign"].startswith('"−"') and drawn["ins"]["sign"].startswith('"+"')
    assert "removed" in drawn["del"]["sign"] and "added" in drawn["ins"]["sign"]
    assert drawn["del"]["fill"] != drawn["ins"]["fill"]
    assert drawn["del"]["empty"] == drawn["ins"]["empty"] == 0
    forced = open_page(address, forced_colors="active").evaluate(DRAWN)
    assert (forced["del"]["outline"], forced["ins"]["outline"]) == ("dashed", "solid")


@pytest.mark.parametrize("page", ["compare?row=0&side=trained", "record?as=markdown", "deltas", "mask", "strategies"])
def test_no_page_beside_the_tokens_scrolls_sideways_on_a_phone(
    make: Maker, open_page: Callable[..., Any], page: str
) -> None:
    address = compared(make).partition("compare")[0]
    view = open_page(address + page, width=400, height=800)
    assert view.evaluate("document.documentElement.scrollWidth") <= 400
