"""Summaries of a conversation: whether a step was asked for one, and whether a later request holds it. Harnesses name a
compaction nowhere in what they record. So a step counts as asked for a summary by the words of its request, and a
summary counts as held when a later message has the reply's whole text."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rollout_inspector.streams.messages import read_message, same
from rollout_inspector.streams.trajectory import Message

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


def has_summary(told: Told) -> bool:
    """Whether a step was asked for a summary and replied a text that can be looked for."""
    return bool(_wanted(told, True)) and asks_for_summary(told)


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
