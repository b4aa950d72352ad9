"""Numbers of an address that no database takes."""

import pytest
from django.test import Client

from tests.team.conftest import person
from tests.web.samples import stored_run

pytestmark = pytest.mark.django_db

HUGE = "9" * 25


def test_numbers_that_no_key_can_be_name_nothing() -> None:
    """The server's admin may do everything, so that nothing but the number is at fault."""
    _, root = person("root", is_superuser=True)
    run = stored_run(1)
    trajectory = run.trajectories.get()
    posts = (
        "shares/{}/revoke", "tokens/{}/revoke", "accounts/{}", "account/sessions/{}/end", "projects/default/members/{}",
        "projects/default/invitations/{}/revoke",
    )
    assert [root.post(f"/{path.format(HUGE)}").status_code for path in posts] == [404] * len(posts)
    assert root.get(f"/trajectories/{trajectory.code}/findings/{HUGE}.py").status_code == 404
    for query in (f"row={HUGE}", f"t={HUGE}-{HUGE}", f"step={HUGE}", f"w={HUGE}", f"finding={HUGE}"):
        for tab in ("", "/compare", "/mask", "/deltas", "/record", "/strategies"):
            assert root.get(f"/trajectories/{trajectory.code}{tab}?{query}").status_code == 200, (tab, query)
    assert root.get(f"/audit?before={HUGE}").status_code == 200
    assert Client().get(f"/s/{HUGE}").status_code == 404
