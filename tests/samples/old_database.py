"""A database as an older version wrote it."""

from __future__ import annotations

from typing import Any

import numpy as np
from django.db import connection
from django.db.migrations.executor import MigrationExecutor
from django.db.migrations.loader import MigrationLoader
from django.utils import timezone

(HEAD,) = MigrationLoader(None).graph.leaf_nodes("rollouts")


PROMPT, COMPLETION, DELTA = np.array([5, 6, 7]), np.array([8, 9]), np.array([1, 2])

LOGPROBS = np.array([-0.5, -1.25], dtype=np.float32)


ROW, MASK = np.array([3, 1, 4, 1, 5]), np.array([False, False, True, True, True])


def migrate(to: tuple[str, str]) -> Any:
    """The models of a state, once the database is in it."""
    MigrationExecutor(connection).migrate([to])
    return MigrationExecutor(connection).loader.project_state([to]).apps


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
                     vocab_size=10, encoder="tokenizers", chat_template=template)  # fmt: skip
    run = make("Run", code=f"run{n}", name="an old run", kind="import", status="done", created_by=user,
               n_trajectories=2, n_finished=2, n_steps=2, n_rows=2, n_tokens=14, finding_counts={"branch": 1},
               tokenizer=tokenizer, chat_template=template, finished_at=timezone.now())  # fmt: skip
    steps, rows = (
        make("StoredTrajectory", code=f"trajectory{n}{index}", run=run, index=index, external_id=str(index), reward=1.0,
             n_tokens=7, n_steps=2 - 2 * index, n_rows=1)
        for index in range(2)
    )  # fmt: skip
    first = make("StoredStep", trajectory=steps, index=0, prompt_length=3, completion_length=2, finish_reason="stop",
                 text=make("Content", sha256="c" * 60 + n, body='"a text"'))  # fmt: skip
    second = make("StoredStep", trajectory=steps, index=1, parent=first, shared_length=5, parent_length=5,
                  prompt_length=7, completion_length=2)  # fmt: skip
    make("StepTokens", step=first, delta_ids=PROMPT, completion_ids=COMPLETION, logprobs=LOGPROBS)
    make("StepTokens", step=second, delta_ids=DELTA, completion_ids=COMPLETION, logprobs=None)
    make("StoredRow", trajectory=steps, index=0, last_step=second, n_tokens=9, n_trained=4, step_indices=[0, 1])
    row = make("StoredRow", trajectory=rows, index=0, n_tokens=5, n_trained=3)
    make("RowTokens", row=row, ids=ROW, loss_mask=MASK, logprobs=None)
    make("RowColumn", row=row, name="advantages", values=np.arange(5) / 4)
    make("StoredFinding", run=run, trajectory=steps, step_index=1, axis="stream", kind="branch", severity="info",
         start=5, stop=7, expected_ids=DELTA, actual_ids=[], evidence="x", version=1)  # fmt: skip
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
