"""Lookup: questions about a small corpus, one tool that searches it (BM25), a reward if the answer names the fact."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rollouts.sampling.environments.protocol import Outcome, Task

BUNDLED_CORPUS = Path(__file__).with_name("lookup_corpus.jsonl")
SYSTEM = "You answer questions about the lighthouses of an invented coast. Look facts up before you answer."

LOOKUP_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Searches the corpus and returns the best passages.",
        "parameters": {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    },
}

MAX_QUERY = 300
N_PASSAGES = 3


@dataclass(frozen=True)
class Passage:
    """One document of the corpus."""

    text: str
    question: str = ""  # A question that this passage answers; empty = the passage is background only.
    answer: str = ""


def read_corpus(path: Path) -> list[Passage]:
    """Passages from JSONL lines ``{"text", "question"?, "answer"?}``. Raises ``ValueError`` with the line's number."""
    passages = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path.name}, line {number}: not JSON ({error.msg}).") from error
        if not isinstance(record, dict) or not isinstance(record.get("text"), str):
            raise ValueError(f'{path.name}, line {number}: a passage is an object with a text named "text".')
        passages.append(Passage(record["text"], str(record.get("question", "")), str(record.get("answer", ""))))
    if not any(passage.question and passage.answer for passage in passages):
        raise ValueError(f'{path.name}: no line has both "question" and "answer", so there is nothing to ask.')
    return passages


class Index:
    """BM25 over the passages."""

    def __init__(self, passages: Sequence[Passage]) -> None:
        import bm25s  # it needs only numpy, but its import is slow for processes that never search

        self._passages = passages
        self._tokenize = lambda text: bm25s.tokenize(text, show_progress=False)
        self._bm25 = bm25s.BM25()
        self._bm25.index(self._tokenize([passage.text for passage in passages]), show_progress=False)

    def search(self, query: str, k: int = N_PASSAGES) -> list[str]:
        """The texts of the best ``k`` passages that share a word with the query, best first."""
        k = min(k, len(self._passages))
        indices, scores = self._bm25.retrieve(self._tokenize(query), k=k, show_progress=False)
        return [self._passages[i].text for i, score in zip(indices[0], scores[0], strict=True) if score > 0]


def mentions(text: str, answer: str) -> bool:
    """Whether ``text`` holds ``answer`` as whole words; upper and lower case are equal."""
    return re.search(rf"(?<!\w){re.escape(answer.casefold())}(?!\w)", text.casefold()) is not None


class LookupEpisode:
    """One trajectory. Searches are answered; the first turn without a search is the answer."""

    def __init__(self, task: Task, index: Index) -> None:
        self._answer = task.answer or ""
        self._index = index
        self._searches = 0

    def step(self, message: Mapping[str, Any]) -> Outcome:
        calls = message.get("tool_calls")
        if isinstance(calls, list) and calls:
            return Outcome(messages=[self._reply(call) for call in calls], done=False)
        content = message.get("content")
        correct = isinstance(content, str) and mentions(content, self._answer)
        return self._end(correct, "answered" if self._searches else "no_tool_call")

    def truncated(self, reason: str) -> Outcome:
        return self._end(False, reason)

    def _end(self, correct: bool, reason: str) -> Outcome:
        parts = {"correct": float(correct), "searches": float(self._searches)}
        return Outcome(messages=[], done=True, reward=float(correct), reward_parts=parts, stop_reason=reason)

    def _reply(self, call: object) -> dict[str, Any]:
        function = call.get("function", call) if isinstance(call, Mapping) else None
        name = function.get("name") if isinstance(function, Mapping) else None
        arguments = function.get("arguments") if isinstance(function, Mapping) else None
        query = arguments.get("query") if isinstance(arguments, Mapping) else None
        if name != "lookup":
            content = "error: unknown tool; the only one is lookup"
        elif not isinstance(query, str) or not query.strip():
            content = 'error: the arguments need one text named "query"'
        else:
            self._searches += 1
            content = "\n".join(self._index.search(query[:MAX_QUERY])) or "nothing found"
        return {"role": "tool", "name": name if isinstance(name, str) else "unknown", "content": content}


class LookupEnvironment:
    """Questions that one search answers."""

    name = "lookup"

    def __init__(self, corpus: Path = BUNDLED_CORPUS) -> None:
        self._passages = read_corpus(corpus)
        self._index = Index(self._passages)

    def tasks(self, n: int, seed: int) -> list[Task]:
        """Returns ``n`` questions of the corpus in an order by the seed. They repeat when the corpus has fewer."""
        passages = [passage for passage in self._passages if passage.question and passage.answer]
        rng = random.Random(f"lookup tasks {seed}")
        order: list[Passage] = []
        while len(order) < n:
            order += rng.sample(passages, len(passages))
        return [
            Task(
                messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": passage.question}],
                tools=[LOOKUP_TOOL],
                answer=passage.answer,
                index=index,
            )
            for index, passage in enumerate(order[:n])
        ]

    def start(self, task: Task) -> LookupEpisode:
        return LookupEpisode(task, self._index)
