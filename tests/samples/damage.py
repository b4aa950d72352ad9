"""A run whose damage the demo policy can measure."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Row, Step, Trajectory, ids_array
from rollouts.jobs import damage
from rollouts.sampling.demo_policy import MODEL_DIR
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run, end_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from tests.samples.demo_engine import DemoOwner, demo_engine
from tests.samples.shard_work import change_kind


def steps(seed: int) -> tuple[Step, Step]:
    """A prompt of 6, a completion of 4, an observation of 5, a completion of 3: a row of 18."""
    rng = np.random.default_rng(seed)
    a, b, c, d = (ids_array(rng.integers(0, 1190, n)) for n in (6, 4, 5, 3))
    first = Step(a, b)
    return first, Step(np.concatenate([first.stream, c]), d)


def row(own: tuple[Step, Step], *flipped: tuple[int, int]) -> Row:
    (base,) = merged_rows(own)
    for start, stop in flipped:
        base.loss_mask[start:stop] ^= True
    return replace(base, logprobs=None, origin=None, step_indices=(0, 1))


def finding(kind: str, start: int, stop: int) -> Finding:
    return Finding(Axis.ROW, kind, Severity.ERROR, row=0, start=start, stop=stop)


def damaged_run(settings: Any, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Clean; an observation trained; a sampled token masked and an observation trained; a mask of another length."""
    demo_engine()  # loaded before a job begins, so that no heartbeat is due meanwhile
    settings.INSPECTOR_MODELS = {"demo": {"engine": "transformers", "path": str(MODEL_DIR)}}
    do: Any = partial(damage.do_job, engine_of=lambda model, engine: DemoOwner())
    change_kind(monkeypatch, "damage", handler=do)
    made = create_run("import", "r", model="demo")
    own = [steps(seed) for seed in range(4)]
    rows = [row(own[0]), row(own[1], (10, 15)), row(own[2], (6, 7), (10, 12)), row(own[3])]
    rows[3] = replace(rows[3], loss_mask=rows[3].loss_mask[:-2])
    values = [Trajectory(name, own[n], (rows[n],)) for n, name in enumerate("abcd")]
    wide, narrow = finding("observation_trained", 10, 12), finding("sampled_masked", 6, 7)
    found = [[], [finding("observation_trained", 10, 15)], [narrow, wide], [finding("length_mismatch", 0, 18)]]
    save_trajectories(made, values, found)
    end_run(made, Run.Status.DONE)
    made.refresh_from_db()
    return made
