"""Check chat templates, or compare them with a lock file; exit status as of check."""

from argparse import ArgumentParser, Namespace
from dataclasses import replace

from rollout_inspector.commands.report_files import add_report_options, report_files, write_reports
from rollout_inspector.commands.template_options import add_template_options, load_template, template_paths
from rollout_inspector.guard.checked_templates import PURPOSES, check_template, purposes_of
from rollout_inspector.guard.fail_rules import ExitStatus
from rollout_inspector.guard.template_lock import (
    LOCK_TIME, compare_with_lock, name_in_lock, path_of_name, read_lock, tokenizer_in_lock
)
from rollout_inspector.guard.template_reports import TEMPLATE_REPORTS
from rollout_inspector.refusal import Refusal


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    add_template_options(parser, "*")
    parser.add_argument("--lock", metavar="FILE", help="fail when a template is not what it was when it was locked")
    parser.add_argument(
        "--for", default="tools", dest="purposes", metavar="PURPOSE,...",
        help=f"what it must be safe for: {', '.join(PURPOSES)} (default: tools)",
    )
    add_report_options(parser, list(TEMPLATE_REPORTS))


def run(options: Namespace) -> int:
    """Check the templates and print the report."""
    purposes = purposes_of(options.purposes)
    files = report_files(options, list(TEMPLATE_REPORTS))
    lock = read_lock(options.lock) if options.lock else None
    paths = template_paths(options.paths)
    if not paths and lock is not None:
        paths = [path_of_name(name, options.lock) for name in lock.templates]
    if not paths:
        raise Refusal("Name a template: a tokenizer's folder, or a template file.")
    reports = []
    for path in paths:
        name = name_in_lock(path, options.lock) if lock is not None else ""
        tokenizer = options.tokenizer or None
        tokenizer = tokenizer if lock is None else tokenizer_in_lock(name, lock, options.lock, tokenizer)
        template = load_template(path, tokenizer)
        checked = check_template(path, *template, purposes=purposes, now=LOCK_TIME if lock is not None else "")
        if lock is not None:
            checked = replace(checked, compared=compare_with_lock(checked, lock, name))
        reports.append(checked)
    write_reports(files, lambda form: TEMPLATE_REPORTS[form](reports))
    return int(ExitStatus.of_all(report.outcome for report in reports))
