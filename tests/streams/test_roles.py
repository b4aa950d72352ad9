"""Turns read from role headers, in the header styles that templates have."""

import re

import numpy as np
import pytest

from rollout_inspector.streams.roles import role_turns


def stream(text: str) -> tuple[np.ndarray, np.ndarray, list[bytes]]:
    """A token per control token ``<...>`` or ``[X]``, and per word with the blank before it or line's end."""
    pieces = [p.encode() for p in re.findall(r"<[^<>\n ]+>|\[/?[A-Z_]+\]|\n| ?[^\s<\[]+| ", text)]
    assert b"".join(pieces).decode() == text
    special = np.array([p[:1] in (b"<", b"[") for p in pieces], dtype=np.bool_)
    return np.arange(len(pieces), dtype=np.int32), special, pieces


def turns(text: str) -> list[tuple[str, str]]:
    ids, special, pieces = stream(text)
    found = role_turns(ids, special, lambda some: [pieces[i] for i in some])
    return [(role, b"".join(pieces[start:stop]).decode()) for start, stop, role in found]


CHATML = "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nuser here<|im_end|>\n<|im_start|>assistant\nyes"
HEADERS = (
    "<|begin|><|start_header_id|>user<|end_header_id|>\n\nhi<|eot_id|>"
    "<|start_header_id|>ipython<|end_header_id|>\n\n4<|eot_id|>"
)
HARMONY = (
    "<|start|>assistant to=functions.add<|channel|>commentary<|message|>{}<|call|>"
    "<|start|>functions.add to=assistant<|channel|>commentary<|message|>4<|end|>"
)
NAMED = (
    "<｜begin▁of▁sentence｜><｜User｜>hi<｜Assistant｜>yes<｜tool▁calls▁begin｜>add<｜tool▁calls▁end｜>"
    "<｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>4<｜tool▁output▁end｜><｜tool▁outputs▁end｜>"
)
BRACKETS = "<s>[INST] hi[/INST] yes</s>[TOOL_RESULTS]4[/TOOL_RESULTS] four</s>"


@pytest.mark.parametrize(
    ("text", "roles"),
    [
        (CHATML, ["system", "user", "assistant"]),
        (HEADERS, ["user", "tool"]),
        (HARMONY, ["assistant", "tool"]),
        (NAMED, ["user", "assistant", "tool"]),
        (BRACKETS, ["user", "assistant", "tool", "assistant"]),
        ("<|user|>\nhi<|end|>\n<|assistant|>\nyes<|end|>\n<|observation|>\n4", ["user", "assistant", "tool"]),
        ("<bos><start_of_turn>user\nhi<end_of_turn>\n<start_of_turn>model\nyes", ["user", "assistant"]),
    ],
)
def test_headers_of_many_styles(text: str, roles: list[str]) -> None:
    found = turns(text)
    assert [role for role, _ in found] == roles
    assert "".join(piece for _, piece in found) == text


def test_a_role_in_running_text_opens_nothing() -> None:
    assert turns("<|a|>user says hi<|b|>\nuser\n") == []
    assert turns("hello user\n") == []


def test_text_before_the_first_header_is_the_prompt() -> None:
    assert turns("Once<|user|>hi") == [("prompt", "Once"), ("user", "<|user|>hi")]
    assert turns("<s><|user|>hi") == [("user", "<s><|user|>hi")]


def test_a_stream_without_tokens() -> None:
    assert role_turns(np.zeros(0, np.int32), np.zeros(0, np.bool_), lambda ids: []) == []
    assert role_turns(np.zeros(1, np.int32), np.ones(1, np.bool_), lambda ids: [b"<|user|>"]) == [
        (0, 1, "user")
    ]
