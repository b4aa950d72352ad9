"""Chooses how tool calls are read: by the tokenizer's response template, or in the form that a chat template writes."""

from typing import Any

from rollout_inspector.streams.interfaces import Conversation, Renderer, RenderFailed
from rollout_inspector.text.replies.parsing import Parse, parser
from rollout_inspector.text.replies.tool_calls import Reader, learn, plain, writes_calls

NOT_UNDERSTOOD = (
    "The chat template writes tool calls in a form that is not understood here, so a call by the model stays "
    "text unless it is a <tool_call> block with JSON. If the worker has vLLM, name the parser that vllm serve "
    'would use in INSPECTOR_MODELS: "options": {"tool_call_parser": "NAME"}.'
)


Way = tuple[Reader | None, str, str]
"""How calls are read: the reader, a description for the run's page, and what is wrong with it, as a sentence. Without a
reader, transformers' ``parse_response`` reads them."""


MAX_KNOWN = 256
_known: dict[tuple[str, str, bool], Way] = {}
"""By hash of tokenizer and chat template, and whether a response template may be used."""


def way_of(tokenizer: Any, renderer: Renderer) -> Way:
    """How calls are read when no parser is named. ``tokenizer`` is a ``LoadedTokenizer`` of a configured model.
    ``transformers`` loads it into this process, where nothing limits what a stranger's tokenizer does."""
    return _kept(tokenizer, renderer, True)


def _kept(tokenizer: Any, renderer: Renderer, is_configured: bool) -> Way:
    key = tokenizer.sha256, renderer.chat_template_sha256, is_configured
    if key not in _known:
        if len(_known) >= MAX_KNOWN:
            _known.clear()
        _known[key] = _found(tokenizer, renderer, is_configured)
    return _known[key]


def _found(tokenizer: Any, renderer: Renderer, is_configured: bool) -> Way:
    if (
        is_configured
        and getattr(tokenizer.hf, "response_template", None) is not None
        and _begins_alike(tokenizer, renderer)
    ):
        return None, "the tokenizer's response template", ""
    read = learn(renderer)
    if read is plain:
        return read, "<tool_call> blocks with JSON, as the chat template writes them", ""
    if read is not None:
        return read, "in the form that the chat template writes", ""
    return plain, "<tool_call> blocks with JSON", NOT_UNDERSTOOD if writes_calls(renderer) else ""


def _begins_alike(tokenizer: Any, renderer: Renderer) -> bool:
    """Whether the response template finds where a turn begins in the prompts of this chat template. If the chat
    template is not the tokenizer's own, it may take the prompt for a part of the answer."""
    try:
        prompt = renderer.render_ids(Conversation([{"role": "user", "content": "Hello?"}], add_generation_prompt=True))
    except RenderFailed:
        return True  # it wants more than this; nothing speaks against it
    reply = parser(tokenizer.hf, tokenizer.stop_ids)(prompt, tokenizer.encode("Six."), None)
    texts = [reply.get("content"), reply.get("reasoning_content")]
    return all(text is None or str(text).strip() in ("", "Six.") for text in texts)


def form_of(tokenizer: Any, renderer: Renderer) -> Way:
    """How calls are read in the form that a chat template writes, with any tokenizer."""
    return _kept(tokenizer, renderer, False)


def parser_of(tokenizer: Any, renderer: Renderer) -> Parse:
    """The parser of replies for any tokenizer. It reads calls in the form that the chat template writes. A response
    template of the tokenizer is not used: it is a program that would run in this process."""
    return parser(tokenizer, tokenizer.stop_ids, form_of(tokenizer, renderer)[0])
