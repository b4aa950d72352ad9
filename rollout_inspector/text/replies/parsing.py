"""From a completion to a message. Under TITO the message only routes the turn (is there a tool call?)."""

import hashlib
import re
import string
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollout_inspector.streams.interfaces import Conversation, Renderer, RenderFailed
from rollout_inspector.streams.trajectory import Ids, Message
from rollout_inspector.text.replies.tool_calls import Reader, Tools, learn, plain, writes_calls

Parse = Callable[[Ids, Ids, Tools], dict[str, Any]]
"""``(prompt_ids, completion_ids, tools) -> assistant message``; never raises because of what a model wrote."""

_TAIL = 64
"""Prompt ids that the parser sees. They hold the generation prompt and what a template already wrote of the turn."""

_CALL_ID_LETTERS = string.ascii_letters + string.digits
_CALL_ID_LENGTH = 9
"""Mistral's templates accept only ids of so many letters and digits. Every other template accepts them too."""
_THINK = re.compile(r"^\s*<think>(.*?)</think>\s*", re.DOTALL)


def parser(tokenizer: Any, stop_ids: frozenset[int], read: Reader | None = None, own: Parse | None = None) -> Parse:
    """Returns a parser that reads replies by ``own``, which may raise, or calls by ``read``. Without both the
    tokenizer's own response parsing is used. A tokenizer without one gets :func:`plain`. ``tokenizer`` is a
    transformers tokenizer; with ``read``, any codec."""
    template = _compiled(getattr(tokenizer, "response_template", None)) if read is None else None

    def parse(prompt_ids: Ids, completion_ids: Ids, tools: Tools = None) -> dict[str, Any]:
        is_stopped = len(completion_ids) and int(completion_ids[-1]) in stop_ids
        ids = completion_ids[:-1] if is_stopped else completion_ids
        if own is not None or template is not None:
            try:
                if own is not None:
                    return own(prompt_ids, completion_ids, tools)
                prefix = tokenizer.decode(prompt_ids[-_TAIL:].tolist())
                message = tokenizer.parse_response(completion_ids.tolist(), template, prefix=prefix)
                if isinstance(message, Mapping):
                    stop = tokenizer.decode(completion_ids[len(ids) :].tolist())
                    return {"role": "assistant", "content": "", **_without_stop(message, stop)}
            except Exception:
                # A model may write anything. A parser that fails on it must not end the rollout.
                return plain_message(tokenizer.decode(ids.tolist()))
        text = tokenizer.decode(ids.tolist())
        if "</think>" in text and tokenizer.decode(prompt_ids[-_TAIL:].tolist()).rstrip().endswith("<think>"):
            text = f"<think>{text}"  # the template has begun the thought
        return plain_message(text, read or plain, tools)

    return parse


def _compiled(response_template: Any) -> Any:
    """A response template, compiled once: compiling it for each completion takes half of the parsing time."""
    if response_template is not None:
        try:
            from transformers.utils.chat_parsing.response_templates import load_response_template

            return load_response_template(response_template)
        except Exception:
            pass  # a wrong template, or another release: each parse meets the same fault and goes on
    return response_template


def _without_stop(message: Mapping[str, Any], stop: str) -> dict[str, Any]:
    """The message without the stop token in a call that was never closed. Such a call reaches to the end."""
    calls = message.get("tool_calls")
    if not stop or not isinstance(calls, list):
        return dict(message)
    cut = [
        {**call, "function": call["function"].removesuffix(stop)}
        if isinstance(call, Mapping) and isinstance(call.get("function"), str)
        else call
        for call in calls
    ]
    return {**message, "tool_calls": cut}


def plain_message(text: str, read: Reader = plain, tools: Tools = None) -> dict[str, Any]:
    """The message of a turn: a ``<think>`` block, the text, and the calls that ``read`` finds."""
    message: dict[str, Any] = {"role": "assistant"}
    thought = _THINK.match(text)
    if thought:
        message["reasoning_content"] = thought.group(1).strip()
        text = text[thought.end() :]
    message["content"], calls = read(text, tools)
    if calls:
        message["tool_calls"] = calls
    return message


def call_id(trajectory: object, number: int) -> str:
    """The id of a trajectory's ``number``-th call: always the same, in a form that every template accepts."""
    value = int.from_bytes(hashlib.sha256(f"{trajectory} {number}".encode()).digest()[:8], "big")
    letters = []
    for _ in range(_CALL_ID_LENGTH):
        value, digit = divmod(value, len(_CALL_ID_LETTERS))
        letters.append(_CALL_ID_LETTERS[digit])
    return "".join(letters)


def with_call_ids(reply: Mapping[str, Any], trajectory: object, first: int) -> dict[str, Any]:
    """A parsed reply with an id for each call that has none. ``first``: how many calls the trajectory made before."""
    calls = reply.get("tool_calls")
    if not isinstance(calls, list):
        return dict(reply)
    return {
        **reply,
        "tool_calls": [
            {**call, "id": call_id(trajectory, first + n)} if isinstance(call, Mapping) and not call.get("id") else call
            for n, call in enumerate(calls)
        ],
    }


def answering(reply: Message, messages: Sequence[Message]) -> list[Message]:
    """Tool messages with the ids of the calls that they answer, in the calls' order. Others are unchanged."""
    calls = reply.get("tool_calls")
    ids = iter([call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else [])
    answered: list[Message] = []
    for message in messages:
        if message.get("role") == "tool" and (call_id := next(ids, None)) and not message.get("tool_call_id"):
            message = {**message, "tool_call_id": call_id}
        answered.append(message)
    return answered


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
    if getattr(renderer, "parse", None) is not None:
        return plain, "by the renderer", ""
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
    return parser(tokenizer, tokenizer.stop_ids, form_of(tokenizer, renderer)[0], getattr(renderer, "parse", None))
