"""The geometry of charts: where bars stand, how tall they are, and what is merged."""

import re
from itertools import pairwise

import numpy as np

from inspector.html.charts import SHARES, ChartFrame, drawn_map, extent, share_bars, strip_means, strip_path
from inspector.trajectories.tokens.lenses import Scale, scale_of
from inspector.trajectories.tokens.turns import Turn
from rollout_inspector.text.html.tokens import NO_LOGPROB, logprob_classes


def test_columns_stand_on_the_base_line_and_the_largest_fills_the_height() -> None:
    low, none, high = ChartFrame(width=30, top=10, base=110, gap=2).columns([1, 0, 4])
    assert low == ("1.00", "85.00", "8.00", "25.00")
    assert none == ("11.00", "110.00", "8.00", "0.00")
    assert high == ("21.00", "10.00", "8.00", "100.00")


def test_a_share_is_of_its_own_total_and_never_drawn_as_nothing() -> None:
    all_of_them, one = share_bars([("step 0", 1000, 1000, "?at=0"), ("step 1", 1, 1000, "?at=1")])
    assert (all_of_them.percent, all_of_them.y) == ("100.0 %", f"{SHARES.top:.2f}")
    assert (one.percent, one.height) == ("0.1 %", "2.00")
    assert float(one.middle) == float(one.x) + float(one.width) / 2
    assert one.has_room and not share_bars([("step", 1, 1, "")] * 20)[0].has_room
    assert share_bars([]) == [] and share_bars([("nobody", 0, 0, "")])[0].percent == "0.0 %"


def turn(start: int, stop: int, number: int, role: str, part: str, n_trained: int = 0) -> Turn:
    return Turn(number, role, part, None, start, stop, n_trained)


def test_a_minimap_covers_the_row_and_merges_what_is_too_narrow_to_be_seen() -> None:
    turns = [turn(i * 3, i * 3 + 3, i + 1, "role", "completion" if i % 2 else "delta") for i in range(2000)]
    html, _ = drawn_map(turns, 6000, "?t={}-{}")
    ranges = [(int(a), int(b)) for a, b in re.findall(r'href="\?t=(\d+)-(\d+)"', html)]
    assert len(ranges) == 500 and (ranges[0][0], ranges[-1][1]) == (0, 6000)
    assert all(one[1] == other[0] for one, other in pairwise(ranges))
    assert "<title>turns 1-4</title>" in html
    # Half of each piece is what was sampled, so half of its height is.
    piece = html[: html.index("</a>")]
    assert re.findall(r'class="map-(\w+)" x="0.00" y="([\d.]+)" width="[\d.]+" height="([\d.]+)"', piece) == [
        ("completion", "6", "5"), ("delta", "11", "5"),
    ]
    html, _ = drawn_map([turn(0, 9, 1, "user", "prompt")], 9, "?t={}-{}")
    assert '<title>turn 1 · user</title><rect class="map-prompt" x="0.00" y="6" width="1000.00" height="10"/>' in html
    assert drawn_map([], 0, "") == ("", "")


def test_a_minimap_shows_the_share_that_is_trained() -> None:
    turns = [turn(0, 50, 1, "user", "prompt"), turn(50, 100, 2, "assistant", "completion", 25)]
    assert drawn_map(turns, 100, "?t={}-{}")[1] == "M500.00 17h500.00v2.0h-500.00z"


def test_a_strip_draws_known_values_alone_at_heights_that_do_not_depend_on_the_row() -> None:
    edges, means = strip_means(np.array([2.0, np.nan, 1.0, np.inf], np.float32))
    assert edges.tolist() == [0, 1, 2, 3, 4]
    assert np.array_equal(means, [2.0, np.nan, 1.0, np.nan], equal_nan=True)
    heights = np.array([0.5, np.nan, 0.0, np.nan])
    assert strip_path(edges, heights, False) == "M0.0 40v-19.5h249.6v19.5zM500.0 40v-1.0h249.6v1.0z"
    assert strip_path(edges[:2], np.array([-1.0]), True) == "M0.0 20v19.0h999.6v-19.0z"
    steps = Scale((0.1, 1.0, 2.0, 4.0), is_signed=True)
    assert steps.heights(np.array([0.0, 0.1, -2.0, 100.0])).tolist() == [0.0, 0.25, -0.75, 1.0]
    sizes = Scale((0.1, 1.0, 2.0, 4.0))
    assert np.array_equal(sizes.heights(np.array([np.nan, -2.0])), [np.nan, 0.75], equal_nan=True)


def test_a_small_constant_is_not_the_loudest_colour() -> None:
    constant = np.full(4, -0.01, np.float32)
    assert scale_of("mismatch", constant).classes(constant, 5).tolist() == [3, 3, 3, 3, NO_LOGPROB]
    large = np.array([-0.8, 0.0, 0.06, np.nan], np.float32)
    assert scale_of("mismatch", large).classes(large, 4).tolist() == [0, 4, 6, NO_LOGPROB]
    # The trainer's log-probabilities have the thresholds of the sampler's.
    half = np.full(4, -0.5, np.float32)
    assert scale_of("prev_logprobs", half).classes(half, 4).tolist() == logprob_classes(half, 4).tolist()


def test_a_place_on_a_strip_is_always_wide_enough_to_be_seen() -> None:
    assert extent(0, 50, 100) == {"x": "0.00", "width": "500.00"}
    assert extent(100, 100, 100) == {"x": "997.00", "width": "3.00"}
    assert extent(0, 0, 0) == {"x": "0.00", "width": "3.00"}
