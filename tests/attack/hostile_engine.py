"""A server of a model that answers as a test tells it to: in raw bytes, without an end, or in odd shapes."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

from tests.recorder.harness import FakeServer

Say = Callable[[web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class HostileEngine(FakeServer):
    """What it says to the next calls of the session `bad`; all others are answered rightly."""

    say: list[Say] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if request.headers.get("X-Session-Id") != "bad":
            return await super().answer(request)
        await request.read()
        answer = await self.say.pop(0)(request)
        if answer is None:
            assert request.transport is not None
            request.transport.close()
        return answer or web.Response()


def raw(data: bytes) -> Say:
    """These bytes, and the end of the connection."""

    async def say(request: web.Request) -> None:
        assert request.transport is not None
        request.transport.write(data)
        await asyncio.sleep(0.05)

    return say


def body(value: Any, **headers: str) -> Say:
    """A whole answer of JSON."""

    async def say(request: web.Request) -> web.StreamResponse:
        data = value if isinstance(value, bytes) else json.dumps(value).encode()
        return web.Response(body=data, content_type="application/json", headers=headers)

    return say


def pieces(content_type: str, piece: bytes, n: int, first: bytes = b"") -> Say:
    """One piece again and again, as fast as it is taken."""

    async def say(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": content_type})
        await response.prepare(request)
        await response.write(first)
        for _ in range(n):
            await response.write(piece)
        return response

    return say


def events(*values: Any) -> Say:
    """A stream of these events."""
    lines = b"".join(b"data: " + (v if isinstance(v, bytes) else json.dumps(v).encode()) + b"\n\n" for v in values)
    return pieces("text/event-stream", lines, 1)
