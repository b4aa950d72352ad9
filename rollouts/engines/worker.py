"""One thread owns one engine. All other threads send it requests and get futures, so that all share one batch."""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, TypeVar

from rollouts.engines import reason
from rollouts.engines.protocol import (
    Engine,
    EngineError,
    Generation,
    GenerationRequest,
    RequestRefused,
    check_generation,
)

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class EngineClosed(EngineError):
    """The worker is shutting down. Another worker can take up the work again."""


class EngineLost(EngineError):
    """The engine died or could not be built. The same exception ends everything that was under way."""


@dataclass(frozen=True)
class EngineInfo:
    """What the loop needs to know about an engine, without touching the engine."""

    name: str
    version: str
    max_model_len: int
    vocab_size: int
    logprobs_mode: str

    @classmethod
    def of(cls, engine: Engine) -> EngineInfo:
        return cls(engine.name, engine.version, engine.max_model_len, engine.vocab_size, engine.logprobs_mode)


class EngineOwner(ABC):
    """Owns an engine for the rest of the worker's life: :class:`EngineThread` or ``engines.process.EngineProcess``.

    Every method may be called from any thread. The engine is built at first use, kept warm, and built again after it
    died. A future ends with its result or with an error: :class:`RequestRefused` (this request only),
    :class:`EngineLost` (all: the engine died or cannot be built) or :class:`EngineClosed` (all: the worker stops).
    """

    tokens: int
    """How many tokens were sampled so far; a page shows the throughput."""

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        """Have a completion sampled."""
        return self._ask("submit", request)

    def call(self, work: Callable[[Any], Result]) -> Future[Result]:
        """Run ``work(engine)`` between two steps. The future ends with its result or exception."""
        return self._ask("call", work)

    def ask_info(self) -> Future[EngineInfo]:
        """What the engine is. The engine is built even when the asking thread stops waiting."""
        return self.call(EngineInfo.of)

    @abstractmethod
    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests. Their futures are cancelled before the engine's next step."""

    @abstractmethod
    def close(self, timeout: float | None = 30) -> None:
        """End what is under way with :class:`EngineClosed` and free the engine."""

    @abstractmethod
    def _ask(self, kind: str, value: Any) -> Future[Any]:
        """Hand ``submit`` or ``call`` with its value to the engine."""


class EngineDriver:
    """What an owner does with its engine, all of it in one thread.

    The owner chooses a key for each thing it asks. ``tell(key, kind, value)`` reports how it ended: ``done`` with a
    result, ``failed`` with an exception, or ``cancelled``.
    """

    def __init__(self, build: Callable[[], Engine], name: str, tell: Callable[[Any, str, Any], None]) -> None:
        self._build, self._name, self._tell = build, name, tell
        self._engine: Engine | None = None
        self._live: dict[str, tuple[Any, GenerationRequest]] = {}
        self._arrived: list[GenerationRequest] = []
        self._aborted: list[str] = []
        self._calls: list[tuple[Any, Callable[[Engine], Any]]] = []

    def take(self, kind: str, key: Any, value: Any) -> None:
        """Keep something to do in the next turn: ``submit`` a request, ``call`` a function, or ``abort`` requests."""
        if kind == "submit":
            self._live[value.request_id] = key, value
            self._arrived.append(value)
        elif kind == "call":
            self._calls.append((key, value))
        else:
            self._aborted.extend(value)

    def is_idle(self) -> bool:
        return not (self._live or self._calls or self._aborted)

    def turn(self) -> None:
        """Do what was taken and let every request grow by a step.

        Raises :class:`EngineLost` when the engine died or cannot be built. The engine is then closed, and ``drop``
        returns the keys that have not been told.
        """
        try:
            if self._engine is None and (self._arrived or self._calls):
                self._engine = self._build()
                log.info("engine ready name=%s version=%s", self._engine.name, self._engine.version)
            if self._engine is None:
                self._aborted.clear()
            else:
                self._turn(self._engine)
            return
        except Exception as error:
            log.exception("engine lost name=%s", self._name)
            lost = EngineLost(str(error) if isinstance(error, EngineError) else f"The engine died: {reason(error)}")
        # Outside the handler, because the traceback of the error would keep the dead engine in memory.
        self.close()
        raise lost

    def drop(self) -> list[Any]:
        """Give up everything that is under way and return its keys."""
        keys = [key for key, _ in [*self._live.values(), *self._calls]]
        for held in (self._live, self._arrived, self._aborted, self._calls):
            held.clear()
        return keys

    def close(self) -> None:
        """Free the engine. The next turn that needs an engine builds another."""
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                engine.close()
            except Exception:
                log.warning("engine did not close cleanly", exc_info=True)

    def _turn(self, engine: Engine) -> None:
        while self._calls:
            key, work = self._calls.pop(0)
            try:
                result = work(engine)
            except Exception as error:
                self._tell(key, "failed", error)
            else:
                self._tell(key, "done", result)
        arrived, self._arrived = self._arrived, []
        for request in arrived:
            try:
                engine.add(request)
            except RequestRefused as error:
                self._tell(self._live.pop(request.request_id)[0], "failed", error)
        self._abort(engine)
        if not self._live:
            return
        if not engine.has_unfinished():
            raise EngineError("The engine lost requests: it reports that it is idle, but completions are missing.")
        try:
            generations = engine.step()
        except RequestRefused as error:
            if error.request_id not in self._live:
                raise
            self._tell(self._live.pop(error.request_id)[0], "failed", error)
            return
        for generation in generations:
            if generation.request_id in self._live:
                check_generation(generation, self._live[generation.request_id][1], engine.vocab_size)
                self._tell(self._live.pop(generation.request_id)[0], "done", generation)

    def _abort(self, engine: Engine) -> None:
        aborted, self._aborted = self._aborted, []
        dropped = [request_id for request_id in aborted if request_id in self._live]
        for request_id in dropped:
            engine.abort(request_id)
            self._tell(self._live.pop(request_id)[0], "cancelled", None)
        if dropped:
            log.info("requests dropped name=%s n=%d left=%d", self._name, len(dropped), len(self._live))


def settle(future: Future[Any], kind: str, value: Any) -> int:
    """End a future as a driver told, and return how many tokens were sampled for it."""
    if kind == "cancelled":
        future.cancel()
    elif kind == "failed":
        future.set_exception(value)
    else:
        future.set_result(value)
        if isinstance(value, Generation):
            return len(value.completion_ids)
    return 0


class EngineThread(EngineOwner):
    """An :class:`EngineOwner` whose engine runs in a thread of this process."""

    def __init__(self, build: Callable[[], Engine], name: str = "engine") -> None:
        self._driver = EngineDriver(build, name, self._told)
        self._name = name
        self._lock = threading.Lock()
        self._inbox: SimpleQueue[tuple[str, Future[Any] | None, Any] | None] = SimpleQueue()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.tokens = 0

    def abort(self, request_ids: Iterable[str]) -> None:
        self._inbox.put(("abort", None, list(request_ids)))

    def close(self, timeout: float | None = 30) -> None:
        with self._lock:
            self._closing = True
            thread = self._thread
        self._inbox.put(None)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _ask(self, kind: str, value: Any) -> Future[Any]:
        future: Future[Any] = Future()
        with self._lock:
            if self._closing:
                raise EngineClosed("The engine is shutting down.")
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=f"{self._name}-owner", daemon=True)
                self._thread.start()
            self._inbox.put((kind, future, value))
        return future

    # -- the owning thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        driver = self._driver
        while True:
            while driver.is_idle() or not self._inbox.empty():
                message = self._inbox.get()
                if message is None:
                    self._fail(EngineClosed("The engine was shut down before the completion was finished."))
                    driver.close()
                    return
                driver.take(*message)
            try:
                driver.turn()
            except EngineLost as lost:
                self._fail(lost)

    def _told(self, future: Future[Any], kind: str, value: Any) -> None:
        self.tokens += settle(future, kind, value)

    def _fail(self, error: EngineError) -> None:
        for future in self._driver.drop():
            future.set_exception(error)
