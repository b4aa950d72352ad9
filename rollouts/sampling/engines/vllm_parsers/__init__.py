"""vLLM's parsers of replies, each by itself, in a confined process: they are code of others that reads hostile text."""

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self

from rollout_inspector.refusal import Refusal
from rollout_inspector.text.processes import Late, LimitedProcess, ProcessEnded
from rollouts.sampling.engines.vllm_engine import ENVIRONMENT

START_SECONDS = 120.0  # vLLM is imported in seven seconds, on a busy machine in more.
LOAD_SECONDS = 60.0
READ_SECONDS, READ_SECONDS_PER_MB = 2, 3  # Processor seconds of one parser on one text.
PATIENCE = 6  # A busy machine may take so many times as long as the processor.
MAX_STARTS = 4  # A parser that cannot be interrupted ends the process. After so many starts the others are not asked.

TOTAL_SECONDS = 120.0  # For all parsers on one text, by the clock. Those that are left are not asked.

_PROGRAM = Path(__file__).parent / "__main__.py"


NOT_ASKED = "It was not asked: other parsers took too long on this reply."


def missing() -> str:
    """Why no parser of vLLM can be asked on this machine, as a sentence; empty = vLLM is installed."""
    if find_spec("vllm") is not None:
        return ""
    return "vLLM is not installed where the worker runs, so none of its parsers was asked."


class VllmParsers:
    """The parsers that the installed vLLM has, for one tokenizer. Use it as a context manager. The tokenizer may be a
    stranger's: its files are parsed in the confined process. Raises :class:`Refusal`."""

    def __init__(self, folder: Path) -> None:
        """``folder``: of the tokenizer."""
        if sentence := missing():
            raise Refusal(sentence)
        self._folder, self._n_starts = folder, 0
        self._process: LimitedProcess | None = None
        self.version = ""  # Of vLLM.
        self.names: Mapping[str, Sequence[str]] = {}
        """``tool`` and ``reasoning`` -> the names of the parsers, as ``vllm serve`` takes them."""
        self._start()

    def read_all(
        self, text: str, tools: Sequence[Mapping[str, Any]] | None, say: Callable[[str], object] = lambda _: None
    ) -> Iterator[tuple[str, str, dict[str, Any]]]:
        """Kind, name and answer of every parser, as :meth:`read` returns it. ``say`` is told how far it is."""
        began, n, total = time.monotonic(), 0, sum(map(len, self.names.values()))
        for kind, names in self.names.items():
            for name in names:
                n += 1
                say(f"parser {n} of {total}: {name}")
                late = time.monotonic() - began > TOTAL_SECONDS
                yield kind, name, {"error": NOT_ASKED} if late else self.read(kind, name, text, tools)

    def read(self, kind: str, name: str, text: str, tools: Sequence[Mapping[str, Any]] | None) -> dict[str, Any]:
        """What a parser reads of a text: ``content``, ``reasoning``, ``calls``; or ``error``, a sentence. ``kind``:
        ``tool`` or ``reasoning``. ``calls``: each with ``name`` and ``arguments``, a text."""
        if self._process is None:
            if self._n_starts >= MAX_STARTS:
                return {"error": NOT_ASKED}
            self._start()
        seconds = READ_SECONDS + READ_SECONDS_PER_MB * len(text) // 1_000_000
        question = {"kind": kind, "name": name, "text": text, "tools": tools, "seconds": seconds}
        try:
            return self._exchange(question, seconds * PATIENCE)
        except Late:
            self.close()
        except ProcessEnded as error:
            self.close()
            if error.status not in (-signal.SIGXCPU, -signal.SIGKILL):
                return {"error": "It brought its process down, perhaps because it needs more memory than it may use."}
        return {"error": f"It was stopped after {seconds} s of computing time."}

    def _start(self) -> None:
        self._n_starts += 1
        self._process = process = LimitedProcess("The process of vLLM's parsers", [str(_PROGRAM)], _ENVIRONMENT)
        try:
            about = json.loads(process.receive(time.monotonic() + START_SECONDS))
            loaded = self._exchange({"folder": str(self._folder)}, LOAD_SECONDS) if "error" not in about else about
        except (Late, ProcessEnded) as error:
            self.close()
            sentence = str(error) or "The process of vLLM's parsers did not start in time."
            raise Refusal(f"vLLM's parsers could not be asked. {sentence}") from error
        if "error" in loaded:
            self.close()
            raise Refusal(f"vLLM's parsers could not be asked. {loaded['error']}")
        self.version, self.names = about["version"], about["names"]

    def _exchange(self, asked: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        assert self._process is not None
        deadline = time.monotonic() + seconds
        self._process.send(json.dumps(asked).encode(), deadline)
        answer: dict[str, Any] = json.loads(self._process.receive(deadline))
        return answer

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_ENVIRONMENT = {
    **ENVIRONMENT,
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CONFIGURE_LOGGING": "0",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "OPENBLAS_NUM_THREADS": "1",
    "MALLOC_ARENA_MAX": "2",
    "HOME": "/nonexistent",
}
