"""A scripted engine: an OpenAI-compatible server that answers by a script, and remembers which ids it read and sampled.
Its answers have the fields that vLLM 0.32 sends: ``return_token_ids``, ``logprobs``, ``weight_versions``, streams. It
is made of the standard library, because an installation without the server has no other HTTP server."""

import codecs
import json
import secrets
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Lock, Thread
from typing import Any

import msgspec

from rollout_inspector.gauntlet.vocabulary import END, decode, encode, mark_of, render, spell, text_of_call, token_bytes

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MAX_CHOICES = 16
CUT_AFTER = 5  # Events of a stream after which the connection is cut, where the script says so.
GATE_AFTER = 4  # Events of a stream after which the engine waits until the client has seen some of them.
TICK_SECONDS = 0.002  # Pause between two tokens of a completion without an end.
VENDOR = {"cost": msgspec.Raw(b"1.50"), "note": "grüezi"}
"""A field that no client knows, with a number that many programs write in another way."""
body_of = msgspec.json.Encoder().encode


@dataclass(frozen=True)
class Script:
    """What the engine does when it is asked with a mark."""

    words: str = "the answer is "  # The text that it samples before the number of the answer.
    tool: tuple[str, str] = ("", "")  # Name and arguments of the call that it samples; empty = none.
    is_canonical: bool = False  # It samples what encoding the text returns; else it spells each word.
    end: int = END  # The token that ends the completion; 0 = none does.
    stop_text: str = ""  # A stop string that it samples, and that the server cuts off the text.
    versions: tuple[str, ...] = ()  # The versions of the weights, which share the tokens evenly.
    refused: int = 0  # The status of the first answer, an error; 0 = it is none.
    is_cut: bool = False  # The first answer, a stream, breaks off.
    is_endless: bool = False  # The stream goes on until the client leaves, a limited time.
    has_gate: bool = False  # The stream goes on when the client has seen a part of it.


@dataclass(frozen=True)
class Sampled:
    """One choice of an answer."""

    serial: int  # Its number, which stands in the text too.
    ids: list[int]
    text: str
    tool: tuple[str, str]
    finish_reason: str
    stop_reason: int | str | None
    versions: list[dict[str, Any]]  # Spans with ``version``, ``start`` and ``end``.

    @property
    def logprobs(self) -> list[float]:
        """``[C]``, of values that 32 bits hold exactly."""
        return [-(1 + (self.serial + n) % 16) / 8 for n in range(len(self.ids))]


@dataclass
class EngineCall:
    """One request that reached the engine, and what it answered."""

    mark: str
    path: str
    request: Mapping[str, Any]
    prompt_ids: list[int]
    choices: list[Sampled]
    script: Script
    is_whole: bool  # The engine ends its answer.
    error: bytes = b""  # The body of an error; empty = it is none.
    is_left: bool = False  # The client closed the connection before the answer ended.
    is_held_back: bool = False  # The client of a stream saw nothing of it in time.
    ended: Event = field(default_factory=Event)

    @property
    def is_served(self) -> bool:
        """Whether it was answered, and to the end."""
        return self.is_whole and not self.error


def answer_of(call: EngineCall, request: Mapping[str, Any]) -> dict[str, Any]:
    """The body that the engine sends for a request, which may ask for other fields than the one that came."""
    ids = call.prompt_ids if request.get("return_token_ids") else None
    choices: list[dict[str, Any]] = []
    for index, sampled in enumerate(call.choices):
        choice = _choice(index, sampled, request, call.path, sampled.ids, sampled.logprobs) | _end(sampled)
        if call.path == CHAT:
            name, arguments = sampled.tool
            tool = _tool(sampled, {"name": name, "arguments": arguments})
            choice["message"] = {"role": "assistant", "content": sampled.text, "tool_calls": [tool] if name else []}
        else:
            choice |= {"text": sampled.text, "prompt_token_ids": ids}
        choices.append(choice)
    return {**_head(call), "choices": choices, "usage": _usage(call),
            **({"prompt_token_ids": ids} if call.path == CHAT else {})}


def events_of(call: EngineCall, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The events of the answer to a chat as a stream: one a token, of all choices in turn."""
    delta = {"role": "assistant", "content": ""}
    yield {
        **_head(call), "prompt_token_ids": call.prompt_ids if request.get("return_token_ids") else None,
        "choices": [{"index": n, "delta": delta, "finish_reason": None} for n in range(len(call.choices))],
    }
    streams = [_parts(index, sampled, request) for index, sampled in enumerate(call.choices)]
    while streams:
        for stream in list(streams):
            choice = next(stream, None)
            if choice is None:
                streams.remove(stream)
            else:
                yield {**_head(call), "choices": [choice]}
    if (request.get("stream_options") or {}).get("include_usage"):
        yield {**_head(call), "choices": [], "usage": _usage(call)}


def _parts(index: int, sampled: Sampled, request: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """What each token adds to a choice. One that adds nothing the request asked for is left out, as vLLM does."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    n_left = len(sampled.text.encode())
    arguments = [sampled.tool[1][:7], sampled.tool[1][7:]] if sampled.tool[0] else []
    for n, (token, logprob) in enumerate(zip(sampled.ids, sampled.logprobs, strict=True)):
        is_last = n == len(sampled.ids) - 1
        piece = token_bytes(token)[:n_left]
        n_left -= len(piece)
        text = decoder.decode(piece)
        delta: dict[str, Any] = {"content": text} if text else {}
        if arguments and not (n_left or text or is_last):
            part = {"arguments": arguments.pop(0)}
            delta = {"tool_calls": [
                {"index": 0, **_tool(sampled, {"name": sampled.tool[0], **part})} if arguments else
                {"index": 0, "function": part}
            ]}
        if delta or is_last or request.get("return_token_ids") or request.get("logprobs"):
            choice = {**_choice(index, sampled, request, CHAT, [token], [logprob]), "delta": delta}
            yield choice | (_end(sampled) if is_last else {})


def _head(call: EngineCall) -> dict[str, Any]:
    return {"id": f"answer-{call.choices[0].serial}", "created": 1_700_000_000, "x_vendor": VENDOR}


def _usage(call: EngineCall) -> dict[str, int]:
    n_prompt, n_sampled = len(call.prompt_ids), sum(len(sampled.ids) for sampled in call.choices)
    return {"prompt_tokens": n_prompt, "completion_tokens": n_sampled, "total_tokens": n_prompt + n_sampled}


def _choice(
    index: int, sampled: Sampled, request: Mapping[str, Any], path: str, ids: list[int], values: Sequence[float]
) -> dict[str, Any]:
    choice: dict[str, Any] = {"index": index, "finish_reason": None, "logprobs": None}
    choice["token_ids"] = ids if request.get("return_token_ids") else None
    names = [f"token_id:{token}" for token in ids]
    if request.get("logprobs") not in (None, False):
        pairs = [{"token": name, "logprob": value} for name, value in zip(names, values, strict=True)]
        choice["logprobs"] = {"content": pairs} if path == CHAT else {"tokens": names, "token_logprobs": values}
    return choice


def _tool(sampled: Sampled, function: Mapping[str, str]) -> dict[str, Any]:
    return {"id": f"call-{sampled.serial}", "type": "function", "function": function}


def _end(sampled: Sampled) -> dict[str, Any]:
    end = {"finish_reason": sampled.finish_reason, "stop_reason": sampled.stop_reason}
    return {**end, "weight_versions": sampled.versions} if sampled.versions else end


class GauntletEngine:
    """The server. It listens on 127.0.0.1; ``port`` 0 takes any. Raises ``OSError`` where the port is in use.
    ``patience``: seconds that a stream waits for its client to see it, or to leave it."""

    def __init__(self, port: int = 0, patience: float = 5.0) -> None:
        self.game = secrets.token_hex(4)  # Signs the marks.
        self.scripts: dict[str, Script] = {}  # Mark -> what is answered.
        self.calls: list[EngineCall] = []
        self.patience = patience
        self.gate = Event()  # Set when the client has seen a part of the stream that waits.
        self._lock = Lock()
        self._serial = 0
        self._tries: Counter[str] = Counter()

        class Server(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, *_: Any) -> None:
                """A gateway that breaks a connection is told by its properties, not on the terminal."""

        self._server = Server(("127.0.0.1", port), type("Handler", (_Handler,), {"owner": self}))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        Thread(target=self._server.serve_forever, args=(0.05,), name="gauntlet-engine", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()

    def ask(self, path: str, request: Mapping[str, Any]) -> EngineCall:
        """Sample the answer of a request. Raises ``LookupError``, ``TypeError`` or ``ValueError`` for what is none."""
        if path == CHAT:
            prompt_ids = render(request["messages"], request.get("tools"))
        else:
            prompt = request["prompt"]
            prompt_ids = encode(prompt) if isinstance(prompt, str) else [int(token) for token in prompt]
        mark = mark_of(decode(prompt_ids), self.game)
        with self._lock:
            script = self.scripts.get(mark, Script())
            is_first = not self._tries[mark]
            self._tries[mark] += 1
            choices = [self._sample(script) for _ in range(min(int(request.get("n") or 1), MAX_CHOICES))]
            is_whole = not (script.is_endless or (script.is_cut and is_first))
            call = EngineCall(mark, path, request, prompt_ids, choices, script, is_whole)
            if script.refused and is_first:
                call.error = b'{"error": {"message": "the engine  is busy", "code": %d}}' % script.refused
            self.calls.append(call)
        return call

    def _sample(self, script: Script) -> Sampled:
        self._serial += 1
        text = f"{script.words}~{self._serial}~"
        ids = (encode if script.is_canonical else spell)(text + script.stop_text + text_of_call(*script.tool))
        ids += [script.end] if script.end else []
        bounds = [len(ids) * n // max(len(script.versions), 1) for n in range(len(script.versions) + 1)]
        spans = zip(script.versions, bounds[:-1], bounds[1:], strict=True)
        finish_reason = "tool_calls" if script.tool[0] else "stop" if script.end or script.stop_text else "length"
        return Sampled(
            self._serial, ids, text, script.tool, finish_reason,
            script.stop_text or (script.end if script.end not in (0, END) else None),
            [{"version": version, "start": start, "end": end} for version, start, end in spans],
        )


class _Handler(BaseHTTPRequestHandler):
    owner: GauntletEngine
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        answers = {"/version": {"version": "0.32.0"}, "/v1/models": {"data": [{"id": "gauntlet"}]}, "/health": {}}
        self._send(200 if self.path in answers else 404, body_of(answers.get(self.path, {})))

    def do_POST(self) -> None:
        try:
            request = json.loads(self._body())
            if self.path == "/tokenize":
                ids = render(request["messages"]) if "messages" in request else encode(request["prompt"])
                return self._send(200, body_of({"tokens": ids, "count": len(ids)}))
            if self.path not in (CHAT, COMPLETIONS) or (request.get("stream") and self.path != CHAT):
                return self._send(404, b'{"error": {"message": "there is no such address", "code": 404}}')
            call = self.owner.ask(self.path, request)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
            return self._send(400, body_of({"error": {"message": f"no request: {error!r}", "code": 400}}))
        try:
            if call.error:
                self._send(call.script.refused, call.error)
            elif request.get("stream"):
                self._stream(call)
            else:
                self._send(200, body_of(answer_of(call, request)))
        except OSError:
            call.is_left = self.close_connection = True
        finally:
            call.ended.set()

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding", "").lower() != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length") or 0))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _send(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _stream(self, call: EngineCall) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream; charset=utf-8")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for n, event in enumerate(self._endless(call) if call.script.is_endless else events_of(call, call.request)):
            if n == CUT_AFTER and call.script.is_cut and not call.is_whole:
                break
            if n == GATE_AFTER and call.script.has_gate:
                call.is_held_back = not self.owner.gate.wait(self.owner.patience)
            self._chunk(b"data: " + body_of(event) + b"\n\n")
        if call.is_whole:
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")
        else:
            self.close_connection = True

    def _endless(self, call: EngineCall) -> Iterator[dict[str, Any]]:
        """The same tokens again and again; the choice holds those that were sent."""
        stop_at = time.monotonic() + self.owner.patience
        sampled = call.choices[0]
        repeated = sampled.ids[:-1]
        sampled.ids.clear()
        yield next(events_of(call, call.request))
        while time.monotonic() < stop_at:
            token = repeated[len(sampled.ids) % len(repeated)]
            sampled.ids.append(token)
            part = _choice(0, sampled, call.request, CHAT, [token], sampled.logprobs[-1:])
            yield {**_head(call), "choices": [{**part, "delta": {"content": decode([token])}}]}
            time.sleep(TICK_SECONDS)

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%b\r\n" % (len(data), data))
