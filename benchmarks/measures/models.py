"""Tokenizers and chat templates of the corpus, and what each template can write."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from rollout_inspector.text import chat_templates, tokenizers

Message = dict[str, Any]

CORPUS = Path(os.environ.get("INSPECTOR_CORPUS") or Path(__file__).resolve().parents[3] / "shared" / "corpus")
ROLE_TOKENS = ("<|assistant|>", "<|observation|>", "<|system|>", "<|user|>")
OPEN, CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Pair:
    """A chat template with the tokenizer that it is used with."""

    template: str
    tokenizer: str
    stops: tuple[str, ...] = ("<|im_end|>",)
    """Tokens that may end a completion. Of several, the template or the next message decides."""
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    added: tuple[str, ...] = ()
    """Control tokens that the tokenizer of the corpus lacks."""

    @property
    def name(self) -> str:
        return "+".join([self.template, *self.kwargs])


_LLAMA, _DEEPSEEK = ("<|eot_id|>",), ("<｜end▁of▁sentence｜>",)
_OSS = ("<|call|>", "<|return|>", "<|end|>")
PAIRS = (
    Pair("qwen2.5", "qwen2.5"),
    Pair("llama3.1", "llama3.1", _LLAMA),
    Pair("qwen3", "qwen3"),
    Pair("deepseek-v3.1", "deepseek-r1", _DEEPSEEK),
    Pair("gpt-oss", "gpt-oss", _OSS),
    Pair("mistral-nemo", "mistral-nemo", ("</s>",)),
    Pair("glm-4.5", "qwen3", ("<|observation|>", "<|user|>"), added=ROLE_TOKENS),
    Pair("qwq-32b", "qwen2.5", kwargs={"enable_thinking": True}),
    Pair("qwen3-coder", "qwen3"),
    Pair("qwen3.5-think", "qwen3"),
    Pair("llama3.2", "llama3.1", _LLAMA),
    Pair("deepseek-r1", "deepseek-r1", _DEEPSEEK),
    Pair("trl--deepseekv3", "deepseek-r1", _DEEPSEEK),
    Pair("qwen3-instruct-2507", "qwen3"),
    Pair("qwen3--seed-one-line-fix", "qwen3"),
    Pair("trl-training--qwen3", "qwen3"),
    Pair("trl-training--gptoss", "gpt-oss", _OSS),
    Pair("deepseek-v3.1", "deepseek-r1", _DEEPSEEK, kwargs={"thinking": True}),
    Pair("qwen3--0.6b-early", "qwen3"),
    Pair("qwen3.5-nothink", "qwen3"),
    Pair("qwen3-vl", "qwen3"),
    Pair("qwen3--skyrl-acc-thinking", "qwen3"),
    Pair("trl-training--qwen2-5", "qwen2.5"),
    Pair("trl-training--deepseekv3", "deepseek-r1", _DEEPSEEK),
    Pair("trl-training--qwen3-instruct-2507", "qwen3"),
    Pair("vllm--chatml", "qwen3"),
    Pair("trl--llama3", "llama3.1", _LLAMA),
)


class Model:
    """One pair in memory. It renders with transformers alone; only :attr:`codec` and :attr:`renderer` are ours."""

    def __init__(self, pair: Pair) -> None:
        self.pair, self.name = pair, pair.name
        self.tokenizer, self.folder = _tokenizer(pair.tokenizer, pair.added)
        self.template = (CORPUS / "templates" / f"{pair.template}.jinja").read_text(encoding="utf-8")
        self.stop_ids = [self.id_of(stop) for stop in pair.stops]
        self.special = {i for i, one in self.tokenizer.added_tokens_decoder.items() if one.special}
        self.codec = _codec(self.folder)
        self.renderer = chat_templates.renderer(self.codec, self.template)

    def id_of(self, token: str) -> int:
        [one] = self.encode(token)
        return one

    def encode(self, text: str) -> list[int]:
        return list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip: bool = False) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False))

    def render(self, messages: Sequence[Message], tools: Any = None, kwargs: Any = None, more: bool = False) -> str:
        """The text of a conversation; ``more`` adds the generation prompt. Raises what the template raises."""
        return str(
            self.tokenizer.apply_chat_template(
                [self._as_taken(one) for one in messages], tools=tools, chat_template=self.template, tokenize=False,
                add_generation_prompt=more, **(dict(self.pair.kwargs) if kwargs is None else kwargs),
            )
        )

    def _as_taken(self, message: Message) -> Message:
        """The message with its arguments in the form that the template takes; on the wire they are JSON text."""
        if self.takes_text or not message.get("tool_calls"):
            return message
        calls = []
        for call in message["tool_calls"]:
            function = {**call["function"], "arguments": json.loads(call["function"]["arguments"])}
            calls.append({**call, "function": function})
        return {**message, "tool_calls": calls}

    def says(self, message: Message, more: Sequence[Message] = ()) -> str:
        """What the template writes for one reply behind a lone question."""
        question = {"role": "user", "content": "q"}
        before, whole = self.render([question], more=True), self.render([question, message, *more])
        at = before.rindex(OPEN) if self.opens else len(before)
        assert whole[:at] == before[:at], f"{self.name} writes a reply without the header of its generation prompt"
        return whole[at:]

    @cached_property
    def opens(self) -> bool:
        """Whether the generation prompt opens a block of reasoning."""
        return self.render([{"role": "user", "content": "q"}], more=True).rstrip().endswith(OPEN)

    @cached_property
    def takes_text(self) -> bool:
        """Whether the template takes arguments as JSON text only."""
        self.__dict__["takes_text"] = False
        try:
            return "'zq'" in self.render([{"role": "user", "content": "q"}, call_message([("f", {"zq": 1})])])
        except TypeError:
            return True

    def _holds(self, word: str, messages: list[Message]) -> bool:
        try:
            return word in self.render([{"role": "user", "content": "q"}, *messages])
        except Exception:  # what a template raises is its own
            return False

    @cached_property
    def calls(self) -> int:
        """How many calls at once the template writes, and their results: 0, 1 or 3."""
        for n in (3, 1):
            message = call_message([("f", {"x": f"zq{i}"}) for i in range(n)])
            results = [result_of(call, f"zr{i}") for i, call in enumerate(message["tool_calls"])]
            if self._holds(f"zq{n - 1}", [message]) and self._holds(f"zr{n - 1}", [message, *results]):
                return n
        return 0

    @cached_property
    def speaks_and_calls(self) -> bool:
        """Whether a reply can hold both text and a call."""
        return self._holds("zq", [{**call_message([("f", {})]), "content": "zq"}])

    @cached_property
    def reasoning_key(self) -> str:
        """The key of a message whose reasoning the template writes; empty = none."""
        for key in ("reasoning_content", "thinking"):
            if self._holds("zq", [{"role": "assistant", "content": "a", key: "zq"}]):
                return key
        return ""

    @cached_property
    def reasons(self) -> str:
        """How reasoning is sampled: ``template`` writes it too, ``open`` or ``free`` are the model's own; or empty."""
        if self.opens:
            return "open"
        if self.reasoning_key and CLOSE not in self.generation_prompt:
            return "template"
        return "free" if CLOSE in self.template and self.pair.template.startswith("deepseek-r1") else ""

    @cached_property
    def takes_system(self) -> bool:
        try:
            return "zq" in self.render([{"role": "system", "content": "zq"}, {"role": "user", "content": "q"}])
        except Exception:
            return False

    @cached_property
    def generation_prompt(self) -> str:
        messages = [{"role": "user", "content": "q"}]
        whole, start = self.render(messages, more=True), self.render(messages)
        return whole.removeprefix(start)


def call_message(calls: Sequence[tuple[str, Any]], ids: Sequence[str] = ()) -> Message:
    """An assistant message as it is on the wire."""
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {
                "id": ids[n] if ids else f"call{n:05}",
                "type": "function",
                "function": {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)},
            }
            for n, (name, arguments) in enumerate(calls)
        ],
    }


def result_of(call: Message, content: str) -> Message:
    return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": content}


@cache
def _tokenizer(name: str, added: tuple[str, ...]) -> tuple[Any, Path]:
    from transformers import AddedToken, AutoTokenizer

    folder = CORPUS / "tokenizers" / name
    tokenizer = AutoTokenizer.from_pretrained(folder)
    if added:
        tokenizer.add_tokens([AddedToken(one, special=True, normalized=False) for one in added], special_tokens=True)
        folder = Path(tempfile.mkdtemp(prefix=f"{name}-"))
        tokenizer.save_pretrained(folder)
    return tokenizer, folder


@cache
def _codec(folder: Path) -> tokenizers.LoadedTokenizer:
    return tokenizers.load(folder)


@cache
def model(pair_index: int) -> Model:
    return Model(PAIRS[pair_index])
