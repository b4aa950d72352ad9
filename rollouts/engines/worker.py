"""One thread owns one engine; every other thread hands it requests and gets futures, so that all share one batch."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass

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


class EngineClosed(EngineError):
    """The worker is shutting down; the work can be taken up again by another one."""


@dataclass(frozen=True)
class EngineFacts:
    """What the loop needs to know about an engine, without touching it."""

    name: str
    version: str
    max_model_len: int
    vocab_size: int
    logprobs_mode: str


@dataclass(eq=False)
class _Submitted:
    request: GenerationRequest
    future: Future[Generation]


class EngineThread:
    """Builds its engine when the first request comes, keeps it warm, and builds it anew after it died.

    ``submit`` and ``abort`` may be called from any thread. A future ends with a :class:`Generation`, with
    :class:`RequestRefused` (this request only), or with :class:`EngineError` (the engine died: all of them).
    """

    def __init__(self, build: Callable[[], Engine], name: str = "engine") -> None:
        self._build, self._name = build, name
        self._wake = threading.Condition()
        self._inbox: deque[_Submitted] = deque()
        self._aborts: deque[str] = deque()
        self._wanted = False
        self._closing = False
        self._thread: threading.Thread | None = None
        self._facts: EngineFacts | None = None
        self._facts_waiting: list[Future[EngineFacts]] = []
        self.tokens = 0
        """Sampled so far, for the throughput that a page shows."""

    def facts(self, timeout: float | None = None) -> EngineFacts:
        """What the engine is; builds it if need be. Raises :class:`EngineError` when it cannot be built."""
        return self.ask_facts().result(timeout)

    def ask_facts(self) -> Future[EngineFacts]:
        """:meth:`facts` for a caller that may lose its patience: the engine is built whoever still waits for it."""
        future: Future[EngineFacts] = Future()
        with self._wake:
            self._start()
            self._facts_waiting.append(future)
            self._wake.notify()
        return future

    def submit(self, request: GenerationRequest) -> Future[Generation]:
        future: Future[Generation] = Future()
        with self._wake:
            self._start()
            self._inbox.append(_Submitted(request, future))
            self._wake.notify()
        return future

    def abort(self, request_ids: Iterable[str]) -> None:
        """Drop requests; their futures are cancelled before the engine's next step."""
        with self._wake:
            self._aborts.extend(request_ids)
            self._wake.notify()

    def close(self, timeout: float | None = 30) -> None:
        """Fail what is under way with :class:`EngineClosed`, free the engine and end the thread."""
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
                while not (self._closing or self._inbox or self._aborts or self._facts_waiting or live):
                    self._wake.wait()
                arrived, aborted, asked = list(self._inbox), list(self._aborts), self._facts_waiting
                self._inbox.clear()
                self._aborts.clear()
                self._facts_waiting = []
                closing = self._closing
            live.update((one.request.request_id, one) for one in arrived)
            if closing:
                self._fail(live, asked, EngineClosed("The engine was shut down before the completion was finished."))
                _close(engine)
                return
            try:
                if engine is None and (arrived or asked):
                    engine = self._build()
                    self._facts = EngineFacts(
                        engine.name, engine.version, engine.max_model_len, engine.vocab_size, engine.logprobs_mode
                    )
                    log.info("engine ready name=%s version=%s", engine.name, engine.version)
                for future in asked:
                    assert self._facts is not None
                    future.set_result(self._facts)
                asked = []
                if engine is not None:
                    self._advance(engine, live, arrived, aborted)
            except Exception as error:
                log.exception("engine lost name=%s", self._name)
                sentence = str(error) if isinstance(error, EngineError) else f"The engine died: {reason(error)}"
                self._fail(live, asked, EngineError(sentence))
                _close(engine)
                engine = self._facts = None

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
            one_live = live.pop(request_id, None)
            if one_live is not None:
                engine.abort(request_id)
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
    def _fail(live: dict[str, _Submitted], asked: list[Future[EngineFacts]], error: EngineError) -> None:
        waiting: list[Future[Generation] | Future[EngineFacts]] = [one.future for one in live.values()]
        for future in [*waiting, *asked]:
            future.set_exception(error)
        live.clear()


def _close(engine: Engine | None) -> None:
    if engine is None:
        return
    try:
        engine.close()
    except Exception:
        log.warning("engine did not close cleanly", exc_info=True)
