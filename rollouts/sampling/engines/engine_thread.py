"""What drives an engine, and the owner whose engine runs in a thread of this process."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

from rollouts.sampling.engines import reason
from rollouts.sampling.engines.engine_owner import EngineClosed, EngineLost, EngineNotBuilt, EngineOwner, Life
from rollouts.sampling.engines.protocol import Engine, EngineError, GenerationRequest, RequestRefused, check_generation

log = logging.getLogger(__name__)


class EngineDriver:
    """What is done with an engine, all of it in one thread. The caller chooses a key for each thing it asks.
    ``tell(key, kind, value)`` reports how it ended: ``done`` with a result, ``failed`` with an exception, or
    ``cancelled``."""

    def __init__(self, build: Callable[[], Engine], name: str, tell: Callable[[Any, str, Any], None]) -> None:
        """Builds the engine. Raises :class:`EngineNotBuilt`."""
        self._name, self._tell = name, tell
        self._live: dict[str, tuple[Any, GenerationRequest]] = {}
        self._arrived: list[GenerationRequest] = []
        self._aborted: list[str] = []
        self._calls: list[tuple[Any, Callable[[Engine], Any]]] = []
        self._engine: Engine | None = None
        try:
            self._engine = build()
            log.info("engine ready name=%s version=%s", self._engine.name, self._engine.version)
            return
        except Exception as error:
            log.exception("engine not built name=%s", name)
            failed = EngineNotBuilt(_sentence(error))
        raise failed

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
        """Do what was taken and let every request grow by a step. Raises :class:`EngineLost` when the engine died."""
        assert self._engine is not None
        try:
            self._turn(self._engine)
            return
        except Exception as error:
            log.exception("engine lost name=%s", self._name)
            lost = EngineLost(_sentence(error))
        # Outside the handler, because the traceback of the error would keep the dead engine in memory.
        self.close()
        raise lost

    def close(self) -> None:
        """Free the engine."""
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
        aborted, self._aborted = self._aborted, []
        dropped = [request_id for request_id in aborted if request_id in self._live]
        for request_id in dropped:
            engine.abort(request_id)
            self._tell(self._live.pop(request_id)[0], "cancelled", None)
        if dropped:
            log.info("requests dropped name=%s n=%d left=%d", self._name, len(dropped), len(self._live))
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


def _sentence(error: Exception) -> str:
    return str(error) if isinstance(error, EngineError) else f"The engine died: {reason(error)}"


class EngineThread(EngineOwner):
    """An :class:`EngineOwner` whose engine runs in a thread of this process. Each life of the engine is one thread."""

    def _begin(self) -> Life:
        return _ThreadLife(self)

    def _packed(self, message: tuple[str, int | None, Any] | None) -> Any:
        return message

    def _run(self, inbox: SimpleQueue[tuple[str, int | None, Any] | None]) -> None:
        try:
            driver = EngineDriver(self._build, self._name, self._told)
        except EngineNotBuilt as error:
            self._ended(error)
            return
        self._ready()
        lost: EngineError = EngineClosed()
        try:
            while (message := inbox.get()) is not None:
                driver.take(*message)
                while inbox.empty() and not driver.is_idle():
                    driver.turn()
        except EngineLost as error:
            lost = error
        driver.close()
        self._ended(lost)


class _ThreadLife:
    def __init__(self, owner: EngineThread) -> None:
        self._inbox: SimpleQueue[tuple[str, int | None, Any] | None] = SimpleQueue()
        self.send = self._inbox.put
        self._thread = threading.Thread(
            target=owner._run, args=(self._inbox,), name=f"{owner._name}-owner", daemon=True
        )
        self._thread.start()

    def end(self, timeout: float | None) -> None:
        if self._thread is not threading.current_thread():
            self._thread.join(timeout)
