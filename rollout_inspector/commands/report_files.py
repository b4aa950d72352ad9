"""The options ``--format``, ``--output`` and ``--also``: where a report is written, and in which forms."""

import os
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Sequence

from rollout_inspector.guard.text_files import check_place, write_whole
from rollout_inspector.outputs import plain, unfiltered
from rollout_inspector.refusal import Refusal


def add_report_options(parser: ArgumentParser, forms: Sequence[str]) -> None:
    """Adds the options of a report that can be written in these forms."""
    parser.add_argument("--format", default="text", choices=list(forms), help="of the report (default: text)")
    parser.add_argument("--output", metavar="FILE", help="write the report there, not to the terminal")
    parser.add_argument(
        "--also", action="append", default=[], metavar="FORMAT=FILE", help="write it in another form too"
    )


def report_files(options: Namespace, forms: Sequence[str]) -> list[tuple[str, str]]:
    """(form, file) of each report; an empty file is the terminal. Raises :class:`Refusal`."""
    files = [(options.format, options.output or "", "--output")]
    for text in options.also:
        form, _, file = text.partition("=")
        if form not in forms or not file:
            raise Refusal(f"--also {text}: write FORMAT=FILE with one of: {', '.join(forms)}.")
        files.append((form, file, "--also"))
    used_paths = {os.path.realpath(path): "it is checked" for path in options.paths}
    for _, file, option in files:
        if not file:
            continue
        if why := used_paths.get(os.path.realpath(file)):
            raise Refusal(f"{option} {file}: {why}. Name another file.")
        used_paths[os.path.realpath(file)] = "another report goes there"
        check_place(file, option)
    return [(form, file) for form, file, _ in files]


def write_reports(files: Sequence[tuple[str, str]], report: Callable[[str], str]) -> None:
    """Write each report, a file whole or not at all. ``report`` makes one of a form. Raises :class:`Refusal`."""
    for form, file in files:
        text = report(form)
        text = text if form == "github" else plain(text)  # GitHub's form is made of its commands
        if file:
            write_whole(file, text.encode("utf-8", "backslashreplace"), "The report")
        else:
            unfiltered(sys.stdout).write(text)
