"""The codec of a stored step: from a step to what it adds to an earlier step, and back.

The prompt of a step mostly repeats the stream of an earlier step, its parent (``prefix``). A step is therefore stored
as ``(parent, shared_length, delta_ids)``, and ``prompt_ids = parent's stream[:shared_length] + delta_ids``. The
messages of its request are stored the same way: the parent's first ``messages_shared`` messages, then ``messages_new``.
``STEP_FIELDS`` lists the fields that are stored as they are.
"""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np

from rollout_inspector.streams.prefix import link_step
from rollout_inspector.streams.trajectory import Ids, Link, Message, Origins, Step


class StepField(NamedTuple):
    """One field of a step, in the value, in the JSON line and in the database."""

    name: str  # The name of the attribute of ``Step`` or ``Request``, and the key in our own JSON lines.
    kind: Literal[
        "text", "number", "whole", "ids", "optional_ids", "floats", "any_text", "object", "mapping", "tools", "request"
    ]
    """What it holds. The database keeps it as ``COLUMNS``, ``ARRAYS`` and ``BODIES`` say. An empty ``text`` or
    ``mapping`` counts as no value; an empty ``any_text`` or ``object`` is a value. The codec splits a ``request`` into
    parts."""
    limit: int = 0  # How many characters the column of a ``text`` holds.
    column: str = ""
    """The attribute of the stored step that holds the key of a JSON body. Empty = the value is no JSON body."""


STEP_FIELDS = (
    StepField("completion_ids", "ids"),
    StepField("logprobs", "floats"),
    StepField("logprobs_mode", "text", 20),
    StepField("finish_reason", "text", 30),
    StepField("stop_reason", "text", 100),
    StepField("request", "request"),
    StepField("reply", "object", column="reply_id"),
    StepField("text", "any_text", column="text_id"),
    StepField("chat_template_sha256", "text", 64),
    StepField("temperature", "number"),
    StepField("top_p", "number"),
    StepField("top_k", "whole"),
    StepField("engine", "text", 60),
    StepField("policy_version", "text", 100),
    StepField("entropy", "floats"),
    StepField("kept_set", "floats"),
    StepField("kept_ids", "optional_ids"),
    StepField("alternative_ids", "optional_ids"),
    StepField("alternative_logprobs", "floats"),
    StepField("extra", "mapping", column="extra_id"),
)
"""Every field of ``Step`` except ``prompt_ids`` and ``delta_origin``, in the order in which a JSON line has them. A new
field of a step is one line here, one field of ``Step``, one field of the model and a migration."""
REQUEST_FIELDS = (
    StepField("tools", "tools", column="tools_id"),
    StepField("chat_template_kwargs", "mapping", column="template_kwargs_id"),
)
"""Every field of ``Request`` except its messages. All are JSON bodies."""


COLUMNS = tuple(field.name for field in STEP_FIELDS if field.kind in ("text", "number", "whole"))
"""The fields that are columns of the stored step."""
ARRAYS = tuple(field.name for field in STEP_FIELDS if field.kind in ("ids", "optional_ids", "floats"))
"""The fields that are arrays beside the stored step (``StepTokens``)."""
BODIES = tuple(field for field in STEP_FIELDS if field.column)
"""The fields that are JSON bodies, each stored once for all steps that have it (``Content``)."""


class CodedStep(NamedTuple):
    """A step as the codec stores it."""

    link: Link  # The parent, and how much of its stream the prompt starts with.
    delta_ids: Ids  # ``prompt_ids[shared_length:]``.
    delta_origin: Origins | None
    """The origin of each id of ``delta_ids``; None when no strategy wrote it, or one of another length."""
    messages_shared: int  # How many leading messages the request shares with the parent's request.
    messages_new: tuple[Message, ...]  # The messages after them.


class StepCodec:
    """Codes the steps of one trajectory, one after the other, in either direction. ``text`` returns the JSON text of a
    message: messages are equal when their texts are, because 1, 1.0 and true are equal in Python and not in JSON."""

    def __init__(self, text: Callable[[Message], str]) -> None:
        self.steps: list[Step] = []  # The steps so far. After decoding a step the caller appends it.
        self._text = text
        self._texts: dict[int, list[str]] = {}  # The texts of the messages of a step, by its index.

    def encode(self, step: Step, link: Link | None = None) -> CodedStep:
        """Append the next step and return it as it is stored. A known ``link`` saves the search for the parent."""
        if link is None:
            link = link_step(self.steps, step)
        self.steps.append(step)
        messages = step.request.messages if step.request else ()
        shared = 0 if link.parent is None or not messages else self._n_shared(link.parent, messages)
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
        before = () if parent is None else self._messages(parent)
        if shared > len(before):
            raise ValueError(f"messages_shared is {shared}, but the parent's request has {len(before)} messages.")
        return (*before[:shared], *new)

    def _n_shared(self, parent: int, messages: Sequence[Message]) -> int:
        """How many leading messages of the last step are those of its parent."""
        before, n = self._messages(parent), 0
        for old, new in zip(before, messages, strict=False):
            if old is not new:
                break
            n += 1
        # Only messages that are not the same objects have to be compared as text.
        if n < len(before) and n < len(messages):
            old_texts, new_texts = self._message_texts(parent), self._message_texts(len(self.steps) - 1)
            while n < min(len(old_texts), len(new_texts)) and old_texts[n] == new_texts[n]:
                n += 1
        return n

    def _message_texts(self, index: int) -> list[str]:
        if index not in self._texts:
            self._texts[index] = [self._text(message) for message in self._messages(index)]
        return self._texts[index]

    def _messages(self, index: int) -> tuple[Message, ...]:
        request = self.steps[index].request
        return request.messages if request else ()


# -- parts of a stream


class StepExtent(NamedTuple):
    """The columns of a stored step from which the place of each of its ids follows."""

    parent: int | None  # The index of its parent.
    shared_length: int
    prompt_length: int
    completion_length: int


class StreamPiece(NamedTuple):
    """Part ``[start, stop)`` of a stream. It is the beginning of one stored array."""

    start: int
    stop: int
    step_index: int
    array: str  # The array that holds it: ``delta_ids`` or ``completion_ids``.


def stream_pieces(steps: Sequence[StepExtent], index: int, whole: bool = True) -> list[StreamPiece]:
    """Returns where the ids of a step's stream lie, in order. ``whole=False`` leaves its completion out."""
    pieces = []
    at: int | None = index
    limit = steps[index].prompt_length + (steps[index].completion_length if whole else 0)
    while at is not None and limit > 0:
        parent, shared_length, prompt_length, _ = steps[at]
        if parent is None:
            shared_length = 0  # what a fork shares with another trajectory is read as a part of its delta
        if limit > prompt_length:
            pieces.append(StreamPiece(prompt_length, limit, at, "completion_ids"))
            limit = prompt_length
        if limit > shared_length:
            pieces.append(StreamPiece(shared_length, limit, at, "delta_ids"))
            limit = shared_length
        at = parent
    return pieces[::-1]
