"""Push what a trainer writes to a folder, file by file, to a server.

It needs the standard library alone, unless an expression finds the training step: a limited process runs that.
"""

import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rollout_inspector.client.adapters.folder_watch import STATE_NAME, FolderWatch
from rollout_inspector.client.adapters.pushed_files import counts_text, shown, step_of
from rollout_inspector.client.adapters.stream import RolloutStream
from rollout_inspector.commands.main import ROOT, refuse
from rollout_inspector.commands.server_options import add_server_options, client_of, tokenizer_of

REFUSED = 1
CONVERTER = ROOT / "tools" / "management" / "commands" / "convert_pickle.py"


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument("folder", metavar="DIR", help="the output folder of a trainer")
    add_server_options(parser)
    parser.add_argument("--only", action="append", default=[], metavar="PATTERN",
                        help="paths inside DIR, such as 'rollouts/*'; may be used several times")
    parser.add_argument("--steady", type=float, default=10.0, metavar="SECONDS",
                        help="a file that did not change for so long is complete (default: 10)")
    parser.add_argument("--every", type=float, default=5.0, metavar="SECONDS", help="pause between two looks")
    parser.add_argument("--once", action="store_true", help="push what is complete now, and end")
    parser.add_argument("--no-prefix", action="store_true", help="do not put the path of a file before its ids")
    parser.add_argument("--training-step-from", default="", metavar="REGEX",
                        help="finds the training step in the path of a file; one group, the number")
    parser.add_argument("--state", default="", metavar="FILE", help=f"what was pushed (default: DIR/{STATE_NAME})")
    parser.add_argument("--fragments", action="store_true",
                        help="DIR is the folder of a stream: push what ended trainers left there, and end")
    parser.add_argument("--convert-pickles", action="store_true",
                        help="also open .pt and .pkl files; only where you trust who wrote them")


def run(options: Namespace) -> int:
    """Watch until interrupted, or pass over the folder once. 1: a file was refused; 2: nothing can be pushed."""
    folder = Path(options.folder).absolute()
    if not folder.is_dir():
        return refuse(f"{options.folder} is no folder.")
    client = client_of(options)
    if options.fragments:
        return _send_fragments(RolloutStream(client.url, client.token, folder=folder))
    if options.convert_pickles and not CONVERTER.is_file():
        return refuse("--convert-pickles needs a checkout of the project: an installed package opens no pickles.")
    if not (0 <= options.steady < 1e6 and 0 < options.every < 1e6):
        return refuse("--steady and --every are seconds: 0 or more, and more than 0.")
    find_step: Callable[[str], int | None] = step_of
    if options.training_step_from:
        from rollout_inspector.formats.training_step import checked_rule

        find_step = checked_rule(pattern=options.training_step_from).in_path
    watch = FolderWatch(
        folder, client, Path(options.state).absolute() if options.state else folder / STATE_NAME, options.name,
        tokenizer_of(options), options.steady,
        tuple(options.only), not options.no_prefix, convert=_converted if options.convert_pickles else None,
        say=partial(print, flush=True), find_step=find_step,
    )
    try:
        counts = watch.once() if options.once else watch.follow(options.every)
    finally:
        watch.close()
    print(f"{counts_text(counts)}, {counts['waiting']:,} not complete. Run: {client.run or 'none yet'}.")
    if watch.is_away:
        return refuse(f"{client.url} did not answer. What is left is sent by the next call.")
    return REFUSED if counts["refused"] or counts["rejected"] else 0


def _send_fragments(stream: RolloutStream) -> int:
    is_sent, counts = stream.send_left_over(), stream.counts
    print(
        f"{counts.stored:,} trajectories stored, {counts.known:,} known, {counts.rejected:,} rejected; "
        f"{counts.refused:,} records in fragments that were refused."
    )
    if not is_sent:
        return refuse(f"Some fragments were not sent to {stream.url}. The next call sends them.")
    return REFUSED if counts.refused or counts.rejected else 0


def _converted(path: Path) -> Path:
    """A pickle as a file of lines, made in a process of its own. Raises ``ValueError`` with a sentence."""
    handle, name = tempfile.mkstemp(prefix="rollout-inspector-", suffix=".jsonl")
    os.close(handle)
    command = [sys.executable, "-m", "rollout_inspector.commands", "manage", "convert_pickle", str(path), name]
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    ran = subprocess.run(command, capture_output=True, text=True, errors="replace", env=environment)
    if ran.returncode:
        Path(name).unlink(missing_ok=True)
        raise ValueError(shown(ran.stderr.strip()[-400:] or f"The conversion ended with {ran.returncode}."))
    return Path(name)
