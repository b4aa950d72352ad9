"""From a completion to a message. Under TITO the message routes the turn (is there a tool call?), nothing else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from rollouts.tito.trajectory import Ids

Parse = Callable[[Ids, Ids], dict[str, Any]]
"""``(prompt_ids, completion_ids) -> assistant message``; never raises for what a model wrote."""

_TAIL = 64
"""Prompt ids that the parser sees: enough for the generation prompt and what a template pre-writes of the turn."""

_CALL = re.compile(r"\s*<tool_call>(.*?)</tool_call>\s*", re.DOTALL)
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
                    return {"role": "assistant", "content": "", **message}
            except Exception:
                # A model may write anything; a parser that stumbles over it must not end the rollout.
                return plain_message(tokenizer.decode(_unstopped(completion_ids, stop_ids).tolist()))
        return plain_message(tokenizer.decode(_unstopped(completion_ids, stop_ids).tolist()))

    return parse


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
