"""Send files to a server, whose pages show them.

It needs the standard library alone.
"""

import os
import shutil
import sys
import tempfile
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from stat import S_ISDIR, S_ISREG
from typing import IO, Any

from rollout_inspector.client.adapters.pushed_files import (
    GROWING, MAX_PART_BYTES, MAX_PREFIX, answer_text, count_answer, counts_text, end_of_lines, is_trajectory,
    lines_between, prefix_of, shown, step_of
)
from rollout_inspector.client.client import Client, ServerError
from rollout_inspector.commands.main import refuse
from rollout_inspector.commands.server_options import add_server_options, client_of, tokenizer_of
from rollout_inspector.commands.tokenizer_options import template_text
from rollout_inspector.refusal import Refusal

STDIN = "-"
NOT_ALL = 1
OF_THE_FILE = (400, 413, 415)  # Answers that concern one file; others concern the run, the token or the server.


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument("files", nargs="+", metavar="FILE", help="of any known format; - = standard input")
    add_server_options(parser)
    parser.add_argument(
        "--chat-template", metavar="FILE", help="of a new run: a Jinja file; default: the tokenizer's own"
    )
    parser.add_argument("--prefix", metavar="TEXT", help="put before each id and group; default: none for one file, "
                        "for several the path of each")
    parser.add_argument("--training-step", type=_step, metavar="N",
                        help="of all that is pushed; default: what the path or the record tells")


def _step(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text[:11]) < 2**31):
        raise ArgumentTypeError(f"{text[:20]!r} is no training step: a whole number, 0 or more")
    return int(text)


def run(options: Namespace) -> int:
    """Push the files one after the other. 1: a file or a line was not taken; 2: nothing can be pushed."""
    client = client_of(options)
    prefixes = _prefixes(options)
    for name in options.files:
        _check(name)
    template = template_text(options.chat_template) if options.chat_template else None
    if client.run and (options.name or options.tokenizer or template):
        raise Refusal(f"--name, --tokenizer and --chat-template are of a new run; {client.run} is there.")
    counts: Counter[str] = Counter()
    try:
        title = options.name or f"pushed {shown(Path(_called(options.files[0])).name, 100)}"
        is_new = client.run is None
        for name in options.files:
            if is_new and not counts["trajectories"] + counts["known"]:  # a run of which nothing is taken goes again
                client.create_run(title, tokenizer_of(options), template)
                client.is_first = True
            step = step_of(str(name)) if options.training_step is None else options.training_step
            _push(client, name, prefixes[name], step, counts)
    except ServerError as error:
        return refuse(shown(str(error)))
    see = f"See {client.url}/runs/{client.run}"
    if is_new and not counts["trajectories"] + counts["known"]:
        see = "Nothing was taken, so there is no run."
    print(f"{counts_text(counts)}. {see}")
    return NOT_ALL if counts["refused"] or counts["rejected"] else 0


def _called(name: str) -> str:
    return "standard input" if name == STDIN else name


def _prefixes(options: Namespace) -> dict[str, str]:
    """The prefix of each file, by its name. Raises :class:`Refusal`."""
    names = options.files
    if len(set(names)) < len(names):
        raise Refusal("A file is named twice.")
    if options.prefix is not None:
        if len(options.prefix) > MAX_PREFIX or not options.prefix.isprintable():
            raise Refusal(f"--prefix is a printable text of at most {MAX_PREFIX} characters.")
        return dict.fromkeys(names, options.prefix)
    if len(names) == 1:
        return {names[0]: ""}
    paths = {name: os.path.abspath(name) for name in names if name != STDIN}
    common = os.path.commonpath([os.path.dirname(path) for path in paths.values()])
    prefixes = {name: prefix_of(os.path.relpath(path, common)) for name, path in paths.items()}
    return prefixes | {STDIN: ""}


def _check(name: str) -> None:
    """Raises :class:`Refusal` for what is no file that can be read."""
    if name == STDIN:
        return
    try:
        mode = os.stat(name).st_mode
        if S_ISDIR(mode):
            raise Refusal(f"{name} is a folder. Push what is in it with: rollout-inspector watch --once {name}")
        if not S_ISREG(mode):
            raise Refusal(f"{name} is no file. What a program writes is pushed with: ... | rollout-inspector push -")
        with open(name, "rb") as file:
            if not file.read(1):
                raise Refusal(f"{name} is empty.")
    except OSError as error:
        raise Refusal(f"{name} cannot be read: {error.strerror}.") from error


@contextmanager
def _opened(name: str) -> Iterator[IO[bytes]]:
    if name != STDIN:
        with open(name, "rb") as file:
            yield file
        return
    with tempfile.TemporaryFile() as copy:  # a retry begins at the start again
        shutil.copyfileobj(sys.stdin.buffer, copy)
        copy.seek(0)
        yield copy


def _push(client: Client, name: str, prefix: str, step: int | None, counts: Counter[str]) -> None:
    """Push one file. What the server will never take of it is told and counted. Raises ``ServerError``."""
    try:
        with _opened(name) as file:
            for answer, start in _sent(client, file, name, prefix, step):
                print(answer_text(_called(name), answer, None if start is None else file, start or 0), flush=True)
                count_answer(counts, answer)
    except ServerError as error:
        if error.status not in OF_THE_FILE:
            raise
        why = shown(str(error))
    except OSError as error:
        why = f"it cannot be read: {error.strerror}."
    else:
        return
    counts["refused"] += 1
    print(f"{shown(_called(name))} is refused: {why}", file=sys.stderr, flush=True)


def _sent(
    client: Client, file: IO[bytes], name: str, prefix: str, step: int | None
) -> Iterator[tuple[dict[str, Any], int | None]]:
    """What the server answers to the file, or to each part of a long one, with the byte where the part begins."""
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    is_lines = name == STDIN or Path(name).suffix.lower() in GROWING
    if size <= MAX_PART_BYTES or not is_lines or not is_trajectory(file.readline(MAX_PART_BYTES)):
        yield client.push_file(file, prefix, step), None
        return
    start = 0
    while start < size:
        end = end_of_lines(file, start, size, MAX_PART_BYTES, is_complete=True)
        end = size if end == start else end  # a last line that is broken off: the server says so
        yield client.push(lines_between(file, start, end), prefix, step), start
        start = end
