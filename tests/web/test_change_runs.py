"""Several runs at once: renamed, tagged, deleted; and the filter by tag."""

from typing import Any

import pytest
from django.test import Client

from rollouts.store.models import AuditEvent, Project, Role, Run
from rollouts.store.runs.runs import MAX_TAGS, add_tags
from tests.people import make_member
from tests.web.samples import HOSTILE, one_line, stored_run

pytestmark = pytest.mark.django_db
HERE = "/runs/change"


@pytest.fixture
def member(db: Any) -> Any:
    """Not an admin: deletes what is their own."""
    return make_member("ada", Role.MEMBER)


@pytest.fixture
def pair(member: Any) -> list[Run]:
    return [stored_run(1, name, user=member) for name in ("one", "two")]


def codes(runs: list[Run]) -> list[str]:
    return [run.code for run in runs]


def names() -> list[str]:
    return sorted(Run.objects.values_list("name", flat=True))


def test_chosen_runs_are_named_and_renamed(web: Client, pair: list[Run]) -> None:
    one, two = pair
    page = one_line(web.get(f"{HERE}?run={one.code}&run={two.code}"))
    assert "Change 2 runs" in page and f'name="name-{one.code}" value="one"' in page
    answer = web.post(
        HERE, {"run": codes(pair), "do": "rename", f"name-{one.code}": f" {HOSTILE}\n x ", "name-zz": "q"}
    )
    assert answer.status_code == 302 and names() == [f"{HOSTILE} x", "two"]
    assert "<script>alert" not in one_line(web.get("/"))
    assert AuditEvent.objects.get(action="run renamed").detail.endswith("before: one")
    assert (
        web.post(
            HERE, {"run": codes(pair), "do": "rename", f"name-{one.code}": "x", f"name-{two.code}": " "}
        ).status_code
        == 422
    )
    assert names() == [f"{HOSTILE} x", "two"], "all or nothing"


def test_runs_are_tagged_and_found_by_tag(web: Client, pair: list[Run]) -> None:
    stored_run(1, "three")
    assert web.post(f"{HERE}.json", {"run": codes(pair), "do": "tag", "tags": "sweep,  lr 1e-6,sweep"}).json()["done"]
    assert [run["tags"] for run in web.get("/runs.json").json()["runs"]] == [
        [],
        ["lr 1e-6", "sweep"],
        ["lr 1e-6", "sweep"],
    ]
    assert [run["name"] for run in web.get("/runs.json?tag=sweep").json()["runs"]] == ["two", "one"]
    page = one_line(web.get("/?tag=sweep"))
    assert (
        "<option selected>sweep</option>" in page and "2 runs, 2 trajectories, 18 tokens that pass the filter" in page
    )
    assert web.get(f"/runs/{pair[0].code}.json").json()["tags"] == ["lr 1e-6", "sweep"]
    web.post(HERE, {"run": [pair[0].code], "do": "untag", "tags": "sweep, none"})
    assert [run["name"] for run in web.get("/runs.json?tag=sweep").json()["runs"]] == ["two"]
    assert AuditEvent.objects.filter(action="run tagged").count() == 3
    for tags in ("", " , ", "x" * 41, ",".join(map(str, range(MAX_TAGS + 1)))):
        assert web.post(HERE, {"run": codes(pair), "do": "tag", "tags": tags}).status_code == 422


def test_runs_are_deleted_together_or_not_at_all(web: Client, pair: list[Run]) -> None:
    assert web.post(HERE, {"run": codes(pair), "do": "delete"}).status_code == 422
    foreign = stored_run(1, "made by another", user=make_member("eve"))
    answer = web.post(HERE, {"run": [*codes(pair), foreign.code], "do": "delete", "sure": "yes"})
    assert answer.status_code == 422 and "made “made by another”" in one_line_of(answer) and len(names()) == 3
    assert web.post(HERE, {"run": codes(pair), "do": "delete", "sure": "yes"}).status_code == 302
    assert names() == ["made by another"] and AuditEvent.objects.filter(action="run deleted").count() == 2
    assert "2 runs deleted: two, one." in one_line(web.get("/"))


def one_line_of(answer: Any) -> str:
    return " ".join(answer.content.decode().split())


def test_a_wrong_wish_changes_nothing_and_is_told(web: Client, pair: list[Run]) -> None:
    assert web.get(f"{HERE}?run=zzzzzzzzzzzz").status_code == 404
    assert "No run is chosen" in one_line(web.get(HERE))
    assert web.post(HERE, {"do": "tag", "tags": "x"}).status_code == 422
    assert web.post(HERE, {"run": codes(pair), "do": "burn"}).status_code == 422


def test_tags_of_hidden_runs_are_not_offered(web: Client, pair: list[Run]) -> None:
    hidden = stored_run(1, "hidden", project=Project.objects.create(name="other"))
    add_tags(hidden, ["secret"])
    assert "secret" not in one_line(web.get("/")) and web.get(f"{HERE}?run={hidden.code}").status_code == 404


def test_the_list_lets_everybody_choose_and_a_member_alone_change(web: Client, pair: list[Run]) -> None:
    page = one_line(web.get("/"))
    assert page.count('form="change-runs"') == 2 and 'id="change-runs"' in page
    viewer = Client()
    viewer.force_login(make_member("vic", Role.VIEWER))
    shown = one_line(viewer.get("/"))
    assert "runs/change" not in shown and shown.count('form="change-runs"') == 2 and 'action="/runs/compare"' in shown
