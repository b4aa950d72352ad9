"""Compares messages. Two ways to write one message count as equal."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_inspector.streams.message_view import REASONING
from rollout_inspector.streams.recorded_renders import parsed
from rollout_inspector.streams.token_origins import content_forms
from rollout_inspector.streams.trajectory import Message

_PART = 12
"""So many bytes of the start or of the end of a text are a trace of it."""


def plain(message: Message) -> dict[str, Any]:
    """A message in one form: no empty keys, no ids, arguments as values, reasoning under one name."""
    result: dict[str, Any] = {"role": message.get("role", "")}
    content = text_of(message.get("content"))
    if content not in ("", None, [], {}):
        result["content"] = content
    if reasoning := reasoning_of(message):
        result["reasoning"] = reasoning
    if calls := calls_of(message):
        result["tool_calls"] = calls
    if message.get("name") and message.get("role") != "tool":
        result["name"] = message["name"]
    return result


def text_of(content: Any) -> Any:
    """Content parts that are all text become one text."""
    if isinstance(content, list | tuple) and all(
        isinstance(part, Mapping) and isinstance(part.get("text"), str) for part in content
    ):
        return "".join(part["text"] for part in content)
    return content


def reasoning_of(message: Message) -> str:
    """The reasoning of a message, under any of its usual names; empty when there is none."""
    for key in REASONING:
        value = message.get(key)
        if isinstance(value, str) and value:
            return value
    return ""


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The tool calls as ``{"name", "arguments"}``. Arguments that are JSON text are parsed."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list | tuple):
        return []
    result = []
    for call in calls:
        if not isinstance(call, Mapping):
            continue
        function = call.get("function")
        body = function if isinstance(function, Mapping) else call
        result.append({"name": body.get("name"), "arguments": parsed(body.get("arguments"))})
    return result


def call_ids(message: Message) -> list[str]:
    calls = message.get("tool_calls")
    ids = [str(call["id"]) for call in calls if isinstance(call, Mapping) and call.get("id")] if calls else []
    return [*ids, str(message["tool_call_id"])] if message.get("tool_call_id") else ids


def same(a: Message, b: Message) -> bool:
    """Whether two messages say the same, in any form. Ids are compared by :func:`call_ids`."""
    return a is b or plain(a) == plain(b)


def first_difference(a: Sequence[Message], b: Sequence[Message]) -> int:
    """The index of the first message that differs; the shorter length when one list extends the other."""
    for index, (left_message, other) in enumerate(zip(a, b, strict=False)):
        if not same(left_message, other):
            return index
    return min(len(a), len(b))


def without_system(messages: Sequence[Message]) -> Sequence[Message]:
    """The messages behind the system texts at the start of a conversation."""
    n = next((i for i, m in enumerate(messages) if m.get("role") not in ("system", "developer")), len(messages))
    return messages[n:]


def has_trace(content: Any, data: bytes, spelled: Callable[[str], str]) -> bool:
    """Whether a content is in the bytes: as it is, as JSON, its start or its end, or at least most of its words."""
    if _is_in(content, data):
        return True
    decoded = None
    for forms in content_forms(content, spelled):
        if any(form in data for form in forms):
            continue
        if any(len(form) > _PART and (form[:_PART] in data or form[-_PART:] in data) for form in forms):
            continue
        text = spelled(forms[0].decode("utf-8", "replace"))
        words = set(re.findall(r"[^\W_]{3,}", text)) or set(re.findall(r"[^\W_]{2,}", text))
        if not words:
            return False
        decoded = data.decode("utf-8", "replace") if decoded is None else decoded
        is_ascii = text.isascii() and decoded.isascii()
        if not is_ascii and (letters := letters_of(text)) and letters in letters_of(decoded):
            continue
        if sum(word in decoded for word in words) * 2 <= len(words):
            return False
    return True


def _is_in(content: Any, data: bytes) -> bool:
    """Whether a text is in the bytes unchanged: then no other form of it is needed."""
    return isinstance(content, str) and content.strip().encode("utf-8", "replace") in data


def letters_of(text: str) -> str:
    """The letters and digits of a text in one form: without accents, capitals, widths, white space and signs."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFKD", unicodedata.normalize("NFKD", text).casefold())))


def stands_in(content: Any, data: bytes, spelled: Callable[[str], str]) -> bool:
    """Whether each text of a content is in the bytes, in one of the forms in which templates write it."""
    parts = () if _is_in(content, data) else content_forms(content, spelled)
    return all(any(form in data for form in forms) for forms in parts)


def strings_in(value: Any) -> list[str]:
    """Every string and number inside a JSON value, as text."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for item in value.values() for text in strings_in(item)]
    if isinstance(value, list | tuple):
        return [text for item in value for text in strings_in(item)]
    return [] if value is None or isinstance(value, bool) else [str(value)]
