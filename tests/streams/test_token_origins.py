import random
from itertools import accumulate

import numpy as np
import pytest

from rollout_inspector.streams.token_origins import (
    byte_offsets, content_forms, mask_runs, origins_of_text, origins_of_texts
)
from rollout_inspector.streams.trajectory import Origin

T, OBS = int(Origin.TEMPLATE), int(Origin.OBSERVATION)


def origins(pieces: list[str], messages: list[dict[str, object]] | None = None) -> list[int]:
    special = [piece.startswith("<|") for piece in pieces]
    encoded = [piece.encode() for piece in pieces]
    return origins_of_text(b"".join(encoded), byte_offsets(encoded), special, messages or []).tolist()


CHAT = ["<|end|>", "\n", "<|start|>", "tool", "\n", "<r>", "4", "2", "</r>", "<|end|>", "\n", "<|start|>", "bot", "\n"]


def test_a_message_is_found_by_its_text() -> None:
    assert origins(CHAT, [{"role": "tool", "content": "42"}]) == [T] * 6 + [OBS, OBS] + [T] * 6


def test_without_messages_headers_are_template() -> None:
    assert origins(CHAT) == [T] * 5 + [OBS] * 4 + [T] * 5


def test_a_text_that_the_template_rewrote_falls_back_to_headers() -> None:
    assert origins(CHAT, [{"role": "tool", "content": "forty-two"}]) == [T] * 5 + [OBS] * 4 + [T] * 5


@pytest.mark.parametrize(
    ("content", "pieces"),
    [
        ("  42\n", ["<|a|>", "42", "<|b|>"]),
        ('say "hi"', ["<|a|>", '"say \\"hi\\""', "<|b|>"]),
        ({"n": 1}, ["<|a|>", '{"n":', " 1}", "<|b|>"]),
        ([{"type": "text", "text": "4"}, {"type": "text", "text": "2"}], ["<|a|>", "4", "-", "2", "<|b|>"]),
        ("é", ["<|a|>", '"\\u00e9"', "<|b|>"]),
        ("e\u0301", ["<|a|>", "\u00e9", "<|b|>"]),
    ],
)
def test_the_ways_templates_write_a_content(content: object, pieces: list[str]) -> None:
    found = origins(pieces, [{"role": "tool", "content": content}])
    assert found == [T if piece.startswith("<|") or piece == "-" else OBS for piece in pieces]


def test_a_content_that_spells_a_role_is_looked_for_behind_the_header() -> None:
    pieces = ["<|start|>", "tool", "\n", "tool", "<|end|>"]
    assert origins(pieces, [{"role": "tool", "content": "tool"}]) == [T, T, T, OBS, T]


def test_messages_are_found_in_order() -> None:
    pieces = ["<|a|>", "7", "<|b|>", "7", "<|c|>"]
    assert origins(pieces, [{"role": "tool", "content": "7"}, {"role": "tool", "content": "7"}]) == [T, OBS, T, OBS, T]


def test_an_assistants_text_is_no_observation() -> None:
    pieces = ["<|a|>", "yes", "<|b|>", "42", "<|c|>"]
    messages = [{"role": "assistant", "content": "yes"}, {"role": "tool", "content": "42"}]
    assert origins(pieces, messages) == [T, T, T, OBS, T]


def test_empty_contents_have_no_form() -> None:
    assert [list(content_forms(value)) for value in (None, "", "  ", [])] == [[], [], [], []]


@pytest.mark.parametrize(
    ("mask", "expected"),
    [([], []), ([0, 0], []), ([1], [(0, 1)]), ([1, 1, 0, 1], [(0, 2), (3, 4)]), ([0, 1, 1, 0], [(1, 3)])],
)
def test_runs_of_a_mask_are_maximal(mask: list[int], expected: list[tuple[int, int]]) -> None:
    assert mask_runs(np.array(mask, bool)) == expected


def test_deltas_that_are_joined_are_as_each_by_itself() -> None:
    rng = random.Random(3)
    texts = ["<|end|>", "<|start|>", "\n", "tool", "user", " ", "42", "4", "2", "", "<r>", "é"]
    contents: list[object] = ["42", "4", "tool", "user 42", "", "é", {"a": 1}]
    for _ in range(500):
        deltas = [[rng.choice(texts) for _ in range(rng.randint(0, 9))] for _ in range(rng.randint(1, 4))]
        messages = [
            [{"role": rng.choice(["tool", "assistant"]), "content": rng.choice(contents)}] * rng.randint(0, 2)
            for _ in deltas
        ]
        pieces = [piece.encode() for delta in deltas for piece in delta]
        special = [piece.startswith(b"<|") for piece in pieces]
        stops = list(accumulate(map(len, deltas)))
        found = origins_of_texts(b"".join(pieces), byte_offsets(pieces), special, stops, messages)
        alone = [origins(delta, new) for delta, new in zip(deltas, messages, strict=True)]
        assert found.tolist() == [origin for one in alone for origin in one], (deltas, messages)
