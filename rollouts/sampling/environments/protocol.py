"""What an environment is to the loop: a source of tasks, and an episode for each trajectory that answers and scores."""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from queue import SimpleQueue
from threading import Thread
from types import ModuleType
from typing import Any, Protocol

from rollout_inspector.refusal import Refusal


def import_package(name: str) -> ModuleType:
    """The optional package of a module. Raises :class:`Refusal` when it is not installed."""
    package = name.partition(".")[0]
    try:
        module = importlib.import_module(package)
        importlib.import_module(name)
        return module
    except ImportError as error:
        raise Refusal(
            f"The {package} environments need the package {error.name}, which is not installed here; "
            "pip install --no-deps -r rollouts/sampling/environments/requirements.txt installs it."
        ) from error


@dataclass(frozen=True)
class Task:
    """One prompt."""

    messages: list[dict[str, Any]]  # The chat messages that the episode starts with. The user wrote the last one.
    tools: list[dict[str, Any]] | None = None
    """Function schemas as the chat template takes them; ``None`` when there are none."""
    answer: str | None = None  # The right answer; ``None`` when the task has no single one.
    index: int = 0  # The place among the tasks of one call of ``tasks``, counted from 0.
    data: dict[str, Any] = field(default_factory=dict)
    """JSON that the environment needs to start the episode, also in another process. Often empty."""


@dataclass(frozen=True)
class Outcome:
    """What the environment returns after an assistant turn."""

    messages: list[dict[str, Any]]  # New messages to append (tool or user); empty when the episode is done.
    done: bool
    reward: float | None = None  # Set when the episode is done.
    reward_parts: dict[str, float] = field(default_factory=dict)
    """The parts of the reward by name; empty while the episode is not done."""
    stop_reason: str = ""  # Why the episode ended; empty while it is not done.


class Episode(Protocol):
    """The environment's half of one trajectory. It remembers what has happened so far."""

    def step(self, message: Mapping[str, Any]) -> Outcome:
        """Answer a parsed assistant message (``role``, ``content``, maybe ``tool_calls``), even a malformed one."""

    def truncated(self, reason: str) -> Outcome:
        """Score an episode that the loop ends (out of tokens or turns). ``reason`` becomes the stop reason."""


class Environment(Protocol):
    """A source of tasks and episodes."""

    name: str

    def tasks(self, n: int, seed: int) -> list[Task]:
        """Returns the ``n`` tasks of a seed. A longer list starts with the shorter one."""

    def start(self, task: Task) -> Episode: ...


class Answers:
    """Threads that wait for environments. A thread that hangs is given up."""

    def __init__(self, n: int = 4) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Outcome], Callable[[Outcome | Exception], None]] | None] = (
            SimpleQueue()
        )
        self._n = 0
        for _ in range(n):
            self.spawn()

    def ask(self, call: Callable[[], Outcome], answered: Callable[[Outcome | Exception], None]) -> None:
        self._calls.put((call, answered))

    def close(self) -> None:
        for _ in range(self._n):
            self._calls.put(None)

    def spawn(self) -> None:
        """Start a thread, also in place of one whose call hangs."""
        self._n += 1
        Thread(target=self._serve, name="environment", daemon=True).start()

    def _serve(self) -> None:
        while (call := self._calls.get()) is not None:
            outcome: Outcome | Exception
            try:
                outcome = call[0]()
            except Exception as error:
                outcome = error
            call[1](outcome)
