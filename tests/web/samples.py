"""Small runs for the tests of pages, stored by the services that real work uses."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from django.http import HttpResponse

from rollout_inspector.diagnose import examine
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run, end_run
from rollouts.store.trajectories.save_trajectories import save_trajectories

HOSTILE = '<script>alert(1)</script> "onmouseover=" & \u202eabc'


def one_line(response: HttpResponse) -> str:
    """A page in which each run of white space is one space, as a browser draws it."""
    assert response.status_code == 200
    return " ".join(response.content.decode().split())


def trajectory(name: str, reward: float | None = 1.0, group: str = "g0", stop: str = "answered") -> Trajectory:
    """Two steps of which the second extends the first."""
    first = Step(ids_array([1, 2, 3]), ids_array([4, 5]))
    second = Step(ids_array([1, 2, 3, 4, 5, 6, 7]), ids_array([8, 9]))
    return Trajectory(name, (first, second), reward=reward, group=group, stop_reason=stop)


def finding(kind: str = "boundary_merge", severity: Severity = Severity.ERROR) -> Finding:
    return Finding(Axis.STREAM, kind, severity, step=1, start=3, stop=4, evidence="The stream differs at offset 3.")


def stored_run(
    n: int = 3,
    name: str = "sample",
    kind: str = "import",
    findings: Sequence[Sequence[Finding]] | None = None,
    **fields: Any,
) -> Run:
    """A finished run of `n` trajectories with rewards 0, 1, 0, 1, ... in groups of two."""
    run = create_run(kind, name, **fields)
    values = [
        trajectory(f"t{i:03}", float(i % 2), f"g{i // 2}", "answered" if i % 3 else "max_turns") for i in range(n)
    ]
    found = findings or [[finding()] if i % 2 else [] for i in range(n)]
    checks = [
        replace(examine(value, None), findings=tuple(some)).checks for value, some in zip(values, found, strict=True)
    ]
    save_trajectories(run, values, found, checks=checks)
    end_run(run, Run.Status.DONE)
    run.refresh_from_db()
    return run
