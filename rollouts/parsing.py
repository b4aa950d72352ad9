"""From a completion to a message. Under TITO the message routes the turn (is there a tool call?), nothing else."""

from __future__ import annotations

import hashlib
import json
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollouts.tito.trajectory import Ids, Message

Parse = Callable[[Ids, Ids], dict[str, Any]]
"""``(prompt_ids, completion_ids) -> assistant message``; never raises for what a model wrote."""

_TAIL = 64
"""Prompt ids that the parser sees: enough for the generation prompt and what a template pre-writes of the turn."""

_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
_CALL_ID_LETTERS = string.ascii_letters + string.digits
_CALL_ID_LENGTH = 9
"""Mistral's templates take ids of exactly so many letters and digits; every other template takes these too."""
_COMMENT = re.compile(r"{#.*?#}", re.DOTALL)
_READS_ID = re.compile(r"\b(?:tool_call_)?id\b")
_THINK = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)


def parser(tokenizer: Any, stop_ids: frozenset[int]) -> Parse:
    """The tokenizer's own response parsing where it has one (transformers' ``parse_response``), else a plain one.

    ``tokenizer`` is a transformers tokenizer.
    """
    own = getattr(tokenizer, "response_template", None)

    def parse(prompt_ids: Ids, completion_ids: Ids) -> dict[str, Any]:
        if own is not None:
            try:
                prefix = tokenizer.decode(prompt_ids[-_TAIL:].tolist())
                message = tokenizer.parse_response(completion_ids.tolist(), prefix=prefix)
                if isinstance(message, Mapping):
                    stop = tokenizer.decode(completion_ids[len(_unstopped(completion_ids, stop_ids)) :].tolist())
                    return {"role": "assistant", "content": "", **_without_stop(message, stop)}
            except Exception:
                # A model may write anything; a parser that stumbles over it must not end the rollout.
                return plain_message(tokenizer.decode(_unstopped(completion_ids, stop_ids).tolist()))
        return plain_message(tokenizer.decode(_unstopped(completion_ids, stop_ids).tolist()))

    return parse


def _without_stop(message: Mapping[str, Any], stop: str) -> dict[str, Any]:
    """A call that was never closed is parsed to the end of the completion; its stop token is no part of the call."""
    calls = message.get("tool_calls")
    if not stop or not isinstance(calls, list):
        return dict(message)
    cut = [
        {**call, "function": call["function"].removesuffix(stop)}
        if isinstance(call, Mapping) and isinstance(call.get("function"), str)
        else call
        for call in calls
    ]
    return {**message, "tool_calls": cut}


def plain_message(text: str) -> dict[str, Any]:
    """``<think>`` and ``<tool_call>`` blocks as most templates write them. A call that is no JSON stays a text."""
    message: dict[str, Any] = {"role": "assistant"}
    thought = _THINK.match(text)
    if thought:
        message["reasoning_content"] = thought.group(1).strip()
        text = text[thought.end() :]
    calls = [{"type": "function", "function": _function(body.strip())} for body in _CALL.findall(text)]
    message["content"] = _CALL.sub("", text)
    if calls:
        message["tool_calls"] = calls
    return message


def _function(body: str) -> Any:
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return body
    return value if isinstance(value, dict) else body


def _unstopped(ids: Ids, stop_ids: frozenset[int]) -> Ids:
    return ids[:-1] if len(ids) and int(ids[-1]) in stop_ids else ids


def wants_call_ids(chat_template: str) -> bool:
    """Whether a chat template reads the ids of calls, so that a call without one may be refused."""
    return _READS_ID.search(_COMMENT.sub("", chat_template)) is not None


def call_id(trajectory: object, number: int) -> str:
    """The id of a trajectory's ``number``-th call: the same each time, and in a form that every template takes."""
    value = int.from_bytes(hashlib.sha256(f"{trajectory} {number}".encode()).digest()[:8], "big")
    letters = []
    for _ in range(_CALL_ID_LENGTH):
        value, digit = divmod(value, len(_CALL_ID_LETTERS))
        letters.append(_CALL_ID_LETTERS[digit])
    return "".join(letters)


def with_call_ids(reply: Mapping[str, Any], trajectory: object, first: int) -> dict[str, Any]:
    """A parsed reply with an id for each call that came without; ``first``: calls that the trajectory made before."""
    calls = reply.get("tool_calls")
    if not isinstance(calls, list):
        return dict(reply)
    return {
        **reply,
        "tool_calls": [
            {**call, "id": call_id(trajectory, first + n)} if isinstance(call, Mapping) and not call.get("id") else call
            for n, call in enumerate(calls)
        ],
    }


def answering(reply: Message, messages: Sequence[Message]) -> list[Message]:
    """Tool messages with the ids of the calls that they answer, in the calls' order; other messages as they are."""
    calls = reply.get("tool_calls")
    ids = iter([call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else [])
    answered: list[Message] = []
    for message in messages:
        if message.get("role") == "tool" and (found := next(ids, None)) and not message.get("tool_call_id"):
            message = {**message, "tool_call_id": found}
        answered.append(message)
    return answered
