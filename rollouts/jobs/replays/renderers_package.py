"""The optional package ``renderers``: finds the hand-written renderer that writes what a chat template writes. The
renderer is found by what it renders. A model's name would be wrong for a fine-tune or another template."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.strategies.appending import Bridge
from rollout_inspector.streams.strategies.protocol import Extends, StrategyRefused
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.package_renderer import PackageRenderer, renderer_names
from rollout_inspector.text.chat_templates.probes.message_shape import CALC, TOOLS, MessageShape, Tool
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer
from rollout_inspector.text.tokenizers import LoadedTokenizer

_LEFT_OUT = {"gpt-oss"}  # It fetches a vocabulary from the network.

MAX_KEPT = 64
_found: dict[tuple[str, str, str], Extends | str] = {}

_SHAPE = MessageShape(ids=True)
_ASKED: list[Message] = [{"role": "user", "content": "What's 2+2?"}]
_CALLED: list[Message] = [*_ASKED, _SHAPE.call((CALC, {"expr": "2+2"})), _SHAPE.result(CALC, "4")]
_TALKED: list[Message] = [
    {"role": "system", "content": "Be short."},
    *_ASKED,
    {"role": "assistant", "content": "4."},
    {"role": "user", "content": "And 3+3?"},
]
PROBES: tuple[tuple[list[Message], Sequence[Tool] | None], ...] = (
    (_ASKED, None), (_TALKED, None), (_ASKED, TOOLS), (_CALLED, TOOLS),
)


def bridges_of(tokenizer: LoadedTokenizer, renderer: TemplateRenderer) -> Callable[[Mapping[str, Any]], Extends]:
    """Returns a function from template kwargs to the object that extends streams of a tokenizer and a chat template. A
    process searches once. Calling the function raises :class:`StrategyRefused` with a sentence."""
    if renderer.bridge is not None:
        return renderer.bridge

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


def _find(tokenizer: LoadedTokenizer, renderer: TemplateRenderer, kwargs: Mapping[str, Any]) -> Extends | str:
    """The first renderer that renders every probe as the chat template does; else a sentence that says why not."""
    if lacking := Bridge.missing():
        return lacking
    conversations, expected = [], []
    for messages, tools in PROBES:
        conversation = Conversation(messages, tools, kwargs, True)
        try:
            expected.append(renderer.render_ids(conversation).tolist())
        except RenderFailed:
            continue  # not every template takes tools or a system message
        conversations.append(conversation)
    for name in sorted({*renderer_names()} - _LEFT_OUT) if expected else ():
        renders = (candidate := PackageRenderer(tokenizer, f"renderer:{name}")).render_many(conversations)
        if [None if render.ids is None else render.ids.tolist() for render in renders] == expected:
            return candidate.bridge(kwargs)
    return (
        "No renderer of the package renderers writes what this chat template writes, so none may extend its stream. "
        "Choose tool_delta, or another strategy."
    )
