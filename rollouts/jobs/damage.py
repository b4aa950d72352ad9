"""Damage: the gradient of the rows of a run against that of what was sampled, by the weights of a served model."""

from collections.abc import Callable
from operator import methodcaller
from typing import Any

import numpy as np

from rollout_inspector.diagnose.loss_weights.damage import damage_case
from rollout_inspector.diagnose.loss_weights.rules import RULES
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.trajectory import NO_IDS, Trajectory
from rollouts.jobs.launch import ServedModel
from rollouts.jobs.rescore import Vocabulary, chosen, engine_failure, wait_for
from rollouts.jobs.warm_engines import engine_of
from rollouts.sampling.engines import ENGINES, EngineError, RequestRefused
from rollouts.sampling.engines.engine_owner import EngineOwner
from rollouts.sampling.engines.model_digest import weights_digest
from rollouts.sampling.engines.protocol import EngineInfo
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, ask_job, end_job
from rollouts.store.models import Job, Run, StoredTrajectory
from rollouts.store.runs.damage import keep_damage, measurable, not_measured_since
from rollouts.store.runs.logprob_columns import mark_of
from rollouts.store.runs.runs import run_of_job
from rollouts.store.trajectories.groups import advantages_of_groups
from rollouts.store.trajectories.trajectories import load_trajectories, trajectory_batches
from rollouts.store.trajectories.trajectory_parts import findings_in_order, placed_finding

ENGINE = next(name for name, spec in ENGINES.items() if spec.has_gradients)  # The engine whose model has gradients.
BATCH = 20  # Trajectories that are loaded at once.


def ask(
    run: Run, model: str = "", trajectory: str = "", user: Any = None, rule: str = "", layers: int | None = None
) -> tuple[Job, bool]:
    """The job that measures the damage of a run, and whether a worker has to be sent for it. Raises :class:`Refusal`.
    ``model``: empty = that of the run. ``trajectory``: the code of the only one. ``rule`` and ``layers``: see
    :func:`damage_case` and ``gradients.measure``."""
    served, _ = chosen(model or run.model, ENGINE)
    if rule and rule not in RULES:
        raise Refusal(f"There is no rule of a loss named {rule[:40]!r}; choose one of {', '.join(RULES)}.")
    if layers is not None and layers < 1:
        raise Refusal("At least one layer is needed. Leave the number out for the whole model.")
    if not run.n_finished:
        raise Refusal("This run has no finished trajectory, so there is nothing to measure.")
    options = {"model": served.name, "trajectory": trajectory, "rule": rule, "layers": layers}
    job, is_new = ask_job(run, KIND.slug, {name: value for name, value in options.items() if value}, user)
    return job, is_new


def do_job(job: Job, beat: Beat, engine_of: Callable[[ServedModel, str], EngineOwner] = engine_of) -> None:
    """Measure the finished trajectories that this job has not measured yet."""
    run, options = run_of_job(job), job.options
    model, _ = chosen(options["model"], ENGINE)
    finished = measurable(run, options.get("trajectory", ""))
    waiting, weights = not_measured_since(finished, job.created_at), weights_digest(model.path)
    n_total = finished.count()
    n_done = n_total - waiting.count()
    beat(n_done=n_done, n_total=n_total, progress="the engine is started")
    try:
        owner = engine_of(model, ENGINE)
        vocabulary = Vocabulary.of(run, model, wait_for(owner.call(EngineInfo.of), beat).vocab_size)
        advantages = advantages_of_groups(run)
        for batch in trajectory_batches(waiting, BATCH):
            for record, value in zip(batch, load_trajectories(batch), strict=True):
                fields = _measure(record, value, advantages.get(record.pk), options, owner, vocabulary, beat)
                beat()  # what a lost worker has measured is not stored
                keep_damage(record, model=model.name, weights=weights, **fields)
                n_done += 1
                beat(n_done=n_done, progress="")
    except EngineError as error:
        raise engine_failure(error) from error
    if not end_job(job, Job.Status.DONE, n_done=n_done):
        raise JobLost


def _measure(
    record: StoredTrajectory, value: Trajectory, advantage: float | None, options: dict[str, Any], owner: EngineOwner,
    vocabulary: Vocabulary, beat: Beat,
) -> dict[str, Any]:
    findings = list(findings_in_order(record))
    for ids in (*(row.ids for row in value.rows), *(step.stream for step in value.steps)):
        vocabulary.check(record, ids)
    try:
        case = damage_case(value, [*map(placed_finding, findings)], advantage, options.get("rule", ""))
        figures = wait_for(owner.call(methodcaller("damage", case, options.get("layers"))), beat)
    except (Refusal, RequestRefused) as error:
        return {"findings": findings, "shares": {}, "missing": str(error)}
    norms = figures.pop("norms")
    marks = [number for row, *_ in case.rows for number in mark_of(row)]
    return {
        "findings": findings, **figures, "rule": case.rule, "rows": marks,
        "norms": np.concatenate([NO_IDS.astype(np.float32), *norms]),
        "missing": "" if figures["relative_error"] is not None else "What was sampled has no gradient.",
    }


KIND = JobKind(
    "damage",
    "Damage to the gradient",
    do_job,
    of_engine=True,
    activity="damage measurement started",
    page="run-cost",
    details=lambda options: f" with {options['model']}",
    done=lambda job: f"{job.n_done:,} trajectories are measured; the page Cost shows what each kind does.",
    cancelled="Cancelled after {done}; what was measured is kept.",
)
"""The gradients of a run are compared; ``options`` name the model and what :func:`ask` was told."""
