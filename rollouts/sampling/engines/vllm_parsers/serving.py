"""Answers what vLLM's parsers read, on the standard streams. Only a confined process runs this. A parser gets so much
computing time. Then the kernel sends a signal, and the parser is interrupted in the middle of its regular expression. A
parser that cannot be interrupted ends the process."""

import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rollout_inspector.text.confinement import confine
from rollout_inspector.text.tokenizers.worker.definition import parse_definition, read_files

MEMORY_BYTES = 3_000_000_000  # Beyond what is mapped when the process is confined.
GRACE_SECONDS = 2  # How much longer a parser that was interrupted may compute before the kernel ends the process.
MAX_ANSWER_BYTES = 16_000_000
MAX_CALLS = 1_000
WARM = '<think>a</think><tool_call>{"name": "b", "arguments": {"c": 1}}</tool_call><|tool|>[b(c=1)]'
Make = Callable[[str, str, Any], Any]


class TooLong(BaseException):
    """A parser has used its computing time. No ``except Exception`` of a parser hides it."""


def main() -> None:
    """Import vLLM, confine this process, load the tokenizer of the first request, then answer the others."""
    # What a library prints must not lie among the answers.
    answers = os.dup(1)
    os.dup2(2, 1)
    try:
        parsers = _Parsers()
        parsers.warm()
    except ImportError as error:
        _write(answers, {"error": f"vLLM cannot be imported: {error.name or error}."})
        return
    _write(answers, {"version": parsers.version, "names": parsers.names})
    signal.signal(signal.SIGXCPU, _interrupt)
    question = _read()
    if question is None:
        return
    try:
        files = read_files(Path(question["folder"]))
        confine(MEMORY_BYTES)
        _limit_seconds(30)
        parsers.load(files)
    except Exception as error:
        _write(answers, {"error": f"The tokenizer cannot be loaded: {type(error).__name__}: {str(error)[:200]}."})
        return
    _write(answers, {})
    while (question := _read()) is not None:
        _write(answers, parsers.read(question))


class _Parsers:
    def __init__(self) -> None:
        import vllm
        from tokenizers import Tokenizer
        from transformers import PreTrainedTokenizerFast
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
        from vllm.reasoning import ReasoningParserManager
        from vllm.tool_parsers import ToolParserManager

        self.version = str(vllm.__version__)
        tool, reasoning = ToolParserManager, ReasoningParserManager
        self.names = {
            "tool": sorted({*tool.tool_parsers, *tool.lazy_parsers}),
            "reasoning": sorted({*reasoning.reasoning_parsers, *reasoning.lazy_parsers}),
        }
        self._classes = {"tool": tool.get_tool_parser, "reasoning": reasoning.get_reasoning_parser}
        self._request = ChatCompletionRequest
        self._tokenizer_of = lambda text, named: PreTrainedTokenizerFast(
            tokenizer_object=Tokenizer.from_str(text), **named
        )
        self._tokenizer: Any = None

    def warm(self) -> None:
        """Have every parser read a text with a tiny tokenizer. What they import late could not be imported later."""
        vocabulary = {word: at for at, word in enumerate(["<unk>", "<think>", "</think>", "<tool_call>", "a"])}
        model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"}
        self._use(json.dumps({"version": "1.0", "model": model, "added_tokens": []}), {})
        tools = [{"type": "function", "function": {"name": "b", "parameters": {"type": "object", "properties": {}}}}]
        for kind, names in self.names.items():
            for name in names:
                self.read({"kind": kind, "name": name, "text": WARM, "tools": tools, "seconds": 0})

    def load(self, files: Mapping[str, bytes]) -> None:
        definition = parse_definition(files)
        self._use(definition.text, dict(definition.named_tokens))

    def _use(self, text: str, named: dict[str, Any]) -> None:
        tokenizer = self._tokenizer_of(text, named)
        vocabulary = tokenizer.get_vocab()  # most parsers ask for it, and it is built each time
        tokenizer.get_vocab = lambda: vocabulary
        self._tokenizer = tokenizer

    def read(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to one request."""
        try:
            if asked["seconds"]:
                _limit_seconds(asked["seconds"])
            answer = self._read(asked["kind"], asked["name"], asked["text"], asked["tools"])
        except TooLong:
            return {"error": f"It was stopped after {asked['seconds']} s of computing time."}
        except MemoryError:
            return {"error": "It needs more memory than it may use."}
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of native code is no Exception
            return {"error": f"{type(error).__name__}: {str(error)[:300]}" if str(error) else type(error).__name__}
        return answer if len(json.dumps(answer)) <= MAX_ANSWER_BYTES else {"error": "It wrote far more than it read."}

    def _read(self, kind: str, name: str, text: str, tools: Any) -> dict[str, Any]:
        try:
            request = self._request(messages=[], tools=list(tools) if tools else None)
        except ValueError:
            request = self._request(messages=[])  # tools in a form that vLLM refuses
        parser_class = self._classes[kind]
        if kind == "reasoning":
            reasoning, content = parser_class(name)(self._tokenizer).extract_reasoning(text, request)
            return {"content": content or "", "reasoning": reasoning or "", "calls": []}
        extracted = parser_class(name)(self._tokenizer, request.tools).extract_tool_calls(text, request)
        calls = [
            {"name": str(call.function.name), "arguments": str(call.function.arguments)}
            for call in extracted.tool_calls[:MAX_CALLS]
        ]
        # As ``vllm serve`` answers: without a call the text is the content.
        content = extracted.content
        if content is None:
            content = "" if calls or extracted.tools_called else text
        return {"content": content, "reasoning": "", "calls": calls}


def _interrupt(*_: object) -> None:
    raise TooLong


def _limit_seconds(seconds: int) -> None:
    """Send this process a signal after so many seconds of computing, and another one each second."""
    used = int(time.process_time()) + 1
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (used + seconds, most))


def _read() -> dict[str, Any] | None:
    """The next request; None when the parent has closed its pipe."""
    head = sys.stdin.buffer.read(4)
    if len(head) < 4:
        return None
    question: dict[str, Any] = json.loads(sys.stdin.buffer.read(struct.unpack("<I", head)[0]))
    return question


def _write(answers: int, value: Mapping[str, Any]) -> None:
    data = json.dumps(value).encode()
    unsent = memoryview(struct.pack("<I", len(data)) + data)
    while unsent:
        unsent = unsent[os.write(answers, unsent) :]
