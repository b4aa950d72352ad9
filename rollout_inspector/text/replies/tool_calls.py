"""Reads tool calls in the form that a chat template writes. The form is learned from two renders. No model is known by
name. A learned form is used only if it reads back the calls that it was learned from."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

from rollout_inspector.streams.interfaces import Conversation, Renderer, RenderFailed
from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.recorded_renders import parsed

Tools = Sequence[Mapping[str, Any]] | None
Calls = list[dict[str, Any]]
Reader = Callable[[str, Tools], tuple[str, Calls]]
"""``(text of a turn, tools) -> (text without the calls, calls)``; never raises because of what a model wrote."""

_FIRST = ("look_up_tides", {"harbour": "Port Ellen", "days": 3})
_SECOND = ("read_gauge", {"river": "Spey", "level": 17})
_IDS = ("a1B2c3D4e", "f5G6h7J8k")
_ANSWER = "§"  # A content that no call begins with.
_CALL = re.compile(r"(?:(?<!\s)\s*)?<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
_NAME = r"(?P<name>[\w./-]+?)"
_CONTROL = re.compile(r"\s*(?:<\|\w+\|>\s*)?")
"""What a model may put before a call without tags, such as Llama's ``<|python_tag|>``."""
_THOUGHT = re.compile(r"^.*</think>\s*", re.DOTALL)
_HARMONY = re.compile(r"<\|channel\|>(?P<channel>\w+)(?P<to>[^<]*)(?:<\|constrain\|>\w*\s*)?<\|message\|>")
_HARMONY_CALL = re.compile(
    r"\s*to=functions\.(?P<name>[\w.-]+)\s*(?:<\|channel\|>\w+)?[^<]*(?:<\|constrain\|>\w*\s*)?<\|message\|>"
)


_Written = tuple[str, str | None]  # What a template wrote for one call, and for two calls where it accepts two.


def learn(renderer: Renderer) -> Reader | None:
    """How to read the calls of a chat template. None when it writes no calls or in a form that is not understood."""
    for written in _probes(renderer):
        for reader in chain([plain], (make(written) for make in (_harmony, _objects, _between, _pairs))):
            if reader is not None and _reads(reader, written):
                return reader
    return None


def writes_calls(renderer: Renderer) -> bool:
    """Whether the template writes calls at all. Without them it cannot serve an environment with tools."""
    return any(True for _ in _probes(renderer))


# -- what the template writes --------------------------------------------------------------------------------------


def _probes(renderer: Renderer) -> list[_Written]:
    probes = []
    for arguments in (dict, json.dumps):
        written = as_written(renderer, [_call(0, arguments)])
        if written is not None and _FIRST[0] in written:
            two = as_written(renderer, [_call(0, arguments), _call(1, arguments)])
            probes.append((written, two if two and _SECOND[0] in two else None))
    return probes


def _call(n: int, arguments: Callable[[Any], Any]) -> dict[str, Any]:
    name, values = (_FIRST, _SECOND)[n]
    return {"type": "function", "id": _IDS[n], "function": {"name": name, "arguments": arguments(values)}}


def _tools() -> list[dict[str, Any]]:
    kinds = {str: "string", int: "integer"}
    return [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": "A probe.",
                "parameters": {
                    "type": "object",
                    "properties": {key: {"type": kinds[type(value)]} for key, value in values.items()},
                },
            },
        }
        for name, values in (_FIRST, _SECOND)
    ]


def as_written(renderer: Renderer, calls: Calls) -> str | None:
    """What the template writes for a turn with these calls, without the turn's beginning and without thoughts. None
    when the template refuses the calls."""
    user = {"role": "user", "content": "How high is it?"}
    for content in ("", None):
        try:
            answered = renderer.render_text(Conversation([user, {"role": "assistant", "content": _ANSWER}], _tools()))
            called = renderer.render_text(
                Conversation([user, {"role": "assistant", "content": content, "tool_calls": calls}], _tools())
            )
        except RenderFailed:
            continue
        call_text = called[common_length(answered, called) :]
        return _THOUGHT.sub("", call_text)
    return None


def _reads(reader: Reader, written: _Written) -> bool:
    for text, calls in zip(written, ([_FIRST], [_FIRST, _SECOND]), strict=True):
        if text is None:
            continue
        for before in ("", "I look.\n"):
            prose, read_calls = reader(before + text, _tools())
            same = [_said_by(call) for call in read_calls] == calls
            if not before and not same:
                return False
            if before and same and not prose.startswith("I look."):
                return False
    return True


def _said_by(call: Mapping[str, Any]) -> tuple[Any, Any]:
    """Name and arguments of a call in any form."""
    function = call.get("function")
    return (function.get("name"), parsed(function.get("arguments"))) if isinstance(function, Mapping) else (None, None)


# -- the forms -----------------------------------------------------------------------------------------------------


def plain(text: str, tools: Tools = None) -> tuple[str, Calls]:
    """Reads ``<tool_call>`` blocks, which most templates write. A call that is not JSON stays text."""
    end = text.rfind("</tool_call>")
    if end < 0:
        return text, []
    # Only up to the last end: else a thousand beginnings without an end would each be followed to the end of the text.
    closed, behind = text[: end + len("</tool_call>")], text[end + len("</tool_call>") :]
    calls = [{"type": "function", "function": _function(body.strip())} for body in _CALL.findall(closed)]
    return (_CALL.sub("", closed) + behind.lstrip(), calls) if calls else (text, [])


def _function(body: str) -> Any:
    value = parsed(body)
    return value if isinstance(value, dict) else body


def _objects(written: _Written) -> Reader | None:
    """A JSON object for each call that holds name and arguments: Hermes, Llama, Mistral up to Nemo."""
    single, two = written
    at = _object_around(single, _FIRST[0])
    if at is None:
        return None
    start, stop, value = at
    name_key = next((key for key, inner in value.items() if inner == _FIRST[0]), None)
    arguments_key = next((key for key, inner in value.items() if parsed(inner) == _FIRST[1]), None)
    if name_key is None or arguments_key is None:
        return None
    head, tail = _flexible(single[:start]), _closing(single[stop:])
    between = r"\s*[,;]?\s*"
    if two is not None and (second := _object_around(two, _SECOND[0])) is not None:
        first = _object_around(two, _FIRST[0])
        assert first is not None
        between = r"\s*" + _flexible(two[first[1] : second[0]]) + r"\s*"
    opening = re.compile(head) if head else None

    def read(text: str, tools: Tools) -> tuple[str, Calls]:
        match = opening.search(text) if opening else _CONTROL.match(text)
        if match is None:
            return text, []
        calls: Calls = []
        at = match.end()
        while (decoded := _decoded(text, at)) is not None and isinstance(decoded[0], dict):
            value, stop = decoded
            if not isinstance(value.get(name_key), str):
                break
            calls.append(_made(value[name_key], value.get(arguments_key, {}), value.get("id")))
            following = re.compile(between).match(text, stop)
            at = stop
            if following is None or _decoded(text, following.end()) is None:
                break
            at = following.end()
        return _left(text, match.start(), at, tail, calls)

    return read


def _between(written: _Written) -> Reader | None:
    """The name as text, then the arguments as JSON: DeepSeek, Kimi, Mistral since 2025."""
    single, two = written
    place = _place(single, _FIRST)
    if place is None:
        return None
    name_at, json_at, stop = place
    before, middle, after = (single[:name_at], single[name_at + len(_FIRST[0]) : json_at], single[stop:])
    if not middle.strip():
        return None
    opening = before
    if two is not None and (second := _place(two, _SECOND)) is not None:
        opening = _common_end(before, two[_place(two, _FIRST)[2] : second[0]])  # type: ignore[index]
    if not opening.strip():
        return None
    head = before[: len(before) - len(opening)]
    pattern = re.compile(_flexible(opening) + r"\s*" + _NAME + r"\s*" + _flexible(middle))

    def read(text: str, tools: Tools) -> tuple[str, Calls]:
        calls: Calls = []
        start, at = 0, 0
        while (match := pattern.search(text, at)) is not None:
            value = _decoded(text, match.end())
            if value is None:
                break
            calls.append(_made(match["name"], value[0], None))
            if len(calls) == 1:
                start = match.start()
            at = value[1]
        lead = re.search(_flexible(head) + r"\s*\Z", text[:start]) if head.strip() else None
        return _left(text, lead.start() if lead else start, at, _closing(after), calls)

    return read


def _pairs(written: _Written) -> Reader | None:
    """The name, then each argument between tags: GLM, Qwen-Coder."""
    single, two = written
    name, values = _FIRST
    (key1, value1), (key2, value2) = ((key, str(value)) for key, value in values.items())
    places, at = [], 0
    for word in (name, key1, value1, key2, value2):
        at = single.find(word, at)
        if at < 0:
            return None
        places.append((at, at + len(word)))
        at += len(word)
    gaps = [single[a[1] : b[0]] for a, b in pairwise(places)]
    key_open = _common_end(gaps[0], gaps[2])
    if gaps[1] != gaps[3] or not key_open.strip() or not gaps[1].strip():
        return None
    middle, value_close = gaps[0][: len(gaps[0]) - len(key_open)], gaps[2][: len(gaps[2]) - len(key_open)]
    before, after = single[: places[0][0]], single[places[-1][1] :]
    if not value_close.strip() or not before.strip() or not after.startswith(value_close):
        return None
    end = _closing(after[len(value_close) :])
    if two is not None:
        # What closes a call stands before the next call; after the last call the turn is closed too.
        second = two.index(_SECOND[0])
        last = two.rindex(value2, 0, second) + len(value2) + len(value_close)
        opening = _common_end(before, two[last:second])
        before, end = opening or before, _flexible(two[last : second - len(opening)])
    # A value ends at its first closing text and holds no other call, so there is one way to read a text, not 2^n.
    value = rf"(?P<value>(?:(?!{_strict(value_close)}|{_flexible(before)}).)*)"
    pair = r"\s*" + _flexible(key_open) + r"\s*(?P<key>[^<>\s]+)\s*" + _strict(gaps[1]) + value + _strict(value_close)
    pattern = re.compile(
        _flexible(before) + r"\s*" + _NAME + r"\s*" + _flexible(middle) + rf"(?P<pairs>(?:{_unnamed(pair)})*)\s*" + end,
        re.DOTALL,
    )
    each = re.compile(pair, re.DOTALL)

    def read(text: str, tools: Tools) -> tuple[str, Calls]:
        calls: Calls = []
        start, at = 0, 0
        while (match := pattern.search(text, at)) is not None:
            kinds = _kinds(tools, match["name"])
            arguments = {
                pair["key"].strip(): _typed(pair["value"], kinds.get(pair["key"].strip()))
                for pair in each.finditer(match["pairs"])
            }
            calls.append(_made(match["name"], arguments, None))
            if len(calls) == 1:
                start = match.start()
            at = match.end()
        return _left(text, start, at, r"\s*", calls)

    return read


def _harmony(written: _Written) -> Reader | None:
    """gpt-oss: the model writes the parts of a call in another order than its template, and its answers in channels."""
    single, _ = written
    if _HARMONY_CALL.match(single) is None:
        return None

    def read(text: str, tools: Tools) -> tuple[str, Calls]:
        calls: Calls = []
        prose = text
        for message in re.split(r"<\|start\|>assistant", text):
            channel = _HARMONY.match(message)
            addressed = channel["to"] if channel else ""
            header = re.match(r"\s*to=functions\.(?P<name>[\w.-]+)", addressed) or _HARMONY_CALL.match(message)
            if header is None:
                if channel and channel["channel"] == "final":
                    prose = message[channel.end() :].removesuffix("<|end|>").removesuffix("<|return|>")
                continue
            body = message[(channel if addressed.strip() else header).end() :]  # type: ignore[union-attr]
            value = _decoded(body, 0)
            if value is not None:
                calls.append(_made(header["name"], value[0], None))
        if calls and prose is text:
            prose = text[: text.index("to=functions.")] if "<|channel|>" not in text else ""
        return prose, calls

    return read


# -- small parts -----------------------------------------------------------------------------------------------------


def _made(name: str, arguments: Any, call_id: Any) -> dict[str, Any]:
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return {**call, "id": call_id} if isinstance(call_id, str) and call_id else call


def _left(text: str, start: int, stop: int, tail: str, calls: Calls) -> tuple[str, Calls]:
    """The text around the calls, without the texts that open and close them."""
    if not calls:
        return text, []
    behind = text[stop:]
    closed = re.match(tail, behind)
    return (text[:start] + behind[closed.end() if closed else 0 :]).rstrip(), calls


def _decoded(text: str, at: int) -> tuple[Any, int] | None:
    """The JSON value at a place, blanks skipped, and where it ends."""
    while at < len(text) and text[at].isspace():
        at += 1
    try:
        return json.JSONDecoder().raw_decode(text, at)
    except (ValueError, RecursionError):
        return None


def _object_around(text: str, name: str) -> tuple[int, int, dict[str, Any]] | None:
    """The innermost JSON object with ``name`` among its values."""
    at = text.find(name)
    start = text.rfind("{", 0, at) if at >= 0 else -1
    while start >= 0:
        decoded = _decoded(text, start)
        if decoded is not None and isinstance(decoded[0], dict) and name in decoded[0].values():
            return start, decoded[1], decoded[0]
        start = text.rfind("{", 0, start)
    return None


def _place(text: str, call: tuple[str, dict[str, Any]]) -> tuple[int, int, int] | None:
    """Where a call's name begins, and where its arguments begin and end as JSON."""
    name_at = text.find(call[0])
    at = text.find("{", name_at) if name_at >= 0 else -1
    decoded = _decoded(text, at) if at >= 0 else None
    return None if decoded is None or decoded[0] != call[1] else (name_at, at, decoded[1])


def _common_end(a: str, b: str) -> str:
    return a[len(a) - common_length(a[::-1], b[::-1]) :]


def _flexible(literal: str) -> str:
    """A pattern for a literal with any blanks inside it or after its brackets."""
    literal = literal.strip()
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+|(?<=[>\]])", literal) if part)


def _strict(literal: str) -> str:
    """A pattern for a literal beside a value, where blanks count. Only the literal's own line break may be missing."""
    return "".join(r"\n?+" if letter == "\n" else re.escape(letter) for letter in literal)


def _closing(literal: str) -> str:
    """A pattern for what may follow a call: the literal or its beginning, because the text has no stop token."""
    for call_id in _IDS:
        literal = literal.replace(call_id, "CALLID")
    parts = [part for part in re.split(r"\s+|(?=<)|(?<=>)", literal) if part]
    pattern = ""
    for part in reversed(parts):
        pattern = rf"(?:\s*{re.escape(part)}{pattern})?"
    return pattern.replace("CALLID", r"[\w-]*") + r"\s*"


def _unnamed(pattern: str) -> str:
    return re.sub(r"\(\?P<\w+>", "(?:", pattern)


def _kinds(tools: Tools, name: str) -> dict[str, Any]:
    """The declared type of each argument of a tool."""
    for tool in tools or ():
        function = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if isinstance(function, Mapping) and function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            if isinstance(properties, Mapping):
                return {key: schema.get("type") for key, schema in properties.items() if isinstance(schema, Mapping)}
    return {}


def _typed(text: str, kind: Any) -> Any:
    """An argument written as text: a string where the tool's schema says so, else its JSON value."""
    is_text = kind == "string" or (isinstance(kind, list) and "string" in kind)
    return text if is_text else parsed(text)
