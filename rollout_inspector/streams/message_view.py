"""A message of any source as what a chat shows: texts, reasoning, calls, results, media. No text is interpreted.

It reads the messages of OpenAI (chat and responses), Anthropic and Hugging Face. What it does not know stays a field.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXTS = ("text", "input_text", "output_text", "refusal")
MEDIA = ("image_url", "input_image", "image", "input_audio", "audio", "audio_url", "video", "video_url")
_ERRORS = ("Error:", "ERROR:", "error:", "Traceback (most recent call last)")
LEFT_OUT = "stored_media"
"""In place of the data of a media part, which a page never holds."""


@dataclass(frozen=True)
class Media:
    """An image, a sound or a film in a message."""

    kind: str
    type: str
    """The media type that the source states; empty when it states none."""
    n_bytes: int | None
    """None for a link."""
    link: str = ""
    """An address at another host, which nothing of ours fetches."""


@dataclass(frozen=True)
class ToolCall:
    """A tool call."""

    name: str
    arguments: Any
    """A value where the source wrote JSON, otherwise its text."""
    id: str = field(default="", compare=False)


@dataclass
class Said:
    """One message."""

    role: str
    texts: list[Any] = field(default_factory=list)
    """In order: a text, or a media part."""
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    result_of: str = ""
    """The id of the call that it answers."""
    name: str = ""
    is_result: bool = False
    is_error: bool = False
    """The source says so, or the text begins as an error does."""
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> str:
        """All words that it holds, in no order."""
        texts = [text for text in self.texts if isinstance(text, str)]
        calls = (f"{call.name} {_text(call.arguments)}" for call in self.calls)
        return "\n".join([*texts, *self.reasoning, *calls, *map(_text, self.others.values())])

    def same_as(self, other: Said) -> bool:
        """Whether it says what another message says: texts, calls and reasoning, where both have reasoning."""
        calls = [[(call.name, call.arguments) for call in message.calls] for message in (self, other)]
        texts = [[t.strip() if isinstance(t, str) else t for t in message.texts] for message in (self, other)]
        thought = not self.reasoning or not other.reasoning or self.reasoning == other.reasoning
        return calls[0] == calls[1] and texts[0] == texts[1] and thought


def read_message(value: Any, role: str) -> list[Said]:
    """The messages in one stored message: itself, and the tool results that its content holds."""
    if not isinstance(value, Mapping):
        return [Said(role, [value if isinstance(value, str) else _text(value)])]
    kind = value.get("type")
    if kind == "function_call":
        return [Said("assistant", calls=[_call(value, value.get("call_id") or value.get("id"))])]
    if kind == "function_call_output":
        message = Said("tool", _parts(value.get("output")), result_of=str(value.get("call_id") or ""), is_result=True)
        return [_marked(message, value)]
    if kind == "reasoning" and "role" not in value:
        return [Said("assistant", reasoning=[_joined(value.get("summary") or value.get("content") or "")])]
    message = Said(str(value.get("role") or kind or role))
    results: list[Said] = []
    content = value.get("content")
    for part in content if isinstance(content, list) else [content]:
        _add(message, results, part)
    for name, item in value.items():
        if item in (None, "", [], {}) or name in ("role", "content", "type", "name", "tool_call_id"):
            continue
        if name in REASONING:
            message.reasoning.insert(0, _joined(item))
        elif name == "tool_calls" and isinstance(item, list):
            message.calls += [_call(call, call.get("id")) for call in item if isinstance(call, Mapping)]
        elif name == "function_call" and isinstance(item, Mapping):
            message.calls.append(_call(item, ""))
        else:
            message.others[name] = item
    message.name = str(value.get("name") or "")
    message.result_of = str(value.get("tool_call_id") or "")
    message.is_result = message.role in ("tool", "function", "ipython") or bool(message.result_of)
    if results and not (message.texts or message.calls or message.reasoning):
        return results
    return [*results, _marked(message, value) if message.is_result else message]


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a message that stand in it as they are: content, reasoning, names and arguments of calls."""
    for name in ("content", *REASONING):
        if isinstance(text := message.get(name), str) and (text := text.strip()):
            yield text
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function") if isinstance(call, Mapping) else None
        fields = function if isinstance(function, Mapping) else {}
        for name in ("name", "arguments"):
            if isinstance(text := fields.get(name), str) and (text := text.strip()):
                yield text


def reply_in(value: Any) -> Said | None:
    """A stored reply as one message: its items (reasoning, text, calls) are put together. None = it is empty."""
    messages = messages_in(value, "assistant")
    if not messages:
        return None
    first = messages[0]
    for more in messages[1:]:
        first.texts += more.texts
        first.reasoning += more.reasoning
        first.calls += more.calls
    return first


def messages_in(value: Any, role: str = "prompt") -> list[Said]:
    """The messages of a stored value: a list of messages, or one."""
    if value is None:
        return []
    return [message for item in (value if isinstance(value, list) else [value]) for message in read_message(item, role)]


def _add(said: Said, results: list[Said], part: Any) -> None:
    if part in (None, "", [], {}):
        return
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in _TEXTS:
        said.texts.append(_joined(part.get("text") or part.get("refusal") or ""))
    elif kind in ("thinking", "reasoning"):
        said.reasoning.append(_joined(part.get("thinking") or part.get("text") or part.get("reasoning") or ""))
    elif kind == "tool_use":
        said.calls.append(ToolCall(str(part.get("name") or ""), part.get("input"), str(part.get("id") or "")))
    elif kind == "tool_result":
        answer = Said("tool", _parts(part.get("content")), result_of=str(part.get("tool_use_id") or ""), is_result=True)
        results.append(_marked(answer, part))
    else:
        said.texts += _parts(part)


def _parts(value: Any) -> list[Any]:
    """Texts and media parts of a content; anything else as JSON."""
    if value in (None, "", [], {}):
        return []
    if isinstance(value, list) and all(isinstance(item, Mapping) for item in value):
        return [part for item in value for part in _parts(item)]
    if isinstance(value, Mapping):
        if media_of(value) is not None:
            return [value]
        if value.get("type") in _TEXTS and isinstance(value.get("text"), str):
            return [value["text"]]
    return [value if isinstance(value, str) else _text(value)]


def _marked(said: Said, value: Mapping[str, Any]) -> Said:
    first = next((text for text in said.texts if isinstance(text, str)), "").lstrip()
    states = value.get("is_error") is True or value.get("status") in ("error", "failed")
    said.is_error = states or first.startswith((*_ERRORS, '{"error"'))
    return said


def _call(value: Mapping[str, Any], key: Any) -> ToolCall:
    function = value.get("function")
    fields = function if isinstance(function, Mapping) else value
    arguments = fields.get("arguments")
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    return ToolCall(str(fields.get("name") or ""), arguments, str(key or ""))


def _joined(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(
            str(item.get("text", _text(item))) if isinstance(item, Mapping) else _text(item) for item in value
        )
    return _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- media ------------------------------------------------------------------------------------------------------------


def media_of(part: Any) -> Media | None:
    """What a part of a content brings; None for a part that is no media."""
    if not isinstance(part, Mapping) or part.get("type") not in MEDIA:
        return None
    kind = next(kind for kind in ("image", "audio", "video") if kind in part["type"])
    record = part.get(LEFT_OUT)
    if isinstance(record, Mapping):
        size = record.get("bytes")
        return Media(kind, str(record.get("type") or ""), size if isinstance(size, int) else None)
    stated, data, link = _brought(part)
    return Media(kind, stated, len(data) * 3 // 4 - data[-2:].count("=") if data else None, link)


def media_data(part: Mapping[str, Any]) -> bytes | None:
    """The bytes that a media part brings; None for a link and for text that is no base64."""
    try:
        return base64.b64decode(_brought(part)[1], validate=True) or None
    except (binascii.Error, ValueError):
        return None


def media_parts(value: Any) -> Iterator[Mapping[str, Any]]:
    """Every media part in a stored value, in its order."""
    if isinstance(value, Mapping):
        if media_of(value) is not None:
            yield value
            return
        value = list(value.values())
    for item in value if isinstance(value, list) else []:
        yield from media_parts(item)


def without_data(value: Any) -> Any:
    """A stored value in which no media part holds data."""
    medium = media_of(value)
    if medium is not None and medium.n_bytes is not None:
        return {"type": value["type"], LEFT_OUT: {"type": medium.type, "bytes": medium.n_bytes}}
    if isinstance(value, dict):
        return {key: without_data(item) for key, item in value.items()}
    return [without_data(item) for item in value] if isinstance(value, list) else value


def _brought(part: Mapping[str, Any]) -> tuple[str, str, str]:
    """Stated type, base64 and link of a media part; what it lacks is empty."""
    source = part.get(part["type"]) or part.get("source") or part.get("image_url") or part.get("image") or ""
    if isinstance(source, Mapping):
        stated = str(source.get("media_type") or source.get("format") or "")
        if isinstance(source.get("data"), str):
            return stated, source["data"], ""
        source = source.get("url") or ""
    text = source if isinstance(source, str) else ""
    if text.startswith("data:"):
        head, _, data = text[5:].partition(",")
        return head.split(";")[0], data if head.endswith(";base64") else "", ""
    return "", "", text
