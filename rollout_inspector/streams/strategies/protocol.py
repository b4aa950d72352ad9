"""What a strategy is, and the values that all strategies share. A strategy is the rule that turns completions and
observations into the next prompt, and into training rows."""

from __future__ import annotations

import importlib.util
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Any, Protocol, TypeVar, cast, runtime_checkable

import numpy as np

from rollout_inspector.streams.interfaces import Codec, Conversation, Renderer, RenderFailed
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.recorded_renders import Form
from rollout_inspector.streams.token_origins import origins_of_text
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Mask, Message, Origins, Row, Step

Tools = Sequence[Mapping[str, Any]] | None
T = TypeVar("T")
MAX_REMEMBERED = 8192  # Renders that are kept: several times what a batch of trajectories asks for.


class StrategyRefused(Exception):
    """The strategy cannot work with this chat template or conversation. The message says why and what would help."""

    of_rows = False  # The refusal is about the chat template of the rows, where that is another one.

    def __str__(self) -> str:
        return f"The chat template of the rows: {super().__str__()}" if self.of_rows else super().__str__()


class TemplateRewrites(StrategyRefused):
    """The chat template is not prefix-preserving: a render with more messages does not start with the one before."""

    def __init__(self, sentence: str, shorter: Ids, longer: Ids, shared: int, role: str) -> None:
        super().__init__(sentence)
        self.shorter, self.longer, self.shared, self.role = shorter, longer, shared, role


class Extends(Protocol):
    """An object that knows the format of one model. ``rollouts.jobs.replays.renderers_package`` finds it."""

    name: str

    def extend(self, prompt_ids: Ids, completion_ids: Ids, messages: Sequence[Message], tools: Tools) -> Ids | None:
        """The next prompt, which starts with prompt and completion; None where no exact extension exists."""
        ...


class SharedRenders:
    """What the trajectories of one run share: renders and what follows from them."""

    def __init__(self) -> None:
        self._values: OrderedDict[Any, Any] = OrderedDict()  # in the order of their last use
        self.first_prompt: tuple[Conversation, Ids] | None = None
        """The last render of a first prompt: trajectories of one prompt start together."""
        self.form: Form | None = None
        """The form of a call's arguments that the chat template takes; None = no call was rendered yet."""

    def remember(self, key: Any, make: Callable[[], T]) -> T:
        """The value under a key; ``make`` is called where there is none. A refusal is kept too. At most
        ``MAX_REMEMBERED`` values are kept, because keys may hold the id of a single call."""
        values = self._values
        value = values.get(key)
        if value is not None:
            values.move_to_end(key)
        else:
            try:
                value = make()
            except StrategyRefused as refusal:
                value = refusal
            while len(values) >= MAX_REMEMBERED:
                values.popitem(last=False)
            values[key] = value
        if isinstance(value, StrategyRefused):
            raise value.with_traceback(None)
        return cast(T, value)

    def remembers(self, key: Any) -> bool:
        """Whether there is a value under a key. The value then counts as used, because the caller will need it."""
        if key not in self._values:
            return False
        self._values.move_to_end(key)
        return True


@dataclass(frozen=True)
class Context:
    """What the strategies of one run share."""

    codec: Codec
    renderer: Renderer
    stop_ids: frozenset[int]  # The ids that end a completion: EOS and the model's other stop tokens.
    cache: SharedRenders = field(default_factory=SharedRenders)
    rows: Context | None = None
    """The context of the rows, where the rows are made with another chat template than the prompts; else None."""
    bridge: Callable[[Mapping[str, Any]], Extends] | None = None
    """Template kwargs -> the object that extends a stream of this tokenizer and chat template; or a refusal."""
    fast_encode: Callable[[str], Ids] | None = None
    """A faster function that returns the ids of ``codec.encode``; None = there is none."""
    keeps_prompts: bool = True
    """Whether a replay may keep recorded prompts: False where it tries another tokenizer or chat template."""
    repr_of: Callable[[Any], str] = repr  # ``repr``, or a cache of it for values that never change.
    refused: str = ""
    """Why nothing can be rendered, as a sentence; empty = it can. Recorded steps make rows all the same."""

    @classmethod
    def without_renderer(cls, why: str) -> Context:
        """A context for the strategies that render nothing."""
        nothing: Any = None  # nobody asks it for anything
        return cls(nothing, nothing, frozenset(), refused=why)

    def encode(self, text: str) -> Ids:
        """The ids of a text."""
        return (self.fast_encode or self.codec.encode)(text)

    def first_prompt(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        """The prompt of a conversation's first step."""
        conversation = Conversation(messages, tools, kwargs, True)
        last = self.cache.first_prompt
        if last is None or last[0] != conversation:
            last = self.cache.first_prompt = conversation, self.renderer.render_ids(conversation)
        return last[1]

    def origins(self, delta: Ids, messages: Sequence[Message]) -> Origins:
        """Which ids of a delta the template wrote and which are text of the new messages."""
        whole, ends = self.codec.joined_bytes(delta)
        offsets = np.concatenate([[0], ends])
        return origins_of_text(whole, offsets, self.are(delta, self.codec.special_ids), messages)

    def are(self, ids: Ids, wanted: frozenset[int]) -> Mask:
        """``[n]``: whether each id is in ``wanted``."""
        if len(wanted) > 8:
            # An id outside the table reads its first or last entry. Both are False.
            return self.cache.remember(wanted, lambda: _table(wanted)).take(ids + 1, mode="clip")
        if not wanted:
            return np.zeros(len(ids), dtype=np.bool_)
        first, *others = wanted
        mask: Mask = ids == first
        for token_id in others:
            mask |= ids == token_id
        return mask

    def after_last(self, ids: Ids, stops: frozenset[int]) -> int:
        """The offset after the last stop token; 0 when there is none."""
        places = self.are(ids, stops).nonzero()[0]
        return int(places[-1]) + 1 if places.size else 0


def _table(wanted: frozenset[int]) -> Mask:
    """``table[id + 1]``: whether an id is in ``wanted``."""
    table: Mask = np.zeros(max(wanted) + 3, dtype=np.bool_)
    table[np.fromiter(wanted, dtype=np.int64, count=len(wanted)) + 1] = True
    return table


def changed_past(
    slug: str, context: Context, messages: Sequence[Message], shorter: Ids, longer: Ids, shared: int
) -> TemplateRewrites:
    """The refusal of a template that rewrites what stood before the new messages."""
    before, after = (repr(context.codec.decode(ids[shared : shared + 8])) for ids in (shorter, longer))
    role = str(messages[0].get("role", "tool")) if messages else "tool"
    sentence = (
        f"The chat template is not prefix-preserving: appending a {role} message changes what was rendered before it, "
        f"from token {shared} of the probe on ({before} becomes {after}). {slug} cannot use it; repair the template "
        "or choose another strategy."
    )
    return TemplateRewrites(sentence, shorter, longer, shared, role)


@dataclass(frozen=True, eq=False)
class ConversationTurn:
    """A completion, and what the conversation gained before the next one."""

    step: Step
    reply: Message | None  # The assistant's message as the next request repeats it, else as it was parsed.
    following: tuple[Message, ...] | None
    """The messages that came before the next completion; None for the last one of its segment."""

    @cached_property
    def logprobs(self) -> Floats | None:
        return matching_logprobs(self.step)

    @cached_property
    def prompt_bytes(self) -> bytes:
        return self.step.prompt_ids.tobytes()


@dataclass(frozen=True, eq=False)
class ConversationSegment:
    """Consecutive steps that each continue the conversation of the step before."""

    start: int  # Index of the first step.
    messages: tuple[Message, ...]  # The messages of the first step's request.
    tools: Tools
    kwargs: Mapping[str, Any]
    turns: tuple[ConversationTurn, ...]
    recorded_prompt: Ids | None = None
    """The first prompt as the engine read it, for strategies that keep it; None = they render it."""

    @cached_property
    def prompt_asks(self) -> list[Conversation]:
        """The render of each prompt. All strategies get the same list, so that a shared render is made once."""
        return [Conversation(prompt, self.tools, self.kwargs, True) for prompt in self.prompts]

    @cached_property
    def reply_asks(self) -> list[Conversation]:
        """The render of the conversation up to each known reply, the last reply included."""
        return [
            Conversation([*prompt, turn.reply], self.tools, self.kwargs, False)
            for turn, prompt in zip(self.turns, self.prompts, strict=True)
            if turn.reply is not None
        ]

    @cached_property
    def prompts(self) -> list[list[Message]]:
        """The conversation at each step, without the reply."""
        prompts = [list(self.messages)]
        for turn in self.turns[:-1]:
            prompts.append([*prompts[-1], *([] if turn.reply is None else [turn.reply]), *(turn.following or ())])
        return prompts

    @cached_property
    def whole(self) -> list[Message]:
        """The conversation with the reply to its last prompt."""
        last = self.turns[-1].reply
        return [*self.prompts[-1], *([last] if last is not None else [])]


def matching_logprobs(step: Step) -> Floats | None:
    """A step's log-probabilities, if there is one for each id."""
    fits = step.logprobs is not None and len(step.logprobs) == len(step.completion_ids)
    return step.logprobs if fits else None


@runtime_checkable
class TakesRecorded(Protocol):
    """A strategy whose rows follow from the recorded steps: a replay renders nothing."""

    def take_recorded(self, steps: Sequence[Step]) -> None: ...


@runtime_checkable
class Forks(Protocol):
    """A strategy that opens a new row where history was rewritten. Other strategies mask everything before it."""

    def fork(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids: ...


class Strategy(ABC):
    """One trajectory under a strategy. The attributes of the class are what forms, pages and commands ask of it."""

    slug: str = ""
    about: str = ""  # One sentence for forms and pages.
    parameters: Mapping[str, int] = MappingProxyType({})
    """The numbers that the rule depends on, by name. Pages and reports show them."""
    package: str = ""  # The optional Python package that the strategy needs; empty = none.
    rows_follow_from_steps: bool = False
    """Whether ``rows()`` returns what merging the steps returns, so that nothing else needs to be stored."""
    continues_message: bool = False
    """Whether a prompt may end inside the assistant's own message. Such a prompt says nothing to a parser, and no
    full render of the conversation can be compared with the stream."""
    delta_origin: Origins | None = None
    """Origin of each id that the last prompt added after the shared prefix; None = not known."""
    recorded_prompt: Ids | None = None
    """In a replay the first prompt as the engine read it, for a strategy that keeps it; None = render it."""

    def __init__(self, context: Context) -> None:
        self._context = context

    @classmethod
    def missing(cls) -> str:
        """Why the strategy cannot work in this installation, as a sentence; empty = it can."""
        if not cls.package or importlib.util.find_spec(cls.package) is not None:
            return ""
        return (
            f"{cls.slug} needs the optional package {cls.package}, which is not installed: install it (pip install "
            f"{cls.package}) and start the workers again, or choose another strategy."
        )

    @abstractmethod
    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        """The first prompt. Raises :class:`StrategyRefused` before anything is sampled in vain."""

    @abstractmethod
    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        """Take a completion, verbatim, and the message that it was parsed to (for routing only under TITO)."""

    @abstractmethod
    def observe(self, messages: Sequence[Message]) -> Ids:
        """The next prompt, after all the messages of a turn together."""

    @abstractmethod
    def rows(self) -> list[Row]:
        """The training rows so far."""

    def foresee(self, segment: ConversationSegment) -> Iterable[Conversation]:
        """The renders that replaying a segment will ask for, as far as they are known; of the very same objects."""
        return ()


class KeepsSteps(Strategy):
    """Mixed into a strategy whose rows follow from its steps: it keeps each prompt with its completion."""

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._steps: list[Step] = []
        self._last_prompt: Ids = NO_IDS

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._last_prompt = super().begin(messages, tools, kwargs)  # type: ignore[safe-super]
        return self._last_prompt

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        super().sampled(ids, logprobs, reply)  # type: ignore[safe-super]
        self._steps.append(Step(self._last_prompt, ids, logprobs))

    def observe(self, messages: Sequence[Message]) -> Ids:
        self._last_prompt = super().observe(messages)  # type: ignore[safe-super]
        return self._last_prompt

    def rows(self) -> list[Row]:
        return merged_rows(self._steps)


class TwoTemplates(Strategy):
    """Two instances of a strategy that get the same input: one makes the prompts, the other makes the rows."""

    def __init__(self, prompts: Strategy, rows: Strategy) -> None:
        self._prompts, self._rows = prompts, rows
        self.slug, self.continues_message = prompts.slug, prompts.continues_message

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._prompts.recorded_prompt = self.recorded_prompt  # the rows' template makes its own
        prompt = self._prompts.begin(messages, tools, kwargs)
        with _OfTheRows():
            self._rows.begin(messages, tools, kwargs)
        return prompt

    def sampled(self, ids: Ids, logprobs: Floats | None, reply: Message | None) -> None:
        self._prompts.sampled(ids, logprobs, reply)
        with _OfTheRows():
            self._rows.sampled(ids, logprobs, reply)

    def observe(self, messages: Sequence[Message]) -> Ids:
        prompt = self._prompts.observe(messages)
        self.delta_origin = self._prompts.delta_origin
        with _OfTheRows():
            self._rows.observe(messages)
        return prompt

    def foresee(self, segment: ConversationSegment) -> Iterable[Conversation]:
        """The renders of the prompts alone: the template of the rows has its own renderer."""
        return self._prompts.foresee(segment)

    def rows(self) -> list[Row]:
        with _OfTheRows():
            return self._rows.rows()


class _OfTheRows:
    """Marks a refusal as one about the template of the rows."""

    def __enter__(self) -> None: ...

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RenderFailed):
            refused = StrategyRefused(str(error))
            refused.of_rows = True
            raise refused from error
        if isinstance(error, StrategyRefused):
            error.of_rows = True


def start(make: Callable[[Context], Strategy], context: Context) -> Strategy:
    """One trajectory under a strategy, with a second template for the rows if the context has one."""
    return make(context) if context.rows is None else TwoTemplates(make(context), make(context.rows))
