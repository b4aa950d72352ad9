"""The diagnosis of what was pushed: new trajectories alone, once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rollouts import services
from rollouts.models import Run
from rollouts.services.pushed import add_new_trajectories
from rollouts.tasks import pushed
from rollouts.tito.trajectory import Step, Trajectory, ids_array
from rollouts.work import diagnosis

pytestmark = pytest.mark.django_db


def trajectory(name: str, broken: bool) -> Trajectory:
    first = Step(ids_array([5, 6, 7]), ids_array([8, 9]))
    prompt = [5, 6, 7, 8, 30 if broken else 9, 11]
    return Trajectory(name, (first, Step(ids_array(prompt), ids_array([12]))))


def test_what_is_new_is_judged_once(tiny_tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = services.register_tokenizer(tiny_tokenizer, "demo")
    run = services.create_run(Run.Kind.IMPORT, "pushed", tokenizer=tokenizer)
    add_new_trajectories(run, [trajectory("whole", False), trajectory("broken", True)])
    judged: list[str] = []
    real = diagnosis.findings_for

    def counted(value: Any, of: Run) -> Any:
        judged.append(value.external_id)
        return real(value, of)

    monkeypatch.setattr(diagnosis, "findings_for", counted)
    pushed.diagnose_pushed(run.pk)
    assert judged == ["whole", "broken"]
    assert run.trajectories.get(external_id="broken").worst_severity == "error"
    assert run.trajectories.get(external_id="whole").worst_severity != "error"
    add_new_trajectories(run, [trajectory("later", True)])
    pushed.diagnose_pushed(run.pk)
    pushed.diagnose_pushed(run.pk)
    assert judged == ["whole", "broken", "later"]
    pushed.diagnose_pushed(999_999)  # deleted meanwhile
