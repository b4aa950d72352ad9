"""The one reader of messages: a message of any source as texts, reasoning, calls, results and media; and comparisons.
It reads the messages of OpenAI (chat and responses), Anthropic and Hugging Face. What it does not know stays a field.
No text is interpreted. Two ways to write one message count as equal."""

from __future__ import annotations

import base64
import binascii
import json
import re
import unicodedata
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_inspector.streams.recorded_renders import parsed
from rollout_inspector.streams.token_origins import MEDIA, content_forms
from rollout_inspector.streams.trajectory import Message

REASONING = ("reasoning_content", "reasoning", "thinking")
_TEXTS = ("text", "input_text", "output_text", "refusal")
_ERRORS = ("Error:", "ERROR:", "error:", "Traceback (most recent call last)")
_PART = 12  # So many bytes of the start or of the end of a text are a trace of it.
LEFT_OUT = "stored_media"  # In place of the data of a media part, which a page never holds.


@dataclass(frozen=True)
class Media:
    """An image, a sound or a film in a message."""

    kind: str
    type: str  # The media type that the source states; empty when it states none.
    n_bytes: int | None  # None for a link.
    link: str = ""  # An address at another host, which nothing of ours fetches.


@dataclass(frozen=True)
class ToolCall:
    """A tool call."""

    name: str
    arguments: Any  # A value where the source wrote JSON, otherwise its text.
    id: str = field(default="", compare=False)


@dataclass
class ChatMessage:
    """One message."""

    role: str
    texts: list[Any] = field(default_factory=list)  # In order: a text, or a media part.
    reasoning: list[str] = field(default_factory=list)
    calls: list[ToolCall] = field(default_factory=list)
    result_of: str = ""  # The id of the call that it answers.
    name: str = ""
    is_result: bool = False
    is_error: bool = False  # The source says so, or the text begins as an error does.
    others: dict[str, Any] = field(default_factory=dict)

    @property
    def held(self) -> str:
        """All words that it holds, in no order."""
        texts = [text for text in self.texts if isinstance(text, str)]
        calls = (f"{call.name} {as_text(call.arguments)}" for call in self.calls)
        return "\n".join([*texts, *self.reasoning, *calls, *map(as_text, self.others.values())])

    def same_as(self, other: ChatMessage) -> bool:
        """Whether it says what another message says: texts, calls and reasoning, where both have reasoning."""
        calls = [[(call.name, call.arguments) for call in message.calls] for message in (self, other)]
        texts = [[t.strip() if isinstance(t, str) else t for t in message.texts] for message in (self, other)]
        thought = not self.reasoning or not other.reasoning or self.reasoning == other.reasoning
        return calls[0] == calls[1] and texts[0] == texts[1] and thought


def read_message(value: Any, role: str) -> list[ChatMessage]:
    """The messages in one stored message: itself, and the tool results that its content holds."""
    if not isinstance(value, Mapping):
        return [ChatMessage(role, [value if isinstance(value, str) else as_text(value)])]
    kind = value.get("type")
    if kind == "function_call":
        return [ChatMessage("assistant", calls=[_call(value, value.get("call_id") or value.get("id"))])]
    if kind == "function_call_output":
        return [_result(value, value.get("output"), value.get("call_id"))]
    if kind == "reasoning" and "role" not in value:
        return [ChatMessage("assistant", reasoning=[_joined(value.get("summary") or value.get("content") or "")])]
    message = ChatMessage(str(value.get("role") or kind or role))
    results: list[ChatMessage] = []
    content = value.get("content")
    for part in content if isinstance(content, list) else [content]:
        _add(message, results, part)
    for name, item in value.items():
        if item in (None, "", [], {}) or name in ("role", "content", "type", "name", "tool_call_id"):
            continue
        if name in REASONING:
            message.reasoning.insert(0, _joined(item))
        elif name == "tool_calls" and isinstance(item, list):
            message.calls += [_call(call, call.get("id")) for call in _calls(value)]
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


def text_in(message: Mapping[str, Any]) -> str:
    """The content of a message as one text, the kind of each part that is no text in brackets."""
    messages = read_message({"content": message.get("content")}, "")
    parts = (part for item in messages for part in item.texts)
    return " ".join(part if isinstance(part, str) else f"[{part['type']}]" for part in parts)


def texts_of(message: Mapping[str, Any]) -> Iterator[str]:
    """The texts of a message that stand in it as they are: content, reasoning, names and arguments of calls."""
    for name in ("content", *REASONING):
        if isinstance(text := message.get(name), str) and (text := text.strip()):
            yield text
    for call in _calls(message):
        function = call.get("function")
        fields = function if isinstance(function, Mapping) else {}
        for name in ("name", "arguments"):
            if isinstance(text := fields.get(name), str) and (text := text.strip()):
                yield text


def reply_in(value: Any) -> ChatMessage | None:
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


def messages_in(value: Any, role: str = "prompt") -> list[ChatMessage]:
    """The messages of a stored value: a list of messages, or one."""
    if value is None:
        return []
    return [message for item in (value if isinstance(value, list) else [value]) for message in read_message(item, role)]


def _add(said: ChatMessage, results: list[ChatMessage], part: Any) -> None:
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
        results.append(_result(part, part.get("content"), part.get("tool_use_id")))
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
    return [value if isinstance(value, str) else as_text(value)]


def _result(value: Mapping[str, Any], content: Any, of: Any) -> ChatMessage:
    return _marked(ChatMessage("tool", _parts(content), result_of=str(of or ""), is_result=True), value)


def _marked(said: ChatMessage, value: Mapping[str, Any]) -> ChatMessage:
    first = next((text for text in said.texts if isinstance(text, str)), "").lstrip()
    states = value.get("is_error") is True or value.get("status") in ("error", "failed")
    said.is_error = states or first.startswith((*_ERRORS, '{"error"'))
    return said


def _calls(message: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    calls = message.get("tool_calls")
    return [call for call in calls if isinstance(call, Mapping)] if isinstance(calls, list | tuple) else []


def _call(value: Mapping[str, Any], key: Any) -> ToolCall:
    function = value.get("function")
    fields = function if isinstance(function, Mapping) else value
    return ToolCall(str(fields.get("name") or ""), parsed(fields.get("arguments")), str(key or ""))


def _joined(value: Any) -> str:
    if isinstance(value, list):
        return "\n".join(
            str(item.get("text", as_text(item))) if isinstance(item, Mapping) else as_text(item) for item in value
        )
    return as_text(value)


def as_text(value: Any) -> str:
    """A text as it is, anything else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


# --- comparison -------------------------------------------------------------------------------------------------------


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
    texts = (message.get(key) for key in REASONING)
    return next((text for text in texts if isinstance(text, str) and text), "")


def calls_of(message: Message) -> list[dict[str, Any]]:
    """The tool calls as ``{"name", "arguments"}``. Arguments that are JSON text are parsed."""
    calls = (_call(call, "") for call in _calls(message))
    return [{"name": call.name, "arguments": call.arguments} for call in calls]


def call_ids(message: Message) -> list[str]:
    """The ids of its calls, and of the call that it answers."""
    ids = [str(call["id"]) for call in _calls(message) if call.get("id")]
    return [*ids, str(message["tool_call_id"])] if message.get("tool_call_id") else ids


def same(a: Message, b: Message) -> bool:
    """Whether two messages say the same, in any form. Ids are compared by :func:`call_ids`."""
    return a is b or plain(a) == plain(b)


def first_difference(a: Sequence[Message], b: Sequence[Message]) -> int:
    """The index of the first message that differs; the shorter length when one list extends the other."""
    pairs = enumerate(zip(a, b, strict=False))
    return next((index for index, pair in pairs if not same(*pair)), min(len(a), len(b)))


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


def messages_problem(messages: Sequence[Any]) -> str:
    """A sentence about the first entry that is not a message. Empty = all are messages."""
    for number, message in enumerate(messages, start=1):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            return (
                f"Message {number} is not an object with a “role”: {json.dumps(message)[:80]}. "
                'Write {"role": "user", "content": "…"}.'
            )
    return ""


def tools_problem(tools: Sequence[Any]) -> str:
    """A sentence about the first entry that is not a function schema, bare or under ``function``. Empty = all are."""
    for number, tool in enumerate(tools, start=1):
        function = tool.get("function", tool) if isinstance(tool, dict) else None
        if not isinstance(function, dict):
            lacks = "is not an object"
        elif not isinstance(function.get("name"), str) or not function["name"]:
            lacks = "is not a function with a “name”"
        else:
            continue
        return (
            f"Tool {number} {lacks}: {json.dumps(tool)[:80]}. "
            'Write {"type": "function", "function": {"name": "f", "parameters": {}}}.'
        )
    return ""
