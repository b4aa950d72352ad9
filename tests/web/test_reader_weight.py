"""What the tokens page weighs on the wire, and that what it sends for its cards is what the twin says."""

import gzip
import re
import zlib
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from django.http import FileResponse, HttpResponse
from django.test import Client, RequestFactory
from django.urls import reverse

from inspector.trajectories import views
from inspector.trajectories.place import WINDOW
from inspector.web import twins as in_parts
from inspector.web.middleware import CompressionMiddleware
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollouts.store import models
from tests.web.long_rows import long_trajectory
from tests.web.trajectory_samples import Maker, own_row

pytestmark = [pytest.mark.django_db, pytest.mark.sqlite_only]  # its queries are those of other pages

READER = {"HX-Request": "true", "HX-Target": "reader"}
WINDOW_ALONE = {"HX-Request": "true", "HX-Target": "window"}
GZIP = {"Accept-Encoding": "gzip"}
MOST_ON_THE_WIRE = 60_000
MOST_UNPACKED = 400_000


def test_a_window_with_its_cards_is_small(web: Client, corpus: Path) -> None:
    made = Maker(corpus / "tokenizers" / "qwen3")
    row = made.run([long_trajectory(made.ids, 1_000_000)]).trajectories.get()
    place = f"?view=tokens&w={200 * WINDOW}"
    window = web.get(reverse("trajectory", args=[row.code]) + place, headers=WINDOW_ALONE | GZIP)
    card = web.get(reverse("trajectory-card", args=[row.code]) + place, headers=GZIP)
    assert window["Content-Encoding"] == card["Content-Encoding"] == "gzip"
    page = gzip.decompress(window.content).decode()
    assert page.count("<i") >= WINDOW and "<html" not in page and len(page) < MOST_UNPACKED
    assert len(window.content) + len(card.content) < MOST_ON_THE_WIRE


def test_another_window_reads_its_own_turns_and_leaves_the_map(
    web: Client, make: Maker, django_assert_max_num_queries: Any
) -> None:
    stored = make.run([make.conversation("a", turns=90, size=100)]).trajectories.get()
    address = reverse("trajectory", args=[stored.code]) + f"?view=tokens&w={WINDOW}"
    reader = web.get(address, headers=READER).content.decode()
    # Session, user, trajectory, roles, rows, steps, messages, comments, muted kinds, arrays.
    with django_assert_max_num_queries(10) as queries:
        window = web.get(address, headers=WINDOW_ALONE).content.decode()
    (messages,) = [query["sql"] for query in queries if 'AS "messages_shared"' in query["sql"]]
    assert 0 < messages.split(" IN (")[1].split(")")[0].count(",") < 60
    tokens = window[window.index('id="pane"') :]
    assert tokens == reader[reader.index('id="pane"') :] and tokens.count("<i") > WINDOW / 2
    map_of = re.compile(r'data-map="[^"]+"')
    assert map_of.findall(window) == map_of.findall(reader) and len(map_of.findall(window)) == 1
    assert "map-completion" in reader and "map-completion" not in window
    assert 'class="map-window"' in reader and 'class="map-window"' in window and len(window) < len(reader)


def test_a_long_page_is_sent_in_parts_that_are_the_page(
    web: Client, make: Maker, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = make.run([make.conversation("a", turns=4, hostile=True)]).trajectories.get()
    address = reverse("trajectory", args=[stored.code])

    def plain(html: str) -> str:  # each answer hides the token of its forms in another way
        return re.sub(r'(name="csrfmiddlewaretoken" value=")[^"]+|\s+', r"\1", html)

    whole = web.get(address).content.decode()
    monkeypatch.setattr(views, "IN_PARTS", 1)
    monkeypatch.setattr(in_parts, "PART", 1)
    answer = web.get(address, headers=GZIP)
    sent = list(answer.streaming_content)
    assert answer["Content-Encoding"] == "gzip" and "Content-Length" not in answer
    unpack = zlib.decompressobj(wbits=31)
    first, *others = [unpack.decompress(part).decode() for part in sent]  # each can be read when it arrives
    assert "<title>" in first and 'class="traj-head"' in first and 'class="turn-head"' not in first
    assert sum('class="turn-head"' in part for part in others) > 4 and unpack.eof
    assert plain(first + "".join(others)) == plain(whole)
    assert web.get(address, headers=GZIP | {"If-None-Match": answer["ETag"]}).status_code == 304


def test_the_cards_say_what_the_twin_says(web: Client, make: Maker) -> None:
    value = make.conversation("a", hostile=True)
    spot = {"step": 1, "start": 30, "stop": 33, "evidence": "x", "remedy": "y"}
    found = Finding(Axis.STREAM, "unclassified", Severity.ERROR, **spot)
    stored = make.run([value], [[found]]).trajectories.get()
    card = web.get(reverse("trajectory-card", args=[stored.code])).json()
    tokens = web.get(reverse("trajectory-json", args=[stored.code])).json()["window"]["tokens"]
    assert card["ids"] == [token["id"] for token in tokens] and card["n_tokens"] == len(tokens)
    assert [card["bytes"].get(str(token["id"])) for token in tokens] == [token["bytes"] for token in tokens]
    exact = [token["logprob"] for token in tokens]
    assert card["logprobs"] == [None if value is None else round(value * 1e4) for value in exact]
    runs = [*card["runs"], [len(tokens), "", False]]
    states = [run[1:] for run, after in pairwise(runs) for _ in range(after[0] - run[0])]
    assert states == [[token["origin"], token["loss_mask"]] for token in tokens]
    assert set(card["special"]) == {token["id"] for token in tokens if token["special"]}
    for start, stop, number, role, step, _ in card["turns"]:
        assert all(token["turn"] == f"turn {number} · {role}" and token["step"] == step for token in tokens[start:stop])
    ((start, stop, words),) = card["findings"]
    assert [token["findings"] for token in tokens] == [[words] * (start <= i < stop) for i in range(len(tokens))]


def test_columns_of_a_trainer_are_in_the_cards(web: Client, make: Maker) -> None:
    stored = make.run([own_row(40, advantages=[0.123456789] * 39)]).trajectories.get()
    card = web.get(reverse("trajectory-card", args=[stored.code])).json()
    assert card["columns"] == {"advantages": [0.123457] * 39 + [None]}


def test_a_row_less_trajectory_has_an_empty_card(web: Client, make: Maker) -> None:
    run = make.run([make.conversation("a")])
    empty = models.StoredTrajectory.objects.create(run=run, index=9, external_id="empty")
    card = web.get(reverse("trajectory-card", args=[empty.code])).json()
    assert card["ids"] == [] and card["runs"] == []


def test_answers_differ_in_length_and_streams_pass_as_they_are(tmp_path: Path) -> None:
    asked = RequestFactory(headers={"Accept-Encoding": "gzip"}).get("/")
    answer = CompressionMiddleware(lambda request: HttpResponse("a secret " * 500))
    # The padding hides the length of what is compressed, which BREACH measures.
    assert len({len(answer(asked).content) for _ in range(40)}) > 3
    (tmp_path / "rows.jsonl").write_text("x" * 5000)
    stream = FileResponse((tmp_path / "rows.jsonl").open("rb"))
    sent = CompressionMiddleware(lambda request: stream)(asked)
    assert "Content-Encoding" not in sent and sent["Content-Length"] == "5000"


def test_a_text_is_found_in_the_whole_row(web: Client, make: Maker) -> None:
    value = make.conversation("a", turns=2, size=40, hostile=True)
    stored = make.run([value]).trajectories.get()
    address = reverse("trajectory-find", args=[stored.code])
    ids = value.steps[-1].stream
    text = make.tokenizer.decode(ids)
    for wanted in ("compute", "COMPUTE 12", "漢", "\u202eevil", "no such text"):
        found = web.get(address, {"q": wanted}).json()
        assert found["n"] == text.lower().count(wanted.lower()) == len(found["places"]), wanted
        for start, stop in found["places"]:
            assert wanted.lower() in make.tokenizer.decode(ids[start:stop]).lower()
            assert wanted.lower() not in make.tokenizer.decode(ids[start : stop - 1]).lower()
    assert web.get(address).json()["missing"]
