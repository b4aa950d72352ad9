"""Had this trajectory been made under another strategy, which rows would its trainer have got?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rollouts.tito.codec import RenderFailed
from rollouts.tito.prefix import common_prefix
from rollouts.tito.strategies.protocol import Context, Strategy, StrategyRefused, TakesRecorded
from rollouts.tito.strategies.two_templates import start
from rollouts.tito.trajectory import Ids, Message, Origin, Row, Step, Trajectory


@dataclass(frozen=True)
class Place:
    """The first place at which a strategy's stream is another than the recorded one."""

    step: int
    offset: int
    """In the recorded stream of that step."""


@dataclass(frozen=True, eq=False)
class Replay:
    """What a strategy makes of a recorded trajectory."""

    slug: str
    rows: tuple[Row, ...] = ()
    trained_tokens: int = 0
    """Tokens under the gradient, over all rows."""
    lost_tokens: int = 0
    """Sampled tokens that no row trains as they were sampled."""
    prompt_tokens_repaid: int = 0
    """Tokens of later rows that an earlier row has forwarded already."""
    differs_at: Place | None = None
    prompts: tuple[Ids, ...] = ()
    """What the engine would have read at each step."""
    refused: str = ""
    """Why the strategy cannot be replayed; everything else is empty then."""


def replay(trajectory: Trajectory, strategy: Callable[[Context], Strategy], context: Context) -> Replay:
    """Feed the recorded completions and messages to a strategy. Never raises for what the trajectory holds."""
    one = start(strategy, context)
    try:
        return _replay(trajectory, one)
    except (StrategyRefused, RenderFailed) as error:
        return Replay(one.slug, refused=str(error))


def _replay(trajectory: Trajectory, strategy: Strategy) -> Replay:
    steps = trajectory.steps
    if not steps:
        raise StrategyRefused("The trajectory holds rows alone; a strategy is replayed over steps.")
    prompts = _prompts(steps, strategy)
    rows = strategy.rows()
    return Replay(
        strategy.slug,
        tuple(rows),
        trained_tokens=sum(int(np.count_nonzero(row.loss_mask)) for row in rows),
        lost_tokens=_lost(steps, rows),
        prompt_tokens_repaid=_repaid(rows),
        differs_at=_differs(steps, prompts, rows),
        prompts=tuple(prompts),
    )


def _prompts(steps: Sequence[Step], strategy: Strategy) -> list[Ids]:
    """What the engine would have read at each step, the strategy having seen them all."""
    if isinstance(strategy, TakesRecorded):
        strategy.take_recorded([replace(step, logprobs=_logprobs(step)) for step in steps])
        return [step.prompt_ids for step in steps]
    first = steps[0].request
    if first is None:
        raise StrategyRefused("The trajectory was recorded without messages, and a strategy is replayed over them.")
    prompts = [np.array(strategy.begin(first.messages, first.tools, first.chat_template_kwargs))]
    for index, step in enumerate(steps):
        following = steps[index + 1] if index + 1 < len(steps) else None
        strategy.sampled(step.completion_ids, _logprobs(step), _reply(index, step, following))
        if following is not None:
            prompts.append(np.array(strategy.observe(_new_messages(index, step, following))))
    return prompts


def _logprobs(step: Step) -> Any:
    if step.logprobs is None or len(step.logprobs) != len(step.completion_ids):
        return None
    return step.logprobs


def _messages(index: int, step: Step) -> tuple[Message, ...]:
    if step.request is None:
        raise StrategyRefused(f"Step {index} was recorded without its messages, and a strategy is replayed over them.")
    return step.request.messages


def _reply(index: int, step: Step, following: Step | None) -> Message | None:
    """The assistant's message as the next request repeats it, else as the server parsed it."""
    if following is not None:
        sent, said = _messages(index, step), _messages(index + 1, following)
        if len(said) > len(sent) and said[len(sent)].get("role") == "assistant":
            return said[len(sent)]
    return step.reply


def _new_messages(index: int, step: Step, following: Step) -> Sequence[Message]:
    """What came between two completions. Raises where the conversation was rewritten instead of continued."""
    sent, said = _messages(index, step), _messages(index + 1, following)
    if list(said[: len(sent)]) != list(sent) or len(said) <= len(sent) or said[len(sent)].get("role") != "assistant":
        raise StrategyRefused(
            f"Step {index + 1} does not continue the conversation of step {index}: its messages were rewritten, or it "
            "is a branch. A strategy is replayed over one conversation that grows."
        )
    return said[len(sent) + 1 :]


def _lost(steps: Sequence[Step], rows: Sequence[Row]) -> int:
    """Sampled tokens minus those that the rows' trained stretches repeat, completion by completion."""
    verbatim = 0
    for row in rows:
        if row.origin is not None and np.any(row.origin == Origin.SAMPLED):
            verbatim += int(np.count_nonzero(row.loss_mask & (row.origin == Origin.SAMPLED)))
            continue
        for index, stretch in zip(row.step_indices, _stretches(row), strict=False):
            verbatim += _repeated(steps[index].completion_ids, stretch)
    return sum(len(step.completion_ids) for step in steps) - verbatim


def _stretches(row: Row) -> list[Ids]:
    """The maximal trained stretches of a row."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], row.loss_mask.astype(np.int8), [0]])))
    return [row.ids[start:stop] for start, stop in zip(edges[::2], edges[1::2], strict=True)]


def _repeated(sampled: Ids, stretch: Ids) -> int:
    """How many ids of a completion stand in a trained stretch as they were sampled: common prefix and suffix."""
    prefix = common_prefix(sampled, stretch)
    suffix = common_prefix(sampled[prefix:][::-1], stretch[prefix:][::-1])
    return prefix + suffix


def _repaid(rows: Sequence[Row]) -> int:
    return sum(
        max(common_prefix(row.ids, earlier.ids) for earlier in rows[:index])
        for index, row in enumerate(rows)
        if index > 0
    )


def _differs(steps: Sequence[Step], prompts: Sequence[Ids], rows: Sequence[Row]) -> Place | None:
    for index, (step, prompt) in enumerate(zip(steps, prompts, strict=True)):
        shared = common_prefix(step.prompt_ids, prompt)
        if shared < max(len(step.prompt_ids), len(prompt)):
            return Place(index, shared)
    last = steps[-1].stream
    for row in rows:
        if row.step_indices and row.step_indices[-1] == len(steps) - 1:
            shared = common_prefix(last, row.ids)
            return Place(len(steps) - 1, shared) if shared < max(len(last), len(row.ids)) else None
    return None


def with_replies(trajectory: Trajectory, parse: Callable[[Ids, Ids], Message]) -> Trajectory:
    """The trajectory with a parsed message for each completion that was recorded without one."""
    steps = tuple(
        step if step.reply is not None else replace(step, reply=parse(step.prompt_ids, step.completion_ids))
        for step in trajectory.steps
    )
    return replace(trajectory, steps=steps)
