"""The trajectory pages over stored trajectories: what they say, what they cost, and what they survive."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from django.contrib.auth.models import User
from django.contrib.staticfiles.storage import staticfiles_storage
from django.test import Client
from django.urls import reverse

from inspector.trajectories.compare import compare_page, side_by_side
from inspector.trajectories.compare.deltas_page import HEAD, TAIL
from inspector.trajectories.tokens.mask_page import OBSERVATIONS
from inspector.trajectories.tokens.page_queries import read_tokens
from rollout_inspector.diagnose.finding import Axis, Cost, Finding, Severity
from rollout_inspector.diagnose.gap.figures import TRAINER_LOGPROBS
from rollout_inspector.diagnose.loss_weights.rules import RULES
from rollout_inspector.streams.prefix import n_new_tokens
from rollout_inspector.streams.trajectory import NO_IDS, Origin, Row, Step, Trajectory
from rollout_inspector.text.html.text import bytes_text
from rollouts.store import models
from rollouts.store.models import Project
from rollouts.store.people.shares import create_share
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.launched_trajectories import save_steps
from rollouts.store.trajectories.trajectory_parts import rows_and_steps
from tests.people import make_member
from tests.web.samples import one_line
from tests.web.trajectory_samples import HOSTILE, Maker, own_row

WEIGHTS = [f"weight_{rule}" for rule in RULES]
"""The lenses of a row with a trainer's values."""

pytestmark = pytest.mark.django_db


@pytest.fixture
def reader(client: Client, django_user_model: type) -> Client:
    client.force_login(make_member("reader"))
    return client


def only(run: models.Run) -> models.StoredTrajectory:
    return run.trajectories.get()


def url(trajectory: models.StoredTrajectory, query: str = "", page: str = "trajectory") -> str:
    return reverse(page, args=[trajectory.code]) + query


class Pane(HTMLParser):
    """The text of token panes, as a copy of the page gives it."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.depth = 0
        self.text = ""
        self.scripts: list[dict[str, str | None]] = []
        self.styled: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        named = dict(attrs)
        if tag == "script":
            self.scripts.append(named)
        if "style" in named or any(name.startswith("on") for name in named):
            self.styled.append(tag)
        if tag == "div" and (self.depth or "toks" in (named.get("class") or "").split()):
            self.depth += 1

    def handle_endtag(self, tag):
        if tag == "div" and self.depth:
            self.depth -= 1

    def handle_data(self, data):
        if self.depth:
            self.text += data


def page_text(response) -> str:
    assert response.status_code == 200
    return response.getvalue().decode()  # a long page comes in parts


@pytest.mark.parametrize("view", ["runs", "tokens"])
def test_the_pane_holds_the_whole_row_and_hostile_text_stays_text(make, reader, view):
    stored = only(make.run([make.conversation("a", hostile=True)]))
    pane = Pane(page_text(reader.get(url(stored, f"?view={view}"))))
    whole = models.StoredRow.objects.get(trajectory=stored)
    last = make.conversation("a", hostile=True).steps[-1]
    assert whole.n_tokens == len(last.stream)
    assert pane.text == make.tokenizer.decode(last.stream)
    assert HOSTILE in pane.text
    assert not pane.styled
    assert all(script.get("src", "").startswith("/static/") for script in pane.scripts)


def test_text_that_runs_from_right_to_left_has_a_note_where_tokens_are_boxes(make, reader):
    value = make.conversation("a")
    arabic = replace(value.steps[0], completion_ids=make.ids("سلام"), logprobs=None)
    stored = only(make.run([replace(value, steps=(arabic,))]))
    note = "runs from right to left"
    assert note in page_text(reader.get(url(stored, "?view=tokens")))
    assert note not in page_text(reader.get(url(stored, "?view=runs")))
    stored = only(make.run([value]))
    assert note not in page_text(reader.get(url(stored, "?view=tokens")))


def test_turns_have_their_roles_ranges_and_trained_tokens(make, reader):
    stored = only(make.run([make.conversation("a", turns=2)]))
    report = reader.get(url(stored) + ".json").json()
    assert [(turn["role"], turn["part"]) for turn in report["turns"]] == [
        ("user", "prompt"), ("assistant", "completion"), ("tool", "delta"), ("assistant", "completion"),
    ]
    assert [turn["n_trained"] for turn in report["turns"]] == [0, 31, 0, 31]
    assert [turn["start"] for turn in report["turns"][1:]] == [turn["stop"] for turn in report["turns"][:-1]]
    html = one_line(reader.get(url(stored)))
    assert 'turn 2</a> · <span class="turn-role">assistant</span>' in html
    assert "all trained" in html and "not trained" in html


def test_the_twin_gives_every_field_of_each_token(make, reader):
    stored = only(make.run([make.conversation("a", hostile=True)]))
    report = reader.get(url(stored, "?view=tokens") + "").status_code
    assert report == 200
    report = reader.get(reverse("trajectory-json", args=[stored.code])).json()
    tokens = report["window"]["tokens"]
    step = make.conversation("a", hostile=True).steps[0]
    assert [token["id"] for token in tokens[: len(step.stream)]] == step.stream.tolist()
    assert bytes.fromhex("".join(token["bytes"] for token in tokens)).decode() == make.tokenizer.decode(
        make.conversation("a", hostile=True).steps[-1].stream
    )
    sampled = tokens[len(step.prompt_ids)]
    assert (sampled["origin"], sampled["loss_mask"]) == ("sampled", True)
    assert sampled["logprob"] == pytest.approx(float(step.logprobs[0]), abs=1e-6)
    assert sampled["step_place"] == f"step 0, completion 0 of {len(step.completion_ids)}"
    assert tokens[0]["logprob"] is None and tokens[0]["origin"] == "prompt"


def test_windows_meet_at_their_edges(make, reader):
    stored = only(make.run([make.conversation("a", turns=2, size=5000, hostile=True)]))
    n = models.StoredRow.objects.get(trajectory=stored).n_tokens
    seen = ""
    for start in range(0, n, 4096):
        html = page_text(reader.get(url(stored, f"?view=tokens&w={start}")))
        assert html.count("<i") - html.count("<input") - html.count("<img") <= 4096 + 20
        seen += Pane(html).text
        assert ('data-go="next"' in html) == (start + 4096 < n)
        assert ('data-go="previous"' in html) == (start > 0)
    assert seen == make.tokenizer.decode(make.conversation("a", turns=2, size=5000, hostile=True).steps[-1].stream)


def test_a_window_that_starts_inside_a_character_loses_nothing(make, reader):
    stored = only(make.run([make.conversation("a", hostile=True)]))
    pieces = make.table.token_bytes(make.conversation("a", hostile=True).steps[0].stream)
    cut = next(i for i, piece in enumerate(pieces) if piece and 0x80 <= piece[0] < 0xC0)
    html = page_text(reader.get(url(stored, f"?view=tokens&w={cut}")))
    assert "\ufffd" not in Pane(html).text


def test_a_range_opens_its_window_and_is_marked(make, reader):
    stored = only(make.run([make.conversation("a", turns=2, size=6000)]))
    html = page_text(reader.get(url(stored, "?view=tokens&t=5000-5003")))
    assert 'data-a="4096"' in html
    assert html.count(' k"') + html.count("k>") >= 3
    assert 'value="5000-5003"' in html


@pytest.mark.parametrize(
    ("query", "sentence"),
    [
        ("?t=99999999-100000000", "are not in row 0"),
        ("?t=5-2", "are not in row 0"),
        ("?t=abc", "is not a range of tokens"),
        ("?row=7", "There is no row 7 here"),
        ("?row=-1", "There is no row -1 here"),
        ("?w=x&view=tokens", "is not a token offset"),
        ("?w=999999999999", "ends at token"),
    ],
)
def test_what_does_not_fit_is_said_and_never_an_error(make, reader, query, sentence):
    stored = only(make.run([make.conversation("a")]))
    assert sentence in page_text(reader.get(url(stored, query)))
    notices = reader.get(reverse("trajectory-json", args=[stored.code]) + query).json()["notices"]
    assert any(sentence in notice for notice in notices)


def test_a_good_range_says_nothing(make, reader):
    stored = only(make.run([make.conversation("a")]))
    assert reader.get(reverse("trajectory-json", args=[stored.code]) + "?t=3-9").json()["notices"] == []


def test_findings_are_listed_with_their_sentences_and_places(make, reader):
    broken, found = make.broken("b")
    stored = only(make.run([broken], [found]))
    html = page_text(reader.get(url(stored)))
    for words in (
        "The prompt leaves the stream.",
        "Extend by ids.",
        "5 sampled tokens lost, 2 rows instead of one",
        "error",
    ):
        assert words in html
    tabs = html[html.index("row-tabs") : html.index('aria-label="View"')].split("</a>")
    assert "has findings" not in tabs[0] and 'aria-label="has findings: error"' in tabs[1]
    report = reader.get(reverse("trajectory-json", args=[stored.code]) + "?row=1").json()
    assert report["findings"][0]["drawn_row"] == 1
    assert report["window"]["tokens"][found[0].start]["findings"] == [f"1: {report['findings'][0]['title']} (error)"]
    assert report["window"]["tokens"][found[0].start - 1]["findings"] == []
    marked = page_text(reader.get(url(stored, "?row=1&view=tokens")))
    assert "f" in {name for part in marked.split("<i class=")[1:] for name in part.split(">")[0].strip('"').split()}


def test_an_address_without_a_place_opens_at_the_worst_finding(make, reader):
    broken, found = make.broken("b")
    stored = only(make.run([broken], [found]))
    start, stop = found[0].start, found[0].stop
    for query in ("", "?view=tokens&lens=logprob"):
        body = reader.get(reverse("trajectory", args=[stored.code]) + ".json" + query).json()
        assert (body["row"]["index"], body["mark"]) == (1, [start, stop])
        marked = [token["index"] for token in body["window"]["tokens"] if token["findings"]]
        assert marked == list(range(start, stop))
    page = page_text(reader.get(url(stored, "?view=tokens&lens=logprob")))
    assert 'data-view="tokens"' in page and 'data-lens="logprob"' in page
    top = reader.get(reverse("trajectory", args=[stored.code]) + ".json?row=0").json()
    assert (top["row"]["index"], top["mark"]) == (0, None)
    assert "?row=0" in page  # the tab of the row that has no finding
    clean = only(make.run([make.conversation("c")]))
    assert reader.get(reverse("trajectory", args=[clean.code]) + ".json").json()["mark"] is None


def test_the_worst_finding_touches_most_trained_tokens_and_the_filter_comes_first(make, reader):
    whole = make.conversation("a")

    def at(start, kind, severity=Severity.ERROR, lost=0):
        return Finding(Axis.STREAM, kind, severity, step=2, start=start, stop=start + 1, evidence="Odd.",
                       cost=Cost(lost))

    found = [
        at(30, "unclassified"), at(40, "unclassified", lost=9), at(50, "unclassified", Severity.WARNING, 99),
        at(60, "noncanonical_sampling", Severity.INFO),
    ]
    stored = only(make.run([whole], [found]))
    for query, mark in (
        ("", [40, 41]),
        ("?finding=noncanonical_sampling", [60, 61]),
        ("?severity=warning", [50, 51]),
        ("?finding=boundary_merge", [40, 41]),
        ("?t=70", [70, 71]),
    ):
        assert reader.get(reverse("trajectory-json", args=[stored.code]) + query).json()["mark"] == mark
    # Where a finding changes only how the text is cut, the token view shows it.
    assert 'data-view="runs"' in page_text(reader.get(url(stored)))
    assert 'data-view="tokens"' in page_text(reader.get(url(stored, "?finding=noncanonical_sampling")))
    assert 'data-view="runs"' in page_text(reader.get(url(stored, "?finding=noncanonical_sampling&view=runs")))


def test_a_finding_about_a_column_opens_under_the_lens_of_that_column(make, reader):
    found = [Finding(Axis.ROW, "advantage_misplaced", Severity.ERROR, row=0, start=3, stop=9, evidence="Odd.")]
    stored = only(make.run([own_row(advantages=np.ones(40, np.float32))], [found]))
    assert 'data-lens="signed"' in page_text(reader.get(url(stored)))
    other = page_text(reader.get(url(stored, "?row=0")))
    assert 'data-lens="mask"' in other and "data-needs-lens" in other and "lens=advantages&amp;t=3-9" in other
    without = only(make.run([own_row()], [found]))
    assert 'data-lens="mask"' in page_text(reader.get(url(without)))


@pytest.mark.parametrize("view", ["runs", "tokens"])
def test_missing_tokens_are_drawn_where_they_are_missing_and_in_the_card(make, reader, view):
    broken, (finding,) = make.broken("b")
    missing = replace(finding, stop=finding.start, actual_ids=NO_IDS)
    replaced = replace(finding, stop=finding.start + 1, actual_ids=finding.actual_ids[:1])
    for one, words in ((missing, "2 tokens missing here"), (replaced, "2 sampled tokens replaced here")):
        stored = only(make.run([broken], [[one]]))
        html = page_text(reader.get(url(stored, f"?view={view}")))
        text = make.tokenizer.decode(finding.expected_ids)
        assert f'<a class=gap href="#finding-1" data-gap="{words}: {text}"' in html
        assert 'id="finding-1"' in html and Pane(html.split('id="pane"')[1]).text == make.tokenizer.decode(
            broken.steps[1].stream
        )
        card = html[html.index('class="token-diff"') : html.index('class="cost"')]
        assert card.count("<dt>sampled</dt>") == card.count("<dt>read next</dt>") == 1
        for token_id in finding.expected_ids.tolist():
            assert f"<small>{token_id}</small>" in card[card.index("<del>") : card.index("</del>")]
        assert ("<em>nothing</em>" in card) == (one is missing)
    noted = only(make.run([broken], [[replace(missing, severity=Severity.INFO)]]))
    assert "class=gap" not in page_text(reader.get(url(noted, f"?row=1&view={view}"))).split('id="pane"')[1]


def test_what_an_engine_read_before_is_not_called_sampled(make, reader):
    broken, (finding,) = make.broken("b")
    first, second = broken.steps
    changed = second.prompt_ids.copy()
    changed[3] = changed[4]
    found = replace(finding, start=3, stop=4, expected_ids=second.prompt_ids[3:4], actual_ids=changed[3:4])
    stored = only(make.run([replace(broken, steps=(first, replace(second, prompt_ids=changed)))], [[found]]))
    html = page_text(reader.get(url(stored)))
    assert "<dt>read before</dt>" in html and "<dt>sampled</dt>" not in html
    assert 'data-gap="1 token replaced here: ' in html


def test_half_a_character_is_named_by_its_bytes():
    assert bytes_text("é".encode() + b"\xc3 <A") == "é<C3> <A"


def test_trained_tokens_that_were_not_sampled_are_marked_and_counted(make, reader):
    row = own_row(40).rows[0]
    found = [Finding(Axis.ROW, "observation_trained", Severity.ERROR, row=0, start=9, stop=12, evidence="Odd.")]
    stored = only(make.run([Trajectory("row", rows=(row,))], [found]))
    html = page_text(reader.get(url(stored, "?view=tokens")))
    assert len(re.findall("<i [^>]*\\bw\\b", html)) == 2  # token 9 is not trained
    assert "2 not as sampled" in html and "trained, not as sampled" in html
    known = replace(row, origin=np.where(np.arange(40) < 15, Origin.TEMPLATE, Origin.SAMPLED).astype(np.uint8))
    told = only(make.run([Trajectory("row", rows=(known,))]))
    assert len(re.findall("<i [^>]*\\bw\\b", page_text(reader.get(url(told, "?view=tokens"))))) == 5


def test_a_finding_in_no_row_is_shown_where_the_row_trains_something_else(make, reader):
    value = make.conversation("a", turns=2)
    first, second = value.steps
    n_prompt = len(first.prompt_ids)
    # The row merges two sampled tokens into one.
    ids = np.concatenate([second.stream[: n_prompt + 4], [first.completion_ids[0]], second.stream[n_prompt + 6 :]])
    mask = np.zeros(len(ids), bool)
    mask[n_prompt : n_prompt + 30] = mask[-31:] = True
    start = len(second.prompt_ids) + 3
    found = [
        Finding(Axis.STREAM, "noncanonical_sampling", Severity.INFO, step=0, start=n_prompt + 4, stop=n_prompt + 6,
                evidence="Drifts."),
        Finding(Axis.STREAM, "noncanonical_sampling", Severity.INFO, step=1, start=start, stop=start + 1,
                evidence="Drifts."),
    ]
    row = Row(ids.astype(np.int32), mask, step_indices=(0, 1))
    stored = only(make.run([replace(value, rows=(row,))], [found]))
    report = reader.get(reverse("trajectory-json", args=[stored.code])).json()
    places = [(one["drawn_row"], one["is_held"], one["drawn_places"]) for one in report["findings"]]
    assert places == [(0, False, [[n_prompt + 4, n_prompt + 5]]), (0, False, [[start - 1, start]])]
    html = page_text(reader.get(url(stored, "?row=0")))
    assert f"In their place: row 0, token {n_prompt + 4}." in html


def test_a_mask_that_was_not_checked_is_never_said_to_be_right(make, reader):
    without = only(make.run([Trajectory("none")]))
    unknown = only(make.run([own_row()], tokenizer=None, chat_template=None))
    right = only(make.run([make.conversation("c")]))
    for stored, words in (
        (without, "Not checked"),
        (unknown, "Not checked"),
        (right, "every sampled token is trained"),
    ):
        body = reader.get(reverse("trajectory-mask", args=[stored.code]) + ".json").json()
        assert words in body["not_odd"] and body["oddities"] == []
        assert body["not_odd"] in page_text(reader.get(url(stored, page="trajectory-mask")))


def test_what_is_merely_noted_costs_nothing(make, reader):
    broken, found = make.broken("b")
    noted = [replace(one, severity=Severity.INFO) for one in found]
    html = page_text(reader.get(url(only(make.run([broken], [noted])))))
    assert "The prompt leaves the stream." in html and "instead of one" not in html


def test_siblings_honour_the_filter_of_the_list(make, reader):
    broken, found = make.broken("b")
    run = make.run(
        [make.conversation("a"), broken, make.conversation("c"), make.broken("d")[0]], [[], found, [], found]
    )
    _, b, c, d = run.trajectories.order_by("index")
    assert f'{c.code}" rel="next"' in page_text(reader.get(url(b)))
    html = page_text(reader.get(url(b, "?finding=unclassified&lens=origin")))
    assert f'/trajectories/{d.code}?finding=unclassified&amp;lens=origin" rel="next"' in html
    assert 'rel="prev"' not in html
    assert "finding unclassified" in html


def test_without_a_tokenizer_ids_are_shown_and_the_way_out_is_named(make, reader):
    undecided = Finding(Axis.STREAM, "not_decidable", Severity.INFO, step=0, start=0, stop=1, evidence="No text.",
                        remedy="Record the missing field.", missing="tokenizer")
    stored = only(make.run([make.conversation("a")], [[undecided]], tokenizer=None, chat_template=None))
    html = page_text(reader.get(url(stored, "?view=tokens")))
    assert f'href="/runs/{stored.run.code}#diagnose"' in html and "Ids are shown as ids" in html
    assert "Choose a tokenizer for the run" in html and "Record the missing field" not in html
    assert f'href="/runs/{stored.run.code}#diagnose"' in page_text(reader.get(url(stored, page="trajectory-compare")))
    first = int(make.conversation("a").steps[0].prompt_ids[0])
    assert f"<i class=u>{first}</i>" in html
    token = reader.get(reverse("trajectory-json", args=[stored.code])).json()["window"]["tokens"][0]
    assert (token["text"], token["bytes"]) == (None, None)
    assert page_text(reader.get(url(stored, page="trajectory-compare")))
    assert page_text(reader.get(url(stored, page="trajectory-deltas")))


def test_a_trainers_row_is_cut_into_turns_by_its_mask(make, reader):
    stored = only(make.run([own_row()]))
    report = reader.get(reverse("trajectory-json", args=[stored.code])).json()
    assert [(turn["part"], turn["n_trained"]) for turn in report["turns"]] == [
        ("prompt", 0), ("completion", 10), ("delta", 0), ("completion", 10),
    ]
    html = page_text(reader.get(url(stored, "?lens=logprob")))
    assert "the source recorded no log-probabilities" in html


def n_of_class(name: str, html: str) -> int:
    """How many tokens have a style class. A code in an address may hold the same letters."""
    return len(re.findall(rf'[ ="]{name}\b', html))


def test_a_trainers_columns_are_lenses(make, reader):
    advantages = np.linspace(-2, 2, 40).astype(np.float32)
    trainer = np.full(40, -1.5, np.float32)
    stored = only(make.run([own_row(advantages=advantages, prev_logprobs=trainer)]))
    report = reader.get(reverse("trajectory-json", args=[stored.code])).json()
    assert report["lenses"] == ["mask", "origin", "logprob", "mismatch", "advantages", "prev_logprobs", *WEIGHTS]
    assert report["window"]["tokens"][39]["columns"] == {"advantages": 2.0, "prev_logprobs": -1.5}
    html = page_text(reader.get(url(stored, "?view=tokens&lens=advantages")))
    assert 'data-lens="signed"' in html and "colours nothing" not in html
    drawn = html.split('id="pane"')[1]
    assert n_of_class("q0", drawn) and n_of_class("q8", drawn)
    # The trainer gives every trained token half a nat less than the sampler did.
    mismatch = page_text(reader.get(url(stored, "?view=tokens&lens=mismatch"))).split('id="pane"')[1]
    assert n_of_class("q1", mismatch) == 20 and not n_of_class("q8", mismatch)


@pytest.mark.parametrize("number", ["²", "١", "9" * 30, "-1", ""])
def test_what_is_no_number_in_an_address_breaks_no_page(make, reader, number):
    stored = make.run([make.conversation("a"), make.conversation("b")]).trajectories.order_by("index")[0]
    other = stored.run.trajectories.get(external_id="b")
    queries = {
        "": "?row={0}&w={0}", "-compare": "?step={0}", "-deltas": "?step={0}", "-mask": "?row={0}",
        "-record": "?step={0}", "-strategies": "?left_row={0}",
    }
    for page, query in queries.items():
        assert reader.get(url(stored, query.format(number), f"trajectory{page}")).status_code == 200
    for query in ("?row={}", f"?with={other.code}&row={{}}"):
        assert reader.get(url(stored, query.format(number), "trajectory-compare")).status_code == 200
    assert reader.get(reverse("run", args=[stored.run.code]) + f"?at={number}").status_code == 200


@pytest.mark.parametrize("name", TRAINER_LOGPROBS)
def test_each_name_of_the_trainers_logprobs_has_the_mismatch_lens(make, reader, name):
    stored = only(make.run([own_row(**{name: np.full(40, -1.5, np.float32)})]))
    report = reader.get(reverse("trajectory-json", args=[stored.code])).json()
    assert report["lenses"] == ["mask", "origin", "logprob", "mismatch", name, *WEIGHTS]
    html = page_text(reader.get(url(stored, "?lens=mismatch")))
    assert ">trainer − sampler</a>" in html and ">trainer logprobs</a>" in html
    drawn = page_text(reader.get(url(stored, "?view=tokens&lens=mismatch"))).split('id="pane"')[1]
    assert n_of_class("q1", drawn) == 20 and not n_of_class("q8", drawn)


def test_a_column_without_signal_says_so(make, reader):
    stored = only(make.run([own_row(advantages=np.zeros(40, np.float32))]))
    html = page_text(reader.get(url(stored, "?lens=advantages")))
    assert "no learning signal" in html
    assert "has no lens “entropy”" in page_text(reader.get(url(stored, "?lens=entropy")))


def test_the_strip_and_the_legend_of_a_column_state_thresholds_that_no_row_changes(make, reader):
    for largest in (0.2, 4.0):
        values = np.linspace(0, largest, 40).astype(np.float32)
        html = page_text(reader.get(url(only(make.run([own_row(entropy=values)])), "?lens=entropy")))
        assert "entropy in nats, steps at 0.01, 0.1, 0.3, 0.7, 1.4, 2.1, 3, 5 · mean in this row" in html
        assert "≥0.7</span>" in html and "the same thresholds in every row" in html
        assert html.count('class="lens-strip"') == 1 and 'data-for="entropy">' in html
    assert 'data-for="mask" hidden' in html


def test_the_groups_rewards_are_named(make, reader):
    run = make.run([make.conversation("a"), make.conversation("b")])
    html = page_text(reader.get(url(run.trajectories.get(index=0))))
    assert "2 trajectories, all rewards 1: no learning signal" in html
    run = make.run([make.conversation("a"), make.broken("b")[0]])
    html = page_text(reader.get(url(run.trajectories.get(index=0))))
    assert "rewards 0 to 1, mean 0.5" in html


def test_the_visitor_of_a_link_sees_one_trajectory_and_no_way_to_another(make, reader, django_user_model):
    run = make.run([make.conversation("a"), make.conversation("b")])
    stored = run.trajectories.get(index=0)
    other = run.trajectories.get(index=1)
    user = django_user_model.objects.get()
    _, token = create_share(user, stored)
    visitor = Client()
    visitor.get(reverse("share-open", args=[token]))
    html = page_text(visitor.get(url(stored)))
    assert other.code not in html and run.code not in html
    assert '<form method="post"' not in html
    assert other.code in page_text(reader.get(url(stored)))
    assert visitor.get(url(other)).status_code == 302


def test_a_lens_that_colours_something_has_no_excuse(make, reader):
    stored = only(make.run([make.conversation("a")]))
    assert "colours nothing" not in page_text(reader.get(url(stored)))


# --- side by side -----------------------------------------------------------------------------------------------------


def test_a_broken_step_is_compared_with_its_parents_stream(make, reader):
    broken, found = make.broken("b")
    stored = only(make.run([broken], [found]))
    html = page_text(reader.get(url(stored, page="trajectory-compare")))
    assert "Expected: the stream of step 0" in html and "Read: the prompt of step 1" in html
    offered = html[html.index('aria-label="What to compare"') : html.index("</nav>", html.index("What to compare"))]
    read, again = offered.split("against the same text encoded again")
    assert "?step=1&amp;side=prompt" in read and "?step=0" not in read
    assert "?step=0" in again and "?row=1" in again and "side=prompt" not in again
    report = reader.get(url(stored, page="trajectory-compare") + ".json?step=1&side=prompt").json()
    sites = report["comparison"]["sites"]
    assert sites[0]["left_start"] == found[0].start
    assert sites[0]["left_ids"] == found[0].expected_ids.tolist()
    assert report["comparison"]["n_sites"] == 1
    assert report["verdict"].startswith(f"{report['comparison']['left_changed']} sampled tokens are missing at token ")


def test_a_sampled_stream_stands_beside_its_re_tokenization(make, reader):
    whole = make.conversation("a", turns=1, size=120)
    step = whole.steps[0]
    # Two byte tokens where the encoder takes one: the smallest drift there is.
    pair = next(
        (first, second)
        for first in range(make.tokenizer.vocab_size)
        for second in range(first, first + 40)
        if second < make.tokenizer.vocab_size
        and len(make.table.token_bytes([first])[0]) == len(make.table.token_bytes([second])[0]) == 1
        and len(make.tokenizer.encode(b"".join(make.table.token_bytes([first, second])).decode("utf-8", "replace")))
        == 1
    )
    drifting = np.concatenate([np.asarray(pair, np.int32), step.completion_ids])
    steps = (type(step)(step.prompt_ids, drifting, None, finish_reason="stop"),)
    stored = only(make.run([type(whole)("drift", steps)]))
    report = reader.get(url(stored, page="trajectory-compare") + ".json?step=0").json()
    assert report["against"] == "retokenized"
    site = report["comparison"]["sites"][0]
    assert site["left_start"] == len(step.prompt_ids)
    assert site["left_ids"][:2] == list(pair)
    assert site["left_text"] == site["right_text"]
    html = page_text(reader.get(url(stored, "?step=0", "trajectory-compare")))
    assert 'id="site-1"' in html and "equal tokens</a>" in html


def test_a_canonical_stream_has_no_site(make, reader):
    stored = only(make.run([make.conversation("a")]))
    for query in ("?step=0", "?row=0"):
        report = reader.get(url(stored, page="trajectory-compare") + f".json{query}").json()
        assert report["comparison"]["n_sites"] == 0, query
    assert "this is canonical" in page_text(reader.get(url(stored, "?step=0", "trajectory-compare")))


@pytest.mark.parametrize(
    "query", ["?step=99", "?step=x", "?step=0&side=prompt", "?row=99", "?step=-1", "?row=" + "9" * 40]
)
def test_an_odd_question_still_gets_an_answer(make, reader, query):
    stored = only(make.run([make.conversation("a")]))
    assert page_text(reader.get(url(stored, query, "trajectory-compare")))


def _not_as_sampled(make):
    """A recorded row that holds one token where two were sampled, trains the answer of a tool, and masks a token."""
    whole = make.conversation("kept", turns=2, size=200)
    ids, at = whole.steps[-1].stream, len(whole.steps[0].prompt_ids) + 4
    mask = np.zeros(len(ids), np.bool_)
    for step in whole.steps:
        mask[len(step.prompt_ids) : len(step.stream)] = True
    told = len(whole.steps[0].stream) + 5
    mask[told] = True
    mask[-1] = False
    row = Row(np.delete(ids, at), np.delete(mask, at), step_indices=(0, 1))
    row.ids[at] = 7
    found = Finding(Axis.ROW, "row_not_sampled", Severity.ERROR, row=0, start=at, stop=at + 1, evidence="x", remedy="y")
    return replace(whole, rows=(row,)), found, at, told


def test_a_row_that_was_not_sampled_opens_beside_what_was_sampled(make, reader):
    whole, found, at, told = _not_as_sampled(make)
    stored = only(make.run([whole], [[found]]))
    report = reader.get(url(stored, page="trajectory-compare") + ".json").json()
    assert (report["against"], report["row"], report["step"]) == ("trained", 0, None)
    sites = [(site["left_start"], site["left_stop"], site["right_ids"]) for site in report["comparison"]["sites"]]
    told_id = int(whole.steps[-1].prompt_ids[told])
    last = len(whole.steps[-1].stream) - 1
    assert sites == [
        (at, at + 2, [7]), (told, told + 1, [told_id]), (last, last + 1, [int(whole.steps[-1].stream[last])]),
    ]
    assert report["comparison"]["causes"]["another mask"] == 2
    assert "So the row trains 2 tokens that the model did not sample there" in report["verdict"]
    assert report["verdict"].endswith("does not train 3 that it sampled.")
    html = page_text(reader.get(url(stored, page="trajectory-compare")))
    assert (
        "3 differences: 2 another mask, 1 " in html and "Sampled stream" in html and 'class="m' in html
    ) or "m>" in html
    unasked = only(make.run([whole]))  # without the finding it is offered, and not the first
    report = reader.get(url(unasked, page="trajectory-compare") + ".json").json()
    assert report["against"] == "retokenized"
    assert "?row=0&amp;side=trained" in page_text(reader.get(url(unasked, page="trajectory-compare")))
    said = page_text(reader.get(url(unasked, "?row=5&side=trained", "trajectory-compare")))
    assert "no such row beside steps" in said


def test_a_fold_opens_in_place(make, reader, monkeypatch):
    whole, found, *_ = _not_as_sampled(make)
    stored = only(make.run([whole], [[found]]))
    folded = page_text(reader.get(url(stored, page="trajectory-compare")))
    (first, *_) = re.findall(r'href="(\?open=(\d+)#at-\d+)">Show (\d+) equal tokens', folded)
    opened = page_text(reader.get(url(stored, first[0].split("#")[0], "trajectory-compare")))
    assert f'id="at-{first[1]}"' in opened and f'id="at-{first[1]}"' not in folded
    assert opened.count('class="fold"') == folded.count('class="fold"') - 1
    monkeypatch.setattr(side_by_side, "OPENED", 10)  # a long one opens bit by bit
    half = page_text(reader.get(url(stored, first[0].split("#")[0], "trajectory-compare")))
    assert f"open={first[1]}&amp;open={int(first[1]) + 10}#at-" in half
    assert f"Show {int(first[2]) - 10} equal tokens" in half


def test_a_row_that_is_too_long_is_encoded_again_in_windows(make, reader, monkeypatch):
    monkeypatch.setattr(compare_page, "MAX_ENCODED_TOKENS", 150)
    whole = make.conversation("long", turns=2, size=120)
    stored = only(make.run([Trajectory("row", rows=(Row(whole.steps[-1].stream, whole.steps[-1].stream > 0),))]))
    first = page_text(reader.get(url(stored, page="trajectory-compare")))
    assert "?row=0&amp;from=150" in first and "Row 0, 0-149" in first and "Choose a step" not in first
    report = reader.get(url(stored, ".json?row=0&from=150", "trajectory-compare")).json()
    assert report["comparison"]["n_sites"] == 0 and "same" in report["verdict"]


# --- deltas, mask -----------------------------------------------------------------------------------------------------


def test_deltas_are_the_ids_between_completions_beside_what_the_template_writes(make, reader):
    whole = make.conversation("a", turns=3)
    stored = only(make.run([whole]))
    report = reader.get(url(stored, page="trajectory-deltas") + ".json").json()
    assert [delta["step"] for delta in report["deltas"]] == [1, 2]
    first = report["deltas"][0]
    parent = len(whole.steps[0].stream)
    assert first["ids"] == whole.steps[1].prompt_ids[parent:].tolist()
    assert first["start"] == parent
    assert not first["render_problem"]
    assert "84" in first["full_render"] and "84" not in first["prefix_render"]
    html = page_text(reader.get(url(stored, page="trajectory-deltas")))
    assert first["same_ids"] is False and "what the chat template writes" in html and "<ins><i" in html
    assert len(re.findall(r'id="(\S+site-\d+)"', html)) == len(set(re.findall(r'id="(\S+site-\d+)"', html))) > 0
    assert first["full_render"].endswith(make.tokenizer.decode(np.array(first["template_ids"], dtype=np.int32)))


def test_a_delta_of_the_templates_ids_says_so(make, reader):
    whole = make.conversation("a", turns=2)
    first, second = whole.steps
    asked = only(make.run([whole]))
    (told,) = reader.get(url(asked, page="trajectory-deltas") + ".json").json()["deltas"]
    right = np.array(told["template_ids"], dtype=np.int32)
    for delta, same in ((right, True), (right[:-1], False)):
        changed = replace(second, prompt_ids=np.concatenate([first.stream, delta]).astype(np.int32))
        stored = only(make.run([replace(whole, steps=(first, changed))]))
        (told,) = reader.get(url(stored, page="trajectory-deltas") + ".json").json()["deltas"]
        assert told["same_ids"] is same
        html = page_text(reader.get(url(stored, page="trajectory-deltas")))
        assert ("They are the ids of that text too." in html) is same
        assert ("what the chat template writes<" in html) is not same
        assert ("<ins><i" in html or "<del><i" in html) is not same


def test_two_rollouts_of_a_prompt_stand_side_by_side(make, reader, monkeypatch):
    other = make.conversation("b", turns=2)
    ids = other.steps[-1].completion_ids.copy()
    ids[3] = ids[4]
    changed = replace(other, steps=(other.steps[0], replace(other.steps[-1], completion_ids=ids)), reward=0.25)
    apart = replace(make.conversation("c", turns=2), group="g1")
    run = make.run([make.conversation("a", turns=2), changed, apart])
    a, b, c = run.trajectories.order_by("index")
    page = page_text(reader.get(url(a, page="trajectory-compare")))
    assert f"?with={b.code}" in page and "b, reward 0.25" in page and f"?with={c.code}" not in page
    report = reader.get(url(a, f".json?with={b.code}", "trajectory-compare")).json()
    (site,) = report["comparison"]["sites"]
    place = len(other.steps[-1].prompt_ids) + 3
    assert (report["with"], report["against"], report["row"]) == (b.code, "group", 0)
    assert (site["left_start"], site["right_ids"]) == (place, [int(ids[3])])
    words = page_text(reader.get(url(a, f"?with={b.code}", "trajectory-compare")))
    assert f"The first {place:,} tokens are the same. 1 token at token {place:,} is replaced by 1" in words
    assert reader.get(url(a, f".json?with={c.code}", "trajectory-compare")).json()["with"] == c.code
    assert "no ended trajectory" in page_text(reader.get(url(a, "?with=nothing", "trajectory-compare")))
    same = page_text(reader.get(url(b, f"?with={a.code}&row=7", "trajectory-compare")))
    assert "b against a" in same  # a row that is not there is the last one
    monkeypatch.setattr(side_by_side, "MAX_TOKENS", 10)
    assert "The first 10 tokens of each" in page_text(reader.get(url(a, f"?with={b.code}", "trajectory-compare")))
    models.StoredTrajectory.objects.filter(pk=b.pk).update(status="running")
    assert f"?with={b.code}" not in page_text(reader.get(url(a, "?step=1", "trajectory-compare")))


def test_the_longest_rows_of_two_rollouts_are_compared_and_others_can_be_chosen(make, reader):
    steps = make.conversation("a", turns=3).steps
    side = Step(make.ids("<|im_start|>user\nA side call.<|im_end|>\n"), make.ids("Yes.<|im_end|>"))
    forked, plain = (
        Trajectory(name, (*steps, *more), group="g0") for name, more in (("forked", (side,)), ("plain", ()))
    )
    run = make.run([forked, plain])
    one, two = run.trajectories.order_by("index")
    for trajectory, other in ((one, two), (two, one)):
        report = reader.get(url(trajectory, f".json?with={other.code}", "trajectory-compare")).json()
        assert (report["row"], report["comparison"]["sites"]) == (0, []), "the row of the side call is the last one"
    page = page_text(reader.get(url(one, f"?with={two.code}", "trajectory-compare")))
    assert "row 1 against row 0" in page
    report = reader.get(url(one, f".json?with={two.code}&row=1", "trajectory-compare")).json()
    assert report["row"] == 1 and report["comparison"]["sites"]
    report = reader.get(url(two, f".json?with={one.code}&right_row=1", "trajectory-compare")).json()
    assert report["row"] == 0 and report["comparison"]["sites"]


def test_a_trajectory_of_another_run_is_compared_with_where_it_may_be_seen(make, reader):
    a, b = (only(make.run([make.conversation(name, turns=2)])) for name in "ab")
    report = reader.get(url(a, f".json?with={b.code}", "trajectory-compare")).json()
    assert (report["with"], report["comparison"]["n_sites"]) == (b.code, 0)
    html = page_text(reader.get(url(a, f"?with={b.code}", "trajectory-compare")))
    assert "against one of another run" in html and f", of {b.run.name}" in html
    hidden = Project.objects.create(name="hidden")
    models.Run.objects.filter(pk=b.run_id).update(project=hidden)
    report = reader.get(url(a, f".json?with={b.code}", "trajectory-compare")).json()
    assert report["with"] is None and "no ended trajectory" in report["notices"][0]
    for odd in ("%00", "x" * 300):
        assert reader.get(url(a, f".json?with={odd}", "trajectory-compare")).json()["with"] is None


def test_the_visitor_of_a_link_to_one_rollout_is_offered_no_other(make, client, django_user_model):
    run = make.run([make.conversation("a"), make.conversation("b")])
    a, b = run.trajectories.order_by("index")
    _, token = create_share(make_member("ada"), a)
    client.get(reverse("share-open", args=[token]))
    assert b.code not in page_text(client.get(url(a, page="trajectory-compare")))
    assert "no ended trajectory" in page_text(client.get(url(a, f"?with={b.code}", "trajectory-compare")))


def test_a_broken_step_stands_beside_the_stream_that_it_should_continue(make, reader):
    broken, found = make.broken("b")
    stored = only(make.run([broken], [found]))
    html = page_text(reader.get(url(stored, page="trajectory-deltas")))
    assert "more than a delta" in html and "<strong>2 sampled tokens are missing at token " in html
    assert html.count("<del><i") == 1 and "expected: the stream of step 0" in html
    assert "/compare?step=1&amp;side=prompt" in html


def test_of_a_long_delta_both_ends_are_drawn_and_twenty_fill_a_page(make, reader, django_assert_max_num_queries):
    whole = make.conversation("a", turns=23)
    bare = [replace(step, request=None) for step in whole.steps]
    words = np.resize(make.ids("a long answer of a tool with many words. "), 5000).astype(np.int32)
    bare[-1] = replace(bare[-1], prompt_ids=np.concatenate([bare[-1].prompt_ids, words]))
    stored = only(make.run([replace(whole, steps=tuple(bare))]))
    with django_assert_max_num_queries(12):
        html = page_text(reader.get(url(stored, page="trajectory-deltas")))
    assert html.count('class="delta-card"') == 20 and "Go on from step 21" in html
    html = page_text(reader.get(url(stored, "?step=21", "trajectory-deltas")))
    assert html.count('class="delta-card"') == 2
    n = len(bare[-1].prompt_ids) - len(bare[-2].stream)
    assert f"{n - HEAD - TAIL:,} tokens are not drawn here." in html
    assert html.count("<i") < 2 * (HEAD + TAIL) and len(html) < 80_000


def test_a_delta_without_messages_says_what_is_missing(make, reader):
    whole = make.conversation("a", turns=2)
    steps = tuple(type(s)(s.prompt_ids, s.completion_ids) for s in whole.steps)
    stored = only(make.run([type(whole)("bare", steps)]))
    html = page_text(reader.get(url(stored, page="trajectory-deltas")))
    assert "messages were not recorded" in html


def test_the_mask_is_explained_and_oddities_are_said(make, reader):
    good = only(make.run([make.conversation("a")]))
    report = reader.get(url(good, page="trajectory-mask") + ".json").json()
    assert report["verdicts"]["Are stop tokens trained?"].startswith("Yes: 3 of 3")
    assert report["verdicts"][OBSERVATIONS].startswith("No: 0 of")
    assert report["oddities"] == []
    assert "sampled at step 0, verbatim" in page_text(reader.get(url(good, page="trajectory-mask")))
    broken, found = make.broken("b")
    odd = only(make.run([broken], [found]))
    assert reader.get(url(odd, page="trajectory-mask") + ".json?row=1").json()["oddities"] == []
    continued = reader.get(url(odd, page="trajectory-mask") + ".json?row=1").json()
    assert [(turn["role"], turn["part"]) for turn in continued["turns"][:4]] == [
        ("user", "history"), ("assistant", "history"), ("tool", "history"), ("assistant", "completion"),
    ]
    assert "an earlier reply, written again" in continued["turns"][1]["why"]
    assert continued["turns"][3]["why"] == "sampled at step 1, verbatim"
    n_tool = continued["turns"][2]["stop"] - continued["turns"][2]["start"]
    assert continued["verdicts"][OBSERVATIONS].startswith("No: 0 of ")
    assert int(continued["verdicts"][OBSERVATIONS].split()[-2]) == n_tool
    unlearned = own_row()
    unlearned.rows[0].loss_mask[:] = False
    nothing = only(make.run([unlearned]))
    said = reader.get(url(nothing, page="trajectory-mask") + ".json").json()["oddities"]
    assert said == ["No token is under the gradient: this row teaches nothing."]


def test_the_consequence_of_a_break_is_of_these_rows(make, reader):
    trajectory, (finding,) = make.broken("b")
    harmless = replace(finding, cost=replace(finding.cost, trained_tokens_lost=0, trained_tokens_wrong=0))
    words = "In these rows no sampled token is lost or trained wrongly"
    for one, is_harmless in ((finding, False), (harmless, True)):
        stored = only(make.run([trajectory], [[one]]))
        assert (words in one_line(reader.get(url(stored, "?row=1")))) == is_harmless


def test_a_file_counts_the_tokens_that_the_page_counts(make):
    for value in (make.conversation("a", 3), make.broken("b")[0], own_row()):
        assert n_new_tokens(value) == only(make.run([value])).n_tokens


def test_padding_is_no_logprob_of_a_token_that_nobody_sampled(make):
    row = own_row(advantages=np.ones(40, np.float32))
    row.rows[0].logprobs[~row.rows[0].loss_mask] = 0.0
    stored = only(make.run([row]))
    (rows, _) = rows_and_steps(stored)
    logprobs = read_tokens(stored, rows[0], 0, 40).logprobs
    assert np.isnan(logprobs).tolist() == (~row.rows[0].loss_mask).tolist()


CHAT = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"


def headed(make, trained: str, shift: int = 0) -> Trajectory:
    """A row without steps and origins that trains where CHAT says ``trained``, and ``shift`` tokens more."""
    ids = make.ids(CHAT)
    ends = np.cumsum([len(piece) for piece in make.table.token_bytes(ids)])
    start = CHAT.index(trained)
    mask = (ends > start) & (ends <= start + len(trained))
    mask[: len(mask)] |= np.roll(mask, shift)
    return Trajectory("row", rows=(Row(ids, mask, None),))


def test_the_mask_of_a_row_without_steps_is_told_by_its_role_headers(make, reader):
    def report(trajectory: Trajectory) -> dict:
        stored = only(make.run([trajectory]))
        assert "Nobody recorded who wrote these tokens" in page_text(reader.get(url(stored, "?lens=origin")))
        return reader.get(url(stored, page="trajectory-mask") + ".json").json()

    good = report(headed(make, "yes<|im_end|>"))
    assert [(turn["role"], turn["stop_token"]) for turn in good["turns"]] == [("user", ""), ("assistant", "trained")]
    assert good["oddities"] == [] and good["turns"][1]["why"].endswith("through its stop token")
    assert good["verdicts"]["Are tokens of others' turns trained?"].startswith("No: 0 of")
    cut = report(headed(make, "yes"))
    assert "its stop token is not" in " ".join(cut["oddities"])
    overrun = report(headed(make, "yes<|im_end|>", shift=1))
    assert overrun["turns"][1]["why"].endswith("through its stop token and 1 more that the template wrote")
    read = report(headed(make, "hi"))
    assert "The policy did not write that turn." in read["oddities"][0]
    assert read["verdicts"]["Are tokens of others' turns trained?"].startswith("YES: ")


def test_the_mask_page_says_what_the_diagnosis_found_in_this_row(make, reader):
    from rollouts.jobs.diagnosis import diagnosis_for

    header = headed(make, "<|im_start|>assistant\nyes<|im_end|>")
    run = make.run([headed(make, "yes<|im_end|>")])
    stored = only(make.run([header], [diagnosis_for(header, run).findings]))
    said = reader.get(url(stored, page="trajectory-mask") + ".json").json()["oddities"]
    assert any(one.startswith("Generation prompt trained: The assistant header at ") for one in said), said
    assert reader.get(url(only(run), page="trajectory-mask") + ".json").json()["oddities"] == []


# --- as recorded ------------------------------------------------------------------------------------------------------


def test_what_was_said_is_shown_step_by_step_with_every_other_field(make, reader):
    value = make.conversation("a", turns=2)
    second = replace(
        value.steps[1], reply={"role": "assistant", "content": [{"type": "text", "text": HOSTILE}], "refusal": None},
        policy_version="v7", extra={"created_at": 3, "usage": {"prompt_tokens": 4}},
    )
    stored = only(make.run([replace(value, steps=(value.steps[0], second), extra={"agent_ref": {"name": "solver"}})]))
    html = page_text(reader.get(url(stored, page="trajectory-record")))
    pane = Pane(html)
    assert "What is 12 * 7?" in pane.text and "calculator" in pane.text and HOSTILE.split("\t")[0] in pane.text
    assert not pane.styled and "<script>alert" not in html and "policy version v7" in html
    twin = json.loads(reader.get(url(stored, page="trajectory-record") + ".json").content)
    assert twin["fields"] == {"agent_ref": {"name": "solver"}} and twin["steps"][1]["fields"] == second.extra
    assert [message["role"] for message in twin["steps"][1]["messages"]] == ["assistant", "tool"]


def test_a_step_that_is_not_there_is_told_and_the_first_is_shown(make, reader):
    stored = only(make.run([make.conversation("a")]))
    html = page_text(reader.get(url(stored, "?step=99", page="trajectory-record")))
    assert "There is no step 99 here: steps run from 0 to 2." in html and 'id="step-0"' in html


def test_text_without_ids_is_read_where_it_was_recorded(make, reader):
    step = Step(NO_IDS, NO_IDS, text="4<end>", extra={"prompt": "2 + 2?"})
    said = Trajectory("t", (step, step), reward=1.0, stop_reason="no_tool_call")
    stored = only(make.run([said], format="verl"))
    assert stored.n_rows == 2 and "2 rows instead of one" not in page_text(
        reader.get(reverse("run", args=[stored.run.code]))
    )
    lacks = "The file holds text and no token ids"
    opened = page_text(reader.get(url(stored), follow=True))
    bare = only(make.run([said], format="verl", tokenizer=None))
    assert "No tokenizer." not in page_text(reader.get(url(bare), follow=True))
    assert lacks in opened
    assert "no tool call" in opened and "no_tool_call" not in opened, "as the list says it"
    assert re.search(r'<div>\s*<dt title="[^"]+">rows</dt>\s*<dd>\s*2\s', opened), "without ids, no warning"
    pane = Pane(opened)
    assert "2 + 2?" in pane.text and "4<end>" in pane.text
    run = page_text(reader.get(reverse("run", args=[stored.run.code])))
    assert lacks in run
    beside = page_text(reader.get(url(stored, page="trajectory-compare")))
    assert "no token ids here" in beside and "canonical." not in beside
    assert lacks not in page_text(reader.get(url(only(make.run([said], format="own_jsonl")), page="trajectory-record")))


def test_the_record_shows_some_steps_and_the_start_of_a_long_text(make, reader, monkeypatch):
    value = make.conversation("long", turns=30)
    stored = only(make.run([replace(value, extra={"note": "\ud800 " + "x" * 5000})]))
    where = url(stored, page="trajectory-record")
    assert json.loads(reader.get(where + ".json").content)["fields"]["note"].endswith("x" * 5000)
    monkeypatch.setattr("inspector.trajectories.record_page.TEXT_CHARACTERS", 1000)
    twin = json.loads(reader.get(where + ".json").content)
    assert len(twin["steps"]) == 20 and twin["fields"]["characters"] > 5000 and len(twin["fields"]["clipped"]) == 1000
    html = page_text(reader.get(where))
    assert "the first 1,000 of 5,0" in html and f"{where}?step=20" in html
    rest = json.loads(reader.get(where + ".json?step=20").content)
    assert [step["index"] for step in rest["steps"]] == list(range(20, 30))
    assert reader.get(where + "?step=-1").status_code == reader.get(where + "?step=" + "9" * 30).status_code == 200


# --- cost, caching, access --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("query", ["", "?view=tokens"])
def test_the_number_of_queries_does_not_depend_on_the_number_of_tokens(make, reader, query, django_assert_num_queries):
    small = only(make.run([make.conversation("small", turns=2, size=100)]))
    large = only(make.run([make.conversation("large", turns=30, size=4000)]))
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    reader.get(url(small, query))
    with CaptureQueriesContext(
        connection,
    ) as first:
        reader.get(url(small, query))
    with CaptureQueriesContext(connection) as second:
        assert reader.get(url(large, query)).status_code == 200
    assert len(first) == len(second) <= 21
    broken, found = make.broken("b")
    many = only(make.run([broken], [found * 40]))
    with CaptureQueriesContext(connection) as third:
        assert reader.get(url(many, query)).status_code == 200
    # Findings, muted kinds, their place in the run (2), and the messages of the repeated prompt.
    assert len(third) <= len(first) + 5


def test_a_row_of_300k_tokens_fits_into_two_and_a_half_megabytes(make, reader):
    stored = only(make.run([make.conversation("large", turns=40, size=7500)]))
    assert models.StoredRow.objects.get(trajectory=stored).n_tokens > 300_000
    for query in ("", "?lens=logprob"):
        assert len(reader.get(url(stored, query)).getvalue()) <= 2_500_000
    shed = page_text(reader.get(url(stored, "?lens=logprob")))
    assert "Go on from token" in shed


def test_other_style_sheets_are_another_page(make, reader, monkeypatch):
    stored = only(make.run([make.conversation("a")]))
    reader.get(url(stored))  # brings the cookie of the forms
    tag = reader.get(url(stored))["ETag"]
    assert reader.get(url(stored), headers={"If-None-Match": tag}).status_code == 304
    monkeypatch.setattr(staticfiles_storage, "manifest_hash", "of other files", raising=False)
    assert reader.get(url(stored), headers={"If-None-Match": tag}).status_code == 200


def test_a_finished_trajectory_is_answered_with_304(make, reader):
    stored = only(make.run([make.conversation("a")]))
    reader.get(url(stored))  # gives this client the cookie that the Share form's token is made with
    first = reader.get(url(stored))
    again = reader.get(url(stored), headers={"If-None-Match": first["ETag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = reader.get(url(stored, "?view=tokens"), headers={"If-None-Match": first["ETag"]})
    # Another session of the same reader holds another secret: a form of the old one would be refused.
    client = Client()
    client.force_login(User.objects.get(username="reader"))
    assert client.get(url(stored), headers={"If-None-Match": first["ETag"]}).status_code == 200
    assert other.status_code == 200
    assert "private" in first["Cache-Control"]


def test_a_live_trajectory_polls_and_is_not_cached(make, reader):
    run = make.run([make.conversation("a")])
    stored = only(run)
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(status="running")
    response = reader.get(url(stored))
    html = one_line(response)
    assert 'hx-trigger="every 2s' in html and "ETag" not in response
    poll = html.split('id="live" class="trajectory" hx-get="')[1].split('"')[0].replace("&amp;", "&")
    assert reader.get(poll).status_code == 204
    models.StoredTrajectory.objects.filter(pk=stored.pk).update(n_tokens=stored.n_tokens + 1)
    assert reader.get(poll).status_code == 200


def test_a_running_trajectory_shows_the_steps_it_has(make, reader):
    run = create_run("launch", "live", tokenizer=make.record)
    stored = models.StoredTrajectory.objects.create(run=run, external_id="x", index=0, status="running")
    whole = make.conversation("x", turns=3)
    seen = []
    for index, step in enumerate(whole.steps):
        save_steps([(stored.pk, index, step)])
        seen.append(Pane(page_text(reader.get(url(stored)))).text)
        for page in ("trajectory-compare", "trajectory-deltas", "trajectory-mask"):
            assert reader.get(url(stored, page=page)).status_code == 200
    assert seen == [make.tokenizer.decode(step.stream) for step in whole.steps]
    report = reader.get(reverse("trajectory-json", args=[stored.code])).json()
    assert [turn["n_trained"] for turn in report["turns"]] == [0, 31, 0, 31, 0, 31]
    # A step that leaves the stream opens a row of its own, as it will when the trajectory ends.
    broken = make.broken("b")[0]
    torn = models.StoredTrajectory.objects.create(run=run, external_id="y", index=1, status="failed", error="It died.")
    for index, step in enumerate(broken.steps):
        save_steps([(torn.pk, index, step)])
    html = page_text(reader.get(url(torn, "?row=1")))
    assert Pane(html).text == make.tokenizer.decode(broken.steps[1].stream)
    assert "It died." in html


def test_a_trajectory_without_steps_yet_has_a_page(make, reader):
    run = create_run("launch", "live", tokenizer=make.record)
    stored = models.StoredTrajectory.objects.create(run=run, external_id="x", index=0, status="queued")
    html = page_text(reader.get(url(stored)))
    assert "This page grows by itself" in html and "ticks are findings" not in html
    for page in ("trajectory-compare", "trajectory-deltas", "trajectory-mask", "trajectory-record"):
        assert reader.get(url(stored, page=page)).status_code == 200


PAGES = ["trajectory", "trajectory-compare", "trajectory-deltas", "trajectory-mask", "trajectory-record"]


@pytest.mark.parametrize("page", PAGES)
def test_every_page_needs_a_login_or_a_link_and_has_a_twin(make, reader, page):
    stored = only(make.run([make.conversation("a")]))
    assert Client().get(url(stored, page=page)).status_code == 302
    assert Client().get(url(stored, page=page) + ".json").status_code in (401, 403)
    body = reader.get(url(stored, page=page) + ".json")
    assert json.loads(body.content)["trajectory"] == stored.code
    assert reader.get(reverse(page, args=["zzzzzzzzzzzz"])).status_code == 404


def test_find_and_a_turn_alone_stand_in_the_address(reader: Client, make: Maker) -> None:
    trajectory = only(make.run([make.conversation("t", turns=3, size=2500)]))
    page = reader.get(url(trajectory, "?solo=2&find=tool&lens=origin")).content.decode()
    assert page.count(' solo"') == 1 and "data-solo" in page.split('id="pane"')[1].split(">")[0]
    assert '<input type="hidden" name="find" value="tool">' in page
    links = re.findall(r'href="([^"]*)"[^>]*data-lens-choice="mask"', page)
    assert links and all("solo=2" in link and "find=tool" in link for link in links)
    window = reader.get(url(trajectory, "?view=tokens&w=4096&solo=2")).content.decode()
    assert "data-solo" not in window and "Turn 2 is not among these; all turns are shown." in window
    assert "solo" not in re.findall(r'href="([^"]*)" data-go="previous"', window)[0]
    wrong = reader.get(url(trajectory, "?solo=x")).content.decode()
    assert "The turn to show alone is not a number" in wrong and "data-solo" not in wrong
