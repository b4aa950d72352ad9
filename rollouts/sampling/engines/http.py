"""What the HTTP engines share: many requests in flight from one thread, retries, deadlines, an allow-list of hosts."""

import asyncio
import json
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Collection, Sequence
from itertools import count
from typing import Any, TypeVar
from urllib.parse import urlsplit

import numpy as np

from rollout_inspector.streams.trajectory import Floats, Ids
from rollouts.sampling.engines.protocol import EngineError, Generation, GenerationRequest, RequestRefused, check_request

T = TypeVar("T")

TRIES = 4  # The least number of tries. A server that is lost or busy is asked again until the patience is used up.
PATIENCE_SECONDS = 120.0  # How long a server may be away: about the time that one needs to restart with its model.
FIRST_WAIT_SECONDS = 0.25  # The wait before the second try; doubled after each further one.
MAX_WAIT_SECONDS = 10.0
CONNECT_SECONDS = 5.0
ANSWER_SECONDS = 600.0  # The longest wait for one completion, queueing at the server included.
PROBE_SECONDS = 15.0
STEP_SECONDS = 0.05
"""How long one ``step`` waits for an answer. It is short, so that aborts and new requests do not wait."""
MAX_ANSWER_BYTES = 64 << 20
BUSY = frozenset({429, 502, 503, 504})  # The HTTP statuses of a server, or a proxy, that will answer again later.

log = logging.getLogger(__name__)


class ServerAnswer(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status, self.text = status, text


def check_host(url: str, allowed_hosts: Collection[str]) -> str:
    """The URL without a trailing slash. Raises :class:`EngineError` unless it is http(s) to an allowed host."""
    try:
        parts = urlsplit(url)
    except ValueError:  # brackets without an address in them
        parts = urlsplit("")
    host = (parts.hostname or "").lower()
    if parts.scheme not in ("http", "https") or not host or parts.username or parts.query or parts.fragment:
        raise EngineError(f"{url!r} is not a server address. Write it as http://HOST:PORT.")
    if host not in {name.lower() for name in allowed_hosts}:
        raise EngineError(f"The host {host} is not allowed. Add it to INSPECTOR_ENGINE_HOSTS to use it.")
    return url.rstrip("/")


class HttpEngine(ABC):
    """Base of the engines that ask a server. Each request is one asyncio task; ``step`` runs the loop for a moment. A
    subclass asks for one completion in :meth:`_ask` and drops one in :meth:`_drop`."""

    name = "http"
    logprobs_mode = "raw"
    version = ""
    max_model_len = 0

    def __init__(
        self,
        url: str,
        vocab_size: int,
        model: str = "",
        allowed_hosts: Collection[str] = ("localhost", "127.0.0.1", "::1"),
        api_key: str = "",
        max_model_len: int = 0,
        logprobs_mode: str = "",
        max_live: int = 256,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        import aiohttp

        self.url = check_host(url, allowed_hosts)
        self.model, self.vocab_size = model, vocab_size
        self.logprobs_mode = logprobs_mode or self.logprobs_mode
        self._patience = patience
        self._loop = asyncio.new_event_loop()
        self._tasks: dict[str, asyncio.Task[Generation]] = {}
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}

        async def session() -> aiohttp.ClientSession:
            return aiohttp.ClientSession(
                headers=headers,
                connector=aiohttp.TCPConnector(limit=max_live),
                # A redirect could lead to a host that is not allowed, so none is followed (see _call).
                timeout=aiohttp.ClientTimeout(total=ANSWER_SECONDS, sock_connect=CONNECT_SECONDS),
                trust_env=False,
            )

        self._session = self._run(session())
        try:
            self._run(self._connect())
        except BaseException:
            self.close()
            raise
        self.max_model_len = max_model_len or self.max_model_len
        if not self.max_model_len:
            self.close()
            raise EngineError(f"The server at {self.url} does not report its context length. Set max_model_len.")

    # -- the protocol --------------------------------------------------------------------------------------------------

    def add(self, request: GenerationRequest) -> None:
        check_request(request, self.vocab_size, self.max_model_len)
        self._tasks[request.request_id] = self._loop.create_task(self._ask(request))

    def step(self) -> list[Generation]:
        if not self._tasks:
            return []
        self._run(asyncio.wait(self._tasks.values(), timeout=STEP_SECONDS, return_when=asyncio.FIRST_COMPLETED))
        finished: list[Generation] = []
        for request_id, task in list(self._tasks.items()):
            if not task.done() or (finished and task.exception()):
                continue  # a step with nothing to return raises the error
            del self._tasks[request_id]
            try:
                finished.append(task.result())
            except RequestRefused as error:
                error.request_id = request_id
                raise
        return finished

    def abort(self, request_id: str) -> None:
        task = self._tasks.pop(request_id, None)
        if task is not None:
            task.cancel()  # closes the connection, by which vLLM learns of it
            self._run(asyncio.wait([task, self._loop.create_task(self._drop(request_id))], timeout=1.0))

    def score(self, streams: Sequence[Ids]) -> list[Floats]:
        """The log-probabilities ``[T]`` of each stream at temperature 1; the first is NaN: nothing stands before it.
        Each stream must be shorter than ``max_model_len``. Raises :class:`RequestRefused` for a stream that the server
        refuses, and :class:`EngineError` where the server does not answer or returns no scores."""

        async def all_of_them() -> list[Floats]:
            return list(await asyncio.gather(*map(self._score, streams)))

        return self._run(all_of_them())

    async def _score(self, ids: Ids) -> Floats:
        path, body, read = self._scoring(ids)
        answer = await self._answer(path, body, lambda found: found)
        try:
            values = np.array(
                [np.nan if logprob is None else float(logprob) for logprob in read(answer) or ()], dtype=np.float32
            )
        except (KeyError, IndexError, TypeError, ValueError, AttributeError):
            values = np.zeros(0, dtype=np.float32)
        if len(values) != len(ids):
            raise EngineError(
                f"The server at {self.url} returns no log-probability for each token of a prompt, so it cannot score. "
                "Choose another engine, or a newer server."
            )
        values[:1] = np.nan
        return values

    def has_unfinished(self) -> bool:
        return bool(self._tasks)

    def close(self) -> None:
        if self._loop.is_closed():
            return
        for task in self._tasks.values():
            task.cancel()
        if self._tasks:
            self._run(asyncio.wait(self._tasks.values(), timeout=1.0))
        self._tasks.clear()
        self._run(self._session.close())
        self._loop.close()

    # -- for a subclass to define --------------------------------------------------------------------------------------

    @abstractmethod
    async def _connect(self) -> None:
        """Learn version, context length and the address that answers with ids. Raises :class:`EngineError`."""

    @abstractmethod
    async def _ask(self, request: GenerationRequest) -> Generation: ...

    @abstractmethod
    def _read(self, answer: Any, request: GenerationRequest) -> Generation:
        """An answer as a generation. Raises :class:`EngineError` when ids or log-probabilities are missing."""

    @abstractmethod
    def _scoring(self, ids: Ids) -> tuple[str, Any, Callable[[Any], Sequence[Any] | None]]:
        """How a stream is scored: an address, a body, and what reads the values ``[T]`` of the answer. Where the answer
        holds no values, reading returns None or raises ``KeyError``, ``TypeError`` and the like."""

    async def _drop(self, request_id: str) -> None:  # noqa: B027  closing the connection is enough for most
        """Tell the server that the completion is no longer wanted, where closing the connection does not."""

    # -- for a subclass to use -----------------------------------------------------------------------------------------

    def _run(self, awaitable: Awaitable[T]) -> T:
        async def wait() -> T:
            return await awaitable

        return self._loop.run_until_complete(wait())

    async def _call(self, path: str, body: Any = None, timeout: float = ANSWER_SECONDS) -> Any:
        """POST ``body`` (GET without it) and decode JSON. Raises :class:`ServerAnswer`, ``OSError``, ``ValueError``."""
        import aiohttp

        method = "GET" if body is None else "POST"
        limit = aiohttp.ClientTimeout(total=timeout, sock_connect=CONNECT_SECONDS)
        async with self._session.request(
            method, self.url + path, json=body, allow_redirects=False, timeout=limit
        ) as answer:
            raw = bytearray()
            async for part in answer.content.iter_any():  # a long answer arrives in many parts
                raw += part
                if len(raw) > MAX_ANSWER_BYTES:
                    raise ServerAnswer(413, f"the answer is larger than {MAX_ANSWER_BYTES >> 20} MB")
            if answer.status != 200:
                raise ServerAnswer(answer.status, message_of(raw))
        return json.loads(raw)

    async def _generate(self, path: str, body: Any, request: GenerationRequest) -> Generation:
        """Ask for a completion; ask again after a lost connection, or while the server is busy or restarts."""

        def read(answer: Any) -> Generation:
            generation = self._read(answer, request)
            if generation.finish_reason in ("stop", "length"):
                return generation
            # A server that shuts down or loads other weights drops its completions and says so.
            raise ServerAnswer(503, f"the server dropped it ({generation.finish_reason or 'no reason'})")

        return await self._answer(path, body, read)

    async def _answer(self, path: str, body: Any, read: Callable[[Any], T]) -> T:
        """What ``read`` makes of an answer. Asks again after a lost connection, or while the server is away."""
        import aiohttp

        wait, began = FIRST_WAIT_SECONDS, time.monotonic()
        for attempt in count(1):
            patient = attempt < TRIES or time.monotonic() - began < self._patience
            try:
                return read(await self._call(path, body))
            except ServerAnswer as error:
                if error.status in (400, 404, 413, 422):
                    raise RequestRefused(f"The server refused the request ({error}).") from error
                again = attempt < TRIES if error.status in (408, 500) else patient and error.status in BUSY
                if not again:
                    raise EngineError(f"The server at {self.url} answered {error}") from error
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                if not patient:
                    kind = (
                        "did not answer in time" if isinstance(error, TimeoutError) else f"cannot be reached ({error})"
                    )
                    raise EngineError(
                        f"The server at {self.url} {kind}; {attempt} tries in "
                        f"{time.monotonic() - began:.0f} seconds. Check that it runs."
                    ) from error
            except ValueError as error:
                raise EngineError(f"The server at {self.url} sent an answer that is not JSON.") from error
            if attempt == TRIES:
                log.warning("server does not answer; asking on url=%s for=%gs", self.url, self._patience)
            await asyncio.sleep(wait)
            wait = min(wait * 2, MAX_WAIT_SECONDS)
        raise AssertionError("unreachable")

    async def _first(self, path: str, pick: Callable[[Any], Any], default: Any = None) -> Any:
        """One value from a GET, or ``default`` if the server lacks it. Raises :class:`EngineError` if unanswered."""
        import aiohttp

        try:
            return pick(await self._call(path, timeout=PROBE_SECONDS))
        except (ServerAnswer, KeyError, IndexError, TypeError, ValueError):
            return default
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise EngineError(
                f"No server answers at {self.url} ({error}). Start it, or correct the address."
            ) from error


def message_of(raw: bytes | bytearray) -> str:
    """The sentence in an error body of any of the usual shapes, shortened."""
    text = raw.decode("utf-8", "replace")
    try:
        body = json.loads(text)
    except ValueError:
        return text.strip()[:300]
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and key in body:
            body = body[key]
    return (body if isinstance(body, str) else json.dumps(body))[:300]
