"""What a user has seen: marked by hand, shown in the list, filtered by, and nobody else's business."""

import pytest
from django.test import Client

from rollouts.store.models import Role, Run, Seen, StoredTrajectory
from rollouts.store.people.shares import create_share
from rollouts.store.runs.runs import delete_run
from rollouts.store.trajectories.comments import mark_seen
from tests.people import make_member
from tests.web.samples import one_line
from tests.web.trajectory_samples import Maker

pytestmark = pytest.mark.django_db
HTMX = {"HX-Request": "true"}


@pytest.fixture
def run(make: Maker) -> Run:
    return make.run([make.conversation("a"), make.conversation("b"), make.conversation("c")])


def listed(client: Client, run: Run, query: str = "") -> dict[str, bool | None]:
    lines = client.get(f"/runs/{run.code}.json{query}").json()["trajectories"]
    return {one["external_id"]: one["seen"] for one in lines}


def test_a_trajectory_is_marked_by_hand_and_taken_back(web: Client, run: Run) -> None:
    first = f"/trajectories/{run.trajectories.get(index=0).code}"
    assert web.get(f"{first}.json").json()["seen"] is False and not Seen.objects.exists()  # reading marks nothing
    etag = web.get(first)["ETag"]
    assert web.post(f"{first}/seen", {"query": "seen=no&view=tokens"})["Location"] == f"{first}?seen=no&view=tokens"
    assert web.post(f"{first}/seen.json").json()["seen"] is True and Seen.objects.count() == 1
    page = web.get(first, headers={"if-none-match": etag})
    assert page.status_code == 200 and 'aria-pressed="true"' in page.content.decode()
    assert listed(web, run) == {"a": True, "b": False, "c": False}
    assert "not seen</span>" in one_line(web.get(f"/runs/{run.code}"))
    assert listed(web, run, "?seen=no") == {"b": False, "c": False} and listed(web, run, "?seen=yes") == {"a": True}
    after = web.get(f"{first}?seen=no").content.decode()
    assert f"{run.trajectories.get(index=1).code}?seen=no" in after  # next leads through what is left
    part = web.post(f"{first}/seen", {"seen": "no"}, headers=HTMX).content.decode()
    assert part.strip().startswith("<form") and 'aria-pressed="false"' in part and 'value="yes"' in part
    assert listed(web, run, "?seen=yes") == {}


def test_a_mark_is_ones_own_and_a_visitor_has_none(web: Client, visitor: Client, member: object, run: Run) -> None:
    first = run.trajectories.get(index=0)
    mark_seen(first, member)
    eve = Client()
    eve.force_login(make_member("eve", Role.VIEWER))
    assert listed(eve, run) == dict.fromkeys("abc", False)
    assert eve.post(f"/trajectories/{first.code}/seen").status_code == 302 and listed(eve, run)["a"] is True
    eve.post(f"/trajectories/{first.code}/seen", {"seen": "no"})
    assert listed(web, run)["a"] is True
    _, token = create_share(member, run)
    visitor.get(f"/s/{token}")
    assert listed(visitor, run, "?seen=yes") == dict.fromkeys("abc")
    assert visitor.get(f"/trajectories/{first.code}.json").json()["seen"] is None
    assert "data-seen" not in visitor.get(f"/trajectories/{first.code}").content.decode()


def test_what_grows_takes_no_mark_and_marks_go_with_their_run(web: Client, member: object, run: Run) -> None:
    StoredTrajectory.objects.filter(run=run, index=1).update(status="running", finished_at=None)
    growing = f"/trajectories/{run.trajectories.get(index=1).code}/seen"
    assert "still grows" in web.post(f"{growing}.json").json()["errors"]["form"][0]
    assert web.post(growing).status_code == 422
    assert "data-seen" not in web.get(growing.removesuffix("/seen")).content.decode()
    mark_seen(run.trajectories.get(index=0), member)
    delete_run(run)
    assert not Seen.objects.exists()
