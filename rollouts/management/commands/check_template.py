"""Check a chat template: does appending a tool result keep what was rendered before it?

And some forty more questions: what breaks, on which line, and what mends it. Exit status 0: prefix-preserving for
tool results, 1: not, 2: could not be checked.
"""

import json
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from django.core.management.base import CommandError

from rollout_inspector.commands.remedies import sentence_of
from rollout_inspector.commands.tokenizer_options import template_text
from rollout_inspector.guard.fail_rules import ExitStatus
from rollout_inspector.guard.text_files import read_text
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.streams.messages import messages_problem, tools_problem
from rollout_inspector.text import chat_templates, tokenizers
from rollout_inspector.text.chat_templates.probes.report import CheckReport, CheckStatus
from rollout_inspector.text.tokenizers import LoadedTokenizer
from rollouts.jobs import template_checks
from rollouts.management import TerminalCommand
from rollouts.management.arguments import add_project_option, json_object, project_named
from rollouts.management.jobs import run_jobs
from rollouts.store.chat_templates.tokenizers import (
    find_tokenizer, load_tokenizer, tokenizer_named, tokenizer_names, tokenizers_of
)
from rollouts.store.database import reload
from rollouts.store.models import Project


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument(
            "--tokenizer",
            metavar="NAME_OR_DIR",
            help="a registered tokenizer, a tokenizer's folder, or a hub id with a revision: org/name@revision",
        )
        parser.add_argument("--chat-template", metavar="FILE", help="a Jinja file, or renderer:NAME")
        parser.add_argument("--tools", metavar="FILE", help="a JSON file with a list of function schemas")
        parser.add_argument("--kwargs", metavar="JSON", help='e.g. {"enable_thinking": false}')
        parser.add_argument("--conversation", metavar="FILE", help="a JSON file with your own list of messages")
        parser.add_argument(
            "--repair", action="store_true", help="search for the smallest verified change that mends the template"
        )
        parser.add_argument(
            "--marks", action="store_true", help="place {%% generation %%} tags that mark exactly what is sampled"
        )
        parser.add_argument(
            "--all",
            action="store_true",
            help="every registered tokenizer's own chat template; answers are stored for the page /templates/matrix",
        )
        add_project_option(parser)
        parser.add_argument("--json", action="store_true", help="print the whole report as JSON")

    def handle(self, *args: Any, **options: Any) -> None:
        try:
            status = self._all(options) if options["all"] else self._one(options)
        except BrokenPipeError:
            raise
        except (Refusal, CommandError, RenderFailed, OSError) as error:
            self.stderr.write(sentence_of(error))
            status = 2
        if status:
            sys.exit(int(status))

    def _one(self, options: dict[str, Any]) -> int:
        # A file alone is checked without a database.
        name = options["tokenizer"]
        tokenizer = resolve_tokenizer(name, project_named(options["project"])) if name else None
        if options["chat_template"]:
            text = template_text(options["chat_template"], "The chat template")
        elif tokenizer is not None and tokenizer.chat_template is not None:
            text = tokenizer.chat_template
        elif tokenizer is not None:
            raise Refusal(f"The tokenizer {tokenizer.name} has no chat template; name one with --chat-template FILE.")
        else:
            raise Refusal("Name what to check: --tokenizer NAME_OR_DIR, --chat-template FILE, or both.")
        report = chat_templates.check(
            tokenizer,
            text,
            tools=_json_list(options["tools"], tools_problem),
            kwargs=json_object(options["kwargs"], "--kwargs") or None,
            conversation=_json_list(options["conversation"], messages_problem),
        )
        if options["repair"]:
            report = chat_templates.with_repair(tokenizer, report)
        if options["marks"] or options["repair"]:
            report = chat_templates.with_marks(tokenizer, report)
        self.print_result(options["json"], report.to_dict(), _lines(report))
        if report.prefix_preserving is None:
            raise Refusal(report.check("tool_append").detail)
        return ExitStatus.of(report.prefix_preserving)

    def _all(self, options: dict[str, Any]) -> int:
        """Answer the questions that the matrix page shows. A stored answer is not rendered again."""
        for name in ("tokenizer", "chat_template", "tools", "kwargs", "conversation"):
            if options[name]:
                raise Refusal(f"--all checks every tokenizer alike; leave --{name.replace('_', '-')} out.")
        search = options["repair"] or options["marks"]
        rows: list[dict[str, Any]] = []
        status = 0
        project = project_named(options["project"])
        for registered in tokenizers_of(project, templates=True):
            report, error = None, "The tokenizer has no chat template."
            if registered.chat_template is not None:
                with run_jobs() as jobs:
                    check, to_do = template_checks.ask(
                        registered, registered.chat_template, repair=search, project=project
                    )
                    jobs += [check.job] if to_do else []
                reload(check)
                report, error = check.report, check.error
                if report is None and not error:
                    error = "A worker checks it now."
            if report is None or error:
                rows.append({"name": registered.name, "prefix_preserving": None, "error": error})
                status = 2
                continue
            rows.append({"name": registered.name, **report})
            status = max(status, ExitStatus.of(report["prefix_preserving"]))
        if not rows:
            raise Refusal("No tokenizer is registered; name one with --tokenizer DIR.")
        letters = ("".join(_LETTER[check["status"]] for check in row.get("checks", ())) for row in rows)
        lines = [f"{row['name']:30} {row.get('error') or word}" for row, word in zip(rows, letters, strict=True)]
        self.print_result(options["json"], {"tokenizers": rows}, [*lines, *LEGEND])
        return status


def _lines(report: CheckReport) -> Iterator[str]:
    yield from report.notes
    for purpose, verdict in report.verdicts.items():
        yield f"{purpose}: {verdict}"
    yield ""
    for check in report.checks:
        if check.status is CheckStatus.OK:
            continue
        yield f"{check.status.value:12} {check.title}: {check.detail}"
        difference = check.to_dict(report.chat_template)
        if check.decisive and difference["index"] is not None:
            for word in ("expected", "actual"):
                yield f"             {word:9} {difference[f'{word}_ids'][:8]} {difference[f'{word}_text'][:60]!r}"
                if line := difference["lines"][word]:
                    yield f"             line {line}: {difference['sources'][word][:100]}"
            if place := difference["decided_by"]:
                yield f"             decided on line {place['line']}: {place['source']}"
    if report.repair is not None:
        yield from ("", report.repair.diff)
        wider = report.repair.wider
        while wider is not None:
            yield from (f"A wider repair, which mends {len(wider.fixes)} probes:", wider.diff)
            wider = wider.wider
    if report.repair_detail:
        yield report.repair_detail
    if report.marks is not None:
        yield from ("", report.marks.diff)
    if report.marks_detail:
        yield report.marks_detail


_LETTER = {"ok": "o", "broken": "B", "raises": "R", "unsupported": "-"}
LEGEND = (
    "o ok   B broken   R raises   - not rendered",
    "The answers are stored: the page /templates/matrix shows them.",
)


def resolve_tokenizer(name: str, project: Project) -> LoadedTokenizer:
    """The tokenizer of a folder, of a name that the project registered, or of ``org/name@revision``.

    Raises :class:`Refusal`.
    """
    if Path(name).exists():
        return tokenizers.load(name)
    registered = tokenizer_named(project, name)
    if registered is None and name.count("/") == 1 and "@" in name:
        try:
            registered = find_tokenizer(name, project)
        except ValueError as error:
            raise Refusal(str(error)) from error
    if registered is None:
        names = ", ".join(tokenizer_names(project, 20))
        raise Refusal(
            f"There is no folder {name} and no registered tokenizer of that name. "
            + (f"Registered are: {names}." if names else "None is registered yet.")
        )
    tokenizer = load_tokenizer(registered.files_sha256)
    tokenizer.name = registered.name  # its folder is named by a hash
    return tokenizer


def _json_list(path: str | None, problem_of: Callable[[list[Any]], str]) -> list[dict[str, Any]] | None:
    if not path:
        return None
    try:
        value = json.loads(read_text(path, "The file"))
    except (ValueError, RecursionError) as error:
        raise Refusal(f"{path} is not JSON: {error}") from error
    if not isinstance(value, list):
        raise Refusal(f"{path} must hold a JSON list of objects.")
    if problem := problem_of(value):
        raise Refusal(f"{path}: {problem}")
    return value
