"""A filter of a run's list is declared once: the address, the form, the API and an export know it."""

from __future__ import annotations

import json

import pytest
from django.http import QueryDict

from inspector.api.app import schema
from inspector.api.work import ExportedAlone
from inspector.runs.filters import PERSONAL, ListQuery, filter_form
from rollouts.store.trajectory_filters import INPUTS, PARAMETERS, FilterParameters, TrajectoryFilters

VALUES = {"status": "done", "severity": "error", "muted": "hide", "seen": "no", "comments": "open"}


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
    (control,) = [one for group in filter_form(query, {}, []) for one in group if one.name == PARAMETERS[field]]
    assert control.value == dict(query.pairs())[PARAMETERS[field]] and control.label == INPUTS[field].label


def test_what_an_address_says_wrongly_is_left_out_and_told() -> None:
    query = ListQuery.read(QueryDict("severity=loud&min=nan&from=x&sort=tallest&seen=maybe&to=9&muted=show"), 1)
    assert query.pass_all is False and query.chosen() == {"last": 9} and query.sort == "index"
    assert [sentence.partition(";")[0].partition(",")[0] for sentence in query.notices] == [
        "There is no severity “loud”", "“nan” is not a number", "“x” is not a whole number",
        "There is no seen “maybe”", "There is no sort “tallest”",
    ]
    long = ListQuery.read(QueryDict("text=" + "a" * 500 + "%00"), None)
    assert long.text == "a" * 200 and long.notices == ()


def test_the_form_lacks_what_has_no_use_until_it_filters() -> None:
    absent = ["training_min", "training_max", "muted", *PERSONAL]

    def names(query: str) -> set[str]:
        form = filter_form(ListQuery.read(QueryDict(query), 1), {}, absent)
        return {one.name for group in form for one in group}

    assert names("") == {"finding", "stop", "min", "max", "tokens_min", "tokens_max", "group", "text", "sort"}
    more = names("training_max=3&muted=hide&flawed=1") - names("")
    assert more == {"training_min", "training_max", "muted", "flawed"}


def test_the_api_takes_filters_by_their_parameters_alone() -> None:
    """The names of fields and what a door adds, the reader above all, are no parameters."""
    asked = {"finding": "branch", "kind": "x", "reader": "5"}
    with pytest.raises(ValueError, match="3 validation errors"):
        ExportedAlone.model_validate(asked | {"hide_queued": True})
    assert ExportedAlone.model_validate({"finding": "branch", "seen": "no"}).chosen(7) == {
        "kind": "branch", "seen": "no", "reader": 7,
    }
