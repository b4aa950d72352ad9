"""The pictures of README and docs are today's: most lines of what drew them, templates and styles, are as they were."""

import json
import re

import pytest

from tests.browser.screenshots import MADE, PICTURES, ROOT, sample_of, share_kept

LEAST_KEPT = 0.75
"""An edit here and there does not age a picture. When a quarter of the lines are others, the page looks different."""


@pytest.mark.parametrize("picture", PICTURES)
def test_a_picture_is_of_todays_page(picture: str) -> None:
    made = json.loads(MADE.read_text())
    kept = share_kept(made.get(picture, []), sample_of(PICTURES[picture][2]))
    assert kept >= LEAST_KEPT, (
        f"{picture} is old: {kept:.0%} of the lines of its templates and styles are as they were when it was made. "
        "Run `make screenshots` and commit the pictures with docs/pictures/made.json."
    )


def test_the_texts_show_these_pictures_and_say_what_is_on_them() -> None:
    shown = set()
    for name, folder in (("README.md", ROOT), ("docs/quickstart.md", ROOT / "docs")):
        for words, path in re.findall(r"!\[([^]]*)\]\(([^)]+)\)", (ROOT / name).read_text()):
            assert len(words) > 20, path
            shown.add((folder / path).relative_to(ROOT).as_posix())
    assert shown == set(PICTURES) and all((ROOT / picture).stat().st_size < 400_000 for picture in PICTURES)


def test_a_few_edits_keep_a_picture_and_another_page_does_not() -> None:
    """The witness of the rule: the sample follows the lines, wherever they stand."""
    files = PICTURES["docs/screenshot.png"][2]
    now = sample_of(files)
    assert len(now) > 100
    assert share_kept(now[5:], now) > LEAST_KEPT
    assert share_kept(now[: len(now) // 2], now) < LEAST_KEPT
    assert share_kept(now, sample_of(PICTURES["docs/pictures/run.png"][2])) < LEAST_KEPT
