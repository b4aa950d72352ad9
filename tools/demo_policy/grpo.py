"""A small GRPO of the demo policy on the CPU, with the loop's own rollouts and faults that can be switched on.

Group relative policy optimization is from Shao et al., "DeepSeekMath" (2024). The advantage of a trajectory is its
reward minus the mean of its group, over the standard deviation. It weighs the log-probability of each trained token.
One update follows each batch of rollouts, so the clipped ratio is 1 where it is taken.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.strategies import STRATEGIES, Context, start
from rollout_inspector.streams.trajectory import Floats, Row, Step, Trajectory
from rollout_inspector.text import chat_templates
from rollout_inspector.text.replies.parsing import parser
from rollout_inspector.text.tokenizers import load
from rollouts.sampling.demo_policy import MODEL_DIR
from rollouts.sampling.engines.engine_thread import EngineThread
from rollouts.sampling.engines.protocol import Sampling
from rollouts.sampling.engines.transformers_engine import TransformersEngine
from rollouts.sampling.environments import ENVIRONMENTS, Task
from rollouts.sampling.loop import RolloutBatch, RolloutJob, RolloutLimits

TRAINER_COLUMN = "trainer_logprobs"
MAX_TASKS = 10_000
KEPT_PROMPTS = 200
"""Sequences whose keys and values the engine keeps, so that a prompt of an earlier step is found again."""


@dataclass(frozen=True)
class GrpoSettings:
    """What a training run does."""

    steps: int
    """Updates."""
    groups: int = 4
    """Prompts of a step."""
    group_size: int = 4
    """Trajectories of a prompt."""
    repeated: int = 0
    """Prompts that every step has, beside new ones."""
    rate: float = 1e-4
    """Of AdamW."""
    strategy: str = "tool_delta"
    """How observations become the next prompt, and what the rows are."""
    temperature: float = 1.0
    """Of sampling."""
    trainer_temperature: float | None = None
    """What the trainer divides its logits by; None = the temperature of sampling. Another one is a fault."""
    deliver_every: int = 1
    """The engine gets the weights after so many updates; 0 = never, which is a fault."""
    reset_cache: bool = True
    """Whether the engine forgets keys and values of the old weights. Not to is a fault."""
    sampler_dtype: str = "float32"
    """``float32``, or ``bfloat16``: the weights of the engine are rounded to it."""
    max_tokens: int = 96
    max_turns: int = 3
    seed: int = 0
    threads: int = 2


@dataclass(frozen=True)
class GrpoStep:
    """A step of training that has ended."""

    step: int
    """From 0."""
    trajectories: tuple[Trajectory, ...]
    """With rows that hold the advantages and both log-probabilities."""
    reward: float
    """Mean of the step."""
    gap: float
    """Mean absolute difference of both log-probabilities over trained tokens, in nats."""


def train(settings: GrpoSettings, policy: Path = MODEL_DIR) -> Iterator[GrpoStep]:
    """Train, and yield each step with its trajectories. The same settings make the same tokens on the same machine."""
    torch.set_num_threads(settings.threads)
    torch.manual_seed(settings.seed)
    model = AutoModelForCausalLM.from_pretrained(policy, local_files_only=True, dtype=torch.float32).eval()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.rate, weight_decay=0.0)
    engine = EngineThread(lambda: TransformersEngine(policy, kept=KEPT_PROMPTS), "grpo")
    try:
        sampler, delivered = _Sampler(settings, engine, policy), 0
        engine.call(_delivery(model, settings)).result()
        for step in range(settings.steps):
            sampled = sampler.sample(step, f"step-{delivered}")
            trajectories = [
                replace(trajectory, rows=tuple(_with_columns(row, advantage) for row in trajectory.rows))
                for trajectory, advantage in zip(sampled, _advantages(sampled), strict=True)
            ]
            scored = _update(model, optimizer, trajectories, settings)
            yield GrpoStep(
                step, tuple(scored), _mean([trajectory.reward or 0.0 for trajectory in scored]), _gap(scored)
            )
            if settings.deliver_every and (step + 1) % settings.deliver_every == 0:
                engine.call(_delivery(model, settings)).result()
                delivered = step + 1
    finally:
        engine.close()


def _delivery(model: torch.nn.Module, settings: GrpoSettings) -> Callable[[Any], None]:
    """What the engine is asked to do in its thread: take a copy of the trainer's weights."""
    rounded = getattr(torch, settings.sampler_dtype)
    weights = {name: value.detach().to(rounded).to(torch.float32) for name, value in model.state_dict().items()}
    return lambda engine: engine.load_weights(weights, settings.reset_cache)


class _Sampler:
    """Samples the trajectories of a step with the loop."""

    def __init__(self, settings: GrpoSettings, engine: EngineThread, policy: Path) -> None:
        self._settings, self._engine = settings, engine
        self._codec = load(policy)
        renderer = chat_templates.renderer(self._codec, self._codec.chat_template or "")
        self._context = Context(self._codec, renderer, self._codec.stop_ids)
        self._parse = parser(self._codec.hf, self._codec.stop_ids)
        self._environment = ENVIRONMENTS["calculator"]()
        new = settings.groups - settings.repeated
        n_tasks = min(settings.repeated + new * settings.steps, MAX_TASKS)
        self._tasks = [_numbered(task) for task in self._environment.tasks(n_tasks, settings.seed)]

    def _tasks_of(self, step: int) -> list[Task]:
        """The prompts of a step: those that every step has, and new ones."""
        n_repeated, new = self._settings.repeated, self._settings.groups - self._settings.repeated
        first = n_repeated + step * new
        return self._tasks[:n_repeated] + [self._tasks[(first + n) % len(self._tasks)] for n in range(new)]

    def sample(self, step: int, version: str) -> list[Trajectory]:
        """The trajectories of a step, in the order of groups."""
        settings = self._settings
        jobs = [
            RolloutJob((group, n), task, settings.seed * 1_000_003 + (step * settings.groups + group) * 1009 + n)
            for group, task in enumerate(self._tasks_of(step))
            for n in range(settings.group_size)
        ]
        waiting, steps, ends = list(jobs), dict[Any, list[Step]](), dict[Any, TrajectoryEnd]()

        def more(n: int, _: bool) -> list[RolloutJob] | None:
            tasks_taken, waiting[:n] = waiting[:n], []
            return tasks_taken or None

        def keep(found: Sequence[tuple[RolloutJob, int, Step]]) -> None:
            for job, _, step_of_job in found:
                steps.setdefault(job.key, []).append(step_of_job)

        stops = tuple(sorted(self._codec.stop_ids))
        sampling = Sampling(settings.temperature, max_tokens=settings.max_tokens, stop_token_ids=stops)
        _, error = RolloutBatch(
            self._engine, self._environment, lambda: start(STRATEGIES[settings.strategy], self._context), self._parse,
            RolloutLimits(sampling, settings.max_turns),
            more, keep, lambda found: ends.update({one.key: one for one in found}), lambda: False,
            policy_version=version,
        ).run()
        if error:
            raise RuntimeError(error)
        return [self._trajectory(step, job, steps.get(job.key, []), ends[job.key]) for job in jobs]

    def _trajectory(self, step: int, job: RolloutJob, steps: Sequence[Step], end: TrajectoryEnd) -> Trajectory:
        group, n = job.key
        rows = tuple(merged_rows(tuple(steps))) if end.rows is None else end.rows
        return Trajectory(
            f"step-{step}/{group}-{n}", tuple(steps), tuple(_with_logprobs(row, steps) for row in rows),
            reward=end.reward or 0.0, reward_parts=end.reward_parts, stop_reason=end.stop_reason,
            group=f"step-{step}/task-{job.task.index}", tokenizer="demo", training_step=step,
        )


def _numbered(task: Task) -> Task:
    """The task with its number at the start, so that two prompts share no long prefix."""
    first, *others = task.messages
    message = {**first, "content": f"{task.index}. {first['content']}"}
    return replace(task, messages=[message, *others])


def _with_logprobs(row: Row, steps: Sequence[Step]) -> Row:
    """The row with the sampled log-probabilities.

    A strategy that encodes texts again keeps none. They are then laid over the trained tokens in order, as trainers do
    that keep texts: where the numbers of tokens differ, the rest is cut or filled with 0.
    """
    if row.logprobs is not None:
        return row
    logprobs = [step.logprobs for step in steps if step.logprobs is not None]
    sampled = np.concatenate(logprobs) if logprobs else np.zeros(0, np.float32)
    values, trained = np.zeros(len(row.ids), np.float32), np.flatnonzero(row.loss_mask)
    n = min(len(trained), len(sampled))
    values[trained[:n]] = sampled[:n]
    return replace(row, logprobs=values)


def _advantages(trajectories: Sequence[Trajectory]) -> list[float]:
    """The advantage of each trajectory in its group. 0 where all rewards of a group are equal."""
    rewards: dict[str, list[float]] = {}
    for trajectory in trajectories:
        rewards.setdefault(trajectory.group, []).append(trajectory.reward or 0.0)
    advantages = []
    for trajectory in trajectories:
        group = np.array(rewards[trajectory.group])
        spread = float(group.std())
        advantages.append(((trajectory.reward or 0.0) - float(group.mean())) / (spread + 1e-6) if spread else 0.0)
    return advantages


def _with_columns(row: Row, advantage: float) -> Row:
    values: Floats = np.where(row.loss_mask, np.float32(advantage), np.float32(0))
    return replace(row, columns={**row.columns, "advantages": values})


def _update(
    model: Any, optimizer: torch.optim.Optimizer, trajectories: Sequence[Trajectory], settings: GrpoSettings
) -> list[Trajectory]:
    """One update by all trained tokens. Returns the trajectories with the trainer's log-probabilities before it."""
    temperature = settings.trainer_temperature or settings.temperature
    n_trained = sum(int(row.loss_mask.sum()) for trajectory in trajectories for row in trajectory.rows)
    losses = []
    optimizer.zero_grad(set_to_none=True)
    for trajectory in trajectories:
        rows = []
        for row in trajectory.rows:
            trained = torch.from_numpy(np.flatnonzero(row.loss_mask[1:]) + 1)
            ids = torch.from_numpy(row.ids.astype(np.int64))
            column = np.zeros(len(ids), np.float32)
            if len(trained):
                logits = model(input_ids=ids[None]).logits[0, trained - 1].float() / temperature
                logprobs = torch.log_softmax(logits, dim=-1).gather(1, ids[trained, None])[:, 0]
                column[trained.numpy()] = logprobs.detach().numpy()
                advantage = torch.from_numpy(row.columns["advantages"])[trained]
                if advantage.any():
                    ratio = torch.exp(logprobs - logprobs.detach())
                    (-(ratio * advantage).sum() / n_trained).backward()  # type: ignore[no-untyped-call]
            rows.append(replace(row, columns={**row.columns, TRAINER_COLUMN: column}))
        losses.append(replace(trajectory, rows=tuple(rows)))
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return losses


def _gap(trajectories: Sequence[Trajectory]) -> float:
    sizes = [
        np.abs(row.columns[TRAINER_COLUMN] - row.logprobs)[row.loss_mask]
        for trajectory in trajectories
        for row in trajectory.rows
        if row.logprobs is not None
    ]
    return float(np.concatenate(sizes).mean()) if sizes else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
