"""Published stories of a gap are named as their authors found them, and at the step that shows them first."""

import numpy as np
import pytest

from rollout_inspector.diagnose.gap.report import gap_report
from tests.samples.gap_runs import ToyRun, tokens_of
from tests.samples.gap_stories import STORIES, Story, martingale_float32, trl_sleep_mode, trl_top_p


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.name)
def test_a_published_story_is_named_as_its_authors_found_it(story: Story) -> None:
    for seed in range(3):
        report = gap_report(tokens_of(story.rows(seed)))
        assert tuple(cause["cause"] for cause in report["causes"]) == story.cause
        if story.first_step is not None:
            assert [cause["from_step"] for cause in report["causes"]] == [story.first_step]


def test_the_figures_of_a_story_are_those_of_its_source() -> None:
    steps = gap_report(tokens_of(martingale_float32(0)))["steps"]
    assert [step["mean_abs"] for step in steps] == pytest.approx([0.0015, 0.81, 1.03, 0.26], rel=0.15)
    steps = gap_report(tokens_of(trl_sleep_mode(0)))["steps"]
    assert [step["mean_abs"] for step in steps[2:]] == pytest.approx([0.018, 0.201], rel=0.15)
    assert gap_report(tokens_of(trl_top_p(0)))["ratio"] == pytest.approx(0.81, abs=0.01)


def test_the_mass_of_the_kept_tokens_decides_top_p() -> None:
    """The logarithm of that mass is what the ratio carries (huggingface/trl#6789), token by token."""
    rows = ToyRun(1, rounding=0.004).rows(top_p=0.8)
    for made in rows:
        made.columns = {"kept_logprob_mass": (made.trainer - made.sampler) * made.mask}
    (cause,) = gap_report(tokens_of(rows))["causes"]
    assert cause["cause"] == "top_p_renormalised" and "is 0.211 on the mean." in cause["evidence"]
    for made in rows:  # the whole vocabulary was kept, so whatever makes the gap, top-p does not
        made.columns = {"kept_logprob_mass": np.zeros(len(made.mask))}
    assert [cause["cause"] for cause in gap_report(tokens_of(rows))["causes"]] == ["unexplained"]


def test_without_the_mass_an_unexplained_gap_says_what_would_decide_top_p() -> None:
    rows = ToyRun(1).rows()
    for made in rows:
        made.versions, made.top_p = ("v0",) * 2, 0.9
        made.trainer = made.trainer + np.random.default_rng(made.step).normal(0, 0.15, len(made.mask)) * made.mask
    report = gap_report(tokens_of(rows))
    assert [cause["cause"] for cause in report["causes"]] == ["unexplained"]
    assert "would need the mass of the kept tokens" in report["undecided"]["top_p_renormalised"]
