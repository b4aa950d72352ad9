"""The codec of a stored step: from a step to what it adds to an earlier step, and back.

The prompt of a step mostly repeats the stream of an earlier step, its parent (``rollouts.tito.prefix``). A step is
therefore stored as ``(parent, shared_length, delta_ids)``, and
``prompt_ids = parent's stream[:shared_length] + delta_ids``. The messages of its request are stored the same way: the
parent's first ``messages_shared`` messages, then ``messages_new``. All other fields are listed in ``STEP_FIELDS``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from rollouts.tito.prefix import link_step
from rollouts.tito.trajectory import JSON, Ids, Link, Message, Origins, Step

# -- the fields of a stored step


class Kept(Enum):
    """Where the database keeps a field."""

    INLINE = auto()
    """A column of the step."""
    ARRAY = auto()
    """An array beside the step (``StepTokens``)."""
    CONTENT = auto()
    """A JSON body that is stored once for all steps that have it (``Content``)."""
    CODED = auto()
    """Nowhere as a whole: the codec splits it into parts (:class:`CodedStep`, ``REQUEST_FIELDS``)."""


class Holds(Enum):
    """What a field holds. Readers check foreign values with it, and writers choose the form of a value by it."""

    TEXT = auto()
    """A short text; an empty one counts as no value."""
    NUMBER = auto()
    WHOLE = auto()
    """A whole number."""
    IDS = auto()
    FLOATS = auto()
    ANY_TEXT = auto()
    """A text of any length; the empty text is a value."""
    OBJECT = auto()
    """A JSON object; the empty object is a value."""
    MAPPING = auto()
    """A JSON object; an empty one counts as no value."""
    TOOLS = auto()
    """JSON objects in a list."""
    REQUEST = auto()
    ORIGINS = auto()


@dataclass(frozen=True)
class StepField:
    """One field of a step, in the value, in the JSON line and in the database."""

    name: str
    """The name of the attribute of ``Step`` or ``Request``, and the key in our own JSON lines."""
    kept: Kept
    holds: Holds
    limit: int = 0
    """How many characters the column of a short text holds."""
    column: str = ""
    """The name in the database; empty = ``name``."""

    @cached_property
    def attribute(self) -> str:
        """The attribute of the stored step that holds the value; for a JSON body its key."""
        return (self.column or self.name) + ("_id" if self.kept is Kept.CONTENT else "")

    def says(self, value: Any) -> bool:
        """Whether a value is to be written. Otherwise it is neither written nor stored as a JSON body."""
        return bool(value) if self.holds in (Holds.TEXT, Holds.MAPPING) else value is not None

    def of_body(self, body: JSON) -> Any:
        """Returns the value of a stored JSON body; None = nothing is stored."""
        if body is None:
            return {} if self.holds is Holds.MAPPING else None
        return tuple(body) if self.holds is Holds.TOOLS else body


STEP_FIELDS = (
    StepField("prompt_ids", Kept.CODED, Holds.IDS),
    StepField("delta_origin", Kept.CODED, Holds.ORIGINS),
    StepField("completion_ids", Kept.ARRAY, Holds.IDS),
    StepField("logprobs", Kept.ARRAY, Holds.FLOATS),
    StepField("logprobs_mode", Kept.INLINE, Holds.TEXT, 20),
    StepField("finish_reason", Kept.INLINE, Holds.TEXT, 30),
    StepField("stop_reason", Kept.INLINE, Holds.TEXT, 100),
    StepField("request", Kept.CODED, Holds.REQUEST),
    StepField("reply", Kept.CONTENT, Holds.OBJECT),
    StepField("text", Kept.CONTENT, Holds.ANY_TEXT),
    StepField("chat_template_sha256", Kept.INLINE, Holds.TEXT, 64),
    StepField("temperature", Kept.INLINE, Holds.NUMBER),
    StepField("top_p", Kept.INLINE, Holds.NUMBER),
    StepField("top_k", Kept.INLINE, Holds.WHOLE),
    StepField("engine", Kept.INLINE, Holds.TEXT, 60),
    StepField("policy_version", Kept.INLINE, Holds.TEXT, 100),
    StepField("extra", Kept.CONTENT, Holds.MAPPING),
)
"""Every field of ``Step``, in the order in which a JSON line has them.

A new field of a step is one line here, one field of ``Step``, one field of the model and a migration.
"""
REQUEST_FIELDS = (
    StepField("tools", Kept.CONTENT, Holds.TOOLS),
    StepField("chat_template_kwargs", Kept.CONTENT, Holds.MAPPING, column="template_kwargs"),
)
"""Every field of ``Request`` except its messages."""


# -- the codec


class CodedStep(NamedTuple):
    """A step as the codec stores it."""

    link: Link
    """The parent, and how much of its stream the prompt starts with."""
    delta_ids: Ids
    """``prompt_ids[shared_length:]``."""
    delta_origin: Origins | None
    """The origin of each id of ``delta_ids``; None when no strategy wrote it, or one of another length."""
    messages_shared: int
    """How many leading messages the request shares with the parent's request."""
    messages_new: tuple[Message, ...]
    """The messages after them."""


class StepCodec:
    """Codes the steps of one trajectory, one after the other, in either direction.

    ``text`` returns the JSON text of a message: messages are equal when their texts are, because 1, 1.0 and true are
    equal in Python and not in JSON.
    """

    def __init__(self, text: Callable[[Message], str]) -> None:
        self.steps: list[Step] = []
        """The steps so far. After decoding a step the caller appends it."""
        self._text = text
        self._texts: dict[int, str] = {}
        """JSON texts by the identity of their message. ``steps`` keep the messages alive."""

    def __len__(self) -> int:
        return len(self.steps)

    def encode(self, step: Step, link: Link | None = None) -> CodedStep:
        """Append the next step and return it as it is stored. A known ``link`` saves the search for the parent."""
        link = link_step(self.steps, step) if link is None else link
        self.steps.append(step)
        messages = _messages(step)
        shared = 0 if link.parent is None else self._n_shared(_messages(self.steps[link.parent]), messages)
        delta, origin = step.prompt_ids[link.shared_length :], step.delta_origin
        if origin is not None and len(origin) != len(delta):
            origin = None
        return CodedStep(link, delta, origin, shared, messages[shared:])

    def prompt_ids(self, parent: int | None, shared_length: int, delta_ids: Ids) -> Ids:
        """Returns the prompt of the next step. Raises ``ValueError`` when the parent's stream is shorter."""
        if parent is None or not shared_length:
            return delta_ids
        earlier = self.steps[parent]
        n, n_sampled = len(earlier.prompt_ids), len(earlier.completion_ids)
        if shared_length > n + n_sampled:
            raise ValueError(f"shared_length is {shared_length}, but the parent's stream has {n + n_sampled} ids.")
        head = earlier.prompt_ids[:shared_length], earlier.completion_ids[: max(shared_length - n, 0)]
        return np.concatenate([*head, delta_ids])

    def messages(self, parent: int | None, shared: int, new: Sequence[Message]) -> tuple[Message, ...]:
        """Returns the messages of the next step's request. Raises ``ValueError`` when the parent's has fewer."""
        before = () if parent is None else _messages(self.steps[parent])
        if shared > len(before):
            raise ValueError(f"messages_shared is {shared}, but the parent's request has {len(before)} messages.")
        return (*before[:shared], *new)

    def text(self, message: Message) -> str:
        """Returns the JSON text of a message of an appended step. It is made once."""
        text = self._texts.get(id(message))
        if text is None:
            text = self._texts[id(message)] = self._text(message)
        return text

    def _n_shared(self, before: Sequence[Message], messages: Sequence[Message]) -> int:
        n, texts = 0, self._texts
        for old, new in zip(before, messages, strict=False):
            if old is not new:
                text = texts[id(new)] = self._text(new)
                if (texts.get(id(old)) or self.text(old)) != text:
                    break
            n += 1
        return n


def _messages(step: Step) -> tuple[Message, ...]:
    return step.request.messages if step.request else ()


# -- parts of a stream


class StepExtent(NamedTuple):
    """The columns of a stored step from which the place of each of its ids follows."""

    parent: int | None
    """The index of its parent."""
    shared_length: int
    prompt_length: int
    completion_length: int


class StreamPiece(NamedTuple):
    """Part ``[start, stop)`` of a stream. It is the beginning of one stored array."""

    start: int
    stop: int
    step_index: int
    array: str
    """The array that holds it: ``delta_ids`` or ``completion_ids``."""


def stream_pieces(steps: Sequence[StepExtent], index: int, whole: bool = True) -> list[StreamPiece]:
    """Returns where the ids of a step's stream lie, in order. ``whole=False`` leaves its completion out."""
    pieces = []
    at: int | None = index
    limit = steps[index].prompt_length + (steps[index].completion_length if whole else 0)
    while at is not None and limit > 0:
        parent, shared_length, prompt_length, _ = steps[at]
        if limit > prompt_length:
            pieces.append(StreamPiece(prompt_length, limit, at, "completion_ids"))
            limit = prompt_length
        if limit > shared_length:
            pieces.append(StreamPiece(shared_length, limit, at, "delta_ids"))
            limit = shared_length
        at = parent
    return pieces[::-1]
