"""The bundled runs of training: what the tool names of each, and that they load as runs."""

import io
import json

import pytest
from django.core.management import call_command

from rollout_inspector.diagnose import examine
from rollout_inspector.diagnose.gap.report import causes_of
from rollout_inspector.diagnose.gap.tokens import GapCollector
from rollout_inspector.formats import Source, read
from rollout_inspector.streams.trajectory import Trajectory
from rollouts.gallery import STEPS, TRAINING_RUNS, TrainingRun
from rollouts.jobs import gallery
from rollouts.jobs.gap_reports import read_gap
from rollouts.store.models import Run
from rollouts.store.runs.training_steps import over_training


def values(run: TrainingRun) -> list[Trajectory]:
    return [one for one in read(Source.of_path(run.path))[1] if isinstance(one, Trajectory)]


@pytest.mark.parametrize("run", TRAINING_RUNS, ids=lambda run: run.name)
def test_the_gap_is_named_by_its_fault(run: TrainingRun) -> None:
    held = values(run)
    assert {one.training_step for one in held} == set(range(STEPS))
    collector = GapCollector()
    for one in held:
        kinds: dict[int, set[str]] = {}
        if run.cause == "row_retokenized":  # the finding comes from a diagnosis, which takes a while
            for found in examine(one, None).findings:
                kinds.setdefault(found.row or 0, set()).add(found.kind)
        collector.add(one, enumerate(one.rows), kinds=kinds)
    named = causes_of(collector.done())[0]
    assert [one.cause for one in named] == ([run.cause] if run.cause else [])
    assert all(one.from_step is not None and one.from_step <= 2 for one in named)


def test_a_tool_that_looks_after_each_step_names_lost_weights_early() -> None:
    """Not at step 29, but after the first steps."""
    (run,) = (one for one in TRAINING_RUNS if one.name == "undelivered")
    held = values(run)
    for last in range(4, STEPS, 5):
        collector = GapCollector()
        for one in held:
            if (one.training_step or 0) <= last:
                collector.add(one, enumerate(one.rows))
        assert [one.cause for one in causes_of(collector.done())[0]] == ["weights_not_delivered"], last


def test_they_are_small() -> None:
    assert sum(run.path.stat().st_size for run in TRAINING_RUNS) < 1_000_000


@pytest.mark.django_db
def test_they_load_once_and_show_their_training(monkeypatch: pytest.MonkeyPatch) -> None:
    only = tuple(run for run in TRAINING_RUNS if run.name == "stale_cache")
    monkeypatch.setattr(gallery, "TRAINING_RUNS", only)
    out = io.StringIO()
    call_command("load_gallery", "--training", "--json", stdout=out)
    code = json.loads(out.getvalue())["stale_cache"]
    call_command("load_gallery", "--training", stdout=out)
    run = Run.objects.get()
    assert (run.code, run.n_trajectories, run.status) == (code, 8 * STEPS, "done")
    steps = over_training(run)[0]
    first, last = steps[0].gap, steps[-1].gap
    assert len(steps) == STEPS and first and last and first["mean_abs"] < 1e-4 < last["mean_abs"]  # type: ignore[operator]
    assert [one["cause"] for one in read_gap(run)["causes"]] == ["stale_cache"]
