"""What was stored under every schema since the release is read by today's code.

One database goes from the schema of the release to today's, migration by migration. At each stop a run with everything
is stored through the models of that time. At the end selectors and pages read all of these runs.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from django.contrib.auth import get_user_model
from django.db.migrations.loader import MigrationLoader
from django.test import Client

from rollouts.store.models import ApiToken, Job, Replay, Run, ShareLink, TemplateCheck
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.samples.old_database import HEAD, LOGPROBS, MASK, ROW, fill, migrate

pytestmark = pytest.mark.django_db(transaction=True)

RELEASED = "0010_stored_names"
"""The schema of 0.1.0."""
STATES = sorted(name for app, name in MigrationLoader(None).graph.nodes if app == "rollouts" and name >= RELEASED)[:-1]


@pytest.fixture
def at_head() -> Iterator[None]:
    yield
    migrate(HEAD)


def read(state: str) -> None:
    """What was stored at a state is what today's selectors and pages say."""
    n = state[:4]
    run = Run.objects.get(code=f"run{n}")
    assert (run.status, run.n_tokens, run.finding_counts) == ("done", 14, {"branch": 1})
    steps, rows = (load_trajectory(one) for one in run.trajectories.order_by("index"))
    assert [one.prompt_ids.tolist() for one in steps.steps] == [[5, 6, 7], [5, 6, 7, 8, 9, 1, 2]]
    assert [one.completion_ids.tolist() for one in steps.steps] == [[8, 9], [8, 9]]
    assert steps.steps[0].logprobs is not None and np.array_equal(steps.steps[0].logprobs, LOGPROBS)
    assert steps.steps[1].logprobs is None and steps.steps[0].text == "a text"
    (row,) = rows.rows
    assert np.array_equal(row.ids, ROW) and np.array_equal(row.loss_mask, MASK)
    assert np.array_equal(row.columns["advantages"], np.arange(5, dtype=np.float32) / 4)
    assert run.findings.get().actual_ids.size == 0 and run.tokenizer is not None and run.tokenizer.name == f"old{n}"
    check, replay = TemplateCheck.objects.get(code=f"check{n}"), Replay.objects.get(trajectory__run=run)
    assert check.status == replay.job.status == Job.Status.DONE
    assert (check.job.kind, replay.job.kind, run.jobs.get().kind) == ("check_template", "replay_trajectory", "export")
    user = get_user_model().objects.get(username=f"ada{n}")
    assert ShareLink.objects.get(run=run).created_by == user
    assert ApiToken.objects.get(token_sha256__endswith=n).created_by == user
    client = Client()
    client.force_login(user)
    for address in (f"/runs/run{n}", f"/trajectories/trajectory{n}0/record", f"/trajectories/trajectory{n}1.json"):
        assert client.get(address).status_code == 200, address


def test_every_state_since_the_release_is_tried() -> None:
    assert STATES[0] == RELEASED and len(STATES) >= 10 and HEAD[1] not in STATES


def test_what_every_schema_stored_is_read_by_todays_code(at_head: None) -> None:
    for state in STATES:
        fill(migrate(("rollouts", state)), state)
    migrate(HEAD)
    for state in STATES:
        try:
            read(state)
        except Exception as error:
            error.add_note(f"of what was stored at {state}")
            raise
    client = Client()
    client.force_login(get_user_model().objects.get(username=f"ada{STATES[-1][:4]}"))
    for address in ("/runs.json", "/templates", "/tokenizers", "/shares", "/tokens"):
        assert client.get(address).status_code == 200, address
