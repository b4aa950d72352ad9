"""A conversation that was never sampled, through every strategy: what each would put between two completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollouts.tito.codec import Renderer, RenderFailed
from rollouts.tito.prefix import common_prefix
from rollouts.tito.strategies import STRATEGIES, Context, Strategy, StrategyRefused
from rollouts.tito.trajectory import Ids, Message
from rollouts.tokenizers import LoadedTokenizer

MOST_TURNS = 40
MOST_DELTA = 600
"""Tokens of one delta that are kept for the page."""


def strategy_deltas(
    tokenizer: LoadedTokenizer,
    renderer: Renderer,
    conversation: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Per turn, the strategies grouped by the delta they give; what refuses is listed with its sentence.

    A completion is what the template itself writes for the assistant's message behind the generation prompt, up to the
    stop token, and is encoded alone, as a model that follows the template would have sampled it.
    """
    context = Context(tokenizer, renderer, tokenizer.stop_ids)
    replies = [k for k, message in enumerate(conversation) if message.get("role") == "assistant"][:MOST_TURNS]
    if not replies or replies[0] == 0:
        sentence = "It needs at least one message before an assistant message, and an assistant message."
        return {"turns": [], "refused": {}, "detail": f"The conversation cannot be replayed. {sentence}"}
    try:
        sampled = [_completion(tokenizer, renderer, conversation, k, tools, kwargs) for k in replies]
    except RenderFailed as error:
        return {"turns": [], "refused": {}, "detail": f"The conversation cannot be rendered: {error}"}
    refused: dict[str, str] = {}
    turns: list[list[dict[str, Any]]] = [[] for _ in range(len(replies))]
    ends = [*replies[1:], len(conversation)]
    for slug, make in STRATEGIES.items():
        strategy = make(context)
        try:
            stream = np.array(strategy.begin(conversation[: replies[0]], tools, kwargs or {}))
            for turn, (place, end) in enumerate(zip(replies, ends, strict=True)):
                strategy.sampled(sampled[turn], None, conversation[place])
                stream = np.concatenate([stream, sampled[turn]])
                if end == place + 1:
                    break
                stream = _observe(strategy, stream, conversation[place + 1 : end], tokenizer, turns[turn], slug)
        except (StrategyRefused, RenderFailed) as error:
            refused[slug] = str(error)
    return {
        "turns": [
            {"message": replies[k], "reply": _tokens(tokenizer, sampled[k]), "deltas": deltas}
            for k, deltas in enumerate(turns)
            if deltas
        ],
        "refused": refused,
        "detail": "",
    }


def _observe(
    strategy: Strategy,
    stream: Ids,
    messages: Sequence[Message],
    tokenizer: LoadedTokenizer,
    turn: list[dict[str, Any]],
    slug: str,
) -> Ids:
    """The next prompt; notes its delta in ``turn``, beside the strategies that gave the same."""
    prompt = np.array(strategy.observe(messages))
    shared = common_prefix(stream, prompt)
    delta = prompt[shared:]
    for other in turn:
        if other["ids"] == delta.tolist()[:MOST_DELTA] and other["n"] == len(delta) and other["shared"] == shared:
            other["strategies"].append(slug)
            return prompt
    turn.append(
        {
            "strategies": [slug],
            "shared": shared,
            "stream": len(stream),
            "n": len(delta),
            "ids": delta.tolist()[:MOST_DELTA],
            "tokens": _tokens(tokenizer, delta[:MOST_DELTA]),
        }
    )
    return prompt


def _completion(
    tokenizer: LoadedTokenizer,
    renderer: Renderer,
    conversation: Sequence[Message],
    place: int,
    tools: Sequence[Mapping[str, Any]] | None,
    kwargs: Mapping[str, Any] | None,
) -> Ids:
    """The ids of one assistant message as it would have been sampled, stop token included."""
    prompt = renderer.render_text(conversation[:place], tools, kwargs, add_generation_prompt=True)
    whole = renderer.render_text(conversation[: place + 1], tools, kwargs)
    if whole.startswith(prompt):
        ids = tokenizer.encode(whole[len(prompt) :])
    else:
        ids = tokenizer.encode(str(conversation[place].get("content") or ""))
    stops = np.flatnonzero(np.isin(ids, np.array(sorted(tokenizer.stop_ids), dtype=np.int64)))
    if stops.size:
        return ids[: int(stops[0]) + 1]
    if tokenizer.eos_id is not None:
        return np.append(ids, np.int32(tokenizer.eos_id)).astype(np.int32)
    return ids


def _tokens(tokenizer: LoadedTokenizer, ids: Ids) -> list[dict[str, Any]]:
    pieces = tokenizer.token_bytes(ids)
    return [{"id": int(i), "text": piece.decode("utf-8", "replace")} for i, piece in zip(ids, pieces, strict=True)]
