"""The commands of `manage.py`, and what they share."""

import json
import sys
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from django.core.management.base import BaseCommand, CommandError, OutputWrapper

from rollout_inspector.commands.remedies import sentence_of
from rollout_inspector.outputs import plain
from rollout_inspector.refusal import Refusal
from rollouts.store.people.activity_log import Actor, acting


class _Terminal(OutputWrapper):
    """Writes plain text."""

    def write(self, msg: str = "", style_func: Any = None, ending: str | None = None) -> None:  # type: ignore[override]
        super().write(plain(msg), style_func, ending)


class TerminalCommand(BaseCommand):
    """A command whose output, error messages included, sends no escape sequence of foreign text to a terminal. A
    refusal ends it with its sentence. What it does stands in the audit log as done by a command: whoever starts it is
    no account of ours. Its help is the docstring of its module, whose first line `rollout-inspector --help` lists."""

    def __init_subclass__(cls) -> None:
        cls.help = sys.modules[cls.__module__].__doc__ or ""

    def execute(self, *args: Any, **options: Any) -> str | None:
        with acting(lambda: Actor(detail="command")):
            try:
                return super().execute(*args, **options)
            except Refusal as refusal:
                raise CommandError(sentence_of(refusal)) from refusal

    def print_result(self, as_json: bool, data: Any, lines: str | Iterable[str]) -> None:
        """The result of a command, at once: as one value of JSON, or as a sentence or lines of text."""
        text = json.dumps(data) if as_json else lines
        for line in [text] if isinstance(text, str) else text:
            self.stdout.write(line)
        self.stdout.flush()

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("stdout", "stderr") and not isinstance(value, _Terminal):
            value = _Terminal(getattr(value, "_out", value))
        super().__setattr__(name, value)


def findings_lines(counts: Mapping[str, int]) -> Iterator[str]:
    """The number of findings of each kind, the most frequent kind first."""
    for kind, n in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        yield f"  {n:>6,}  {kind}"
