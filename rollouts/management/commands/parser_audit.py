"""Read the replies of a trajectory with every parser, and print what each of them loses.

The parsers are those of the installed vLLM and the form of the chat template; what each one holds and loses is
counted in sampled ids.
"""

import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from typing import Any

from rollout_inspector.outputs import show_progress
from rollouts.jobs.parser_comparison import compare_steps
from rollouts.management import TerminalCommand
from rollouts.management.arguments import trajectory_named


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("trajectory", metavar="TRAJECTORY", help="a code")
        parser.add_argument("--step", type=int, default=None, help="one step (default: every step)")
        parser.add_argument("--json", action="store_true", help="print a JSON list, one object for each step")

    def handle(self, *_: Any, **options: Any) -> None:
        record = trajectory_named(options["trajectory"])
        steps = None if options["step"] is None else [options["step"]]
        steps_read = compare_steps(record, steps, show_progress if sys.stderr.isatty() else lambda _: None)
        self.print_result(options["json"], steps_read, (line for step in steps_read for line in _lines(step)))


def _lines(step: dict[str, Any]) -> Iterator[str]:
    start, stop = step["tokens"]
    yield f"step {step['step']}, {stop - start:,} tokens"
    if step["message"] is None:
        yield "  message: the source has none of this reply"
    else:
        by = f", read with {step['run_reads']}" if step["run_reads"] else ""
        yield f"  message ({step['message_of']}{by}): {_line(step['message'])}"
    for reading in step["readings"]:
        differs = reading["differs"]
        same = "" if differs is None else "other " + " and ".join(differs) if differs else "as the message"
        yield f"  {', '.join(reading['parsers'])}: {_line(reading)}{same and '; ' + same}"
    for refused in step["unusable"]:
        yield f"  {refused['parser']}: not usable: {refused['reason']}"
    for note in step["notes"]:
        yield f"  {note}"


def _line(reading: dict[str, Any]) -> str:
    parts = [
        f"{piece['text']}({piece['arguments'][:60]})"
        if piece["kind"] == "call"
        else f"{piece['kind']} {piece['text'][:40]!r}"
        for piece in reading["pieces"][:6]
    ]
    lost = f"; loses {reading['lost'][0]['text'][:60]!r}" if reading["lost"] else "; loses nothing"
    return (", ".join(parts) or "nothing") + lost
