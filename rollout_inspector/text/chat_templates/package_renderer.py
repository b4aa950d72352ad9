"""A renderer of the optional package ``renderers`` in place of a chat template, for models that have none. It is
installed code, so it runs in this process and nothing limits it. The tokenizer that it asks stays in its own."""

import importlib.util
import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from importlib.metadata import version
from typing import Any

import numpy as np

from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.recorded_renders import NOW
from rollout_inspector.streams.strategies.protocol import Extends, Tools
from rollout_inspector.streams.trajectory import Ids, Message, ids_array
from rollout_inspector.text.chat_templates.sandbox.client import Rendered
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer, TemplateTokenizer
from rollout_inspector.text.processes import Faults
from rollout_inspector.text.tokenizers import LoadedTokenizer

MAX_KEPT = 64
NO_TEXT = "A renderer is installed code, so it has no text that could be changed."
_NAMED = re.compile(r"\s*renderer:([\w.-]+)(?: of renderers ([\w.+-]+))?\s*")


def is_renderer(chat_template: str) -> bool:
    """Whether the text of a chat template names a renderer of the package: ``renderer:NAME``."""
    return _NAMED.fullmatch(chat_template) is not None


def kept_text(chat_template: str) -> str:
    """The text under which a chat template is kept: after ``renderer:NAME`` the version of the package is written, any
    other text is unchanged. Raises :class:`Refusal` for a name that the installed package does not have."""
    match = _NAMED.fullmatch(chat_template)
    if match is None or match[2]:
        return chat_template
    if match[1] not in (names := renderer_names()):
        raise Refusal(f"The package renderers has no renderer {match[1]!r}. It has: {', '.join(names)}.")
    return f"renderer:{match[1]} of renderers {version('renderers')}"


def renderer(
    tokenizer: TemplateTokenizer | None, chat_template: str, now: str = "", faults: Faults | None = None
) -> TemplateRenderer:
    """What renders a chat template: Jinja text in the sandbox, ``renderer:NAME`` by a renderer of the package. The
    arguments are those of :class:`TemplateRenderer`. Where it cannot be made, each render fails with the reason."""
    kind = PackageRenderer if is_renderer(chat_template) else TemplateRenderer
    return kind(tokenizer, chat_template, now, faults)


def renderer_names() -> list[str]:
    """The renderers of the package by name, without the one that renders by a chat template. Raises
    :class:`Refusal` where the package is not installed."""
    if importlib.util.find_spec("renderers") is None:
        raise Refusal("The package renderers is not installed. Install it: pip install 'rollout-inspector[renderers]'")
    from renderers.base import RENDERER_REGISTRY, _populate_registry

    _populate_registry()
    return sorted(RENDERER_REGISTRY.keys() - {"default"})


class PackageRenderer(TemplateRenderer):
    """A renderer by its name. It writes ids: the text of a render is what they decode to. ``chat_template`` says which
    renderer it is, and of which version if it was kept (:func:`kept_text`)."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """They are those of :class:`TemplateRenderer`."""
        super().__init__(*arguments, **options)
        self.name = self.chat_template.split()[0].removeprefix("renderer:")
        self._codec: Any = self.tokenizer
        self._renderers: dict[str, Any] = {}

    def render_many(self, conversations: Sequence[Conversation], lines: bool = False) -> list[Rendered]:
        """One outcome for each conversation, with its ids; nothing tells which line wrote what."""
        return [*map(self._rendered, conversations)]

    def _rendered(self, conversation: Conversation) -> Rendered:
        try:
            renderer = self._renderer(conversation.kwargs)
            messages, tools, _, prompted = deepcopy(conversation)
            ids = ids_array(renderer.render_ids([*messages], tools=tools and [*tools], add_generation_prompt=prompted))
        except RenderFailed as error:
            return Rendered(error=str(error), kind="forbidden")
        except Exception as error:  # it may fail on a message that its model never saw
            return Rendered(error=f"The renderer raises: {type(error).__name__}: {error}", kind="raises")
        ids.flags.writeable = False
        return Rendered(self._codec.decode(ids), ids=ids)

    def _renderer(self, kwargs: Mapping[str, Any] | None) -> Any:
        """The object of the package under these template kwargs. Raises :class:`RenderFailed`."""
        arguments = self._clock | dict(kwargs or {})
        day = str(arguments.pop(NOW, ""))[:10]
        key = repr((day, sorted(arguments.items(), key=repr)))
        if key not in self._renderers:
            if len(self._renderers) >= MAX_KEPT:
                self._renderers.clear()
            try:
                self._renderers[key] = self._made(arguments, day)
            except Exception as error:  # it is written for another vocabulary, or wants files that are not here
                raise RenderFailed(f"The renderer {self.name} cannot be made: {error}") from error
        return self._renderers[key]

    def _made(self, arguments: dict[str, Any], day: str) -> Any:
        if self._codec is None:
            raise Refusal("A renderer writes ids, so it needs a tokenizer.")
        installed = kept_text(f"renderer:{self.name}")
        if " of " in self.chat_template and installed != self.chat_template:
            raise Refusal(f"Installed is {installed}, and this is {self.chat_template}: they may write other tokens.")
        from renderers.base import create_renderer, merge_chat_template_kwargs
        from renderers.configs import config_from_name

        config: Any = config_from_name(self.name)
        self.reads_clock = "conversation_start_date" in config.template_field_names()
        if day and self.reads_clock:
            arguments.setdefault("conversation_start_date", day)
        renderer = create_renderer(_Tokenizer(self._codec), merge_chat_template_kwargs(config, arguments))
        claim = "is" if renderer.is_prefix_stable else "may not be"
        self.notes = [f"Rendered by {self.chat_template}, which says of itself that it {claim} prefix-stable."]
        return renderer

    def parse(
        self, prompt_ids: Ids, completion_ids: Ids, tools: Tools = None, kwargs: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The assistant message of a completion up to its first stop token, without calls that are not well-formed."""
        renderer = self._renderer(kwargs)
        stops = np.flatnonzero(np.isin(completion_ids, renderer.get_stop_token_ids()))
        ids = completion_ids[: stops[0] + 1].tolist() if len(stops) else completion_ids.tolist()
        parsed = renderer.parse_response(ids, tools=tools and deepcopy([*tools]), prompt_ids=prompt_ids.tolist())
        message: dict[str, Any] = {"role": "assistant", "content": parsed.content}
        if parsed.reasoning_content:
            message["reasoning_content"] = parsed.reasoning_content
        calls = [
            {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
            for call in parsed.tool_calls if call.status == "ok"
        ]
        return message | ({"tool_calls": calls} if calls else {})

    def bridge(self, kwargs: Mapping[str, Any]) -> Extends:
        """What extends a stream under these template kwargs."""
        return _Bridge(self.name, self._renderer(kwargs))


class _Bridge:
    def __init__(self, name: str, renderer: Any) -> None:
        self.name, self._renderer = name, renderer

    def extend(self, prompt_ids: Ids, completion_ids: Ids, messages: Sequence[Message], tools: Tools) -> Ids | None:
        try:
            extended = self._renderer.bridge_to_next_turn(
                prompt_ids.tolist(), completion_ids.tolist(), deepcopy([*messages]), tools=tools and deepcopy([*tools])
            )
        except Exception:  # it may fail on a message that its model never saw
            return None
        return None if extended is None else ids_array(extended.token_ids)


class _Tokenizer:
    """The little that a renderer asks of a tokenizer. A ``transformers`` tokenizer would run in this process."""

    def __init__(self, tokenizer: LoadedTokenizer) -> None:
        self._tokenizer = tokenizer
        self.name_or_path = tokenizer.name
        self.unk_token_id = tokenizer.token_id(tokenizer.named_tokens.get("unk_token", ""))
        self.eos_token_id = tokenizer.eos_id

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(map(int, self._tokenizer.encode(text)))

    def decode(self, token_ids: Sequence[int], **_: Any) -> str:
        return self._tokenizer.decode(token_ids)

    def convert_tokens_to_ids(self, token: str) -> int | None:
        token_id = self._tokenizer.token_id(token)
        return self.unk_token_id if token_id is None else token_id
