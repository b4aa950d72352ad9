"""What an environment is to the loop: a giver of tasks, and one episode per trajectory that answers and scores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol


class EnvironmentUnavailable(ValueError):
    """There is no such environment here; the message is a sentence that says why and what would help."""


@dataclass(frozen=True)
class Task:
    """One prompt."""

    messages: list[dict[str, Any]]
    """The chat messages the episode starts with, the last one the user's."""
    tools: list[dict[str, Any]] | None
    """Function schemas as the chat template takes them; ``None`` when there are none."""
    answer: str | None
    """The right answer; ``None`` when the task has no single one."""
    index: int
    """0-based place among the tasks of one call of ``tasks``."""
    data: dict[str, Any] = field(default_factory=dict)
    """JSON that the environment itself needs to start the episode, in another process too; often empty."""


@dataclass(frozen=True)
class Outcome:
    """What the environment says after an assistant turn."""

    messages: list[dict[str, Any]]
    """New messages to append (tool or user); empty when done."""
    done: bool
    reward: float | None = None
    """Set when done."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The reward by name; empty while not done."""
    stop_reason: str = ""
    """Why the episode ended; empty while not done."""


class Episode(Protocol):
    """One trajectory's side of the environment: it remembers what has happened so far."""

    def step(self, message: Mapping[str, Any]) -> Outcome:
        """Answer a parsed assistant message (``role``, ``content``, maybe ``tool_calls``); a bad one raises nothing."""
        ...

    def truncated(self, reason: str) -> Outcome:
        """Score an episode that the loop ends itself (out of tokens or turns); ``reason`` becomes the stop reason."""
        ...


class Environment(Protocol):
    """A source of tasks and episodes."""

    name: str
    description: str

    def tasks(self, n: int, seed: int) -> list[Task]:
        """The ``n`` tasks of a seed; a longer list starts with the shorter one."""
        ...

    def start(self, task: Task) -> Episode: ...
