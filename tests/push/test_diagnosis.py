"""The diagnosis of what was pushed: new trajectories alone, once."""

from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from rollouts.jobs import diagnosis
from rollouts.store.chat_templates.tokenizers import register_tokenizer
from rollouts.store.jobs.jobs import ask_job
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.save_trajectories import add_new_trajectories
from rollouts.worker.jobs import do_job

pytestmark = pytest.mark.django_db


def trajectory(name: str, broken: bool) -> Trajectory:
    first = Step(ids_array([5, 6, 7]), ids_array([8, 9]))
    prompt = [5, 6, 7, 8, 30 if broken else 9, 11]
    return Trajectory(name, (first, Step(ids_array(prompt), ids_array([12]))))


def diagnose_pushed(run: Run) -> None:
    job, is_new = ask_job(run, "diagnose_pushed")
    assert is_new
    do_job(job.pk)


def test_what_is_new_is_diagnosed_once(tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = register_tokenizer(tiny_tokenizer, "demo")
    run = create_run(Run.Kind.IMPORT, "pushed", tokenizer=tokenizer)
    add_new_trajectories(run, [trajectory("whole", False), trajectory("broken", True)])
    diagnosed: list[str] = []
    real = diagnosis.diagnosis_for

    def counted(value: Any, of: Run) -> Any:
        diagnosed.append(value.external_id)
        return real(value, of)

    monkeypatch.setattr(diagnosis, "diagnosis_for", counted)
    diagnose_pushed(run)
    assert diagnosed == ["whole", "broken"]
    assert run.trajectories.get(external_id="broken").worst_severity == "error"
    assert run.trajectories.get(external_id="whole").worst_severity != "error"
    add_new_trajectories(run, [trajectory("later", True)])
    diagnose_pushed(run)
    diagnose_pushed(run)
    assert diagnosed == ["whole", "broken", "later"]
