"""Replays of strategies over one stored trajectory. A page asks for one and a worker makes it."""

import hashlib
from typing import Any

import numpy as np
from django.db import transaction

from rollout_inspector.refusal import Refusal, Remedy
from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.streams.strategies import STRATEGIES
from rollout_inspector.streams.strategies.rendering import RenderedPrompts
from rollout_inspector.streams.strategies.replay import StrategyResult, replay_many
from rollout_inspector.streams.trajectory import Origin, Row
from rollouts.jobs import template_checks
from rollouts.jobs.replays.replay_context import complete_replies, context_of, template_text
from rollouts.store.chat_templates.chat_templates import find_chat_template
from rollouts.store.database import save_columns
from rollouts.store.jobs.jobs import Beat, JobKind, JobLost, ask_job, end_job, is_active
from rollouts.store.models import Job, Replay, ReplayRows, Run, StoredTrajectory
from rollouts.store.trajectories.replays import find_replay, replace_replay_rows, replay_of, replay_of_job
from rollouts.store.trajectories.trajectories import load_trajectories

VERSION = 7  # Raise it when a strategy makes other rows than before: stored replays are then stale.
REPAIR = "with_repair"  # The name in a replay's report of what the trajectory becomes under the repaired chat template.
NO_REPAIR = "The chat template passes every probe, so there is nothing to repair."
MAX_STEPS = 500
MAX_FORWARDED_TOKENS = 8_000_000
"""Prompt and completion tokens over all steps. Some strategies render and encode all of them."""
MAX_KEPT_TOKENS = 3_000_000
"""Tokens of one strategy's rows that are stored for the comparison. Of larger rows only the figures are stored."""


def missing(trajectory: StoredTrajectory) -> Refusal | None:
    """Why no strategy can be replayed over a trajectory; None = at least the step-wise ones can."""
    if trajectory.n_steps:
        return None
    return Refusal(
        "It came as training rows without steps, and a strategy is replayed over steps: prompts, completions and "
        "the messages between them. Import what the rollout side recorded."
    )


def all_installed() -> bool:
    """Whether no strategy lacks its optional package."""
    return not any(strategy.missing() for strategy in STRATEGIES.values())


def key_of(trajectory: StoredTrajectory) -> str:
    """The hash of all that a replay depends on. A stored replay with another key is stale."""
    counted = trajectory.attempt, trajectory.n_steps, trajectory.n_tokens, trajectory.status
    return hash_of(trajectory.run, *counted)


def hash_of(run: Run, *counted: Any) -> str:
    """The hash of all that replays of a run depend on, and of the numbers that change with its trajectories."""
    parts = (
        VERSION, sorted(STRATEGIES), all_installed(), *counted,
        run.tokenizer.sha256 if run.tokenizer else "", hashlib.sha256((template_text(run) or "").encode()).hexdigest(),
        *filter(None, [run.rows_chat_template_id]),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def ask(
    trajectory: StoredTrajectory, again: bool = False, user: Any = None, repair: bool = False
) -> tuple[Replay, bool]:
    """The replay of a trajectory, and whether a worker has to be sent for it. ``again`` retries one that did not end.
    ``repair``: it is also replayed under the repaired chat template, which is searched for first."""
    key = key_of(trajectory)
    with transaction.atomic():
        replay, created = replay_of(trajectory, key)
        if not created and not (
            is_active(replay.job) or replay.key != key or (repair and not repair_of(replay))
            or (again and replay.job.status != Job.Status.DONE)
        ):
            return replay, False
        replay.job, is_new = ask_job(replay, KIND.slug, {"repair": True} if repair else None, user)
        if is_new:
            replay.key, replay.report = key, None
            save_columns(replay, "key", "report")
    return replay, is_new


def repair_of(replay: Replay) -> dict[str, Any] | None:
    """What the trajectory becomes under the repaired chat template, or why that is not known; None = nobody asked."""
    repair: dict[str, Any] | None = (replay.report or {}).get(REPAIR)
    return repair


def current(trajectory: StoredTrajectory) -> Replay | None:
    """The stored replay of a trajectory if it is not stale or a worker is making it now; else None."""
    replay = find_replay(trajectory)
    if replay is None or not (replay.key == key_of(trajectory) or is_active(replay.job)):
        return None
    return replay


def do_job(job: Job, beat: Beat) -> None:
    """Replay every strategy over a trajectory and store figures and rows."""
    replay = replay_of_job(job)
    beat()
    replay.key = key_of(replay.trajectory)
    save_columns(replay, "key")
    try:
        results = _replayed(replay.trajectory)
        replay.report = {"strategies": [figures(result) for result in results]}
        if job.options.get("repair"):
            replay.report[REPAIR], repaired = _repaired(replay.trajectory, job, beat)
            results += repaired
    except Refusal:
        raise
    except (RenderFailed, OSError, ValueError) as error:
        raise Refusal(str(error)) from error
    stored = [_kept(replay, result) for result in results if result.rows]
    with transaction.atomic():
        if not end_job(job, Job.Status.DONE):
            raise JobLost
        replace_replay_rows(replay, [rows for rows in stored if rows is not None])
        save_columns(replay, "report")


def _replayed(record: StoredTrajectory) -> list[StrategyResult]:
    if refusal := missing(record):
        raise refusal
    (value,) = load_trajectories([record])
    forwarded = sum(len(step.prompt_ids) + len(step.completion_ids) for step in value.steps)
    if len(value.steps) > MAX_STEPS or forwarded > MAX_FORWARDED_TOKENS:
        raise Refusal(
            f"With {len(value.steps):,} steps that forward {forwarded:,} tokens it is too long for a worker, which "
            f"replays up to {MAX_STEPS:,} steps and {MAX_FORWARDED_TOKENS:,} tokens.",
            Remedy.REPLAY_BY_COMMAND,
        )
    context, loaded = context_of(record.run)
    (results,) = replay_many([complete_replies(value, loaded, context)], list(STRATEGIES.values()), context)
    return results


def _repaired(record: StoredTrajectory, job: Job, beat: Beat) -> tuple[dict[str, Any], list[StrategyResult]]:
    """The trajectory under the smallest of the repairs with the fewest rows; ``refused`` says why there is none. The
    repairs are those of the check of its chat template with the tools of the first request."""
    (value,), run = load_trajectories([record]), record.run
    request = value.steps[0].request
    recorded = next((step.chat_template_sha256 for step in value.steps if step.chat_template_sha256), "")
    template = find_chat_template(run.project_id, recorded) or run.chat_template
    template = template or (run.tokenizer.chat_template if run.tokenizer else None)
    if template is None or request is None:
        lacks = "The run has no chat template" if template is None else "The messages of the requests were not recorded"
        return {"refused": f"{lacks}, so nothing can be rendered under a repaired one.", "check": None}, []
    beat(progress="the chat template is checked")
    check, _ = template_checks.ask(
        run.tokenizer, template, request.tools, request.chat_template_kwargs, job.created_by, project=run.project
    )
    report = template_checks.answer_now(check, beat).report or {}
    repaired: dict[str, Any] = {"refused": report.get("repair_detail") or NO_REPAIR, "check": check.code}
    best: StrategyResult | None = None
    for which, repair in template_checks.repairs_of(report).items():
        beat(progress="the conversation is rendered with the repair")
        context, loaded = context_of(run, chat_template=repair["template"])
        ((result,),) = replay_many([complete_replies(value, loaded, context)], [RenderedPrompts], context)
        if best is None or (not result.refused and (best.refused or len(result.rows) < len(best.rows))):
            best, repaired = result, repaired | {"which": which} | figures(result)
            repaired["row_steps"] = [row.step_indices for row in result.rows]
    return repaired, [best] if best is not None else []


def figures(made: StrategyResult) -> dict[str, Any]:
    """The figures of what one strategy makes of a trajectory."""
    return {
        "strategy": made.slug,
        "parameters": dict(STRATEGIES[made.slug].parameters) if made.slug in STRATEGIES else {},
        "refused": made.refused or None,
        "trained_tokens": made.trained_tokens,
        "sampled_tokens": made.sampled_tokens,
        "trained_share": made.trained_share,
        "frozen_steps": made.frozen_steps,
        "lost_tokens": made.lost_tokens,
        "prompt_tokens_repaid": made.prompt_tokens_repaid,
        "rows_count": len(made.rows),
        "tokens": sum(len(row.ids) for row in made.rows),
        "differs_at": made.differs_at and dict(zip(("step", "offset"), made.differs_at, strict=True)),
    }


def _kept(made: Replay, result: StrategyResult) -> ReplayRows | None:
    if sum(len(row.ids) for row in result.rows) > MAX_KEPT_TOKENS:
        return None
    return ReplayRows(
        replay=made,
        strategy=result.slug,
        lengths=[len(row.ids) for row in result.rows],
        ids=np.concatenate([row.ids for row in result.rows]),
        loss_mask=np.concatenate([row.loss_mask for row in result.rows]),
        origin=None
        if any(row.origin is None for row in result.rows)
        else np.concatenate([row.origin for row in result.rows if row.origin is not None]),
    )


def row_of(stored: ReplayRows, index: int) -> Row:
    """The row at an index of the rows that a strategy made. Without recorded origins every token has ``prompt``."""
    stops = np.cumsum(stored.lengths)
    part = slice(int(stops[index]) - stored.lengths[index], int(stops[index]))
    origin = stored.origin[part] if stored.origin is not None else np.full(stored.lengths[index], Origin.PROMPT, "u1")
    return Row(stored.ids[part], stored.loss_mask[part], origin=origin)


KIND = JobKind("replay_trajectory", "Replay Trajectory", do_job, activity="replay started")
"""Every strategy is replayed over one trajectory."""
