"""Runs whose trajectories belong to training steps."""

from dataclasses import replace
from typing import Any

import numpy as np

from rollout_inspector.diagnose import examine
from rollout_inspector.streams.trajectory import Row, Trajectory
from rollouts.jobs.diagnosis import gap_json
from rollouts.store.models import Run, TrainingStepFigures
from rollouts.store.trajectories.save_trajectories import save_trajectories
from tests.storage.build import chain


def world(steps: int = 4) -> list[Trajectory]:
    """Four trajectories a step in two groups; breaks from step 2 on, a gap that grows, and one without a step."""
    made = []
    for step in range(steps):
        for n in range(4):
            broken = 1 if step >= 2 and n == 0 else None
            one = chain(f"{step}-{n}", seed=10 * step + n, broken_at=broken, training_step=step)
            rng = np.random.default_rng(n)
            sampler = -rng.random(6, dtype=np.float32)
            row = Row(
                np.arange(6, dtype=np.int32), np.array([0, 0, 1, 1, 1, 1], dtype=bool), sampler,
                columns={"trainer_logprobs": sampler + np.float32(0.1 * step)},
            )
            made.append(replace(one, rows=(row,), group=f"g{n // 2}", reward=1.0 if n < 2 or step == 0 else float(n)))
    cut = made[-1].steps[-1]
    made[-1] = replace(made[-1], steps=(*made[-1].steps[:-1], replace(cut, finish_reason="length")))
    return [*made, chain("no step", seed=99)]


def save(run: Run, made: list[Trajectory]) -> dict[str, list[Any]]:
    found = [examine(one, None) for one in made]
    gaps = [gap_json(one) for one in found]
    save_trajectories(
        run, made, [list(one.findings) for one in found], checks=[one.checks for one in found], gaps=gaps
    )
    return {one.external_id: list(diagnosis.findings) for one, diagnosis in zip(made, found, strict=True)}


def store_steps(run: Run, broken: list[int], of: int = 10) -> None:
    """Figures of training steps, as counting stores them."""
    TrainingStepFigures.objects.filter(run=run).delete()
    TrainingStepFigures.objects.bulk_create(
        TrainingStepFigures(
            run=run, training_step=step, n_trajectories=of, n_broken=n, n_steps=of, n_rows=of, n_tokens=of,
            n_sampled=of, n_trained=of, n_lost=0, n_repaid=0, n_truncated=None, n_rewards=0, reward_sum=0.0,
            n_groups=0, n_same_reward=0, finding_counts={"boundary_merge": n} if n else {}, gap=None,
        )
        for step, n in enumerate(broken)
    )


def of_versions(made: list[Trajectory], name: Any) -> list[Trajectory]:
    """Trajectories whose steps were sampled by the version that ``name`` returns."""
    return [replace(one, steps=tuple(replace(s, policy_version=name(one)) for s in one.steps)) for one in made]
