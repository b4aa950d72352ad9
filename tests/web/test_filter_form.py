"""A filter of a run's list is declared once: the address, the search box, the API and an export know it."""

import json

import pytest
from django.http import QueryDict
from django.test import Client

from inspector.api.app import schema
from inspector.api.jobs import ExportedAlone
from inspector.runs.filters import COLUMNS, ORDERS, PERSONAL, USUAL, ListQuery, read_words, search_words
from rollout_inspector.diagnose.kinds import KINDS
from rollouts.store.parameters import SORTS
from rollouts.store.trajectory_filters import INPUTS, PARAMETERS, FilterParameters, TrajectoryFilters
from tests.web.samples import stored_run

VALUES = {"kind": "branch", "status": "done", "severity": "error", "muted": "hide", "seen": "no", "comments": "open"}


def test_every_filter_is_a_parameter_of_the_page_the_api_and_an_export() -> None:
    document = json.loads(schema())
    listing = document["paths"]["/api/v1/runs/{code}/trajectories"]["get"]["parameters"]
    assert set(PARAMETERS.values()) | {"sort", "cursor", "limit", "code"} == {one["name"] for one in listing}
    assert all(one["description"] for one in listing if one["name"] in PARAMETERS.values())
    exported = document["components"]["schemas"]["ExportedAlone"]
    assert set(exported["properties"]) == set(PARAMETERS.values()) and exported["additionalProperties"] is False
    assert TrajectoryFilters.model_fields.keys() - FilterParameters.model_fields.keys() == {"reader", "hide_queued"}


@pytest.mark.parametrize("field", PARAMETERS)
def test_a_filter_comes_back_from_its_own_address(field: str) -> None:
    value = VALUES.get(field, "3")
    query = ListQuery.read(QueryDict(f"{PARAMETERS[field]}={value}"), 1)
    assert query.notices == () and query.is_set and not query.pass_all
    assert dict(query.pairs()) == {PARAMETERS[field]: "1" if field == "flawed" else value}
    (chip,) = query.chips()
    assert chip.url == "?#trajectories" and chip.words


@pytest.mark.parametrize("field", PARAMETERS)
def test_the_search_box_has_a_word_for_every_filter(field: str) -> None:
    asked = INPUTS[field]
    values, notices = read_words(f"{asked.word}{asked.sign}{VALUES.get(field, 'yes' if field == 'flawed' else '3')}")
    assert notices == [] and set(values) == {PARAMETERS[field]}
    examples, notices = read_words(asked.example)
    assert notices == [] and ListQuery.read(QueryDict(mutable=True), 1).notices == () and examples


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("reward>0", {"above": "0"}),
        ("reward >= 0.5 reward < 1", {"min": "0.5", "below": "1"}),
        ("reward:1", {"min": "1", "max": "1"}),
        ("tokens>10k", {"tokens_min": "10001"}),
        ("tokens<1.5k tokens>=2", {"tokens_max": "1499", "tokens_min": "2"}),
        ("training:7", {"training_min": "7", "training_max": "7"}),
        ("finding:branch severity:error", {"finding": "branch", "severity": "error"}),
        ('kind:"branch"', {"finding": "branch"}),
        ('stop:"max tokens" task 7', {"stop": "max tokens", "text": "task 7"}),
        ("KIND:branch", {"finding": "branch"}),
        ("reward ≥ 2", {"min": "2"}),
        ("", {}),
    ],
)
def test_words_of_the_search_box_are_filters(text: str, meant: dict[str, str]) -> None:
    assert read_words(text) == (meant, [])


def test_a_kind_may_be_typed_by_its_title() -> None:
    values, notices = read_words(f'kind:"{KINDS["branch"].title.upper()}"')
    assert values == {"finding": "branch"} and not notices


@pytest.mark.parametrize(
    ("text", "left"),
    [("colour:red", {"text": "colour:red"}), ("policy>3", {}), ("flawed:no", {}), ("a reward>", {"text": "a reward>"})],
)
def test_what_the_search_box_does_not_know_is_told_or_looked_for_in_the_ids(text: str, left: dict[str, str]) -> None:
    values, notices = read_words(text)
    assert values == left and (len(notices) == 1 or "text" in left)


def test_a_value_that_does_not_fit_is_told() -> None:
    query = ListQuery.read(QueryDict(""), None, "reward>much tokens>few group:a seen:no")
    assert query.group == "a" and query.chosen() == {"group": "a"} and len(query.notices) == 3


def test_every_order_has_words_and_a_head() -> None:
    assert set(ORDERS) == set(SORTS)
    for name in COLUMNS:
        (head,) = ListQuery().heads([name])
        assert bool(head["url"]) == bool(COLUMNS[name].sort)


def test_columns_are_kept_by_the_address_where_they_are_not_the_usual_ones() -> None:
    query = ListQuery.read(QueryDict("columns=reward&columns=lost&columns=nonsense&finding=branch"), 1)
    assert query.shown == ("index", "reward", "lost") and query.query() == "?finding=branch&columns=reward%2Clost"
    assert ListQuery.read(QueryDict(query.query()[1:]), 1).shown == query.shown
    usual = QueryDict("&".join(f"columns={name}" for name in USUAL if name != "index"))
    assert ListQuery.read(usual, 1).query() == "" and ListQuery.read(QueryDict("columns=nonsense"), 1).shown == USUAL


@pytest.mark.django_db
def test_what_is_typed_becomes_the_address(web: Client) -> None:
    run = stored_run(4)
    answer = web.get(f"/runs/{run.code}?finding=branch&q=reward>0.5&sort=-reward&columns=reward")
    assert answer.status_code == 302
    assert answer["Location"] == f"/runs/{run.code}?finding=branch&above=0.5&sort=-reward&columns=reward#trajectories"
    page = web.get(f"/runs/{run.code}?q=colour:red").content.decode()
    assert "is no word of the search" in page and 'value="colour:red"' in page
    live = web.get(f"/runs/{run.code}?q=group:nobody", headers={"HX-Request": "true", "HX-Target": "run-live"})
    assert live.status_code == 200 and "No trajectory matches" in live.content.decode()
    assert "group: nobody" in live.content.decode()


def test_what_an_address_says_wrongly_is_left_out_and_told() -> None:
    query = ListQuery.read(QueryDict("severity=loud&min=nan&from=x&sort=tallest&seen=maybe&to=9&muted=show"), 1)
    assert query.pass_all is False and query.chosen() == {"last": 9} and query.sort == "index"
    assert [sentence.partition(";")[0].partition(",")[0] for sentence in query.notices] == [
        "There is no severity “loud”", "“nan” is not a number", "“x” is not a whole number",
        "There is no seen “maybe”", "There is no sort “tallest”",
    ]
    long = ListQuery.read(QueryDict("text=" + "a" * 500 + "%00"), None)
    assert long.text == "a" * 200 and long.notices == ()


def test_a_visitor_is_offered_no_word_about_people() -> None:
    def words(has_role: bool) -> set[str]:
        return {example.partition(":")[0] for example, meaning in search_words(has_role) if meaning}

    assert words(True) - words(False) == {INPUTS[name].word for name in PERSONAL} == {"seen", "comments"}


def test_the_api_takes_filters_by_their_parameters_alone() -> None:
    """The names of fields and what a door adds, the reader above all, are no parameters."""
    asked = {"finding": "branch", "kind": "x", "reader": "5"}
    with pytest.raises(ValueError, match="3 validation errors"):
        ExportedAlone.model_validate(asked | {"hide_queued": True})
    assert ExportedAlone.model_validate({"finding": "branch", "seen": "no"}).chosen(7) == {
        "kind": "branch", "seen": "no", "reader": 7,
    }
