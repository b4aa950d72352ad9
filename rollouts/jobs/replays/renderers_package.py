"""The optional package ``renderers``: finds the hand-written renderer that writes what a chat template writes. The
renderer is found by what it renders. A model's name would be wrong for a fine-tune or another template."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from rollout_inspector.streams.interfaces import Conversation, Renderer, RenderFailed
from rollout_inspector.streams.recorded_renders import NOW
from rollout_inspector.streams.strategies.appending import Bridge
from rollout_inspector.streams.strategies.protocol import Extends, StrategyRefused, Tools
from rollout_inspector.streams.trajectory import Ids, Message, ids_array
from rollout_inspector.text.tokenizers import LoadedTokenizer

_LEFT_OUT = ("default", "gpt-oss")
"""The first renders by the chat template itself. The second fetches a vocabulary from the network."""

MAX_KEPT = 64
_found: dict[tuple[str, str, str], Extends | str] = {}

_TOOL = {
    "type": "function",
    "function": {
        "name": "calc",
        "description": "Computes.",
        "parameters": {"type": "object", "properties": {"expr": {"type": "string"}}, "required": ["expr"]},
    },
}
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "calc", "arguments": {"expr": "2+2"}}}
_ASKED: list[Message] = [{"role": "user", "content": "What's 2+2?"}]
_CALLED: list[Message] = [
    *_ASKED,
    {"role": "assistant", "content": "", "tool_calls": [_CALL]},
    {"role": "tool", "name": "calc", "tool_call_id": "abcdefghi", "content": "4"},
]
_TALKED: list[Message] = [
    {"role": "system", "content": "Be short."},
    *_ASKED,
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3+3?"},
]
PROBES: tuple[tuple[list[Message], list[dict[str, Any]] | None], ...] = (
    (_ASKED, None), (_TALKED, None), (_ASKED, [_TOOL]), (_CALLED, [_TOOL]),
)


def bridges_of(tokenizer: LoadedTokenizer, renderer: Renderer) -> Callable[[Mapping[str, Any]], Extends]:
    """Returns a function from template kwargs to the object that extends streams of a tokenizer and a chat template. A
    process searches once. Calling the function raises :class:`StrategyRefused` with a sentence."""

    def bridge(kwargs: Mapping[str, Any]) -> Extends:
        key = (tokenizer.sha256, renderer.chat_template_sha256, repr(sorted(kwargs.items(), key=repr)))
        if key not in _found:
            if len(_found) >= MAX_KEPT:
                _found.clear()
            _found[key] = _find(tokenizer, renderer, kwargs)
        extends = _found[key]
        if isinstance(extends, str):
            raise StrategyRefused(extends)
        return extends

    return bridge


class _Tokenizer:
    """The little that a renderer asks of a tokenizer. A ``transformers`` tokenizer would run in this process."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name
        self.unk_token_id = self._named("unk_token")
        self.eos_token_id = self._named("eos_token")

    def _named(self, name: str) -> int | None:
        text = self._tokenizer.named_tokens.get(name)
        return None if text is None else self._tokenizer.token_id(text)

    def encode(self, text: str, **_: Any) -> list[int]:
        return self._tokenizer.encode(text).tolist()

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return self._tokenizer.decode(token_ids)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self._tokenizer.token_id(tokens)
        return self.unk_token_id if token_id is None else token_id


class _Bridge:
    def __init__(self, name: str, renderer: Any) -> None:
        self.name, self._renderer = name, renderer

    def extend(self, prompt_ids: Ids, completion_ids: Ids, messages: Sequence[Message], tools: Tools) -> Ids | None:
        try:
            extended = self._renderer.bridge_to_next_turn(
                prompt_ids.tolist(), completion_ids.tolist(), [dict(message) for message in messages],
                tools=None if tools is None else [dict(tool) for tool in tools],
            )
        except Exception:  # it may fail on a message that its model never saw
            return None
        return None if extended is None else ids_array(extended.token_ids)


def _find(tokenizer: LoadedTokenizer, renderer: Renderer, kwargs: Mapping[str, Any]) -> Extends | str:
    """The first renderer that renders every probe as the chat template does; else a sentence that says why not."""
    if lacking := Bridge.missing():
        return lacking
    expected = []
    for messages, tools in PROBES:
        try:
            expected.append((messages, tools, renderer.render_ids(Conversation(messages, tools, kwargs, True))))
        except RenderFailed:
            continue  # not every template takes tools or a system message
    for name, make in _candidates(tokenizer, kwargs):
        try:
            candidate = make()
            if expected and all(
                np.array_equal(candidate.render_ids(messages, tools=tools, add_generation_prompt=True), ids)
                for messages, tools, ids in expected
            ):
                return _Bridge(name, candidate)
        except Exception:  # a renderer of another model, whose tokens are not in this vocabulary
            continue
    return (
        "No renderer of the package renderers writes what this chat template writes, so none may extend its stream. "
        "Choose tool_delta, or another strategy."
    )


def _candidates(tokenizer: LoadedTokenizer, kwargs: Mapping[str, Any]) -> list[tuple[str, Callable[[], Any]]]:
    from renderers.base import RENDERER_REGISTRY, _populate_registry, create_renderer, merge_chat_template_kwargs
    from renderers.configs import config_from_name

    shim = _Tokenizer(tokenizer)
    arguments = {name: value for name, value in kwargs.items() if name != NOW}

    def maker(name: str) -> Callable[[], Any]:
        return lambda: create_renderer(shim, merge_chat_template_kwargs(config_from_name(name), arguments))

    _populate_registry()
    return [(name, maker(name)) for name in sorted(RENDERER_REGISTRY) if name not in _LEFT_OUT]
