"""Dialects, and bodies on the wire: what is added to a request, what is removed from its answer, what is recorded.
Values that the recorder does not change are never parsed and written again: they keep their bytes (``msgspec.Raw``)."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Raw

from rollouts.recorder.choices import Calls, generate_calls, join_sglang, join_stream, sglang_calls
from rollouts.recorder.messages import join_messages, messages_calls
from rollouts.recorder.responses import RAW, join_responses, responses_calls


@dataclass(frozen=True)
class Dialect:
    """How an address speaks."""

    title: str
    ids_field: str = ""  # The field of a request that asks for token ids; empty = they come unasked, or not at all.
    ids: tuple[str, ...] = ()  # The fields of an answer or a choice that only this brings.
    logprobs: str = "logprobs"
    """The field that asks for log-probabilities of sampled tokens; empty = the recorder does not ask."""
    logprobs_value: bytes = b"true"
    settings: str = ""  # The object of a request that holds that field; empty = the request itself.
    has_ids: bool = True  # Some server tells the ids of a call.
    join: Callable[[Sequence[Any], bool], Any] = join_stream
    """Adds up the events of a stream; the second argument says that it broke off."""
    calls: Callable[[dict[str, Any], Any], Calls] | None = None
    """Request and answer in the shape of Chat Completions; None = they have it."""


_CHOICE_IDS = ("prompt_token_ids", "token_ids")
DIALECTS = {
    "/v1/chat/completions": Dialect("Chat Completions", "return_token_ids", _CHOICE_IDS),
    "/v1/completions": Dialect("Completions", "return_token_ids", _CHOICE_IDS, logprobs_value=b"0"),
    "/inference/v1/generate": Dialect(
        "vLLM's tokens in, tokens out", "return_token_ids", ("prompt_token_ids", "mm_placeholders"),
        logprobs_value=b"0", settings="sampling_params", calls=generate_calls,
    ),
    "/generate": Dialect("SGLang's generate", logprobs="", join=join_sglang, calls=sglang_calls),
    "/v1/responses": Dialect(
        "Responses", "enable_response_messages", RAW, logprobs="",
        join=join_responses, calls=responses_calls,
    ),
    "/v1/messages": Dialect("Messages", logprobs="", has_ids=False, join=join_messages, calls=messages_calls),
}
"""Address -> dialect."""
NO_TOKENS = ("/tokenize", "/detokenize", "/render", "/derender", "/count_tokens")
"""How addresses end that sample nothing. They pass, and are not missed."""


MAX_KEPT_BYTES = 64 << 20
"""The longest recorded answer. A longer one, or a longer event, passes without being recorded, and the run says so."""

_Object = dict[str, Raw]
_object = msgspec.json.Decoder(_Object)
_objects = msgspec.json.Decoder(list[_Object])
_any = msgspec.json.Decoder()
_encode = msgspec.json.Encoder().encode
_NULL = Raw(b"null")
_BLANK_LINE = re.compile(rb"\r?\n\r?\n")
_NOT_JSON = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


_LOGPROBS = "logprobs"  # The field of an answer that brings log-probabilities.


def _off(fields: _Object, name: str) -> bool:
    return name not in fields or bytes(fields[name]) in (b"null", b"false")


def amend(dialect: Dialect, body: bytes, logprobs: bool = False) -> tuple[bytes, tuple[str, ...]] | None:
    """The request with the field that asks for ids, and with log-probabilities if wanted; and the fields of its answer
    that only this brings. None when it is no object."""
    try:
        fields = _object.decode(body)
        holder = _object.decode(fields.get(dialect.settings, b"{}")) if dialect.settings else fields
    except _NOT_JSON:
        return None
    added_ids = bool(dialect.ids_field) and _off(fields, dialect.ids_field)
    added_logprobs = logprobs and bool(dialect.logprobs) and _off(holder, dialect.logprobs)
    if added_ids:
        fields[dialect.ids_field] = Raw(b"true")
    if added_logprobs:
        holder[dialect.logprobs] = Raw(dialect.logprobs_value)
        if holder is not fields:
            fields[dialect.settings] = Raw(_encode(holder))
    changed = added_ids or added_logprobs
    added = dialect.ids * added_ids + (_LOGPROBS,) * added_logprobs
    return _encode(fields) if changed else body, added


def strip(answer: bytes, added: Sequence[str]) -> bytes:
    """The answer, or one event of a stream, with null in the ``added`` fields, as vLLM writes it.
    The same object where nothing is to be removed. Empty when nothing is left: when ids are asked for, vLLM also sends
    events that carry nothing else."""
    if not added:
        return answer
    try:
        fields = _object.decode(answer)
        choices = _objects.decode(fields["choices"]) if "choices" in fields else []
        inner = _object.decode(fields["response"]) if "response" in fields else {}
    except _NOT_JSON:
        return answer
    only_ids = added[0] != _LOGPROBS and len(choices) > 0
    blanked = [_blank(fields, added), _blank(inner, added)]
    for choice in choices:
        blanked.append(_blank(choice, added))
        # A chat stream's choice carries nothing with an empty delta, no end, and no logprobs that the client asked for.
        parts = [bytes(choice.get(name, _NULL)) for name in ("delta", "finish_reason", "logprobs")]
        only_ids = only_ids and parts == [b"{}", b"null", b"null"]
    if only_ids and bytes(fields.get("usage", _NULL)) == b"null":
        return b""
    if not any(blanked):
        return answer
    if choices:
        fields["choices"] = Raw(_encode(choices))
    if inner:
        fields["response"] = Raw(_encode(inner))
    return _encode(fields)


def _blank(fields: _Object, added: Sequence[str]) -> bool:
    """Write null over what only the recorder asked for. Whether something was there."""
    blanked = False
    for name in added:
        if name in fields and bytes(fields[name]) != b"null":
            fields[name] = _NULL
            blanked = True
    return blanked


class Events:
    """Cuts a stream of server-sent events into whole events, and one that is too long into parts. The stream may arrive
    in any pieces."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, piece: bytes) -> Iterator[bytes]:
        """Whole events, with the blank line at their end, and parts of one that is too long."""
        # Bytes that were searched before are not searched again: the event with a prompt's ids can be long.
        start = max(len(self._rest) - 3, 0)
        self._rest += piece
        while (blank_line := _BLANK_LINE.search(self._rest, start)) is not None:
            event = bytes(self._rest[: blank_line.end()])
            del self._rest[: blank_line.end()]
            start = 0
            yield event
        if len(self._rest) > MAX_KEPT_BYTES:
            yield self.end()

    def end(self) -> bytes:
        """The bytes of an event that never ended."""
        remainder = bytes(self._rest)
        self._rest.clear()
        return remainder


def payload(event: bytes) -> bytes | None:
    """The JSON object in an event; None for ``[DONE]``, comments and everything else."""
    lines = [line for line in event.splitlines() if line.startswith(b"data:")]
    text = lines[0][5:].strip() if len(lines) == 1 else b""
    return text if text.startswith(b"{") else None


def recorded_lines(
    dialect: Dialect, session: str, request: bytes, answer: bytes | Sequence[bytes], created_at: str,
    broken_off: bool = False, agent: str = "",
) -> bytes:
    """A call as lines of the format of recorded calls, one for each time that the model was asked.

    ``answer``: a body, or the payloads of a stream; ``broken_off`` = the stream did not end. ``agent``: the sub-agent
    that called; empty = none is named. Raises ``msgspec.DecodeError``, ``ValueError``, ``TypeError``, ``LookupError``
    or ``AttributeError`` where a body is not what the dialect knows.
    """
    about: dict[str, Any] = {"session_id": session, "created_at": created_at, **({"agent": agent} if agent else {})}
    joined = None if isinstance(answer, bytes) else dialect.join([_any.decode(event) for event in answer], broken_off)
    if dialect.calls is None:
        fields = _object.decode(request)
        if bytes(fields.get("prompt", b"")).startswith(b"["):
            del fields["prompt"]  # the ids of a prompt are already kept as prompt_token_ids
        calls: Sequence[tuple[Any, Any]] = [(fields, Raw(answer) if isinstance(answer, bytes) else joined)]
    else:
        calls = dialect.calls(_any.decode(request), _any.decode(answer) if isinstance(answer, bytes) else joined)
    lines = [_encode({**about, "request": body, "response": reply}) for body, reply in calls]
    # Values that kept their bytes may hold line breaks.
    return b"".join((msgspec.json.format(line, indent=-1) if b"\n" in line else line) + b"\n" for line in lines)
