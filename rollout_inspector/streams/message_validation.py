"""Checks messages and tools that people write by hand, and says what an entry lacks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any


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
