"""The turns of a row are counted once: every door shows a message under the same number, in every row that holds it."""

import re
from html import unescape
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from django.test import Client

from inspector.trajectories.tokens.turns import cut_at_headers
from rollout_inspector.streams.prefix import common_prefix
from rollouts.jobs import gallery
from rollouts.store.trajectories.rows import Span
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db

HEAD = re.compile(r'class="turn-name" href="#[^"]*turn-(\d+)">turn (\d+)</a> ·\s*<span class="turn-role">([^<]*)')
PLACE = re.compile(r"turn ([\d,]+) ·\s*<a href=\"/trajectories/\w+(\?[^\"]*)\" data-tokens")


def turns_of(web: Client, code: str, row: int) -> list[dict[str, Any]]:
    """The turns of a row in the twin, after the page, the saved file and *Mask, explained* have shown the same."""
    twin: list[dict[str, Any]] = web.get(f"/trajectories/{code}.json?row={row}").json()["turns"]
    numbers = [(turn["number"], turn["role"]) for turn in twin]
    page = unescape(web.get(f"/trajectories/{code}?row={row}").content.decode())
    heads = [(int(name), role) for anchor, name, role in HEAD.findall(page) if anchor == name]
    assert heads == numbers
    mask = web.get(f"/trajectories/{code}/mask.json?row={row}").json()["turns"]
    assert [(turn["number"], turn["role"]) for turn in mask] == numbers
    return twin


def test_every_door_counts_alike_over_the_gallery(web: Client) -> None:
    n_places = n_shared = 0
    for record in gallery.load().trajectories.order_by("index"):
        rows = [turns_of(web, record.code, row) for row in range(record.n_rows)]
        for turns in rows:
            assert [turn["number"] for turn in turns] == list(range(1, len(turns) + 1))
        # What two rows share at their start has the same numbers in both.
        streams = row_ids(record)
        for first, second in pairwise(streams):
            shared = common_prefix(streams[first], streams[second])
            for one, other in zip(rows[first], rows[second], strict=False):
                if max(one["stop"], other["stop"]) <= shared:
                    n_shared += 1
                    assert (one["number"], one["start"]) == (other["number"], other["start"]), record.external_id
        html = unescape(web.get(f"/trajectories/{record.code}/record").content.decode())
        for number, query in PLACE.findall(html):
            n_places += 1
            row = int(found[1]) if (found := re.search(r"row=(\d+)", query)) else 0
            start = int(re.search(r"[?&]t=(\d+)", query)[1])  # type: ignore[index]
            turn = next(turn for turn in rows[row] if turn["start"] <= start < turn["stop"])
            assert turn["number"] == int(number.replace(",", "")), record.external_id
    assert n_places > 150 and n_shared > 20


def row_ids(record: Any) -> dict[int, np.ndarray]:
    """Index of each row that follows from steps -> its ids."""
    steps = load_trajectory(record).steps
    followed = record.rows.filter(last_step__isnull=False)
    return {row.index: steps[max(row.step_indices)].stream for row in followed.order_by("index")}


def test_a_message_that_is_read_again_keeps_its_number(make: Maker, web: Client) -> None:
    value, found = make.broken("b")
    code = make.run([value], [found]).trajectories.get().code
    first, again = (turns_of(web, code, row) for row in (0, 1))
    roles = [turn["role"] for turn in again]
    assert [turn["role"] for turn in first] == roles[: len(first)] and roles[:3] == ["user", "assistant", "tool"]
    assert again[-1]["part"] == "completion" and len(again) == 2 * len(value.steps)


def test_a_header_of_the_reply_belongs_to_the_message_before_it() -> None:
    spans = [Span(0, 20, 0, "prompt"), Span(20, 30, 0, "completion"), Span(30, 40, 1, "delta")]
    headers = [(0, 8, "system"), (8, 17, "user"), (17, 32, "assistant"), (32, 40, "tool")]
    cut = [(span.start, span.stop, span.roles) for span in cut_at_headers(spans, headers)]
    assert cut == [(0, 8, ("system",)), (8, 20, ("user",)), (20, 30, ()), (30, 40, ())]
