"""Diagnose many files side by side, and write what was found as Parquet."""

import sys
import time
from argparse import SUPPRESS, ArgumentParser, ArgumentTypeError, Namespace
from functools import partial
from pathlib import Path
from typing import Any

from rollout_inspector.commands.main import refuse
from rollout_inspector.commands.remedies import sentence_of
from rollout_inspector.commands.tokenizer_options import (
    add_tokenizer_options, load_renderer, load_tokenizer, template_text
)
from rollout_inspector.formats import FORMATS
from rollout_inspector.formats.training_step import checked_rule
from rollout_inspector.guard.audit_folder import AuditFolder
from rollout_inspector.guard.audit_runners import Done, Todo, on_processes, on_ray
from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.shard_audit import SCHEMA, cut_files, key_of
from rollout_inspector.outputs import line_of, show_progress
from rollout_inspector.refusal import Refusal

PROGRESS_SECONDS = 0.5
LOG_SECONDS = 30.0  # Pause between two lines of progress where no terminal shows them.
MAX_SAID = 10  # Kinds, and sentences about shards, that are printed.
NOT_WHOLE = 2


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument("paths", nargs="+", metavar="FILE_OR_DIR", help="files of any known format, or folders of them")
    parser.add_argument("--output", required=True, metavar="DIR", help="a new folder, or one of the same audit: go on")
    parser.add_argument("--on", default="processes", choices=("processes", "ray"), help="where (default: processes)")
    parser.add_argument("--processes", type=_number, metavar="N", help="default: one for each processor")
    parser.add_argument(
        "--ray-address", default="auto", metavar="HOST:PORT", help="default: the cluster that runs here"
    )
    parser.add_argument("--index", type=Path, help=SUPPRESS)  # what is opened where it lies: keep findings there too
    add_tokenizer_options(parser)
    parser.add_argument("--input-format", default="auto", metavar="NAME", help=f"auto, or one of: {', '.join(FORMATS)}")
    parser.add_argument("--training-step", default="", metavar="N", help="the training step of all that is read")
    parser.add_argument("--training-step-from", default="", metavar="REGEX", help="finds it in the path of each file")


def _number(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:6]) <= 1024:
        raise ArgumentTypeError(f"{text[:20]!r} is no number from 1 to 1024")
    return int(text)


def run(options: Namespace) -> int:
    """Audit the files and print what was found. Returns 0, or 2 when something was not read."""
    try:
        settings = _settings(options)
        folder = AuditFolder(options.output)
        summary = _audit(options, settings, folder)
    except (ValueError, OSError) as error:
        return refuse(sentence_of(error))
    if summary is None:
        return NOT_WHOLE
    sys.stdout.write(as_text(summary, folder.path))
    return 0 if summary["trajectories"] and not summary["unread"] else NOT_WHOLE


def _settings(options: Namespace) -> AuditSettings:
    """What the options say. A tokenizer or template that cannot be used is refused before any shard is read."""
    rule = checked_rule(options.training_step, options.training_step_from)
    if options.input_format not in ("auto", *FORMATS):
        format_names = ", ".join(FORMATS)
        raise Refusal(f"--input-format: there is no format {options.input_format!r}. There are: {format_names}.")
    tokenizer = load_tokenizer(options.tokenizer)
    try:
        load_renderer(tokenizer, options.chat_template)
    finally:
        if tokenizer is not None:
            tokenizer.close()
    return AuditSettings(
        str(Path(options.tokenizer).absolute()) if options.tokenizer else "",
        template_text(options.chat_template) if options.chat_template else "",
        options.input_format, rule.step, rule.pattern,
    )


def _audit(options: Namespace, settings: AuditSettings, folder: AuditFolder) -> dict[str, Any] | None:
    """Read the shards that are not done yet. Returns the summary; None when a shard is missing."""
    cut, digest = cut_files(options.paths, settings.format_name, output=folder.path), settings.digest(str(SCHEMA))
    todo = {key_of(shard, digest): shard for shard in cut.shards}
    keys = set(todo)
    todo = {key: shard for key, shard in todo.items() if not folder.has(key)}
    progress = _Progress(len(keys), len(keys) - len(todo))
    failed: list[str] = []
    for key, table in _results(options, todo, settings):
        if isinstance(table, str):
            failed.append(table)
            continue
        folder.save(key, table)
        progress(len(table))
    progress.end()
    if failed:
        for sentence in list(dict.fromkeys(failed))[:MAX_SAID]:
            print(line_of(sentence), file=sys.stderr)
        print(
            f"{len(failed):,} of {len(keys):,} shards were not read. The same command reads them again; the others are "
            f"kept in {folder.path}.",
            file=sys.stderr,
        )
        return None
    return folder.finish(cut, settings, digest)


def _results(options: Namespace, todo: Todo, settings: AuditSettings) -> Done:
    if not todo:
        return iter(())
    if options.on == "ray":
        return on_ray(todo, settings, options.ray_address)
    if options.index is None:
        return on_processes(todo, settings, options.processes)
    from rollout_inspector.opened.file_audit import audit_and_keep

    return on_processes(todo, settings, options.processes, partial(audit_and_keep, options.index))


def as_text(summary: dict[str, Any], path: Path) -> str:
    """What was found, for a terminal."""
    n = summary["trajectories"]
    counts = [f"{summary[name]:,} {name}" for name in ("files", "trajectories", "tokens", "findings")]
    lines = [f"{', '.join(counts)}."]
    kinds = [(kind, count["trajectories"]) for kind, count in summary["kinds"].items()]
    lines += [f"{n_trajectories:>10,}  {n_trajectories / n:>7.2%}  {kind}" for kind, n_trajectories in kinds[:MAX_SAID]]
    if len(kinds) > MAX_SAID:
        lines.append(f"and {len(kinds) - MAX_SAID} more kinds.")
    if summary["unread"]:
        lines.append(f"{summary['unread']:,} lines or files were not read: {path / 'unread.parquet'} says why.")
    return "\n".join([*lines, f"Findings: {path / 'findings.parquet'}", ""])


class _Progress:
    """Prints now and then how many shards are done: over one line of a terminal, or line after line into a log."""

    def __init__(self, n: int, n_done: int) -> None:
        self._n, self._n_done, self._n_read, self._last = n, n_done, 0, time.monotonic()
        if n_done:
            print(f"{n_done:,} of {n:,} shards are done already.", file=sys.stderr)

    def __call__(self, n_read: int) -> None:
        self._n_done += 1
        self._n_read += n_read
        now = time.monotonic()
        is_terminal = sys.stderr.isatty()
        if now - self._last > (PROGRESS_SECONDS if is_terminal else LOG_SECONDS):
            self._last = now
            text = f"{self._n_done:,} of {self._n:,} shards, {self._n_read:,} trajectories now ..."
            if is_terminal:
                show_progress(text)
            else:
                print(text, file=sys.stderr, flush=True)

    def end(self) -> None:
        """Clear the line of a terminal."""
        if sys.stderr.isatty():
            show_progress("", "\r")
