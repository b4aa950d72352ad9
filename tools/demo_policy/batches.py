"""Dialogues as training batches: ids and their loss mask. Some texts are cut into other tokens than the encoder's."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer
from transformers.utils.chat_template_utils import render_jinja_template

from rollouts.sampling.environments.calculator import CALCULATOR_TOOL
from tools.demo_policy.dialogues import SYSTEMS, Dialogue, random_dialogue
from tools.demo_policy.tokenizer import CHAT_TEMPLATE, IM_START

RECUT_SHARE = 0.12
"""Share of assistant turns in which words are cut otherwise than by the encoder."""
RECUT_RATE = 0.15
"""How likely each token in such a turn is cut in two."""

CHUNK_BATCHES = 16
"""The dialogues of so many batches are sorted by length together, so that there is little padding."""


@dataclass(frozen=True)
class Batch:
    """``prefix`` ``[P]`` is common to all sequences. ``ids`` and ``loss_mask`` are ``[B, L]``, padded on the right."""

    prefix: NDArray[np.int64]
    ids: NDArray[np.int64]
    loss_mask: NDArray[np.bool_]
    real: NDArray[np.bool_]


def batches(tokenizer: Tokenizer, n: int, size: int, seed: int) -> Iterator[Batch]:
    """Yields ``n`` batches of ``size`` dialogues. Equal seeds make equal batches."""
    rng = random.Random(f"demo policy batches {seed}")
    cutter = Cutter(tokenizer)
    made = 0
    while made < n:
        prefix_text = system_block(rng.choice(SYSTEMS))
        prefix = np.array(tokenizer.encode(prefix_text).ids, dtype=np.int64)
        encoded = encode_dialogues(tokenizer, [random_dialogue(rng) for _ in range(size * CHUNK_BATCHES)], rng, cutter)
        encoded.sort(key=lambda pair: len(pair[0]))
        starts = list(range(0, len(encoded), size))
        rng.shuffle(starts)
        for start in starts[: n - made]:
            yield _pad(prefix, encoded[start : start + size])
        made += min(len(starts), n - made)


def system_block(system: str | None) -> str:
    """The text before the first user message."""
    messages = [] if system is None else [{"role": "system", "content": system}]
    return render([messages])[0]


def render(conversations: list[list[dict[str, Any]]]) -> list[str]:
    """Render conversations with the chat template; the calculator is among the tools."""
    texts, _ = render_jinja_template(conversations, tools=[CALCULATOR_TOOL], chat_template=CHAT_TEMPLATE.read_text())
    return list(texts)


def encode_dialogues(
    tokenizer: Tokenizer, dialogues: list[Dialogue], rng: random.Random, cutter: Cutter
) -> list[tuple[list[int], list[bool]]]:
    """Ids and loss mask of each dialogue, without the system block.

    The loss covers what the policy samples: everything after ``<|im_start|>assistant`` and its line end, up to and
    without ``<|im_end|>``.
    """
    block = system_block(None)
    texts = [text[len(block) :] for text in render([dialogue.messages for dialogue in dialogues])]
    turns = [[IM_START + turn for turn in text.split(IM_START)[1:]] for text in texts]
    opening, end = IM_START + "assistant\n", "<|im_end|>"
    n_opening = len(tokenizer.encode(opening).ids)
    flat = iter(tokenizer.encode_batch([turn for dialogue in turns for turn in dialogue]))
    result = []
    for dialogue, dialogue_turns in zip(dialogues, turns, strict=True):
        ids: list[int] = []
        mask: list[bool] = []
        learned = iter(dialogue.learned)
        for turn in dialogue_turns:
            turn_ids = next(flat).ids
            if not turn.startswith(opening):
                ids += turn_ids
                mask += [False] * len(turn_ids)
                continue
            if not turn.endswith(end + "\n"):
                raise ValueError("an assistant turn must end with <|im_end|> and a line end")
            sampled = turn_ids[n_opening:-1]
            if rng.random() < RECUT_SHARE:
                sampled = cutter.recut(sampled, rng)
            ids += [*turn_ids[:n_opening], *sampled, turn_ids[-1]]
            mask += [False] * n_opening + [next(learned)] * len(sampled) + [False]
        result.append((ids, mask))
    return result


class Cutter:
    """Cuts tokens into two with the same bytes together (the idea of BPE-dropout).

    A policy that has seen several cuts of a text samples them too. They are the source of non-canonical completions.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        added = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        self._ids = {token: id_ for token, id_ in tokenizer.get_vocab().items() if token not in added}
        self._tokens = {id_: token for token, id_ in self._ids.items()}
        self._cuts = lru_cache(maxsize=None)(self._find_cuts)

    def _find_cuts(self, id_: int) -> list[tuple[int, int]]:
        token = self._tokens.get(id_, "")
        pairs = ((token[:at], token[at:]) for at in range(1, len(token)))
        return [(self._ids[a], self._ids[b]) for a, b in pairs if a in self._ids and b in self._ids]

    def recut(self, ids: list[int], rng: random.Random) -> list[int]:
        """Ids of the same bytes, each cut in two with the chance ``RECUT_RATE``."""
        out: list[int] = []
        for id_ in ids:
            cuts = self._cuts(id_) if rng.random() < RECUT_RATE else []
            out += rng.choice(cuts) if cuts else [id_]
        return out


def _pad(prefix: NDArray[np.int64], rows: list[tuple[list[int], list[bool]]]) -> Batch:
    length = max(len(ids) for ids, _ in rows)
    ids = np.zeros((len(rows), length), dtype=np.int64)
    loss_mask = np.zeros((len(rows), length), dtype=np.bool_)
    real = np.zeros((len(rows), length), dtype=np.bool_)
    for index, (row_ids, row_mask) in enumerate(rows):
        ids[index, : len(row_ids)] = row_ids
        loss_mask[index, : len(row_ids)] = row_mask
        real[index, : len(row_ids)] = True
    return Batch(prefix, ids, loss_mask, real)
