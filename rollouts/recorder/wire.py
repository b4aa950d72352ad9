"""Bodies on the wire: what is added to a request, what is removed from its answer, and what is recorded.

Values that the recorder does not change are never parsed and written again: they keep their bytes (``msgspec.Raw``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

CHAT = "/v1/chat/completions"
TEXT = "/v1/completions"
RECORDED = (CHAT, TEXT)

_Object = dict[str, Raw]
_object = msgspec.json.Decoder(_Object)
_objects = msgspec.json.Decoder(list[_Object])
_any = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode
_NULL = Raw(b"null")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")


@dataclass(frozen=True)
class AmendedRequest:
    """A client's request in the form that is sent to the server."""

    body: bytes
    added_ids: bool
    """The client did not ask for token ids, so they are removed from its answer."""
    added_logprobs: bool


def _off(fields: _Object, name: str) -> bool:
    return name not in fields or bytes(fields[name]) in (b"null", b"false")


def amend(path: str, body: bytes, logprobs: bool = False) -> AmendedRequest | None:
    """The request with ``return_token_ids``, and with ``logprobs`` if wanted. None when it is not a JSON object."""
    try:
        fields = _object.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    added_ids, added_logprobs = _off(fields, "return_token_ids"), logprobs and _off(fields, "logprobs")
    if added_ids:
        fields["return_token_ids"] = Raw(b"true")
    if added_logprobs:
        # Only of the sampled token: `true` for a chat, 0 alternatives for a text completion.
        fields["logprobs"] = Raw(b"true" if path == CHAT else b"0")
    return AmendedRequest(_encode(fields) if added_ids or added_logprobs else body, added_ids, added_logprobs)


def strip(answer: bytes, amended: AmendedRequest) -> bytes:
    """The answer, or one event of a stream, with null in place of what only the recorder asked for, as vLLM writes it.

    Empty when nothing is left: when ids are asked for, vLLM also sends events that carry nothing else.
    """
    if not (amended.added_ids or amended.added_logprobs):
        return answer
    try:
        fields = _object.decode(answer)
        choices = _objects.decode(fields["choices"]) if "choices" in fields else []
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return answer
    only_ids = amended.added_ids and len(choices) > 0
    for choice in choices:
        _blank(choice, amended)
        only_ids = only_ids and _carries_nothing(choice)
    if only_ids and bytes(fields.get("usage", _NULL)) == b"null":
        return b""
    _blank(fields, amended)
    if choices:
        fields["choices"] = Raw(_encode(choices))
    return _encode(fields)


def _carries_nothing(choice: _Object) -> bool:
    """Whether a stream's choice has an empty delta, no end, and no logprobs that the client asked for."""
    is_empty = bytes(choice.get("delta", _NULL)) == b"{}"
    return is_empty and all(bytes(choice.get(name, _NULL)) == b"null" for name in ("finish_reason", "logprobs"))


def _blank(fields: _Object, amended: AmendedRequest) -> None:
    names = ("prompt_token_ids", "token_ids") if amended.added_ids else ()
    for name in (*names, *(("logprobs",) if amended.added_logprobs else ())):
        if name in fields:
            fields[name] = _NULL


class Events:
    """Cuts a stream of server-sent events into whole events; the stream may arrive in any pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Whole events, with the blank line at their end."""
        # Bytes that were searched before are not searched again: the event with a prompt's ids can be long.
        start = max(len(self._rest) - 3, 0)
        self._rest += piece
        while (blank_line := _BLANK_LINE.search(self._rest, start)) is not None:
            event = bytes(self._rest[: blank_line.end()])
            del self._rest[: blank_line.end()]
            start = 0
            yield event

    def end(self) -> bytes:
        """The bytes of an event that never ended."""
        remainder = bytes(self._rest)
        self._rest.clear()
        return remainder


def payload(event: bytes) -> bytes | None:
    """The JSON object in an event; None for ``[DONE]``, comments and everything else."""
    text = event.strip()
    if not text.startswith(b"data:") or b"\n" in text:
        return None
    text = text[5:].lstrip()
    return text if text.startswith(b"{") else None


def join_stream(payloads: Sequence[bytes], broken_off: bool) -> dict[str, Any]:
    """The answer that the events of a stream add up to. ``broken_off``: choices without an end were aborted."""
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for raw in payloads:
        event = _any.decode(raw)
        for part in event.pop("choices", None) or []:
            _add_part(choices.setdefault(part.get("index") or 0, {"index": part.get("index") or 0}), part)
        answer.update({name: value for name, value in event.items() if value is not None})
    if "object" in answer:
        answer["object"] = str(answer["object"]).removesuffix(".chunk")
    for choice in choices.values():
        if choice.get("finish_reason") is None and broken_off:
            choice["finish_reason"] = "abort"
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def _add_part(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if value is None or name == "index":
            continue
        if name == "delta":
            _add_delta(choice.setdefault("message", {"role": "assistant"}), value)
        elif name == "token_ids" or name == "text":
            choice[name] = choice[name] + value if name in choice else value
        elif name == "logprobs":
            logprobs = choice.setdefault("logprobs", {})
            for key, items in value.items():
                if isinstance(items, list):
                    logprobs[key] = [*logprobs.get(key, []), *items]
        else:
            choice[name] = value


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls":
            for call in value:
                _add_tool_call(message.setdefault("tool_calls", []), call)
        elif isinstance(value, str) and name != "role":
            message[name] = message.get(name, "") + value
        else:
            message[name] = value


def _add_tool_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index") or 0
    while len(calls) <= index < 1000:
        calls.append({"function": {"name": "", "arguments": ""}})
    call = calls[index]
    call |= {name: value for name, value in part.items() if name not in ("index", "function") and value is not None}
    for name, value in (part.get("function") or {}).items():
        call["function"][name] = call["function"].get(name, "") + (value or "")


def recorded_line(session: str, request: bytes, answer: bytes | dict[str, Any], created_at: str) -> bytes:
    """A call as a line of the format of recorded calls. Raises ``msgspec.DecodeError`` if a body is not an object."""
    request_body = _object.decode(request)
    prompt = bytes(request_body.get("prompt", b""))
    if prompt.startswith(b"["):
        del request_body["prompt"]  # the ids of a prompt are already kept as prompt_token_ids
    response = Raw(answer) if isinstance(answer, bytes) else answer
    line = _encode({"session_id": session, "request": request_body, "response": response, "created_at": created_at})
    # Values that kept their bytes may hold line breaks.
    return (msgspec.json.format(line, indent=-1) if b"\n" in line else line) + b"\n"
