"""The values that all parts of the product exchange: steps, rows and trajectories as arrays. Readers in
``rollout_inspector.formats`` yield a :class:`Trajectory`, ``rollouts.store`` stores it, ``rollouts.store`` loads the
same value. The loop builds one, writers export one, the diagnosis reads one. Nothing here knows a database."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int32]
Floats = NDArray[np.float32]
Mask = NDArray[np.bool_]
Origins = NDArray[np.uint8]
Message = Mapping[str, Any]
JSON = Any


class Origin(IntEnum):
    """Who wrote a token. The number is stored, one byte a token."""

    PROMPT = 0  # The first prompt of a row: system text, task, everything before the first completion.
    SAMPLED = 1  # Drawn by the policy, verbatim.
    TEMPLATE = 2
    """Text that the chat template wrote between completions: role markers, separators, the generation prompt."""
    OBSERVATION = 3  # Text of a tool or of the environment between completions.
    INSERTED = 4  # Added by a strategy alone: an appended EOS, a close that the model did not sample.

    @property
    def slug(self) -> str:
        return self.name.lower()


def ids_array(values: Sequence[int] | NDArray[Any]) -> Ids:
    """Token ids as int32 ``[n]``. Raises ``OverflowError`` for an id outside int32, ``ValueError`` for nested lists."""
    array = np.asarray(values, dtype=np.int64)
    if array.ndim != 1 and array.size:
        raise ValueError(f"token ids must be a flat list, not {array.ndim}-dimensional")
    array = array.reshape(-1)
    if array.size and (int(array.min()) < -(2**31) or int(array.max()) >= 2**31):
        raise OverflowError("a token id does not fit into 32 bits")
    return array.astype(np.int32)


REWARD_COLUMNS = ("rewards", "rm_scores", "token_level_scores", "token_level_rewards")
"""Columns of a row that hold the reward of each token (SkyRL, verl)."""
NO_IDS: Ids = np.zeros(0, dtype=np.int32)


def is_teacher(name: str) -> bool:
    """Whether a column of a row holds the log-probabilities of a teacher, as ``teacher_log_probs`` (slime, verl) and
    ``teacher/<name>/logprobs`` (tokendb) do."""
    return "teacher" in name and "best" not in name and name.endswith(("logprobs", "log_probs"))


FORKED = "forked_from"
"""The key in ``extra`` of a trajectory that continues another one: its ``trajectory``, ``row`` and ``offset``. Its
first prompt holds what another one sampled, so that no template wrote it."""
OTHER_FIELDS = "other_fields"
"""The key in ``extra`` of a step: ``prompt`` or ``completion`` -> a field that tells it too -> what it tells. That is a
number of tokens, or for each token its id, its text or None. What agrees with the ids is left out."""


@dataclass(frozen=True, eq=False)
class Request:
    """The request to the engine at a step, if the source kept it."""

    messages: tuple[Message, ...]  # The whole conversation as it was sent (OpenAI style), not only the new messages.
    tools: tuple[Mapping[str, Any], ...] | None = None  # Function schemas; None = the request had no ``tools`` key.
    chat_template_kwargs: Mapping[str, JSON] = field(default_factory=dict)  # E.g. ``{"enable_thinking": false}``.


@dataclass(frozen=True, eq=False)
class Step:
    """One engine call: prompt in, completion out."""

    prompt_ids: Ids  # ``[P]``, as the engine read them.
    completion_ids: Ids  # ``[C]``, as sampled, stop token included.
    logprobs: Floats | None = None
    """``[C]``, or None when the source has none. A wrong length is kept; the diagnosis reports it."""
    logprobs_mode: str = ""  # ``raw``, ``processed`` or empty = not recorded.
    finish_reason: str = ""  # In vLLM's words: ``stop``, ``length``, ``tool_calls``, ``abort``; empty = not recorded.
    stop_reason: str = ""  # The stop token or string that ended the completion, if recorded.
    request: Request | None = None
    reply: Message | None = None  # The assistant message that the server parsed from the completion.
    text: str | None = None  # The raw completion text as the server returned it, if recorded.
    chat_template_sha256: str = ""  # The template of this step; empty = the run's template.
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    engine: str = ""  # E.g. ``vllm 0.32.0``.
    policy_version: str = ""
    entropy: Floats | None = None
    """``[C]``, in nats: of the whole distribution that ``logprobs`` are of; None = not recorded."""
    kept_set: Floats | None = None
    """``[C]``: how many tokens top_p, top_k and min_p left to draw from at each place; NaN or None = not recorded."""
    kept_ids: Ids | None = None  # The ids of these sets, one set after the other; None = not recorded, or too many.
    alternative_ids: Ids | None = None
    """``[C * K]``: for each sampled token the K likeliest ids at its place, likeliest first; None = not recorded."""
    alternative_logprobs: Floats | None = None
    """``[C * K]``: their log-probabilities, of the same distribution. Minus infinity = no alternative."""
    delta_origin: Origins | None = None
    """The origin of each prompt id in the delta, when a strategy wrote it. None = derive it."""
    extra: Mapping[str, JSON] = field(default_factory=dict)
    """Fields of the source without a column, kept for a lossless export."""

    @property
    def stream(self) -> Ids:
        """``prompt_ids + completion_ids`` ``[P+C]``."""
        return np.concatenate([self.prompt_ids, self.completion_ids])


@dataclass(frozen=True)
class Link:
    """How a step follows an earlier one."""

    parent: int | None
    """The earlier step whose stream shares the longest prefix with this prompt, the latest of several; None = first."""
    shared_length: int  # Length of that prefix; 0 without a parent.
    parent_length: int  # Length of the parent's stream; 0 without a parent.

    @property
    def extends(self) -> bool:
        """Whether the prompt starts with the parent's whole stream: the prefix check passes."""
        return self.shared_length == self.parent_length


NO_PARENT = Link(parent=None, shared_length=0, parent_length=0)


@dataclass(frozen=True, eq=False)
class Row:
    """One training sequence as a trainer holds it. All arrays are ``[T]``; another length makes a finding."""

    ids: Ids
    loss_mask: Mask
    logprobs: Floats | None = None
    origin: Origins | None = None
    columns: Mapping[str, Floats] = field(default_factory=dict)
    """Trainer-side columns by name: ``advantages``, ``prev_logprobs``, ``trainer_logprobs``, ``entropy``, ..."""
    step_indices: tuple[int, ...] = ()
    """The steps whose completions the row trains, in order. Empty for a row that came without steps."""
    extra: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def n_trained(self) -> int:
        """Tokens under the loss mask."""
        return int(np.count_nonzero(self.loss_mask))


@dataclass(frozen=True, eq=False)
class Trajectory:
    """One episode: ordered steps and a reward. From a trainer's dump it may be rows alone."""

    external_id: str  # The id in the source, unique within its run.
    steps: tuple[Step, ...] = ()
    rows: tuple[Row, ...] = ()
    """Rows that the source holds. Empty = the rows follow from the steps (``rollout_inspector.streams.prefix``)."""
    reward: float | None = None
    reward_parts: Mapping[str, float] = field(default_factory=dict)
    stop_reason: str = ""
    """Why the trajectory ended: ``answered``, ``max_turns``, ``length``, ``cancelled``, ...; empty = not recorded."""
    error: str = ""  # The first error of an episode that failed; empty = it did not.
    group: str = ""  # The same for all trajectories of one prompt; empty = not recorded.
    tokenizer: str = ""  # The tokenizer's name in the source.
    training_step: int | None = None  # The step of the trainer that it was sampled for, from 0; None = not recorded.
    extra: Mapping[str, JSON] = field(default_factory=dict)

    @property
    def n_sampled(self) -> int:
        """Tokens of the completions. Rows alone say nothing of it: their trained tokens stand for them."""
        if self.steps:
            return sum(len(step.completion_ids) for step in self.steps)
        return sum(row.n_trained for row in self.rows)

    @property
    def n_ids(self) -> int:
        """How many ids the arrays hold: prompts and completions of all steps, and all rows."""
        in_steps = sum(len(step.prompt_ids) + len(step.completion_ids) for step in self.steps)
        return in_steps + sum(len(row.ids) for row in self.rows)


@dataclass(frozen=True, eq=False)
class Tokens:
    """A stretch of one row. Arrays are all ``[n]``; ``start`` is the row offset of the first."""

    start: int
    ids: Ids
    origin: Origins
    loss_mask: Mask
    logprobs: Floats | None = None
    """NaN for a token that was not sampled, or beyond the end of the recorded values; None: nothing was recorded."""
    step_index: np.ndarray | None = None  # int32; -1 when the step is not known.
    n_tokens: int = 0  # Tokens of the whole row.
    origin_known: bool = True
    """False: nobody recorded the origins, and ``origin`` is guessed from the loss mask, only for colours."""
    columns: dict[str, Floats] = field(default_factory=dict)
    """What a trainer or an engine told beside the tokens; NaN where a column has no value."""

    def __len__(self) -> int:
        return int(self.ids.size)

    @property
    def stop(self) -> int:
        """The row offset behind the last token."""
        return self.start + len(self)

    def slice(self, start: int, stop: int) -> Tokens:
        """The tokens with row offsets ``[start, stop)``."""
        part = slice(max(start - self.start, 0), max(stop - self.start, 0))
        return replace(
            self, start=self.start + part.start, ids=self.ids[part], origin=self.origin[part],
            loss_mask=self.loss_mask[part], logprobs=None if self.logprobs is None else self.logprobs[part],
            step_index=None if self.step_index is None else self.step_index[part],
            columns={name: values[part] for name, values in self.columns.items()},
        )


def plain_tokens(ids: Ids, start: int = 0, mask: Mask | None = None) -> Tokens:
    """Ids of which only the loss mask may be known; the first stands at offset ``start``."""
    n = len(ids)
    return Tokens(start, ids, np.zeros(n, np.uint8), np.zeros(n, np.bool_) if mask is None else mask)
