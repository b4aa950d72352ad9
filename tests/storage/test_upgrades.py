"""What was stored under every schema since the release is read by today's code.

One database goes from the schema of the release to today's, migration by migration. At each stop a run with everything
is stored through the models of that time. At the end selectors and pages read all of these runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from django.contrib.auth import get_user_model
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.test import Client
from django.utils import timezone

from rollouts.models import ApiToken, Job, Replay, Run, ShareLink, TemplateCheck
from rollouts.selectors.trajectories import load_trajectory

pytestmark = pytest.mark.django_db(transaction=True)

RELEASED = "0010_stored_names"
"""The schema of 0.1.0."""
(HEAD,) = MigrationLoader(None).graph.leaf_nodes("rollouts")
STATES = sorted(name for app, name in MigrationLoader(None).graph.nodes if app == "rollouts" and name >= RELEASED)[:-1]
PROMPT, COMPLETION, DELTA = np.array([5, 6, 7]), np.array([8, 9]), np.array([1, 2])
LOGPROBS = np.array([-0.5, -1.25], dtype=np.float32)
ROW, MASK = np.array([3, 1, 4, 1, 5]), np.array([False, False, True, True, True])


def migrate(to: tuple[str, str]) -> Any:
    """The models of a state, once the database is in it."""
    MigrationExecutor(connection).migrate([to])
    return MigrationExecutor(connection).loader.project_state([to]).apps


@pytest.fixture
def at_head() -> Iterator[None]:
    yield
    migrate(HEAD)


def fill(apps: Any, state: str) -> None:
    """One of everything, through the models of a state. A value for a field that it lacks is left out."""
    n = state[:4]

    def make(model: str, **values: Any) -> Any:
        found = apps.get_model("rollouts", model)
        names = {name for field in found._meta.get_fields() for name in (field.name, getattr(field, "attname", ""))}
        return found.objects.create(**{name: value for name, value in values.items() if name in names})

    user = apps.get_model("auth", "User").objects.create(username=f"ada{n}")
    if state >= "0016":  # earlier everybody could do everything, and the migration makes them members
        project, _ = apps.get_model("rollouts", "Project").objects.get_or_create(code="default", name="Default")
        make("Membership", project=project, user=user, role="admin")
    template = make("ChatTemplate", sha256="a" * 60 + n, text="{{ messages }}")
    tokenizer = make("Tokenizer", name=f"old{n}", sha256="b" * 64, path="/gone/tokenizers/abc", source="folder",
                     vocab_size=10, encoder="tokenizers", chat_template=template)
    run = make("Run", code=f"run{n}", name="an old run", kind="import", status="done", created_by=user,
               n_trajectories=2, n_finished=2, n_steps=2, n_rows=2, n_tokens=14, finding_counts={"branch": 1},
               tokenizer=tokenizer, chat_template=template, finished_at=timezone.now())
    steps, rows = (
        make("StoredTrajectory", code=f"trajectory{n}{index}", run=run, index=index, external_id=str(index), reward=1.0,
             n_tokens=7, n_steps=2 - 2 * index, n_rows=1)
        for index in range(2)
    )
    first = make("StoredStep", trajectory=steps, index=0, prompt_length=3, completion_length=2, finish_reason="stop",
                 text=make("Content", sha256="c" * 60 + n, body='"a text"'))
    second = make("StoredStep", trajectory=steps, index=1, parent=first, shared_length=5, parent_length=5,
                  prompt_length=7, completion_length=2)
    make("StepTokens", step=first, delta_ids=PROMPT, completion_ids=COMPLETION, logprobs=LOGPROBS)
    make("StepTokens", step=second, delta_ids=DELTA, completion_ids=COMPLETION, logprobs=None)
    make("StoredRow", trajectory=steps, index=0, last_step=second, n_tokens=9, n_trained=4, step_indices=[0, 1])
    row = make("StoredRow", trajectory=rows, index=0, n_tokens=5, n_trained=3)
    make("RowTokens", row=row, ids=ROW, loss_mask=MASK, logprobs=None)
    make("RowColumn", row=row, name="advantages", values=np.arange(5) / 4)
    make("StoredFinding", run=run, trajectory=steps, step_index=1, axis="stream", kind="branch", severity="info",
         start=5, stop=7, expected_ids=DELTA, actual_ids=[], evidence="x", version=1)
    make("Rejection", run=run, file="a.jsonl", line=3, reason="It is no JSON.")
    check = make(
        "TemplateCheck",
        code=f"check{n}",
        chat_template=template,
        status="done",
        report={"checks": [], "prefix_preserving": True},
    )
    replay = make("Replay", trajectory=steps, key="k", status="done", report={"strategies": []})
    make("ReplayRows", replay=replay, strategy="step_wise", lengths=[5], ids=ROW, loss_mask=MASK)
    make("Job", run=run, kind="export", status="done")
    if state >= "0012":  # earlier, the migration gives them their jobs
        make("Job", template_check=check, kind="check_template", status="done", n_done=1)
        make("Job", replay=replay, kind="replay_trajectory", status="done", n_done=1)
    make("ShareLink", token_sha256="d" * 60 + n, hint="d", run=run, created_by=user, expires_at=timezone.now())
    make("ApiToken", token_sha256="e" * 60 + n, hint="e", name="a trainer", created_by=user)


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
