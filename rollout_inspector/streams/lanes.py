"""Lanes: the steps of a trajectory as a tree. A lane is a chain of steps, each of which extends the one before.

The links of the steps say where a lane leaves another one. The diagnosis names why: its finding at the first step of a
lane. Harnesses name a compaction nowhere in what they record, so a summary is found by what the messages hold. No token
array is read.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import Protocol

from rollout_inspector.streams.messages import read_message, same
from rollout_inspector.streams.trajectory import Message

MAX_LOOKED = 20  # So many earlier lanes, the nearest first, may have written the summary that a lane begins with.
MAX_READERS = 20  # So many steps after a branch, the nearest first, may read its answer.
REWRITES = {"history_rewritten", "context_truncated", "request_changed"}
"""Causes of a break after which the conversation goes on with another history."""
NO_CAUSE = {"", "unclassified"}
_OF_ONE_STEP = {"token_ids_missing", "engine_ids_inconsistent", "not_decidable"}


def names_break(kind: str, axis: str, start: int, prompt_length: int) -> bool:
    """Whether a finding at a step says why its prompt leaves an earlier stream. ``start``: its offset in the stream."""
    in_prompt = start < prompt_length or kind == "duplicate_call"  # of a duplicate the whole prompt is shared
    return axis == "stream" and in_prompt and kind not in _OF_ONE_STEP


class LaneKind(StrEnum):
    """What a lane is to the lanes before it."""

    FIRST = "first"  # The lane of the first step. It leaves no other one.
    CONTINUATION = "continuation"  # The conversation goes on, and its prompt does not start with what was sampled.
    BRANCH = "branch"  # A conversation beside another one: a sub-agent, a side call, or one of several choices.
    COMPACTION = "compaction"  # The conversation goes on with another history, after a step that wrote a summary of it.
    SUMMARY = "summary"  # A side call that wrote a summary of the conversation.
    DUPLICATE = "duplicate"  # Its first step sends the prompt of an earlier step again.
    UNNAMED = "unnamed"  # No diagnosis names why it leaves: none has run, or the cause is not known.


_LABELS = {
    LaneKind.FIRST: "first lane",
    LaneKind.CONTINUATION: "continuation",
    LaneKind.BRANCH: "branch",
    LaneKind.COMPACTION: "compaction",
    LaneKind.SUMMARY: "summary call",
    LaneKind.DUPLICATE: "duplicate call",
    LaneKind.UNNAMED: "new row",
}


class LaneStep(Protocol):
    """What is read of a step. Lengths count tokens."""

    @property
    def index(self) -> int: ...
    @property
    def parent(self) -> int | None: ...
    @property
    def shared_length(self) -> int: ...
    @property
    def parent_length(self) -> int: ...
    @property
    def prompt_length(self) -> int: ...
    @property
    def completion_length(self) -> int: ...


class LaneRow(Protocol):
    """What is read of a row."""

    @property
    def index(self) -> int: ...
    @property
    def n_trained(self) -> int: ...
    @property
    def follows_steps(self) -> bool: ...
    @property
    def steps(self) -> frozenset[int]: ...


@dataclass(frozen=True)
class LeavingPlace:
    """The place where a lane leaves an earlier one."""

    lane: int
    """Index of that lane."""
    step: int
    """The step of that lane whose prompt or completion holds the place."""
    offset: int
    """The first token that differs: an offset of that step's stream and of the new lane's stream."""
    part: str
    """``prompt``, ``completion`` or ``end``: of that step; ``end`` = behind its completion."""


@dataclass(frozen=True)
class Summary:
    """A summary of a conversation that a step wrote."""

    step: int
    """The step that wrote it."""
    outcome: str | None
    """``accepted``: a later prompt begins a lane with it. ``discarded``: no later prompt holds it. None = not known."""
    taken_by: int | None
    """The step whose prompt holds it; None unless it was accepted."""


@dataclass(frozen=True)
class Lane:
    """A chain of steps that extend each other."""

    index: int
    """In the order of the first steps, from 0."""
    kind: LaneKind
    """``first``, ``continuation``, ``branch``, ``compaction``, ``summary``, ``duplicate`` or ``unnamed``."""
    cause: str
    """Kind of the finding at its first step; empty = none."""
    steps: tuple[int, ...]
    """Its engine calls."""
    row: int | None
    """The row that trains them; None = no row does."""
    leaves: LeavingPlace | None
    """Where it leaves an earlier lane; None = it follows no earlier step."""
    depth: int
    """How many lanes it stands beside: 0 for the main conversation."""
    repeats: int | None
    """Of a duplicate: the earlier step with the same prompt."""
    n_tokens: int
    """Tokens that it adds to the lane that it leaves."""
    n_sampled: int
    """Tokens that its calls sampled."""
    n_trained: int | None
    """Tokens that its row trains; None = its row trains other lanes as well."""
    same_reply: bool | None = None
    """Of a duplicate: whether both replies say the same; None = not known."""
    read_by: int | None = None
    """Of a branch: the later step that was told its answer, as of a sub-agent; None = none is known."""
    summary: Summary | None = None
    """The summary that it begins with, that it wrote, or that was given up before it."""
    agent: str = ""
    """The sub-agent that made its first call, by the name that its harness gave; empty = none is named."""
    words: str = ""
    """Its steps, why and where it leaves, and its tokens; empty until a page asks for them."""

    @property
    def label(self) -> str:
        """Its kind in words, with what became of a summary."""
        label = _LABELS[self.kind] if self.read_by is None else "branch, a sub-agent"
        return label if self.summary is None else f"{label}, summary {self.summary.outcome or 'not followed'}"

    @property
    def sentence(self) -> str:
        """What it is, where it leaves and what it holds, in a sentence."""
        return f"{self.label}: {self.words}"


def find_lanes(
    steps: Sequence[LaneStep], rows: Sequence[LaneRow], causes: Mapping[int, str] | None = None,
) -> list[Lane]:
    """The lanes of a trajectory, in the order of their first steps; none where no step has token ids. ``causes``: step
    -> kind of the finding at its break. Steps may come in any order. O(steps). :func:`with_messages` finds what the
    messages tell."""
    causes = causes or {}
    steps_by_index = {step.index: step for step in sorted(steps, key=lambda one: one.index)}
    if not any(step.prompt_length or step.completion_length for step in steps_by_index.values()):
        return []
    chains = _chains(steps_by_index, rows)
    lane_of = {step: n for n, chain in enumerate(chains) for step in chain}
    row_of = {step: row for row in reversed(rows) for step in row.steps}
    in_row: dict[int, set[int]] = {}
    for step, row in row_of.items():
        if step in lane_of:
            in_row.setdefault(row.index, set()).add(lane_of[step])
    lanes: list[Lane] = []
    for n, chain in enumerate(chains):
        first, last = steps_by_index[chain[0]], steps_by_index[chain[-1]]
        leaves = _leaving(first, steps_by_index, lane_of)
        cause = causes.get(first.index, "")
        repeats = _same_prompt(first, steps_by_index) if cause in ("duplicate_call", *NO_CAUSE) else None
        kind = _kind(n, cause, repeats, is_fork=0 < first.parent_length == first.shared_length)
        own = next((row_of[step] for step in chain if step in row_of), None)
        n_sampled = sum(steps_by_index[step].completion_length for step in chain)
        alone = own is not None and len(in_row[own.index]) == 1
        lanes.append(Lane(
            n, kind, cause, tuple(chain), None if own is None else own.index, leaves,
            _depth(kind, leaves, lanes, steps_by_index), repeats if kind is LaneKind.DUPLICATE else None,
            last.prompt_length + last.completion_length - (leaves.offset if leaves else 0), n_sampled,
            0 if own is None else own.n_trained if alone else None,
        ))
    return lanes


def _chains(held: Mapping[int, LaneStep], rows: Sequence[LaneRow]) -> list[list[int]]:
    """The steps of each lane. Where rows follow from steps, a lane is a row; else the links alone join steps."""
    of_row = {step: row.index for row in rows if row.follows_steps for step in row.steps}
    chains: list[list[int]] = []
    by_row: dict[int, list[int]] = {}
    open_at: dict[int, list[int]] = {}
    for index, step in held.items():
        chain = None
        if index in of_row:
            chain = by_row.get(of_row[index])
        elif step.parent is not None and step.parent_length and step.shared_length == step.parent_length:
            chain = open_at.pop(step.parent, None)
        if chain is None:
            chain = []
            chains.append(chain)
            if index in of_row:
                by_row[of_row[index]] = chain
        chain.append(index)
        if index not in of_row:
            open_at[index] = chain
    return chains


def _kind(n: int, cause: str, repeats: int | None, is_fork: bool) -> LaneKind:
    """``is_fork``: it starts with the whole stream of a step that another step continues."""
    if n == 0:
        return LaneKind.FIRST
    if cause == "branch" or (is_fork and not cause):
        return LaneKind.BRANCH
    if cause == "duplicate_call" or repeats is not None:
        return LaneKind.DUPLICATE
    return LaneKind.UNNAMED if cause in NO_CAUSE else LaneKind.CONTINUATION


def _leaving(first: LaneStep, held: Mapping[int, LaneStep], lane_of: Mapping[int, int]) -> LeavingPlace | None:
    """Where a lane leaves: the earliest step whose stream holds the place."""
    step = _parent(first, held)
    if step is None:
        return None
    offset = first.shared_length
    while offset < step.shared_length and (before := _parent(step, held)) is not None:
        step = before
    end = step.prompt_length + step.completion_length
    part = "prompt" if offset < step.prompt_length else "completion" if offset < end else "end"
    return LeavingPlace(lane_of[step.index], step.index, offset, part)


def _same_prompt(step: LaneStep, held: Mapping[int, LaneStep]) -> int | None:
    """An earlier step with the same prompt. The links tell it: a whole prompt is shared, and the lengths are equal."""
    n, earlier = step.prompt_length, step
    while n and earlier.shared_length >= n and (before := _parent(earlier, held)) is not None:
        if before.prompt_length == n:
            return before.index
        earlier = before
    return None


def _parent(step: LaneStep, held: Mapping[int, LaneStep]) -> LaneStep | None:
    """The parent, if it is there and earlier."""
    return None if step.parent is None or step.parent >= step.index else held.get(step.parent)


def _depth(kind: LaneKind, leaves: LeavingPlace | None, lanes: Sequence[Lane], held: Mapping[int, LaneStep]) -> int:
    """A side lane stands one deeper than the lane it leaves. Two that share a first prompt alone stand side by side."""
    if leaves is None:
        return 1 if kind is LaneKind.BRANCH else 0
    parent = lanes[leaves.lane]
    if kind not in (LaneKind.BRANCH, LaneKind.DUPLICATE):
        return parent.depth
    if parent.depth and leaves.offset <= held[parent.steps[0]].prompt_length:
        return parent.depth
    return parent.depth + 1


def with_messages(lanes: Sequence[Lane], told: Mapping[int, Told]) -> list[Lane]:
    """The lanes with what the messages tell: of summaries, of the answers of branches, of the replies of duplicates.
    ``told``: step -> what its request added and what it replied. A summary is called discarded only where all later
    steps are told. At most ``MAX_LOOKED`` searches in text for each lane that may begin with a summary."""
    steps = sorted(step for lane in lanes for step in lane.steps)
    latest = list(accumulate((lane.steps[-1] for lane in lanes), max))
    joined, used = list(lanes), set[int]()
    for n, lane in enumerate(lanes):
        if (first_told := told.get(lane.steps[0])) is not None:
            other_told = None if lane.repeats is None else told.get(lane.repeats)
            same_reply = lane.same_reply if other_told is None else first_told.says_the_same(other_told)
            joined[n] = replace(lane, agent=first_told.agent, same_reply=same_reply)
    for lane in lanes[1:]:
        first = lane.steps[0]
        # A branch beside a conversation that goes on is no compaction of it.
        goes_on = latest[lane.index - 1] > first
        if first not in told or not (lane.cause in REWRITES or (lane.cause == "branch" and not goes_on)):
            continue
        for other in lanes[max(lane.index - MAX_LOOKED, 0) : lane.index][::-1]:
            step = other.steps[-1]
            if step > first or step in used or step not in told:
                continue
            if holds(told[first], told[step], asks_for_summary(told[step])):
                summary = Summary(step, "accepted", first)
                used.add(step)
                joined[lane.index] = replace(lane, kind=LaneKind.COMPACTION, summary=summary)
                if other.kind is LaneKind.BRANCH:
                    joined[other.index] = replace(joined[other.index], kind=LaneKind.SUMMARY, summary=summary)
                break
    for lane in lanes:
        step = lane.steps[-1]
        side = joined[lane.index].kind is LaneKind.BRANCH
        if step in used or step not in told or not (side or len(lane.steps) > 1):
            continue
        if not (_wanted(told[step], True) and asks_for_summary(told[step])):
            continue
        later = steps[bisect_right(steps, step) :]
        if not later or any(index in told and holds(told[index], told[step], True) for index in later):
            continue
        summary = Summary(step, "discarded" if all(index in told for index in later) else None, None)
        if side:
            joined[lane.index] = replace(joined[lane.index], kind=LaneKind.SUMMARY, summary=summary)
            continue
        breaks = (other for other in joined if other.steps[0] > step and other.cause in (*REWRITES, "branch"))
        after = next(breaks, None)
        if after is not None and after.summary is None:
            joined[after.index] = replace(after, kind=LaneKind.COMPACTION, summary=summary)
    return [_with_reader(lane, told, steps) for lane in joined]


def _with_reader(lane: Lane, told: Mapping[int, Told], steps: Sequence[int]) -> Lane:
    """A branch with the step that reads its answer: in a message that is no assistant's."""
    step = lane.steps[-1]
    if lane.kind is not LaneKind.BRANCH or step not in told:
        return lane
    start = bisect_right(steps, step)
    later = (index for index in steps[start : start + MAX_READERS] if index in told)
    reader = next((index for index in later if holds(told[index], told[step], False)), None)
    return replace(lane, read_by=reader)


LEAST = 24  # A shorter reply may stand in another message by chance, unless its step was asked for a summary.
LEAST_ASKED = 6
_ASKED = re.compile(r"summar|compact|condens|compress", re.IGNORECASE)
_ENDS = 2000
"""Characters of each end of a message in which the words are looked for: between them may stand a transcript."""
_TAGGED = re.compile(r"<summary>(.*?)</summary>", re.DOTALL)


@dataclass(frozen=True, eq=False)
class Told:
    """What a step's request added to that of its parent, and what the step replied."""

    new: tuple[Message, ...]  # The messages behind those that it shares with the parent's request.
    reply: Message | None  # The assistant's message; None = not recorded.
    agent: str = ""  # The sub-agent that made the call, by the name that its harness gave; empty = none is named.

    @cached_property
    def texts(self) -> list[tuple[str, str]]:
        """Role and plain text of each new message."""
        return [(str(message.get("role")), _plain(_text(message))) for message in self.new]

    @cached_property
    def answers(self) -> list[str]:
        """The plain texts that a harness may take from the reply: see :func:`_forms`."""
        return list(_forms(self.reply))

    def says_the_same(self, other: Told) -> bool | None:
        """Whether both replies say the same; None where one is not recorded."""
        return None if self.reply is None or other.reply is None else same(self.reply, other.reply)


def asks_for_summary(told: Told) -> bool:
    """Whether the words of a request ask for a summary: in its last message, or in a new system text."""
    instructions = [message for message in told.new[-1:] if message.get("role") in ("user", "system", "developer")]
    instructions += [message for message in told.new[:1] if message.get("role") in ("system", "developer")]
    texts = (_text(message) for message in instructions)
    return any(_ASKED.search(text[:_ENDS]) or _ASKED.search(text[-_ENDS:]) for text in texts)


def holds(later: Told, told: Told, was_asked: bool) -> bool:
    """Whether the new messages of a later request hold the whole reply of a step, line ends and spaces aside. A message
    of the assistant counts only where the step was asked for a summary: else it is the history itself."""
    words = _wanted(told, was_asked)
    return any(form in text for form in words for role, text in later.texts if was_asked or role != "assistant")


def _wanted(told: Told, was_asked: bool) -> list[str]:
    return [form for form in told.answers if len(form) >= (LEAST_ASKED if was_asked else LEAST)]


def _forms(reply: Message | None) -> Iterator[str]:
    """The texts that a harness may take from a reply: all of it, what follows the reasoning, what stands in a tag."""
    if reply is None:
        return
    text = _text(reply)
    yield _plain(text)
    if "</think>" in text:
        yield _plain(text.rpartition("</think>")[2])
    for tagged in _TAGGED.findall(text):
        yield _plain(tagged)


def _text(message: Message) -> str:
    messages = read_message(message, "")
    return "\n".join(text for item in messages for text in item.texts if isinstance(text, str))


def _plain(text: str) -> str:
    return " ".join(text.split())
