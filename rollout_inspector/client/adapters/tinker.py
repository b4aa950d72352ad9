"""tinker-cookbook: streams the groups of trajectories of each training step. Tested with tinker-cookbook 0.6.1.

    from tinker_cookbook.rl import train
    stream_training(train)      # before `asyncio.run(train.main(config))`

It stands around ``do_train_step_and_get_sampling_client``, which synchronous and asynchronous training call with the
groups of a step. A loop of your own calls :func:`send_groups`.
"""

import secrets
from collections.abc import Iterable, Iterator
from typing import Any

from rollout_inspector.client.adapters import records
from rollout_inspector.client.adapters.stream import RolloutStream

_STEP = "do_train_step_and_get_sampling_client"
_START = secrets.token_hex(2)


def stream_training(train: Any, stream: RolloutStream | None = None, **options: Any) -> RolloutStream:
    """Stream what the module ``tinker_cookbook.rl.train`` trains on. Returns the stream. Without a ``stream``,
    ``options`` go to a new one. Raises ``TypeError`` for another module."""
    if not callable(getattr(train, _STEP, None)):
        raise TypeError(f"{getattr(train, '__name__', train)} has no {_STEP}. Hand over tinker_cookbook.rl.train.")
    into = stream or RolloutStream(**options)
    do_step = getattr(train, _STEP)

    async def step(config: Any, i_batch: int, *args: Any, **kwargs: Any) -> Any:
        # training client, checkpoints, reference client, tokenizer, builders, groups
        groups = (
            kwargs["trajectory_groups_P"] if "trajectory_groups_P" in kwargs else args[5] if len(args) > 5 else None
        )
        if groups is not None:
            send_groups(groups, i_batch, into)
        return await do_step(config, i_batch, *args, **kwargs)

    setattr(train, _STEP, step)
    return into


def send_groups(groups: Iterable[Any], step: int, stream: RolloutStream, policy_version: str = "") -> bool:
    """Stream the ``TrajectoryGroup`` objects of a training step."""
    return stream.send_made(lambda: list(trajectories(groups, step, policy_version)), f"step-{step}/{_START}-", step)


def trajectories(groups: Iterable[Any], step: int, policy_version: str = "") -> Iterator[dict[str, Any]]:
    """One line for each trajectory: its transitions are engine calls, and rows follow from them."""
    for g, group in enumerate(groups):
        totals = group.get_total_rewards()
        for n, trajectory in enumerate(group.trajectories_G):
            calls = [
                (_ids(each.ob), each.ac.tokens, each.ac.maybe_logprobs)
                for each in trajectory.transitions
                if each.ac.tokens
            ]
            yield records.trajectory(
                f"{g}-{n}",
                steps=records.calls_with_prompts(calls, policy_version=policy_version, engine="tinker"),
                reward=totals[n],
                group=str(g),
                training_step=step,
                stop_reason=str(trajectory.stop_reason or ""),
                reward_parts={
                    "steps": sum(each.reward for each in trajectory.transitions),
                    "group": group.final_rewards_G[n],
                },
            )


def _ids(observation: Any) -> list[int]:
    """The ids of a ``ModelInput``. Raises ``ValueError`` for a chunk that has none, such as an image."""
    ids: list[int] = []
    for chunk in observation.chunks:
        if not hasattr(chunk, "tokens"):
            raise ValueError(f"a {type(chunk).__name__} has no ids")
        ids += list(chunk.tokens)
    return ids
