"""Check files of rollouts; exit status 0: passed, 1: failed, 2: could not be decided."""

import sys
import time
from argparse import ArgumentParser, Namespace

from rollout_inspector.commands.report_files import add_report_options, report_files, write_reports
from rollout_inspector.commands.tokenizer_options import add_tokenizer_options, load_renderer, load_tokenizer
from rollout_inspector.formats import FORMATS
from rollout_inspector.formats.training_step import checked_rule
from rollout_inspector.guard.checked_files import CheckedFiles, check_files
from rollout_inspector.guard.fail_rules import fail_rule, verdict_on
from rollout_inspector.guard.report_formats import REPORTS
from rollout_inspector.outputs import show_progress
from rollout_inspector.refusal import Refusal

PROGRESS_SECONDS = 0.5


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_DIR", help="files of any known format, or folders of them")
    add_tokenizer_options(parser)
    parser.add_argument(
        "--fail-on", default="error", metavar="SEVERITY,KIND,...",
        help="error, warning, info or none, and kinds of findings (default: error)",
    )
    parser.add_argument(
        "--max-rate", action="append", default=[], metavar="KIND=RATE",
        help="the share of trajectories, 0 to 1, that may have a kind; may be used several times",
    )
    parser.add_argument("--baseline", metavar="FILE", help="the JSON report of an earlier check: its rates are allowed")
    add_report_options(parser, list(REPORTS))
    parser.add_argument("--input-format", default="auto", metavar="NAME", help=f"auto, or one of: {', '.join(FORMATS)}")
    parser.add_argument("--training-step", default="", metavar="N", help="the training step of all that is read")
    parser.add_argument("--training-step-from", default="", metavar="REGEX", help="finds it in the path of each file")


def run(options: Namespace) -> int:
    """Check the files and print the report."""
    rule = fail_rule(options.fail_on, options.max_rate, options.baseline)
    training_step = checked_rule(options.training_step, options.training_step_from)
    tokenizer = load_tokenizer(options.tokenizer)
    renderer = load_renderer(tokenizer, options.chat_template)
    files = report_files(options, list(REPORTS))
    if options.input_format not in ("auto", *FORMATS):
        format_names = ", ".join(FORMATS)
        raise Refusal(f"--input-format: there is no format {options.input_format!r}. There are: {format_names}.")
    progress = _Progress() if sys.stderr.isatty() else None
    checked = check_files(options.paths, tokenizer, renderer, options.input_format, training_step, progress)
    verdict = verdict_on(checked, rule)
    write_reports(files, lambda form: REPORTS[form](checked, verdict))
    if options.output and verdict.reasons:
        print(" ".join(verdict.reasons), file=sys.stderr)
    return int(verdict.outcome)


class _Progress:
    """Prints now and then how many trajectories are done."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def __call__(self, checked: CheckedFiles) -> None:
        now = time.monotonic()
        if now - self._last > PROGRESS_SECONDS:
            self._last = now
            show_progress(f"{checked.n_trajectories:,} trajectories ...", "\r")
