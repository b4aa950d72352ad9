"""Comparisons of two streams: what counts as one difference, which are drawn, how they are marked, where they lead."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from django.test import Client
from django.urls import reverse

from inspector.html.token_diff import marked_tokens
from inspector.trajectories.compare import compare_page, side_by_side
from inspector.trajectories.compare.side_by_side import without_stray
from rollout_inspector.streams.align import AlignedGroup
from rollout_inspector.streams.trajectory import Row, Step, Trajectory, ids_array, plain_tokens
from rollout_inspector.text.html.tokens import TokenPainter
from rollout_inspector.text.tokenizers import TokenizerUnusable
from rollouts.jobs.diagnosis import diagnose_run
from rollouts.store import models
from rollouts.store.runs.runs import delete_run
from rollouts.store.trajectories.retokenized import keep_retokenized
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db

LEFT = ids_array([*range(300, 340), 401, 402, 350, 403, 404, *range(360, 400)])
RIGHT = ids_array([*range(300, 340), 411, 412, 350, 413, 414, *range(360, 400)])
"""Two differences of two tokens, and between them one token that is equal by chance."""


def compared(web: Client, trajectory: models.StoredTrajectory, query: str) -> Any:
    address = reverse("trajectory-compare", args=[trajectory.code])
    return web.get(f"{address}.json{query}").json(), web.get(address + query).content.decode()


def beside(make: Maker, left: np.ndarray, right: np.ndarray, mask: np.ndarray | None = None) -> models.Run:
    """Two siblings with these completions; the first has a row of its own with the ids of the second."""
    head = ids_array([290, 291])
    ids = np.concatenate([head, right])
    trained = np.arange(len(ids)) >= len(head) if mask is None else mask
    one = Trajectory("one", (Step(head, left),), rows=(Row(ids, trained, step_indices=(0,)),), group="g")
    broken = Trajectory("broken", (Step(head, left), Step(ids, head)), group="g")
    return make.run([one, Trajectory("two", (Step(head, right),), group="g"), broken])


def test_an_equal_token_by_chance_splits_no_difference(make: Maker, web: Client) -> None:
    one, two, broken = beside(make, LEFT, RIGHT).trajectories.order_by("index")
    of_group = broken, f"?with={two.code}&row=0"  # its first row follows from its steps
    for trajectory, query in ((one, "?row=0&side=trained"), of_group, (broken, "?step=1&side=prompt")):
        report, html = compared(web, trajectory, query)
        found = [(site["left_start"], site["left_stop"], site["right_stop"]) for site in report["comparison"]["sites"]]
        assert found == [(42, 47, 47)], query
        # The token that is equal is not marked; those around it are.
        assert html.count("<del><i") == 2 and html.count("<ins><i") == 2
    verdict = compared(web, one, "?row=0&side=trained")[0]["verdict"]
    assert verdict.startswith("5 sampled tokens at token 42 are replaced by 5; ")
    assert "So the row trains 4 tokens that the model did not sample there" in verdict


def test_equal_tokens_by_chance_are_part_of_a_difference() -> None:
    groups = [(0, 9, 0, 9, True), (9, 12, 9, 14, False), (12, 14, 14, 16, True), (14, 20, 16, 17, False),
              (20, 23, 17, 20, True), (23, 24, 20, 20, False), (24, 25, 20, 21, True)]
    left, right = np.arange(25, dtype=np.int32), np.arange(100, 121, dtype=np.int32)
    kept = without_stray(left, right, [AlignedGroup(*group) for group in groups])
    assert [(group.left_start, group.left_stop, group.equal) for group in kept] == [
        (0, 9, True), (9, 20, False), (20, 23, True), (23, 24, False), (24, 25, True),
    ]
    # "b" before the "a" that is matched and "b" behind it: in truth both sides are the same.
    same = ids_array([1, 2, 3, 2, 4])
    groups = [(0, 1, 0, 1, True), (1, 1, 1, 3, False), (1, 2, 3, 4, True), (2, 4, 4, 4, False), (4, 5, 4, 5, True)]
    assert without_stray(same, same, [AlignedGroup(*group) for group in groups]) == [AlignedGroup(0, 5, 0, 5, True)]


def test_a_difference_of_a_recorded_row_leads_to_its_place_in_that_row(make: Maker, web: Client) -> None:
    right = np.concatenate([RIGHT[:10], RIGHT[12:]])
    one = beside(make, LEFT, right).trajectories.get(external_id="one")
    report, html = compared(web, one, "?row=0&side=trained")
    assert report["comparison"]["causes"] == {"only on the left": 1, "other text": 1}
    base = reverse("trajectory", args=[one.code])
    links = re.findall(r'<a href="([^"]+)" title="Show in the stream">([^<]+)</a>', html)
    assert links == [
        (f"{base}?view=tokens&amp;t=12-13", "12-14 | 12"),
        (f"{base}?view=tokens&amp;t=40-45", "42-47 | 40-45"),
    ]
    assert "<small>only on the left</small>" in html


def test_differences_are_shown_in_parts_and_counted_whole(
    make: Maker, web: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(side_by_side, "MAX_SITES", 3)
    left = np.arange(1000, dtype=np.int32) % 7 + 300
    left[::5] = np.arange(200) % 190 + 310
    right, places = left.copy(), list(range(50, 1000, 120))
    right[places] = 299
    one = beside(make, left, right).trajectories.get(external_id="one")
    seen, query, pages = [], "?row=0&side=trained", 0
    while query:
        report, html = compared(web, one, query)
        found = report["comparison"]
        assert found["n_sites"] == len(places) == 8 and found["causes"] == {"other text": 8}
        assert found["n_before"] == len(seen) and html.count('class="site"') == len(found["sites"])
        assert html.count("before</a>") == (pages > 0)
        seen += [site["left_start"] - 2 for site in found["sites"]]
        assert f"Differences {found['n_before'] + 1} to {len(seen)} of 8 are shown." in html
        following = re.search(r'<a href="([^"#]+)#side-by-side" rel="next">', html)
        assert (following is None) == (found["next_from"] is None)
        query = following[1].replace("&amp;", "&") if following else ""
        assert not query or {f"from={found['next_from']}", "side=trained"} < set(query[1:].split("&"))
        pages += 1
    assert seen == places and pages == 3
    late, html = compared(web, one, "?row=0&side=trained&from=999")
    assert late["comparison"]["sites"] == [] and "All 8 differences lie before." in html


def test_a_side_that_is_too_long_is_compared_up_to_a_bound_that_is_said(
    make: Maker, web: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two, _ = beside(make, LEFT, RIGHT).trajectories.order_by("index")
    monkeypatch.setattr(side_by_side, "MAX_TOKENS", 20)
    for query in ("?row=0&side=trained", f"?with={two.code}"):
        report, html = compared(web, one, query)
        assert report["comparison"]["n_left"] == 20 and report["comparison"]["n_sites"] == 0
        assert html.count("The first 20 tokens of each side are compared; there are 87.") == 1


def test_marks_cut_no_character(make: Maker) -> None:
    table = make.table
    sides = [make.ids(text) for text in ("a 漢 b", "a 漣 b")]
    left, right = marked_tokens(TokenPainter(table), *(plain_tokens(ids) for ids in sides))
    for html, ids, tag in ((left, sides[0], "del"), (right, sides[1], "ins")):
        inside = re.sub(f"</?{tag}>", "", html)
        assert f"<{tag}>" in html
        whole = TokenPainter(table).window(plain_tokens(ids))
        classes = r' class=("[^"]*"|\w+)'  # a mark begins another run for a screen reader
        assert re.sub(classes, "", inside) == re.sub(classes, "", whole)
    assert (
        marked_tokens(TokenPainter(table), plain_tokens(sides[0]), replace(plain_tokens(sides[0])))[0].count("del") == 0
    )


def drifting(make: Maker, name: str) -> Trajectory:
    """A completion of which two words are sampled as the tokens of their bytes."""
    head, words = (
        make.ids("<|im_start|>user\nRead<|im_end|>\n<|im_start|>assistant\n"),
        make.ids("I compute the result. "),
    )
    one_byte = {piece[0]: one for one, piece in enumerate(table_of(make)) if len(piece) == 1}
    long = next(i for i, piece in enumerate(make.table.token_bytes(words)) if len(piece) > 3)
    cut = [one_byte[byte] for byte in make.table.token_bytes(words[long : long + 1])[0]]
    sampled = np.concatenate([words[:long], cut, words[long + 1 :]])
    return Trajectory(name, (Step(head, np.concatenate([sampled, words, sampled]).astype(np.int32)),), group="g")


def table_of(make: Maker) -> list[bytes]:
    return make.table.token_bytes(np.arange(make.table.vocab_size, dtype=np.int32))


def test_what_the_diagnosis_encoded_again_needs_no_encoder(
    make: Maker, web: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make.run([drifting(make, "a"), make.conversation("b", turns=2), drifting(make, "c")])
    questions = [(one, query) for one in run.trajectories.order_by("index") for query in ("?step=0", "?row=0")]
    by_encoder = [compared(web, *question)[0]["comparison"] for question in questions]
    assert [bool(one["n_sites"]) for one in by_encoder] == [True, True, False, False, True, True]
    list(diagnose_run(run))

    def no_encoder(files_sha256: str) -> None:
        raise TokenizerUnusable("asked for")

    monkeypatch.setattr(compare_page, "load_tokenizer", no_encoder)
    for question, before in zip(questions, by_encoder, strict=True):
        report, html = compared(web, *question)
        assert report["comparison"] == before and "asked for" not in html
    # Other ids than those that were encoded, and another tokenizer, need the encoder.
    first, query = questions[0]
    held = first.retokenized
    held.streams = np.where(np.arange(len(held.streams)) == 2, 7, held.streams)
    held.save()
    assert "asked for" in compared(web, first, query)[1] and "asked for" not in compared(web, first, "?row=0")[1]
    models.Retokenized.objects.filter(pk=held.pk).update(files_sha256="0" * 64)
    assert "asked for" in compared(web, first, "?row=0")[1]
    # Every diagnosis writes it anew; nothing of it outlives its trajectory.
    list(diagnose_run(run))
    assert "asked for" not in compared(web, first, query)[1]
    assert models.Retokenized.objects.count() == 3
    keep_retokenized(run, [(first.pk + 1000, ())])  # it was deleted meanwhile
    delete_run(run)
    assert not models.Retokenized.objects.exists()
