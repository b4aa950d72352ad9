"""rLLM gateway traces: one model call a line, with the request's messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollouts.formats import shapes
from rollouts.formats.registry import Format, Rejected, has_keys
from rollouts.formats.sessions import Session, read_sessions
from rollouts.formats.source import Source
from rollouts.tito.trajectory import Request, Step, Trajectory

_KNOWN = ("session_id", "model", "messages", "tools", "prompt_token_ids", "completion_token_ids", "logprobs",
          "finish_reason", "weight_version", "temperature", "reward", "response_message")  # fmt: skip


def read(source: Source) -> Iterator[Trajectory | Rejected]:
    return read_sessions(source, _session_id, _add_line)


def _session_id(value: Mapping[str, Any], number: int) -> str:
    found = value.get("session_id")
    return shapes.text(value.get("trace_id") if found is None else found, "session_id", 200) or f"line-{number}"


def _add_line(session: Session, value: dict[str, Any]) -> None:
    session.tokenizer = session.tokenizer or shapes.text(value.get("model"), "model", 200)
    reward = shapes.number(value.get("reward"), "reward")
    session.reward = session.reward if reward is None else reward
    request = None
    extra = shapes.rest(value, _KNOWN)
    if "tools" not in value and value.get("messages") is not None:
        # Without the tools that were rendered with them they are no whole request.
        extra["messages"] = value["messages"]
    elif value.get("messages") is not None:
        messages = shapes.messages(value["messages"], "messages")
        request = Request(messages, shapes.optional_tools(value.get("tools"), "tools"))
    reply = value.get("response_message")
    session.append(
        Step(
            prompt_ids=shapes.optional_ids(value.get("prompt_token_ids"), "prompt_token_ids"),
            completion_ids=shapes.optional_ids(value.get("completion_token_ids"), "completion_token_ids"),
            logprobs=shapes.optional_floats(value.get("logprobs"), "logprobs"),
            finish_reason=shapes.text(value.get("finish_reason"), "finish_reason", 30),
            temperature=shapes.number(value.get("temperature"), "temperature"),
            policy_version=shapes.text(value.get("weight_version"), "weight_version", 100),
            request=request,
            reply=None if reply is None else shapes.mapping(reply, "response_message"),
            extra=extra,
        )
    )


def detect(values: Sequence[Any]) -> bool:
    one = values[0]
    return has_keys(one, "prompt_token_ids", "completion_token_ids") and ("trace_id" in one or "session_id" in one)


FORMAT = Format("rllm", "rLLM gateway traces", detect, read)
