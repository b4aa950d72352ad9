"""Calls of OpenAI's Responses: items in, items out, and with ``enable_response_messages`` vLLM's own token ids."""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from rollout_inspector.formats.readers.nemo_gym import assistant_message
from rollouts.recorder.choices import Calls

_OF_ASSISTANT = ("function_call", "reasoning", "custom_tool_call")
_OUTPUTS = ("function_call_output", "custom_tool_call_output", "computer_call_output")
_REQUEST = ("input", "instructions", "tools")
RAW = ("input_messages", "output_messages")
"""The fields of an answer with the ids of the prompt, and of what was sampled."""


def join_responses(events: Sequence[dict[str, Any]], broken_off: bool) -> dict[str, Any]:
    """The response that a stream ends with; of one that broke off the text that had come, without ids."""
    text = ""
    for event in events:
        if event.get("type") in ("response.completed", "response.incomplete", "response.failed"):
            return dict(event["response"])
        if event.get("type") == "response.output_text.delta":
            text += str(event.get("delta") or "")
    return {"output": [{"type": "message", "content": text}], "status": "cancelled" if broken_off else "incomplete"}


def responses_calls(request: dict[str, Any], answer: dict[str, Any]) -> Calls:
    """A call of ``/v1/responses``. A server that runs tools itself asks the model several times: a call each. The
    messages of a request that names a ``previous_response_id`` are not whole, and are left out."""
    chat_request = {name: value for name, value in request.items() if name not in _REQUEST}
    if not request.get("previous_response_id"):
        chat_request["messages"] = chat_messages(request)
    else:
        chat_request["input"] = request.get("input")
    if request.get("tools"):
        chat_request["tools"] = [_tool(tool) for tool in request["tools"]]
    streams = [_tokens(message) for name in RAW for message in answer.get(name) or []]
    # Prompt, completion, prompt of the next time, its completion, ...
    times = list(pairwise(streams))[::2] if streams and None not in streams else [(None, None)]
    output = answer.get("output") or []
    chat_answer = {name: value for name, value in answer.items() if name not in ("output", *RAW)}
    details = answer.get("incomplete_details")
    reason = {"incomplete": "length", "cancelled": "abort"}.get(str(answer.get("status")), "stop")
    if isinstance(details, Mapping) and details.get("reason") != "max_output_tokens":
        reason = str(details.get("reason"))
    calls = []
    for n, (prompt, completion) in enumerate(times):
        is_last = n == len(times) - 1
        choice: dict[str, Any] = {"index": 0, "finish_reason": reason if is_last else "tool_calls"}
        if completion is not None:
            choice["token_ids"] = completion
        if len(times) == 1:
            choice["message"] = assistant_message([item for item in output if item.get("type") not in _OUTPUTS])
        elif is_last:
            chat_answer["output"] = output  # nothing says which items came of which time
        usage = _usage(answer.get("usage")) if len(times) == 1 else None
        calls.append((
            chat_request if n == 0 else {name: value for name, value in chat_request.items() if name != "messages"},
            {**chat_answer, "usage": usage, "prompt_token_ids": prompt, "choices": [choice]},
        ))
    return calls


def chat_messages(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """``instructions`` and ``input`` of a request as chat messages. Items of one turn of the model are one message."""
    messages: list[dict[str, Any]] = []
    if request.get("instructions"):
        messages.append({"role": "system", "content": request["instructions"]})
    input_value = request.get("input")
    items = [{"role": "user", "content": input_value}] if isinstance(input_value, str) else list(input_value or [])
    turn: list[Mapping[str, Any]] = []
    for item in items:
        kind, role = item.get("type", "message"), item.get("role", "assistant")
        if kind in _OF_ASSISTANT or (kind == "message" and role == "assistant"):
            turn.append(item)
            continue
        if turn:
            messages.append(dict(assistant_message(turn)))
            turn = []
        if kind in _OUTPUTS:
            content = _content(item.get("output"))
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": content})
        elif kind == "message":
            messages.append({"role": role, "content": _content(item.get("content"))})
    if turn:
        messages.append(dict(assistant_message(turn)))
    return messages


def _content(content: Any) -> Any:
    """The content of an item as that of a chat message: text as text, other parts as parts."""
    if not isinstance(content, list):
        return content
    parts: list[Any] = []
    for part in content:
        if isinstance(part, dict) and part.get("type") in ("input_text", "output_text"):
            part = {"type": "text", "text": part.get("text")}
        elif isinstance(part, dict) and part.get("type") == "input_image":
            part = {"type": "image_url", "image_url": {"url": part.get("image_url")}}
        parts.append(part)
    if len(parts) == 1 and isinstance(parts[0], dict) and parts[0].get("type") == "text":
        return parts[0]["text"]
    return parts


def _tool(tool: Any) -> Any:
    if not isinstance(tool, dict) or tool.get("type") != "function" or "function" in tool:
        return tool
    return {"type": "function", "function": {name: value for name, value in tool.items() if name != "type"}}


def _tokens(message: Any) -> list[int] | None:
    """The ids of a raw message; None = the server renders messages in another way and tells none."""
    return message["tokens"] if isinstance(message, dict) and message.get("type") == "raw_message_tokens" else None


def _usage(usage: Any) -> dict[str, Any] | None:
    if not isinstance(usage, dict):
        return None
    return {"prompt_tokens": usage.get("input_tokens"), "completion_tokens": usage.get("output_tokens")}
