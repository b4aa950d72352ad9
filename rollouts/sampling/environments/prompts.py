"""Prompts from a JSONL file. A line has ``messages``, and may have ``answer`` and ``tools``."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any, BinaryIO

from rollout_inspector.formats.containers.json_text import json_problem
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.messages import tools_problem
from rollouts.sampling.environments.calculator import last_number
from rollouts.sampling.environments.lookup import mentions
from rollouts.sampling.environments.protocol import Outcome, Task

MAX_LINE = 4 << 20  # Bytes of one line. A longer line is rejected.
MAX_PROMPTS = 100_000
MAX_PROBLEMS = 20  # How many bad lines are named.

_ROLES = ("system", "developer", "user", "assistant", "tool")


class PromptsRejected(Refusal):
    """The file holds lines that are not prompts. ``problems`` has a sentence for each, up to ``MAX_PROBLEMS``."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(" ".join(problems))
        self.problems = tuple(problems)


def read_prompts(source: Path | BinaryIO) -> list[Task]:
    """The prompts of a JSONL file (a path, or a file open for reading bytes). Raises :class:`PromptsRejected`. The
    trajectories of a line without an answer get no reward."""
    prompts: list[Task] = []
    problems: list[str] = []
    with source.open("rb") if isinstance(source, Path) else nullcontext(source) as file:
        for number, line in _lines(file):
            if not line.strip():
                continue
            if len(prompts) == MAX_PROMPTS:
                problems.append(f"Line {number}: a file may hold at most {MAX_PROMPTS} prompts; split it.")
                break
            try:
                prompts.append(_prompt(line))
            except ValueError as error:
                problems.append(f"Line {number}: {error}")
                if len(problems) == MAX_PROBLEMS:
                    problems.append("Reading stopped here; there may be more.")
                    break
    if not prompts and not problems:
        problems.append('The file holds no prompt; each line is a JSON object with "messages".')
    if problems:
        raise PromptsRejected(problems)
    return prompts


def _lines(file: BinaryIO) -> Iterator[tuple[int, bytes]]:
    """The lines with their numbers. A line that is too long is cut; its rest is skipped and not kept in memory."""
    number = 0
    while line := file.readline(MAX_LINE + 1):
        number += 1
        yield number, line
        while len(line) > MAX_LINE and not line.endswith(b"\n") and (line := file.readline(MAX_LINE + 1)):
            pass


def _prompt(line: bytes) -> Task:
    if len(line) > MAX_LINE:
        raise ValueError(f"it is longer than {MAX_LINE >> 20} MiB.")
    try:
        record = json.loads(line)
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text.") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error.msg}, column {error.colno}).") from None
    except RecursionError:
        raise ValueError("its JSON is nested too deeply.") from None
    if not isinstance(record, dict):
        raise ValueError('it is not a JSON object with "messages".')
    if problem := json_problem(record):
        raise ValueError(f"it {problem}.")
    messages, answer, tools = record.get("messages"), record.get("answer"), record.get("tools")
    if not isinstance(messages, list) or not messages:
        raise ValueError('"messages" must be a list with at least one message.')
    for place, message in enumerate(messages):
        if not isinstance(message, dict):
            raise ValueError(f"messages[{place}] must be an object with a role and a content.")
        if message.get("role") not in _ROLES:
            raise ValueError(f'messages[{place}]: "role" must be one of {", ".join(_ROLES)}.')
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, str) and not (content is None and isinstance(calls, list) and calls):
            raise ValueError(f'messages[{place}]: "content" must be a text.')
    if messages[-1]["role"] not in ("user", "tool"):
        raise ValueError('the last message must be the user\'s or a tool\'s ("role": "user"); the model speaks next.')
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | None):
        raise ValueError('"answer" must be a text or a number.')
    if not isinstance(tools, list | None):
        raise ValueError('"tools" must be a list of function schemas.')
    if problem := tools_problem(tools or ()):
        raise ValueError(f'"tools" must be a list of function schemas. {problem}')
    return Task(messages, tools or None, None if answer is None else str(answer))


def matching(text: str, answer: str) -> dict[str, float]:
    """Which rules find ``answer`` in ``text``: 0.0 or 1.0 for each. ``exact``: the text is the answer, apart from case
    and outer spaces. ``last_number`` (for a number): it is the last number of the text. ``contains`` (for other
    answers): the text holds it as whole words."""
    rewards = {"exact": float(text.strip().casefold() == answer.strip().casefold())}
    number: Fraction | None = None
    with suppress(ValueError, ZeroDivisionError):
        number = Fraction(answer.strip().replace(",", ""))
    if number is None:
        rewards["contains"] = float(bool(answer.strip()) and mentions(text, answer.strip()))
    else:
        rewards["last_number"] = float(last_number(text) == number)
    return rewards


class PromptsEpisode:
    """One turn. Nothing answers a tool call, so the first completion is the answer."""

    def __init__(self, task: Task) -> None:
        self._answer = task.answer

    def step(self, message: Mapping[str, Any]) -> Outcome:
        if message.get("tool_calls"):
            return self._end("", "unanswered_call")
        content = message.get("content")
        return self._end(content if isinstance(content, str) else "", "answered")

    def truncated(self, reason: str) -> Outcome:
        return self._end("", reason)

    def _end(self, text: str, reason: str) -> Outcome:
        if self._answer is None:
            return Outcome(messages=[], done=True, stop_reason=reason)
        parts = matching(text, self._answer)
        return Outcome([], True, reward=max(parts.values()), reward_parts=parts, stop_reason=reason)


class PromptsEnvironment:
    """The prompts of a file, in their order. They repeat from the start when more are asked for."""

    name = "prompts"

    def __init__(self, prompts: Sequence[Task] = ()) -> None:
        self._prompts = prompts

    def tasks(self, n: int, seed: int) -> list[Task]:
        """The first ``n`` prompts. Raises :class:`Refusal` without a file."""
        if not self._prompts:
            raise Refusal("The environment prompts needs a JSONL file of prompts; choose one.")
        return [replace(self._prompts[index % len(self._prompts)], index=index) for index in range(n)]

    def start(self, task: Task) -> PromptsEpisode:
        return PromptsEpisode(task)
