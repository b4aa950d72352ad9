"""A scripted harness: sends requests to a gateway as clients of agents do, and remembers what came back."""

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any
from urllib.parse import quote, urlsplit

from rollout_inspector.gauntlet.engine import CHAT, GauntletEngine
from rollout_inspector.gauntlet.vocabulary import serial_of, signed
from rollout_inspector.refusal import Refusal

TIMEOUT_SECONDS = 20.0
MAX_BODY_BYTES = 16 << 20  # A gateway may send anything, without an end.
_WHOLE = ("role", "id", "type", "name", "finish_reason", "stop_reason")
"""Texts of an event that do not go on those before."""


@dataclass(frozen=True)
class Answer:
    """What a client got for one request."""

    mark: str
    session: str
    path: str
    request: Mapping[str, Any]
    status: int  # 0 = no answer came.
    content_type: str
    body: bytes  # Of a stream its events, as they came.
    is_whole: bool  # False = it broke off, or the client left.

    @property
    def payloads(self) -> list[str]:
        """The data of each event of a stream."""
        lines = self.body.decode("utf-8", "replace").splitlines()
        return [line[5:].strip() for line in lines if line.startswith("data:")]

    @cached_property
    def value(self) -> dict[str, Any]:
        """The answer as one object: of a stream what its events add up to. Empty where it is no answer of a model."""
        try:
            if self.content_type != "text/event-stream":
                value = exact_json(self.body)
            else:
                value = joined([exact_json(text) for text in self.payloads if text != "[DONE]"])
            messages = [choice.get("message") or {} for choice in value.get("choices") or ()]
            [call["function"]["arguments"] for message in messages for call in message.get("tool_calls") or ()]
        except (ValueError, TypeError, AttributeError, LookupError, RecursionError):
            return {}
        return dict(value)

    @property
    def message(self) -> dict[str, Any]:
        """The message of the first choice, as a harness keeps it in its conversation."""
        message = (self.value.get("choices") or [{}])[0].get("message") or {"role": "assistant"}
        return {name: value for name, value in message.items() if value not in (None, [])}

    @cached_property
    def serials(self) -> list[int]:
        """The numbers of the engine's answers that it holds, one a choice."""
        choices = self.value.get("choices") or ()
        texts = [(choice.get("message") or {}).get("content") or choice.get("text") for choice in choices]
        return [serial for text in texts if (serial := serial_of(str(text)))]

    def __str__(self) -> str:
        """What came, for a sentence."""
        if not self.status:
            return "no answer"
        return f"status {self.status}" + ("" if self.is_whole else " and a broken answer")


def exact_json(text: str | bytes) -> Any:
    """A text of JSON, with numbers as texts, as they are written. Raises ``ValueError``."""
    return json.loads(text, parse_float=str, parse_int=str)


def joined(events: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The answer that the events of a stream add up to."""
    answer: dict[str, Any] = {}
    choices: dict[Any, dict[str, Any]] = {}
    for event in events:
        answer |= {name: value for name, value in event.items() if name != "choices" and value is not None}
        for part in event.get("choices") or ():
            choice = choices.setdefault(part["index"], {"index": part["index"]})
            _add(choice, {"message" if name == "delta" else name: part[name] for name in part if name != "index"})
    return {**answer, "choices": [choices[index] for index in sorted(choices)]}


def _add(fields: dict[str, Any], more: Mapping[str, Any]) -> None:
    """Add the parts of an event: texts and lists grow, objects grow inside, calls of tools go by their index."""
    for name, value in more.items():
        if name == "tool_calls":
            calls = fields.setdefault(name, [])
            for part in value or ():
                calls += [{} for _ in range(int(part["index"]) + 1 - len(calls))]
                _add(calls[int(part["index"])], {key: part[key] for key in part if key != "index"})
        elif isinstance(value, dict):
            _add(fields.setdefault(name, {}), value)
        elif isinstance(value, list) or (isinstance(value, str) and name not in _WHOLE):
            fields[name] = fields[name] + value if name in fields else value
        elif value is not None:
            fields[name] = value


@dataclass
class GauntletHarness:
    """The clients. ``url`` is the gateway's base URL; ``{session}`` in it stands for the name of a session."""

    url: str
    engine: GauntletEngine
    answers: list[Answer] = field(default_factory=list)

    def ask(
        self, mark: str, session: str, prompt: Any, *, parent: str = "", path: str = CHAT, leave_after: int = 0,
        on_event: Callable[[], object] = lambda: None, **fields: Any,
    ) -> Answer:
        """Send one request, and keep its answer. ``prompt``: the messages of a chat, or the prompt of a completion.
        ``leave_after``: leave a stream after so many events. ``on_event`` is called when its second event came."""
        name = "messages" if path == CHAT else "prompt"
        request = json.loads(signed(json.dumps({"model": "gauntlet", name: prompt, **fields}), self.engine.game))
        names = {"X-Session-Id": session, "X-Parent-Session-Id": parent}
        names = {header: f"{value}-{self.engine.game}" for header, value in names.items() if value}
        address = urlsplit(self.url.replace("{session}", quote(names["X-Session-Id"], safe="")))
        place = address.path.rstrip("/").removesuffix("/v1") + path
        connection = http.client.HTTPConnection(address.hostname or "", address.port or 80, timeout=TIMEOUT_SECONDS)
        status, content_type, body, is_whole = 0, "", bytearray(), False
        try:
            headers = {"Content-Type": "application/json", **names}
            connection.request("POST", place, json.dumps(request).encode(), headers)
            response = connection.getresponse()
            status, content_type = response.status, response.headers.get_content_type()
            n_events = 0
            read = response.readline if request.get("stream") else response.read
            while len(body) < MAX_BODY_BYTES and (line := read(MAX_BODY_BYTES)):
                body += line
                n_events += line.startswith(b"data:")
                if n_events == 2:
                    on_event()
                if leave_after and n_events == leave_after:
                    break
            is_whole = not (request.get("stream") and status == 200) or b"data: [DONE]" in body
        except (OSError, http.client.HTTPException):
            pass
        finally:
            connection.close()
        answer = Answer(mark, session, path, request, status, content_type, bytes(body), is_whole)
        self.answers.append(answer)
        return answer

    def check(self) -> None:
        """Raises :class:`Refusal` where the gateway does not pass a plain chat on to the engine."""
        answer = self.ask("check.0", "check", [{"role": "user", "content": "#check.0#"}])
        if any(call.mark == "check.0" for call in self.engine.calls):
            return
        if not answer.status:
            raise Refusal(f"The gateway at {self.url} does not answer. Is it running, and is this its base URL?")
        raise Refusal(
            f"The gateway at {self.url} answered a chat with {answer}, and did not ask the engine at "
            f"{self.engine.url}. Point it at this address."
        )
