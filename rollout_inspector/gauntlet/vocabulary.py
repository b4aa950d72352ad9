"""The vocabulary and the chat template of the scripted engine, so small that no tokenizer is needed. Each byte is a
token, and so are some words. A model may spell such a word byte by byte: the text is the same then, and the ids differ
from what encoding the text would return."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

START, END, OTHER_END = 1, 2, 3
"""Begins a prompt; ends a turn; ends a document, which a model samples now and then in place of the former."""
ROLES = {"system": 11, "user": 12, "assistant": 13, "tool": 14}
BYTE, WORD = 100, 400  # The ids of the byte 0 and of the first word.
WORDS = ("the ", "answer ", "weather ", "tool ")
_PIECES = re.compile(f"({'|'.join(WORDS)})")
_MARK = re.compile(r"#(?:([0-9a-f]{8}):)?([a-z-]+\.\d+)#")
_SERIAL = re.compile(r"~(\d+)~")


def spell(text: str) -> list[int]:
    """The ids of a text, byte by byte."""
    return [BYTE + byte for byte in text.encode()]


def encode(text: str) -> list[int]:
    """The ids of a text as a tokenizer encodes it: words where there are any."""
    pieces = _PIECES.split(text)
    return [id_ for piece in pieces for id_ in ([WORD + WORDS.index(piece)] if piece in WORDS else spell(piece))]


def token_bytes(token: int) -> bytes:
    """The bytes of a token; empty for a control token and for an id that is none."""
    if BYTE <= token < BYTE + 256:
        return bytes([token - BYTE])
    return WORDS[token - WORD].encode() if WORD <= token < WORD + len(WORDS) else b""


def decode(ids: Iterable[int]) -> str:
    """The text of ids. Control tokens have none."""
    return b"".join(map(token_bytes, ids)).decode(errors="replace")


def text_of_call(name: str, arguments: str) -> str:
    """How a call of a tool stands in the text of a turn."""
    return f"<call>{name} {arguments}</call>" if name else ""


def render(messages: Sequence[Mapping[str, Any]], tools: Any = None) -> list[int]:
    """The ids of the prompt for a conversation. A message more never changes what stands before it."""
    ids = [START, *([ROLES["system"], *encode(json.dumps(tools)), END] if tools else [])]
    for message in messages:
        content = message.get("content") or ""
        text = content if isinstance(content, str) else "".join(part["text"] for part in content)
        functions = [call["function"] for call in message.get("tool_calls") or ()]
        text += "".join(text_of_call(function["name"], function["arguments"]) for function in functions)
        ids += [ROLES[message["role"]], *encode(text), END]
    return [*ids, ROLES["assistant"]]


def signed(text: str, game: str) -> str:
    """A text whose marks name the game that they are of, so that what an earlier one left is known."""
    return _MARK.sub(rf"#{game}:\2#", text)


def mark_of(text: str, game: str) -> str:
    """The last mark of a game in a text, which says what is asked; empty = there is none."""
    return next((mark for owner, mark in reversed(_MARK.findall(text)) if owner == game), "")


def is_of_another(text: str, game: str) -> bool:
    """Whether a text has marks, and none of this game."""
    return _MARK.search(text) is not None and not mark_of(text, game)


def serial_of(text: str) -> int:
    """The number of the answer that a text is; 0 = none. Each answer of the engine has another number."""
    number = _SERIAL.search(text)
    return int(number[1]) if number else 0
