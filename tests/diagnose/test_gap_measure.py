"""The measurement of ``benchmarks/measures/gap_causes.py`` runs, and its shortest runs of training are named right."""

import pytest

from benchmarks.measures import gap_causes


def test_causes_in_the_made_policy_are_named_and_none_where_nothing_is_planted() -> None:
    (few,) = (one for one in gap_causes.SETTINGS if one.name == "few steps")
    found = gap_causes.measure([0], [few])
    assert set(found) == {"clean", *gap_causes.CAUSES} and found["clean"].right == 1
    single = [one for name, one in found.items() if name != "clean"]
    assert sum(one.right for one in single) >= 0.95 * sum(one.cases for one in single), list(gap_causes.table(found))


def test_the_same_seed_plants_the_same() -> None:
    (few,) = (one for one in gap_causes.SETTINGS if one.name == "few steps")
    first, again = (gap_causes.planted(few, 3, "placeholder") for _ in range(2))
    assert (first.ids == again.ids).all() and (first.trainer == again.trainer).all()
    assert (first.sampler == 0).sum() > (gap_causes.planted(few, 3).sampler == 0).sum()


@pytest.mark.parametrize(
    ("setting", "seed", "causes"),
    [
        ("part of the rows", 32, ("weights_not_delivered",)),  # no row of the last step is of that part
        ("part of the rows", 41, ("temperature",)),
        ("float32", 31, ("heavy_tokens", "weights_not_delivered")),  # one quiet step has too few tokens of the ids
        ("float32", 11, ("heavy_tokens", "weights_not_delivered")),  # one of two ids has four tokens in quiet steps
    ],
)
def test_causes_are_named_where_few_rows_or_tokens_show_them(
    setting: str, seed: int, causes: tuple[str, ...]
) -> None:
    (used,) = (one for one in gap_causes.SETTINGS if one.name == setting)
    assert gap_causes.planted(used, seed, *causes).named() == causes
