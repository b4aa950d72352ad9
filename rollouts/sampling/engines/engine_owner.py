"""Who owns an engine: futures for all that ask, and another engine in place of one that died. All threads of a worker
share one engine, so that they share one batch. The death of an engine fails nothing by itself: what was under way is
asked again of the next engine. A request that kills every engine is found, because it is then asked alone."""

import logging
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol, TypeVar

from rollouts.sampling.engines.protocol import (
    Engine, EngineError, EngineInfo, Generation, GenerationRequest, RequestRefused, reason
)

log = logging.getLogger(__name__)
Result = TypeVar("Result")

PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0)
"""Seconds before the next engine is built, by the deaths since the last answer. A further death ends all that waits."""
SUSPECT_DEATHS = 2  # What was under way at so many deaths may have caused them. From then on it is asked alone.
REQUEST_DEATHS = 4  # What was under way at so many deaths, the last two alone, is refused.


class EngineClosed(EngineError):
    """The worker is shutting down. Another worker can take up the work again."""


class EngineLost(EngineError):
    """The engine died, and so did those that were built in its place; or none could be built."""


class EngineNotBuilt(EngineLost):
    """The engine could not be built, and its process lived on to say why."""


class Life(Protocol):
    """One engine from its building to its end, in a thread or in a process. It reports to its owner."""

    def send(self, message: Any) -> None:
        """Hand over what ``EngineOwner._packed`` returned. Never waits."""

    def end(self, timeout: float | None) -> None:
        """Wait at most so many seconds until it has ended."""


@dataclass(eq=False)
class _Question:
    """A future that is not done yet."""

    value: Any
    message: Any  # The question as the life takes it.
    future: Future[Any] = field(default_factory=Future)
    is_aborted: bool = False
    n_deaths: int = 0  # How many built engines died while it was under way.


class EngineOwner(ABC):
    """Owns an engine for the rest of the worker's life: ``worker.EngineThread`` or ``process.EngineProcess``.

    Every method may be called from any thread. The engine is built at first use, kept warm, and built again after it
    died. A future ends with its result or with an error:

    * ``RequestRefused``: this request only.
    * ``EngineLost``: all; engines died one after another, or none can be built.
    * ``EngineClosed``: all; the worker stops.
    """

    def __init__(self, build: Callable[[], Engine], name: str = "engine") -> None:
        self._build, self._name = build, name
        self._lock = threading.RLock()
        self._numbers = count()
        self._asked: dict[int, _Question] = {}
        self._waiting: list[int] = []  # Numbers of what was asked and is not under way.
        self._alone: int | None = None  # Number of what is asked alone now.
        self._life: Life | None = None
        self._is_built = False
        self._pause: threading.Timer | None = None
        self._n_deaths = 0  # Deaths since the last answer.
        self._closing = False
        self.tokens = 0  # How many tokens were sampled so far; a page shows the throughput.

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        """Have a completion sampled."""
        return self._ask("submit", request)

    def call(self, work: Callable[[Any], Result]) -> Future[Result]:
        """Run ``work(engine)`` between two steps, and again if the engine dies meanwhile. The future ends alike."""
        return self._ask("call", work)

    def ask_info(self) -> Future[EngineInfo]:
        """What the engine is. The engine is built even when the asking thread stops waiting."""
        return self.call(EngineInfo.of)

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests. Their futures are cancelled before the engine's next step."""
        dropped = set(request_ids)
        with self._lock:
            for number, question in list(self._asked.items()):
                if getattr(question.value, "request_id", None) in dropped:
                    question.is_aborted = True
                    if number in self._waiting:
                        self._waiting.remove(number)
                        self._asked.pop(number).future.cancel()
            if self._life is not None and self._is_built:
                self._life.send(self._packed(("abort", None, list(dropped))))

    def close(self, timeout: float | None = 30) -> None:
        """End what is under way with :class:`EngineClosed` and free the engine."""
        with self._lock:
            self._closing = True
            life = self._life
            if life is not None:
                life.send(self._packed(None))
            if self._pause is not None:
                self._pause.cancel()
        if life is not None:
            life.end(timeout)
        else:
            self._ended(EngineClosed())

    # -- for a subclass to define --------------------------------------------------------------------------------------

    @abstractmethod
    def _begin(self) -> Life:
        """Start a life. It calls ``_ready`` once its engine is built, ``_told`` with answers, ``_ended`` at last."""

    @abstractmethod
    def _packed(self, message: tuple[str, int | None, Any] | None) -> Any:
        """Returns (kind, number, value) as the life takes it. None ends a life."""

    # -- called by a life ----------------------------------------------------------------------------------------------

    def _ready(self) -> None:
        with self._lock:
            self._is_built = True
            self._pass_on()

    def _told(self, number: int, kind: str, value: Any) -> None:
        """Take an answer: ``done`` with a result, ``failed`` with an exception, or ``cancelled``."""
        with self._lock:
            question = self._asked.pop(number)
            if kind == "done":
                self._n_deaths = 0
            if number == self._alone:
                self._alone = None
            if self._waiting:
                self._pass_on()
        if kind == "cancelled":
            question.future.cancel()
        elif kind == "failed":
            question.future.set_exception(value)
        else:
            if isinstance(value, Generation):
                self.tokens += len(value.completion_ids)
            question.future.set_result(value)

    def _ended(self, error: EngineError) -> None:
        """The engine is gone. Ask what was under way again of the next engine, as long as the limits allow it."""
        with self._lock:
            self._life = None
            if self._closing:
                error = EngineClosed("The engine was shut down before the completion was finished.")
                ended = self._give_up()
            elif not self._asked:
                ended = []
            else:
                self._n_deaths += 1
                # An engine that cannot be built at first is set up wrongly: nobody waits to learn it.
                if self._n_deaths > len(PAUSES) or (isinstance(error, EngineNotBuilt) and self._n_deaths == 1):
                    ended = self._give_up()
                else:
                    ended = self._take_back()
                    error = RequestRefused(
                        f"The engine died {REQUEST_DEATHS} times while it sampled this step, at last with nothing else "
                        f"under way. {error}"
                    )
            self._is_built, self._alone = False, None
        for question in ended:
            if question.is_aborted:
                question.future.cancel()
            else:
                question.future.set_exception(error)

    # -- the lock is held ----------------------------------------------------------------------------------------------

    def _ask(self, kind: str, value: Any) -> Future[Any]:
        with self._lock:
            if self._closing:
                raise EngineClosed("The engine is shutting down.")
            number = next(self._numbers)
            question = self._asked[number] = _Question(value, self._packed((kind, number, value)))
            self._waiting.append(number)
            if self._is_built:
                self._pass_on()
            elif self._life is None and self._pause is None:
                self._start()
            return question.future

    def _start(self) -> None:
        try:
            self._life = self._begin()
        except Exception as error:  # the machine has no memory for a process or a thread
            self._ended(EngineLost(f"The engine cannot be started: {reason(error)}"))

    def _pass_on(self) -> None:
        """Hand what waits to the built engine. What may have killed an engine goes alone, with nothing beside it."""
        assert self._life is not None
        if self._alone is not None:
            return
        numbers, self._waiting = self._waiting, []
        suspects = [number for number in numbers if self._asked[number].n_deaths >= SUSPECT_DEATHS]
        if suspects:
            if len(numbers) < len(self._asked):
                self._waiting = numbers  # until what is under way has ended
                return
            # Not in turn: requests that kill engines come in groups, and the deaths between two answers are limited.
            self._alone = random.choice(suspects)
            self._waiting = [number for number in numbers if number != self._alone]
            numbers = [self._alone]
        for number in numbers:
            self._life.send(self._asked[number].message)

    def _take_back(self) -> list[_Question]:
        """Have what was under way wait for the next engine. Returns what is not to be asked again."""
        waited = set(self._waiting)
        for number, question in self._asked.items():
            # An engine that was not built has seen no request.
            question.n_deaths += self._is_built and number not in waited
        over = [
            number
            for number, question in self._asked.items()
            if number not in waited and (question.is_aborted or question.n_deaths >= REQUEST_DEATHS)
        ]
        ended = [self._asked.pop(number) for number in over]
        self._waiting = list(self._asked)
        pause = PAUSES[self._n_deaths - 1]
        log.warning("engine lost name=%s n=%d; another is built in %g s", self._name, self._n_deaths, pause)
        self._pause = threading.Timer(pause, self._go_on)
        self._pause.daemon = True
        self._pause.start()
        return ended

    def _give_up(self) -> list[_Question]:
        ended = list(self._asked.values())
        self._asked.clear()
        self._waiting.clear()
        self._n_deaths = 0
        return ended

    # -- after a pause -------------------------------------------------------------------------------------------------

    def _go_on(self) -> None:
        with self._lock:
            self._pause = None
            if self._asked and not self._closing:
                self._start()
