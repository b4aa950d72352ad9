"""A server that answers as vLLM does, and a recorder in front of it, in one event loop."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from aiohttp.test_utils import TestServer

from rollouts.recorder.proxy import Recorder
from rollouts.recorder.writer import Writer
from rollouts.store.models import Run


def encode(messages: list[dict[str, Any]]) -> list[int]:
    """A template of one token a role, one a character, one to close."""
    found = []
    for message in messages:
        found += [{"user": 1, "assistant": 2, "tool": 3, "system": 4}[message["role"]]]
        found += [100 + ord(letter) % 1000 for letter in message.get("content") or ""] + [9]
    return [*found, 2]


@dataclass
class FakeServer:
    """Answers chats by `turn N`, with ids and logprobs where asked, whole or streamed, nulls where vLLM has them."""

    gives_ids: bool = True
    seen: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    """Path, headers and body of each request."""
    status: int = 200
    break_off_after: int | None = None
    """Events of a stream after which the connection is cut."""
    hang: bool = False
    """Send half a stream, then nothing."""
    pretty: bool = False
    """Answers with line breaks in them."""

    def application(self) -> web.Application:
        app = web.Application(client_max_size=1 << 30)
        app.router.add_post("/v1/chat/completions", self.answer)
        app.router.add_post("/v1/completions", self.answer)
        app.router.add_route("*", "/{path:.*}", self.other)
        return app

    async def other(self, request: web.Request) -> web.Response:
        self.seen.append((request.raw_path, dict(request.headers), await request.read()))
        return web.Response(
            status=207,
            body=b"\x00\xffraw " + self.seen[-1][2],
            headers={"X-Kept": "yes", "Connection": "X-Gone", "X-Gone": "1"},
        )

    async def answer(self, request: web.Request) -> web.StreamResponse:
        raw = await request.read()
        self.seen.append((request.raw_path, dict(request.headers), raw))
        if self.status != 200:
            return web.Response(status=self.status, body=b'{"error":  "as it is"}', content_type="application/json")
        asked = json.loads(raw)
        chat = "messages" in asked
        prompt = encode(asked["messages"]) if chat else asked["prompt"]
        text = f"turn {sum(m['role'] == 'assistant' for m in asked['messages'])}" if chat else "text"
        ids = [*(100 + ord(letter) % 1000 for letter in text), 9]
        wants_ids = bool(asked.get("return_token_ids")) and self.gives_ids
        logprobs = asked.get("logprobs") not in (None, False)
        if asked.get("stream"):
            return await self.stream(request, prompt, text, ids, wants_ids, logprobs)
        choice: dict[str, Any] = {
            "index": 0, "logprobs": self.logprobs(ids, chat) if logprobs else None, "finish_reason": "stop",
            "stop_reason": None, "token_ids": ids if wants_ids else None,
        }
        answer: dict[str, Any] = {
            "id": "x-1",
            "model": asked.get("model"),
            "created": 1.50,
            "usage": {"total_tokens": 3},
        }
        if chat:
            choice["message"] = {"role": "assistant", "content": text, "tool_calls": []}
            answer["prompt_token_ids"] = prompt if wants_ids else None
        else:
            choice |= {"text": text, "prompt_token_ids": prompt if wants_ids else None}
        answer["choices"] = [choice]
        body = json.dumps(answer, indent=2 if self.pretty else None).encode()
        return web.Response(body=body, content_type="application/json", headers={"X-Kept": "yes"})

    def logprobs(self, ids: list[int], chat: bool) -> dict[str, Any]:
        values = [-0.5 - n for n in range(len(ids))]
        return {"content": [{"logprob": value} for value in values]} if chat else {"token_logprobs": values}

    async def stream(
        self, request: web.Request, prompt: list[int], text: str, ids: list[int], wants_ids: bool, logprobs: bool
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        head: dict[str, Any] = {"id": "x-1", "object": "chat.completion.chunk", "model": "m"}
        events: list[dict[str, Any]] = [
            head | {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                                 "finish_reason": None}], "prompt_token_ids": prompt if wants_ids else None}
        ]
        for n, (letter, one) in enumerate(zip([*text, ""], ids, strict=True)):
            last = n == len(ids) - 1
            if n == 2 and not wants_ids:
                events[-1]["choices"][0]["delta"]["content"] += letter  # a parser held it back
                continue
            held = n == 1 and wants_ids
            delta = {} if held else {"content": (text[1] + letter) if n == 2 else letter}
            if n == 1 and not wants_ids:
                delta = {"content": letter}
            choice = {
                "index": 0, "delta": delta, "logprobs": self.logprobs([one], True) if logprobs else None,
                "token_ids": [one] if wants_ids else None, "finish_reason": "stop" if last else None,
            }
            events.append(head | {"choices": [choice]})
        for n, event in enumerate(events):
            if n == self.break_off_after:
                assert request.transport is not None
                request.transport.close()
                return response
            if self.hang and n == 3:
                await asyncio.sleep(60)
            await response.write(b"data: " + json.dumps(event, separators=(",", ":")).encode() + b"\n\n")
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        await response.write_eof()
        return response


@dataclass
class RecorderSetup:
    """The servers and the client of a scenario."""

    http: aiohttp.ClientSession
    direct: str
    recorded: str
    writer: Writer
    server: FakeServer

    async def chat(self, *contents: str, session: str | None = None, base: str | None = None, **more: Any) -> Any:
        """One chat whose messages alternate user, assistant, user, ...; gives the answer's JSON."""
        messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(contents)]
        headers = {"X-Session-Id": session} if session else {}
        url = f"{base or self.recorded}/v1/chat/completions"
        async with self.http.post(url, json={"model": "m", "messages": messages, **more}, headers=headers) as answer:
            return await answer.json(content_type=None)


Scenario = Callable[[RecorderSetup], Awaitable[Any]]


def play(
    run: Run,
    folder: Path,
    scenario: Scenario,
    server: FakeServer | None = None,
    logprobs: bool = False,
    token: str = "",
    **options: Any,
) -> tuple[Any, Writer]:
    """Run a scenario; everything is stored and settled when this returns."""

    async def main() -> tuple[Any, Writer]:
        fake = server or FakeServer()
        async with TestServer(fake.application()) as upstream:
            direct = f"http://127.0.0.1:{upstream.port}"
            recorder = Recorder(direct, logprobs, token)
            writer = Writer(run, folder, direct, "vllm 0.0", stored=recorder.stored, **options)
            recorder.writer = writer
            runner = recorder.runner(5)
            await runner.setup()
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            writer.start()
            try:
                async with aiohttp.ClientSession() as http:
                    at = f"http://127.0.0.1:{runner.addresses[0][1]}"
                    result = await scenario(RecorderSetup(http, direct, at, writer, fake))
            finally:
                await runner.cleanup()
                await asyncio.to_thread(writer.close)
            return result, writer

    found = asyncio.run(main())
    run.refresh_from_db()
    return found
