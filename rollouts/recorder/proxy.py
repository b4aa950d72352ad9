"""The reverse proxy: passes requests to the server and answers back, and keeps a copy of each call for the writer. An
answer is on its way to the client before anything is done with its copy."""

import asyncio
import contextlib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

from rollout_inspector.diagnose.trajectory_end import TrajectoryEnd
from rollout_inspector.formats.shapes import MAX_NUMBER
from rollouts.recorder import access, wire
from rollouts.recorder.sessions import Caller, SessionNames, session_of_key, tidy_name
from rollouts.recorder.wire import DIALECTS, NO_TOKENS, Dialect
from rollouts.recorder.writer import Call, Writer

MAX_CALLS = 4096  # Above this number, requests wait for the database.
MAX_BYTES = 1 << 30  # Of requests and answers. One call alone may be larger; answers that have begun go on beyond it.


class Room:
    """Who finds no room waits until calls are stored. For one event loop."""

    def __init__(self) -> None:
        self.n_calls = self.n_bytes = 0
        self._freed = asyncio.Event()

    async def take(self, n_bytes: int) -> None:
        """Wait for the room of a call whose request has so many bytes."""
        while self.n_calls and (self.n_calls >= MAX_CALLS or self.n_bytes + n_bytes > MAX_BYTES):
            self._freed.clear()
            await self._freed.wait()
        self.n_calls += 1
        self.n_bytes += n_bytes

    def grow(self, n_bytes: int) -> None:
        """A call has become so much larger, or smaller."""
        self.n_bytes += n_bytes

    def free(self, n_calls: int, n_bytes: int) -> None:
        """So many calls are stored or let go."""
        self.n_calls -= n_calls
        self.n_bytes -= n_bytes
        self._freed.set()


log = logging.getLogger(__name__)

SESSION_PATH = "/session/"
"""`/session/NAME/v1/...` is `/v1/...` of that session, for a harness that can change only its base URL."""
RECORDER_PATH = "/recorder"
MAX_HEADER_BYTES = 1 << 17  # The longest header: harnesses describe their turn in one.
PASSED_BELOW = ("/v1/", "/inference/v1/")
PASSED = ("/generate", "/health", "/version", "/tokenize", "/detokenize")
"""The addresses that the server may be asked: all below the first ones, and the others exactly."""
MAX_BODY_BYTES = 256 << 20
BODY_SECONDS = 120.0  # How long a client may take to send the body of a call: its room is taken from others meanwhile.
IDLE_SECONDS = 120  # How long a connection may be without a whole head of a request.
NOT_PASSED = frozenset(
    ("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
     "upgrade", "host", "content-length", "proxy-connection", "expect", access.TOKEN_HEADER.lower())
)
STREAM_TYPE = "text/event-stream"


def _headers(found: Mapping[str, str]) -> CIMultiDict[str]:
    """The headers that are passed on: all except the recorder's token and those about a single connection."""
    connection_names = {name.strip().lower() for name in found.get("Connection", "").split(",")}
    headers: CIMultiDict[str] = CIMultiDict()
    for name, value in found.items():
        if name.lower() not in NOT_PASSED and name.lower() not in connection_names:
            headers.add(name, value)
    return headers


def _begun(upstream: aiohttp.ClientResponse) -> web.StreamResponse:
    """The start of an answer, with the server's status and headers."""
    return web.StreamResponse(status=upstream.status, reason=upstream.reason, headers=_headers(upstream.headers))


@contextlib.contextmanager
def _cut_when_broken(request: web.Request) -> Iterator[None]:
    """Close the connection when an answer that has begun cannot be finished, so that no client waits for more."""
    try:
        yield
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        log.warning("answer broken off: %r", error)
        if request.transport is not None:
            request.transport.close()


def _refuse(status: int, sentence: str) -> web.Response:
    """An error in the shape that OpenAI's clients expect."""
    body = {"error": {"message": sentence, "type": "recorder", "code": status}}
    return web.json_response(body, status=status)


class Recorder:
    """The proxy's application, with one upstream server and one writer. Clients name ``token``; empty = none."""

    def __init__(self, upstream: str, logprobs: bool = False, token: str = "") -> None:
        self.upstream = upstream.rstrip("/").removesuffix("/v1")
        self.logprobs, self.token = logprobs, token
        self.writer: Writer | None = None
        self._room = Room()
        self._names = SessionNames()
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def stored(self, n_calls: int, n_bytes: int) -> None:
        """Make room for more calls. The writer's thread calls it when calls are stored."""
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._room.free, n_calls, n_bytes)

    def runner(self, shutdown_seconds: float) -> web.AppRunner:
        """What serves the application."""
        return web.AppRunner(
            self.application(), handler_cancellation=True, shutdown_timeout=shutdown_seconds, access_log=None,
            max_field_size=MAX_HEADER_BYTES, keepalive_timeout=IDLE_SECONDS,
            auto_decompress=False,  # a packed body passes packed
        )

    def application(self) -> web.Application:
        app = web.Application(client_max_size=MAX_BODY_BYTES)
        app.router.add_route("*", "/{path:.*}", self.handle)
        app.cleanup_ctx.append(self._connect)
        return app

    async def _connect(self, _: web.Application) -> Any:
        self._loop = asyncio.get_running_loop()
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=4),  # vLLM keeps a connection for 5 s
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=10),
            trust_env=False,
            # A line of a stream may hold the ids of a long prompt.
            read_bufsize=1 << 20,
        )
        yield
        await self._session.close()

    # -- requests ------------------------------------------------------------------------------------------------------

    async def handle(self, request: web.Request) -> web.StreamResponse:
        path, _, query = request.raw_path.partition("?")
        if sentence := access.foreign(request):
            return _refuse(403, sentence)
        token, path = access.named_token(request, path)
        if not access.is_token(token, self.token):
            return _refuse(
                401, f"Name the token in the header {access.TOKEN_HEADER}, or as .../token/TOKEN/v1 in the base URL.",
            )
        if path == RECORDER_PATH or path.startswith(f"{RECORDER_PATH}/"):
            return await self._recorder_page(request, unquote(path))
        of_address = ""
        if path.startswith(SESSION_PATH):
            name, slash, path_left = path[len(SESSION_PATH) :].partition("/")
            path, of_address = slash + path_left, unquote(name)
        plain = unquote(path).replace("\\", "/")
        if not (path.startswith(PASSED_BELOW) or path in PASSED) or {".", ".."} & set(plain.split("/")):
            addresses = ", ".join(PASSED_BELOW + PASSED)
            return _refuse(404, f"The recorder passes {addresses} on to the server, and nothing else.")
        url = URL(self.upstream + path + (f"?{query}" if query else ""), encoded=True)
        try:
            headers = _headers(request.headers)
            of_key, authorization = session_of_key(headers.get("Authorization", ""))
            if of_key:
                headers.popall("Authorization")
                if authorization:
                    headers["Authorization"] = authorization
            if request.method == "POST" and path in DIALECTS:
                caller = self._names.caller(request.headers, of_address, of_key)
                return await self._record(request, url, DIALECTS[path], headers, caller)
            answer = await self._pass(request, url, headers)
            if request.method == "POST" and answer.status < 400 and not path.endswith(NO_TOKENS):
                assert self.writer is not None
                self.writer.missed(path)
            return answer
        except web.HTTPRequestEntityTooLarge:
            return _refuse(413, f"The request is larger than {MAX_BODY_BYTES >> 20} MB.")
        except (aiohttp.ClientConnectionResetError, ConnectionResetError):
            raise  # the client has gone
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:  # a head that cannot be passed on
            log.warning("upstream does not answer: %r", error)
            return _refuse(502, f"The server at {self.upstream} does not answer ({error}). Is it running?")

    async def _pass(self, request: web.Request, url: URL, headers: CIMultiDict[str]) -> web.StreamResponse:
        """Pass everything on untouched, both ways."""
        assert self._session is not None
        body = request.content if request.body_exists else None
        if "Content-Length" in request.headers:
            headers["Content-Length"] = request.headers["Content-Length"]
        async with self._session.request(
            request.method, url, data=body, headers=headers, allow_redirects=False
        ) as upstream:
            return await self._copy(request, upstream)

    async def _copy(
        self, request: web.Request, upstream: aiohttp.ClientResponse, first: bytes | bytearray = b""
    ) -> web.StreamResponse:
        """Pass an answer on as it comes; ``first`` was read before."""
        response = _begun(upstream)
        if upstream.content_length is not None:
            response.content_length = upstream.content_length
        await response.prepare(request)
        with _cut_when_broken(request):
            await response.write(first)
            async for piece in upstream.content.iter_any():
                await response.write(piece)
            await response.write_eof()
        return response

    async def _record(
        self, request: web.Request, url: URL, dialect: Dialect, headers: CIMultiDict[str], caller: Caller
    ) -> web.StreamResponse:
        assert self._session is not None and self.writer is not None
        declared = min(request.content_length or 0, MAX_BODY_BYTES)
        await self._room.take(declared)
        try:
            async with asyncio.timeout(BODY_SECONDS):
                body = await request.read()
            amended = wire.amend(dialect, body, self.logprobs)
        except TimeoutError:
            self._room.free(1, declared)
            return _refuse(408, f"The request did not come to its end in {BODY_SECONDS:.0f} seconds.")
        except BaseException:
            self._room.free(1, declared)
            raise
        self._room.grow(len(body) - declared)
        if amended is not None:
            headers["Accept-Encoding"] = "identity"
        session, agent = caller
        call = Call(session, body, dialect, agent)
        try:
            async with self._session.post(
                url, data=amended[0] if amended else body, headers=headers, allow_redirects=False
            ) as upstream:
                encoded = upstream.headers.get("Content-Encoding", "identity").lower() != "identity"
                if amended is None or upstream.status != 200 or encoded:
                    if upstream.status == 200:
                        call.problem = (
                            "its request is packed, or no JSON object." if amended is None
                            else "the server compressed its answer although it was asked not to."
                        )
                    return await self._copy(request, upstream)
                if upstream.content_type == STREAM_TYPE:
                    return await self._stream(request, upstream, amended[1], call)
                return await self._whole(request, upstream, amended[1], call)
        finally:
            # Also runs when the client has gone, which cancels this task: nothing here waits.
            if call.answer or call.problem:
                self.writer.take(call)
            else:  # an error, or no answer came
                self._room.free(1, call.n_bytes)

    async def _whole(
        self, request: web.Request, upstream: aiohttp.ClientResponse, added: Sequence[str], call: Call
    ) -> web.StreamResponse:
        body = bytearray()
        async for piece in upstream.content.iter_any():
            body += piece
            self._room.grow(len(piece))
            if not call.keeps(len(piece)):
                return await self._copy(request, upstream, body)
        call.answer = answer = bytes(body)
        response = web.Response(
            status=upstream.status, reason=upstream.reason, headers=_headers(upstream.headers),
            body=wire.strip(answer, added),
        )
        await response.prepare(request)
        await response.write_eof()
        return response

    async def _stream(
        self, request: web.Request, upstream: aiohttp.ClientResponse, added: Sequence[str], call: Call
    ) -> web.StreamResponse:
        response = _begun(upstream)
        await response.prepare(request)
        payloads: list[bytes] = []
        call.answer, call.broken_off = payloads, True
        events = wire.Events()
        with _cut_when_broken(request):
            async for piece in upstream.content.iter_any():
                out = []
                for event in events.feed(piece):
                    event_payload = wire.payload(event)
                    if event_payload is None:
                        out.append(event)
                        continue
                    self._room.grow(len(event_payload))
                    if call.keeps(len(event_payload)):
                        payloads.append(event_payload)
                    stripped = wire.strip(event_payload, added)
                    if stripped:  # an unchanged event keeps its bytes
                        out.append(event.replace(event_payload, stripped, 1))
                if out:
                    await response.write(b"".join(out))
            call.broken_off = False
            if remainder := events.end():
                await response.write(remainder)
            await response.write_eof()
        return response

    # -- the recorder's own addresses ----------------------------------------------------------------------------------

    async def _recorder_page(self, request: web.Request, path: str) -> web.Response:
        """`GET /recorder` shows the recorder's state. `POST /recorder/sessions/NAME` ends a session."""
        assert self.writer is not None
        if request.method == "GET" and path == RECORDER_PATH:
            return web.json_response({"run": self.writer.run.code, "upstream": self.upstream, **self.writer.state()})
        name = tidy_name(path.removeprefix(f"{RECORDER_PATH}/sessions/"))
        if request.method != "POST" or not path.startswith(f"{RECORDER_PATH}/sessions/") or not name:
            return _refuse(404, "There are GET /recorder and POST /recorder/sessions/NAME.")
        try:
            end = json.loads(await request.read() or b"{}")
            reward, stop_reason = end.get("reward"), end.get("stop_reason") or ""
            reward = None if reward is None else float(reward)
            if not isinstance(stop_reason, str) or "\0" in stop_reason or not abs(reward or 0) <= MAX_NUMBER:
                raise ValueError
            stop_reason.encode()
        except (ValueError, TypeError, AttributeError, RecursionError, OverflowError):
            return _refuse(400, 'Send the end of the session as {"reward": 1.0, "stop_reason": "answered"}.')
        self.writer.take(TrajectoryEnd(name, reward=reward, stop_reason=stop_reason))
        return web.json_response({"run": self.writer.run.code, "session": name})
