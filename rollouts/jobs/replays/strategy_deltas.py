"""The deltas that each strategy would put between the completions of a conversation that was never sampled."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rollout_inspector.streams.interfaces import Conversation, Renderer, RenderFailed
from rollout_inspector.streams.prefix import common_prefix
from rollout_inspector.streams.strategies import STRATEGIES, Context, Strategy, StrategyRefused
from rollout_inspector.streams.strategies.protocol import Tools
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Message, Row, Step
from rollout_inspector.text.chat_templates import TemplateRenderer
from rollout_inspector.text.tokenizers import LoadedTokenizer

MAX_TURNS = 40
MAX_DELTA_TOKENS = 600  # Tokens of one delta that are kept for the page.


def strategy_deltas(
    tokenizer: LoadedTokenizer, renderer: TemplateRenderer, conversation: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Returns the strategies of each turn, grouped by their delta. ``refused`` has a sentence for each that refuses.

    A completion is the text that the template writes for the assistant's message, from the generation prompt to the
    stop token. It is encoded alone, as a model that follows the template would sample it. The step-wise strategies keep
    every prompt as the engine read it. Here that is the rendered conversation before the reply, so they refuse no
    template. ``rows`` holds their rows: the messages that a row trains, its tokens and how many of them are trained.
    """
    context = Context(tokenizer, renderer, tokenizer.stop_ids, bridge=renderer.bridge)
    replies = [k for k, message in enumerate(conversation) if message.get("role") == "assistant"][:MAX_TURNS]
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
    rows: dict[str, list[dict[str, Any]]] = {}
    for slug, make in STRATEGIES.items():
        strategy: Strategy | _Recorded = make(context)
        if hasattr(strategy, "take_recorded"):
            strategy = _Recorded(strategy, context)
        try:
            stream = np.array(strategy.begin(conversation[: replies[0]], tools, kwargs or {}))
            for turn, (place, end) in enumerate(zip(replies, ends, strict=True)):
                strategy.sampled(sampled[turn], None, conversation[place])
                stream = np.concatenate([stream, sampled[turn]])
                if end == place + 1:
                    break
                stream = _observe(strategy, stream, conversation[place + 1 : end], tokenizer, turns[turn], slug)
            if isinstance(strategy, _Recorded):
                rows[slug] = [
                    {
                        "messages": [replies[index] for index in row.step_indices],
                        "tokens": len(row.ids),
                        "trained": row.n_trained,
                    }
                    for row in strategy.rows()
                ]
        except (StrategyRefused, RenderFailed) as error:
            refused[slug] = str(error)
    return {
        "turns": [
            {"message": replies[k], "reply": _tokens(tokenizer, sampled[k]), "deltas": deltas}
            for k, deltas in enumerate(turns)
            if deltas
        ],
        "refused": refused,
        "rows": rows,
        "detail": "",
    }


class _Recorded:
    """A strategy that makes rows of engine calls. Each call renders the whole conversation."""

    def __init__(self, strategy: Any, context: Context) -> None:
        self._strategy, self._context = strategy, context
        self._messages: list[Message] = []
        self._steps: list[Step] = []
        self._asked: tuple[Any, Any] = (None, {})
        self._prompt: Ids = NO_IDS

    def begin(self, messages: Sequence[Message], tools: Tools, kwargs: Mapping[str, Any]) -> Ids:
        self._asked = tools, kwargs
        return self.observe(messages)

    def sampled(self, ids: Ids, logprobs: None, reply: Message) -> None:
        self._steps.append(Step(self._prompt, ids))
        self._messages.append(reply)

    def observe(self, messages: Sequence[Message]) -> Ids:
        self._messages += messages
        self._prompt = self._context.renderer.render_ids(Conversation(self._messages, *self._asked, True))
        return self._prompt

    def rows(self) -> Sequence[Row]:
        self._strategy.take_recorded(self._steps)
        rows: Sequence[Row] = self._strategy.rows()
        return rows


def _observe(
    strategy: Strategy | _Recorded, stream: Ids, messages: Sequence[Message], tokenizer: LoadedTokenizer,
    turn: list[dict[str, Any]], slug: str,
) -> Ids:
    """Returns the next prompt, and adds its delta to ``turn`` or the strategy to an equal delta there."""
    prompt = np.array(strategy.observe(messages))
    shared = common_prefix(stream, prompt)
    delta = prompt[shared:]
    for other in turn:
        if other["ids"] == delta.tolist()[:MAX_DELTA_TOKENS] and other["n"] == len(delta) and other["shared"] == shared:
            other["strategies"].append(slug)
            return prompt
    turn.append({
        "strategies": [slug],
        "shared": shared,
        "stream": len(stream),
        "n": len(delta),
        "ids": delta.tolist()[:MAX_DELTA_TOKENS],
        "tokens": _tokens(tokenizer, delta[:MAX_DELTA_TOKENS]),
    })
    return prompt


def _completion(
    tokenizer: LoadedTokenizer, renderer: Renderer, conversation: Sequence[Message], place: int,
    tools: Sequence[Mapping[str, Any]] | None, kwargs: Mapping[str, Any] | None,
) -> Ids:
    """The ids of one assistant message as a model would sample it, stop token included."""
    prompt = renderer.render_text(Conversation(conversation[:place], tools, kwargs, add_generation_prompt=True))
    whole = renderer.render_text(Conversation(conversation[: place + 1], tools, kwargs))
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
