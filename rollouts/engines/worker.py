"""One thread owns one engine; every other thread hands it requests and gets futures, so that all share one batch."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

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
    """The worker is shutting down; the work can be taken up again by another one."""


class EngineLost(EngineError):
    """The engine died or could not be built: one and the same object ends everything that was under way."""


@dataclass(frozen=True)
class EngineFacts:
    """What the loop needs to know about an engine, without touching it."""

    name: str
    version: str
    max_model_len: int
    vocab_size: int
    logprobs_mode: str

    @classmethod
    def of(cls, engine: Engine) -> EngineFacts:
        return cls(engine.name, engine.version, engine.max_model_len, engine.vocab_size, engine.logprobs_mode)


class EngineOwner(Protocol):
    """Whoever owns an engine for the rest of the worker: :class:`EngineThread`, or ``engines.process.EngineProcess``.

    All may be called from any thread. The engine is built when it is first needed, kept warm, and built anew after it
    died. A future ends with its result, with :class:`RequestRefused` (this request only), with :class:`EngineLost`
    (the engine died, or cannot be built: all of them) or with :class:`EngineClosed`.
    """

    tokens: int
    """Sampled so far, for the throughput that a page shows."""

    def submit(self, request: GenerationRequest) -> Future[Generation]: ...

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; their futures are cancelled before the engine's next step."""
        ...

    def call(self, work: Callable[[Any], Result]) -> Future[Result]:
        """``work(engine)`` between two steps; the future ends with what it gives or raises."""
        ...

    def ask_facts(self) -> Future[EngineFacts]:
        """What the engine is; it is built whoever still waits for the answer."""
        ...

    def close(self, timeout: float | None = 30) -> None:
        """Fail what is under way with :class:`EngineClosed` and free the engine."""
        ...


@dataclass(eq=False)
class _Submitted:
    request: GenerationRequest
    future: Future[Generation]


@dataclass(eq=False)
class _Call:
    work: Callable[[Engine], Any]
    future: Future[Any]


class EngineThread:
    """An :class:`EngineOwner` with the engine in a thread of this process.

    ``on_lost`` hears of a death before those do who wait.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        name: str = "engine",
        on_lost: Callable[[EngineLost], None] = lambda error: None,
    ) -> None:
        self._build, self._name, self._on_lost = build, name, on_lost
        self._wake = threading.Condition()
        self._inbox: deque[_Submitted] = deque()
        self._aborts: deque[str] = deque()
        self._calls: deque[_Call] = deque()
        self._closing = False
        self._thread: threading.Thread | None = None
        self.tokens = 0

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        future: Future[Generation] = Future()
        with self._wake:
            self._start()
            self._inbox.append(_Submitted(request, future))
            self._wake.notify()
        return future

    def abort(self, request_ids: Iterable[str]) -> None:
        with self._wake:
            self._aborts.extend(request_ids)
            self._wake.notify()

    def call(self, work: Callable[[Any], Result]) -> Future[Result]:
        future: Future[Result] = Future()
        with self._wake:
            self._start()
            self._calls.append(_Call(work, future))
            self._wake.notify()
        return future

    def ask_facts(self) -> Future[EngineFacts]:
        return self.call(EngineFacts.of)

    def close(self, timeout: float | None = 30) -> None:
        with self._wake:
            self._closing = True
            self._wake.notify()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout)

    def _start(self) -> None:
        if self._closing:
            raise EngineClosed("The engine is shutting down.")
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"{self._name}-owner", daemon=True)
            self._thread.start()

    # -- the owning thread ---------------------------------------------------------------------------------------------

    def _run(self) -> None:
        engine: Engine | None = None
        live: dict[str, _Submitted] = {}
        while True:
            with self._wake:
                while not (self._closing or self._inbox or self._aborts or self._calls or live):
                    self._wake.wait()
                arrived, aborted, calls = list(self._inbox), list(self._aborts), list(self._calls)
                self._inbox.clear()
                self._aborts.clear()
                self._calls.clear()
                closing = self._closing
            live.update((one.request.request_id, one) for one in arrived)
            if closing:
                self._fail(live, calls, EngineClosed("The engine was shut down before the completion was finished."))
                _close(engine)
                return
            try:
                if engine is None and (arrived or calls):
                    engine = self._build()
                    log.info("engine ready name=%s version=%s", engine.name, engine.version)
                if engine is not None:
                    while calls:
                        _answer(calls.pop(0), engine)
                    self._advance(engine, live, arrived, aborted)
            except Exception as error:
                log.exception("engine lost name=%s", self._name)
                sentence = str(error) if isinstance(error, EngineError) else f"The engine died: {reason(error)}"
                lost = EngineLost(sentence)
                self._on_lost(lost)
                self._fail(live, calls, lost)
                _close(engine)
                engine = None

    def _advance(
        self, engine: Engine, live: dict[str, _Submitted], arrived: list[_Submitted], aborted: list[str]
    ) -> None:
        for one in arrived:
            try:
                engine.add(one.request)
            except RequestRefused as error:
                del live[one.request.request_id]
                one.future.set_exception(error)
        dropped = 0
        for request_id in aborted:
            one_live = live.get(request_id)
            if one_live is not None:
                engine.abort(request_id)
                del live[request_id]
                one_live.future.cancel()
                dropped += 1
        if dropped:
            log.info("requests dropped name=%s n=%d left=%d", self._name, dropped, len(live))
        if not live:
            return
        if not engine.has_unfinished():
            raise EngineError("The engine lost requests: it says it is idle while completions are due.")
        for generation in engine.step():
            done = live.get(generation.request_id)
            if done is None:
                continue
            check_generation(generation, done.request, engine.vocab_size)
            del live[generation.request_id]
            self.tokens += len(generation.completion_ids)
            done.future.set_result(generation)

    @staticmethod
    def _fail(live: dict[str, _Submitted], calls: list[_Call], error: EngineError) -> None:
        due: list[_Submitted | _Call] = [*live.values(), *calls]
        for one in due:
            one.future.set_exception(error)
        live.clear()


def _answer(call: _Call, engine: Engine) -> None:
    try:
        result = call.work(engine)
    except Exception as error:
        call.future.set_exception(error)
    else:
        call.future.set_result(result)


def _close(engine: Engine | None) -> None:
    if engine is None:
        return
    try:
        engine.close()
    except Exception:
        log.warning("engine did not close cleanly", exc_info=True)
