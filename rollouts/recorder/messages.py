"""Calls of Anthropic's Messages. No server tells token ids in this dialect, so they are recorded as text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from rollouts.recorder.choices import Calls

_REASONS = {"end_turn": "stop", "stop_sequence": "stop", "max_tokens": "length", "tool_use": "tool_calls"}
_REQUEST = ("system", "messages", "tools")
_CHOICE = ("content", "stop_reason", "stop_sequence", "role")


def join_messages(events: Sequence[dict[str, Any]], broken_off: bool) -> dict[str, Any]:
    """The message that a stream adds up to."""
    message: dict[str, Any] = {}
    blocks: dict[int, dict[str, Any]] = {}
    arguments: dict[int, str] = {}
    for event in events:
        kind, index = event.get("type"), event.get("index") or 0
        if kind == "message_start":
            message = dict(event["message"])
        elif kind == "content_block_start":
            blocks[index] = dict(event["content_block"])
        elif kind == "content_block_delta":
            delta, block = event["delta"], blocks[index]
            if delta.get("type") == "input_json_delta":
                arguments[index] = arguments.get(index, "") + delta["partial_json"]
            for name in ("text", "thinking"):
                if name in delta:
                    block[name] = str(block.get(name) or "") + delta[name]
        elif "delta" in event:
            message |= event["delta"]
            message["usage"] = {**(message.get("usage") or {}), **(event.get("usage") or {})}
    for index, text in arguments.items():
        blocks[index]["input"] = text  # as the model wrote it
    if broken_off and not message.get("stop_reason"):
        message["stop_reason"] = "abort"
    message["content"] = [blocks[index] for index in sorted(blocks)]
    return message


def messages_calls(request: dict[str, Any], answer: dict[str, Any]) -> Calls:
    """A call of ``/v1/messages`` in the shape of Chat Completions, without ids."""
    chat_request = {name: value for name, value in request.items() if name not in _REQUEST}
    chat_request["messages"] = chat_messages(request)
    if request.get("tools"):
        chat_request["tools"] = [_tool(tool) for tool in request["tools"]]
    reason = str(answer.get("stop_reason") or "")
    choice = {
        "index": 0, "message": _assistant(answer.get("content") or []), "finish_reason": _REASONS.get(reason, reason),
        "stop_reason": answer.get("stop_sequence"),
    }
    chat_answer = {name: value for name, value in answer.items() if name not in _CHOICE}
    return [(chat_request, {**chat_answer, "choices": [choice]})]


def chat_messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``system`` and ``messages`` of a request as chat messages; each result of a tool is a message of its own."""
    messages: list[dict[str, Any]] = []
    if request.get("system"):
        messages.append({"role": "system", "content": _text(request["system"])})
    for message in request.get("messages") or []:
        role, content = message.get("role"), message.get("content")
        if isinstance(content, str):
            messages.append({"role": role, "content": content})
        elif role == "assistant":
            messages.append(_assistant(content or []))
        else:
            parts = []
            for block in content or []:
                if block.get("type") == "tool_result":
                    text = _text(block.get("content"))
                    messages.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
                else:
                    parts.append(_part(block))
            if len(parts) == 1 and parts[0].get("type") == "text":
                messages.append({"role": role, "content": parts[0]["text"]})
            elif parts:
                messages.append({"role": role, "content": parts})
    return messages


def _assistant(blocks: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Blocks of one turn of the model as one chat message."""
    message: dict[str, Any] = {"role": "assistant", "content": _text(blocks)}
    if thought := "".join(str(block.get("thinking") or "") for block in blocks if block.get("type") == "thinking"):
        message["reasoning_content"] = thought
    calls = []
    for block in blocks:
        if block.get("type") == "tool_use":
            values = block.get("input")
            arguments = values if isinstance(values, str) else json.dumps(values or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
    if calls:
        message["tool_calls"] = calls
    return message


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    return "".join(str(block.get("text") or "") for block in content or [] if block.get("type") == "text")


def _part(block: Mapping[str, Any]) -> dict[str, Any]:
    """A block of a user as a part of a chat message; a block of another kind stays as it is."""
    if block.get("type") != "image":
        return dict(block)
    source = block.get("source") or {}
    url = source.get("url") or f"data:{source.get('media_type')};base64,{source.get('data')}"
    return {"type": "image_url", "image_url": {"url": url}}


def _tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    names = {"name": "name", "description": "description", "input_schema": "parameters"}
    return {"type": "function", "function": {names[name]: value for name, value in tool.items() if name in names}}
