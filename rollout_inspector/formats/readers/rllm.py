"""rLLM gateway traces: one model call a line, with the request's messages. A gateway in cumulative mode writes of each
prompt only what it adds to the stream of the call before it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_inspector.formats import shapes
from rollout_inspector.formats.readers.sessions import Session, session_format
from rollout_inspector.formats.registry import has_keys
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Ids, Request, Step

_KNOWN = ("session_id", "model", "messages", "tools", "prompt_token_ids", "completion_token_ids", "logprobs",
          "finish_reason", "weight_version", "temperature", "reward", "response_message", "trace_id",
          "prompt_delta_token_ids", "parent_trace_id")


def _session_id(value: Mapping[str, Any], number: int) -> str:
    session_id = value.get("trace_id") if value.get("session_id") is None else value["session_id"]
    return shapes.text(session_id, "session_id", 200) or f"line-{number}"


def _add_line(session: Session, value: dict[str, Any]) -> None:
    session.tokenizer = session.tokenizer or shapes.text(value.get("model"), "model", 200)
    reward = shapes.number(value.get("reward"), "reward")
    session.reward = session.reward if reward is None else reward
    request = None
    extra = shapes.rest(value, _KNOWN)
    raw = value.get("raw_request")
    call = value if "tools" in value or not isinstance(raw, dict) else raw
    if call is value and "tools" not in value and value.get("messages") is not None:
        # Without the tools that were rendered with them they are no whole request.
        extra["messages"] = value["messages"]
    elif value.get("messages") is not None:
        messages = shapes.messages(value["messages"], "messages")
        request = Request(messages, shapes.optional_tools(call.get("tools"), "tools"))
    name = shapes.text(value.get("trace_id"), "trace_id", 200)
    reply = value.get("response_message")
    session.append(
        Step(
            prompt_ids=_prompt(session, value),
            completion_ids=shapes.optional_ids(value.get("completion_token_ids"), "completion_token_ids"),
            logprobs=shapes.optional_floats(value.get("logprobs"), "logprobs"),
            finish_reason=shapes.text(value.get("finish_reason"), "finish_reason", 30),
            temperature=shapes.spare(shapes.number, value.get("temperature"), "temperature"),
            policy_version=shapes.text(value.get("weight_version"), "weight_version", 100),
            request=request,
            reply=None if reply is None else shapes.mapping(reply, "response_message"),
            extra={"trace_id": name, **extra} if name else extra,
        ),
        name,
    )


def _prompt(session: Session, value: Mapping[str, Any]) -> Ids:
    added = value.get("prompt_delta_token_ids")
    if added is None or value.get("prompt_token_ids"):
        return shapes.optional_ids(value.get("prompt_token_ids"), "prompt_token_ids")
    parent = shapes.text(value.get("parent_trace_id"), "parent_trace_id", 200)
    stream = session.stream(parent)
    if stream is None:
        raise BadLine(
            f"The prompt continues the call {parent!r} (parent_trace_id), which is on no earlier line of this session."
        )
    return np.concatenate([stream, shapes.ids(added, "prompt_delta_token_ids")])


def detect(values: Sequence[Any]) -> bool:
    record = values[0]
    return has_keys(record, "prompt_token_ids", "completion_token_ids") and (
        "trace_id" in record or "session_id" in record
    )


FORMAT = session_format("rllm", "rLLM gateway traces", detect, _session_id, _add_line)
