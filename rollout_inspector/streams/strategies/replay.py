"""Replay: the rows that another strategy would have made of a recorded trajectory."""

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from rollout_inspector.streams.align import trained_tokens
from rollout_inspector.streams.batches import batched
from rollout_inspector.streams.figures import share, trained_as_sampled
from rollout_inspector.streams.interfaces import Conversation, Foresees, RenderFailed
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.recorded_renders import (
    NOW, UNKNOWN_DATE, Form, first_rendered, kwargs_of_record, with_objects
)
from rollout_inspector.streams.strategies.protocol import (
    MAX_REMEMBERED, Context, ConversationSegment, ConversationTurn, Forks, Strategy, StrategyRefused, TakesRecorded,
    matching_logprobs, start
)
from rollout_inspector.streams.trajectory import Ids, Message, Row, Step, Trajectory


def segments(steps: Sequence[Step]) -> list[ConversationSegment]:
    """The steps, cut where a request does not continue the request before: history was rewritten, or a branch begins.
    Raises :class:`StrategyRefused` where messages are missing."""
    if not steps:
        raise StrategyRefused("The trajectory holds rows alone; a strategy is replayed over steps.")
    if steps[0].request is None:
        raise StrategyRefused("The trajectory was recorded without messages, and a strategy is replayed over them.")
    parts: list[ConversationSegment] = []
    turns: list[ConversationTurn] = []
    start = 0
    for index, step in enumerate(steps):
        _messages(index, step)
        following = steps[index + 1] if index + 1 < len(steps) else None
        turn = None if following is None else _continued(index, step, following)
        turns.append(turn or ConversationTurn(step, step.reply, None))
        if turn is None:
            first = steps[start].request
            assert first is not None
            parts.append(
                ConversationSegment(start, first.messages, first.tools, first.chat_template_kwargs, tuple(turns))
            )
            start, turns = index + 1, []
    return parts


def for_template(segment: ConversationSegment, context: Context) -> list[ConversationSegment]:
    """The segment with the arguments that the template takes and the date of the record. If the date is not known,
    there are two segments: only rows that are the same under both hold no invented date."""
    step, request = segment.turns[0].step, segment.turns[0].step.request
    assert request is not None
    dated = kwargs_of_record(step, request, context.renderer, context.codec)
    if context.rows is not None and NOW not in dated[0]:
        dated = kwargs_of_record(step, request, context.rows.renderer, context.codec)
    takes = _form(segment, dated[0], context)
    turns = tuple(
        replace(
            turn, reply=None if turn.reply is None else takes([turn.reply])[0],
            following=None if turn.following is None else tuple(takes(turn.following)),
        )
        for turn in segment.turns
    )
    prompt = step.prompt_ids if context.keeps_prompts and len(step.prompt_ids) else None
    messages = tuple(takes(segment.messages))
    return [
        replace(segment, messages=messages, kwargs=dated_kwargs, turns=turns, recorded_prompt=prompt)
        for dated_kwargs in dated
    ]


def _form(segment: ConversationSegment, kwargs: Mapping[str, Any], context: Context) -> Form:
    """The form of arguments that the context's template takes. It is looked for in the first calls that render."""
    if context.cache.form is None and any(message.get("tool_calls") for message in segment.whole):
        rendered = first_rendered(context.renderer, Conversation(segment.whole, segment.tools, kwargs))
        if rendered is not None:
            context.cache.form = rendered[0]
    return context.cache.form or with_objects


def continues(step: Step, following: Step) -> bool:
    """Whether a request consists of the request before, its reply and further messages."""
    if step.request is None or following.request is None:
        return False
    sent, following_messages = step.request.messages, following.request.messages
    return (
        len(following_messages) > len(sent)
        and following_messages[: len(sent)] == sent
        and following_messages[len(sent)].get("role") == "assistant"
    )


def _continued(index: int, step: Step, following: Step) -> ConversationTurn | None:
    n, messages = len(_messages(index, step)), _messages(index + 1, following)
    return ConversationTurn(step, messages[n], messages[n + 1 :]) if continues(step, following) else None


def _messages(index: int, step: Step) -> tuple[Message, ...]:
    if step.request is None:
        raise StrategyRefused(f"Step {index} was recorded without its messages, and a strategy is replayed over them.")
    return step.request.messages


@dataclass(frozen=True, eq=False)
class StrategyResult:
    """What a strategy makes of a recorded trajectory."""

    slug: str
    rows: tuple[Row, ...] = ()
    trained_tokens: int = 0  # Tokens under the gradient, over all rows.
    lost_tokens: int = 0  # Sampled tokens that no row trains as they were sampled.
    prompt_tokens_repaid: int = 0  # Tokens of later rows that an earlier row has already forwarded.
    sampled_tokens: int = 0  # All tokens that the trajectory sampled.
    frozen_steps: int = 0  # Steps before the last rewrite of history. The strategy has them as prompt, masked.
    differs_at: tuple[int, int] | None = None
    """The step and the offset in its recorded stream at which the strategy's stream first differs."""
    refused: str = ""  # Why the strategy cannot be replayed. All other fields are then empty.

    @property
    def trained_share(self) -> float:
        """The share of sampled tokens that is still under the gradient as sampled, from 0 to 1."""
        return share(trained_as_sampled(self.sampled_tokens, self.lost_tokens), self.sampled_tokens)


New = Callable[[Context], Strategy]

BATCH_STEPS = 128  # Steps whose renders are made in one round trip.


def replay(trajectory: Trajectory, strategy: New, context: Context) -> StrategyResult:
    """Feed the recorded completions and messages to a strategy. Never raises for what the trajectory holds."""
    return _replayed(trajectory, _Conversation(trajectory, context), strategy, context)


def replay_many(
    trajectories: Iterable[Trajectory], strategies: Sequence[New], context: Context
) -> Generator[list[StrategyResult]]:
    """For each trajectory, what :func:`replay` returns for each strategy. If the renderer can prefetch, the renders of
    a batch are made in one call while the batch before is replayed."""
    context = replace(context, repr_of=_ReprCache())
    renderer = context.renderer
    if not isinstance(renderer, Foresees):
        for trajectory in trajectories:
            conversation = _Conversation(trajectory, context)
            yield [_replayed(trajectory, conversation, strategy, context) for strategy in strategies]
        return
    batches = batched(trajectories, BATCH_STEPS, lambda one: len(one.steps))
    with ThreadPoolExecutor(1, thread_name_prefix="foresee") as thread:

        def begin(batch: list[Trajectory]) -> tuple[list[Trajectory], list[_Conversation], Future[Any]]:
            conversations = [_Conversation(trajectory, context) for trajectory in batch]
            asks = [ask for conversation in conversations for ask in _asks(conversation, strategies, context)]
            return batch, conversations, thread.submit(renderer.foresee, asks)

        batches_begun = map(begin, batches)
        upcoming = next(batches_begun, None)
        while upcoming:
            batch, conversations, foreseen = upcoming
            renderer.use(foreseen.result())
            upcoming = next(batches_begun, None)
            for trajectory, conversation in zip(batch, conversations, strict=True):
                yield [_replayed(trajectory, conversation, strategy, context) for strategy in strategies]


class _ReprCache(dict[int, tuple[Any, str]]):
    """``repr`` with a cache, because several strategies ask for it of the same recorded message."""

    def __call__(self, value: Any) -> str:
        entry = self.get(id(value))
        if entry is None:
            if len(self) >= MAX_REMEMBERED:
                self.clear()
            entry = self[id(value)] = value, repr(value)  # keeps the value, so that its identity is not used again
        return entry[1]


class _Conversation:
    """The segments of a trajectory, or why there are none."""

    def __init__(self, trajectory: Trajectory, context: Context) -> None:
        self.segments: list[ConversationSegment] = []
        self.under_another_date: list[ConversationSegment] = []
        """The same segments, where the date of one of them is not known; else empty."""
        self.n_sampled = sum(len(step.completion_ids) for step in trajectory.steps)
        self.refused = context.refused
        if context.refused:
            return
        try:
            dated = [for_template(segment, context) for segment in segments(trajectory.steps)]
            self.segments = [segment[0] for segment in dated]
            if any(len(segment) > 1 for segment in dated):
                self.under_another_date = [segment[-1] for segment in dated]
        except StrategyRefused as refusal:
            self.refused = str(refusal)


def _asks(conversation: _Conversation, strategies: Sequence[New], context: Context) -> list[Conversation]:
    """The renders that the strategies will need, none twice. Growing conversations first: texts extend each other."""
    asks: dict[int, Conversation] = {}
    for make in strategies:
        strategy = start(make, context)
        for segment in _followed(strategy, conversation.segments):
            for ask in strategy.foresee(segment):
                asks[id(ask)] = ask
    first = (
        id(conversation.segments[-1].messages[0]) if conversation.segments and conversation.segments[-1].messages else 0
    )
    return sorted(asks.values(), key=lambda ask: (not ask.messages or id(ask.messages[0]) != first, len(ask.messages)))


def _followed(strategy: Strategy, found: list[ConversationSegment]) -> list[ConversationSegment]:
    """The segments that are fed to a strategy: all where it can fork, else the last one."""
    if isinstance(strategy, TakesRecorded):
        return []
    return found if isinstance(strategy, Forks) else found[-1:]


def _replayed(trajectory: Trajectory, conversation: _Conversation, make: New, context: Context) -> StrategyResult:
    strategy = start(make, context)
    steps = trajectory.steps
    try:
        if not steps:
            raise StrategyRefused("The trajectory holds rows alone; a strategy is replayed over steps.")
        if not conversation.n_sampled:
            raise StrategyRefused(
                "The trajectory was recorded as text, without token ids, and a strategy is replayed over the ids that "
                "were sampled. Record calls with return_token_ids."
            )
        differs, frozen = None, 0
        if isinstance(strategy, TakesRecorded):
            strategy.take_recorded([
                step if matching_logprobs(step) is step.logprobs else replace(step, logprobs=None) for step in steps
            ])
        elif conversation.refused:
            raise StrategyRefused(conversation.refused)
        else:
            followed = _followed(strategy, conversation.segments)
            frozen = followed[0].start
            differs = _follow(strategy, followed)
            if conversation.under_another_date:
                other = start(make, context)
                _follow(other, _followed(other, conversation.under_another_date))
                if [row.ids.tobytes() for row in strategy.rows()] != [row.ids.tobytes() for row in other.rows()]:
                    raise StrategyRefused(UNKNOWN_DATE)
        # Their step indices count from the step at which the replay began.
        rows = [replace(row, step_indices=tuple(n + frozen for n in row.step_indices)) for row in strategy.rows()]
    except (StrategyRefused, RenderFailed) as error:
        return StrategyResult(strategy.slug, refused=str(error))
    lost = trained_tokens(steps, rows).n_lost
    assert lost is not None  # the rows of a strategy name their steps
    return StrategyResult(
        strategy.slug, tuple(rows), trained_tokens=sum(row.n_trained for row in rows), lost_tokens=lost,
        prompt_tokens_repaid=repaid_tokens(rows), sampled_tokens=conversation.n_sampled, frozen_steps=frozen,
        differs_at=differs or _last_differs(steps, rows),
    )


def _follow(strategy: Strategy, followed: Sequence[ConversationSegment]) -> tuple[int, int] | None:
    """Feed the segments to a strategy. Returns the first place where its prompt differs from the recorded prompt."""
    differs: tuple[int, int] | None = None
    for n, segment in enumerate(followed):
        strategy.recorded_prompt = segment.recorded_prompt
        begin = strategy.fork if n and isinstance(strategy, Forks) else strategy.begin
        prompt = begin(segment.messages, segment.tools, segment.kwargs)
        for index, turn in enumerate(segment.turns, segment.start):
            if differs is None and turn.prompt_bytes != prompt.tobytes():
                differs = _other(index, turn.step.prompt_ids, prompt)
            strategy.sampled(turn.step.completion_ids, turn.logprobs, turn.reply)
            if turn.following is not None:
                prompt = strategy.observe(turn.following)
    return differs


def _other(index: int, recorded: Ids, prompt: Ids) -> tuple[int, int] | None:
    shared = common_prefix(recorded, prompt)
    return (index, shared) if shared < max(len(recorded), len(prompt)) else None


def _last_differs(steps: Sequence[Step], rows: Sequence[Row]) -> tuple[int, int] | None:
    """The first difference between the row that ends with the last step and that step's stream."""
    last = len(steps) - 1
    row = next((row for row in rows if row.step_indices[-1:] == (last,)), None)
    return None if row is None else _other(last, steps[-1].stream, row.ids)


def repaid_tokens(rows: Sequence[Row]) -> int:
    """How many tokens of all rows are forwarded again: each row's longest common start with an earlier row."""
    total = 0
    for index, row in enumerate(rows):
        best = 0
        for earlier in reversed(rows[:index]):
            # Comparing one id, the one after the best prefix so far, makes most full comparisons unnecessary.
            n = min(len(earlier.ids), len(row.ids))
            if best < n and earlier.ids[best] == row.ids[best]:
                best = max(best, common_prefix(row.ids, earlier.ids))
        total += best
    return total


def with_replies(trajectory: Trajectory, parse: Callable[[Ids, Ids, Any], Message]) -> Trajectory:
    """The trajectory with a parsed message for each completion that lacks one, in its step and in the next request."""
    lacking = set(lacks_reply(trajectory))
    steps = tuple(
        replace(step, reply=parse(step.prompt_ids, step.completion_ids, step.request and step.request.tools))
        if index in lacking
        else step
        for index, step in enumerate(trajectory.steps)
    )
    return replace(trajectory, steps=steps)


def lacks_reply(trajectory: Trajectory) -> list[int]:
    """The steps whose completion was recorded without a message."""
    steps = trajectory.steps
    return [
        index
        for index, step in enumerate(steps)
        if step.reply is None and not (index + 1 < len(steps) and continues(step, steps[index + 1]))
    ]
