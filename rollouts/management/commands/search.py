"""Search the tokens, findings or metadata of a run, or of all runs."""

import time
from argparse import ArgumentParser
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.outputs import line_of
from rollouts.jobs.search import SearchedPart, SearchHit, SearchQuestion, search
from rollouts.management import TerminalCommand
from rollouts.store.models import Run
from rollouts.store.people.access import EVERYTHING
from rollouts.store.runs.runs import find_run


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("run", metavar="RUN", help="the code of a run, or all")
        question = parser.add_mutually_exclusive_group(required=True)
        question.add_argument("--ids", help="ids in a row; * is any one id, `text` any id of a token with that text")
        question.add_argument("--text", help="a text in the tokens")
        question.add_argument("--regex", help="a regular expression in the text of the tokens")
        question.add_argument("--metadata", help="a part of an id, a group, a task or other metadata")
        question.add_argument("--finding", metavar="KIND", help="a kind of finding")
        parser.add_argument("--limit", type=int, default=1000, help="the most results (default 1000)")
        parser.add_argument("--seconds", type=float, default=60.0, help="the longest time (default 60)")
        parser.add_argument("--json", action="store_true", help="print a JSON object")

    def handle(self, *_: Any, **options: Any) -> None:
        run = None
        if options["run"] != "all" and (run := find_run(code=options["run"])) is None:
            raise CommandError(f"There is no run with the code {options['run']!r}. “all” searches every run.")
        if options["limit"] < 1:
            raise CommandError("--limit takes a number from 1 on.")
        if not 0 < options["seconds"] < float("inf"):
            raise CommandError("--seconds takes a number above 0.")
        by = next(name for name in ("ids", "text", "regex", "metadata", "finding") if options[name] is not None)
        question = SearchQuestion.read(by, options[by])
        parts = self._parts(question, run, options["limit"], options["seconds"])
        results = [result for part in parts for result in part.results]
        complete = not parts[-1].next and not any(part.too_slow for part in parts)
        for note in dict.fromkeys(note for part in parts for note in part.notes):
            self.stderr.write(note)
        cut = "" if complete else " A limit cut the search: --limit and --seconds raise it."
        end = f"{len(results):,} result{'s' * (len(results) != 1)}.{cut}"
        value = {"results": [result_value(result) for result in results], "complete": complete}
        self.print_result(options["json"], value, [*map(_lines, results), end])

    @staticmethod
    def _parts(question: SearchQuestion, run: Run | None, limit: int, seconds: float) -> list[SearchedPart]:
        """What is found until a limit is reached. A trajectory that takes an expression too long is left out."""
        late, parts = time.monotonic() + seconds, list[SearchedPart]()
        while not parts or (parts[-1].next and parts[-1].too_slow and time.monotonic() < late):
            cursor = parts[-1].next if parts else ""
            n_left = limit - sum(len(part.results) for part in parts)
            parts.append(search(EVERYTHING, question, run, cursor, n_left, max(late - time.monotonic(), 0)))
        return parts


def _lines(found: SearchHit) -> str:
    place = "" if found.start is None else f", tokens {found.start}-{found.stop}"
    where = f" step {found.step}" if found.row is None and found.step is not None else ""
    where = where or ("" if found.row is None else f" row {found.row}")
    text = f"{line_of(found.before)}[{line_of(found.text)}]{line_of(found.after)}"
    return f"{line_of(found.external_id)} ({found.trajectory}){where}{place}\n    {text}"


def result_value(found: SearchHit) -> dict[str, Any]:
    """A result as ``--json`` prints it."""
    names = ("trajectory", "row", "start", "stop", "text", "before", "after", "step", "run", "external_id", "kind")
    return {name: getattr(found, name) for name in names} | {"run": found.run.code}
