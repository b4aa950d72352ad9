"""What ``push`` and ``watch`` share: parts of files, the prefix and the training step of a path, and what they say."""

import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterator
from typing import IO, Any

from rollout_inspector.client.client import PushError
from rollout_inspector.outputs import line_of

REFUSED = (400, 411, 413, 415)  # Answers that concern the file; other refusals concern the run or the token.
GROWING = (".jsonl", ".ndjson")  # Files of lines, to which a trainer may append.
MAX_PREFIX = 60
MAX_PART_BYTES = 32 << 20  # Longer files are pushed in parts, where each line is a trajectory.
MAX_LINE_BYTES = 64 << 20  # The server takes no longer line.
_IN_PATH = re.compile(
    r"(?:^|[/_.-])(?:global_?step|train_?step|training_?step|step|iteration|iter|rollout)[_-]?(\d{1,9})(?=$|[/_.-])",
    re.IGNORECASE,
)


def shown(text: str, most: int = 400) -> str:
    """A text of a file, of a path or of a server, fit for a terminal."""
    return line_of(text[:most])


def prefix_of(key: str) -> str:
    """The path without its ending, because many trainers count from 0 in each file."""
    folder, slash, name = key.rpartition("/")
    stem = folder + slash + name.split(".")[0]
    if len(stem) < MAX_PREFIX and stem.isprintable():
        return f"{stem}/"
    mark = hashlib.sha256(stem.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{''.join(char for char in stem[-40:] if char.isprintable())}-{mark}/"


def step_of(key: str) -> int | None:
    """The training step that a path tells: the last number."""
    numbers = _IN_PATH.findall(key)
    return int(numbers[-1]) if numbers and str(numbers[-1]).isdecimal() and int(numbers[-1]) < 2**31 else None


def answer_text(key: str, said: dict[str, Any], file: IO[bytes] | None = None, start: int = 0) -> str:
    """What the server counted, as a sentence. ``file``: the one whose lines from byte ``start`` on were pushed."""
    sentence = f"{shown(key)}: {said.get('trajectories', 0):,} trajectories stored"
    if said.get("known"):
        sentence += f", {said['known']:,} known"
    if n_rejected := rejected_of(said):
        first = said["rejected"][0]
        line = first["line"] if file is None else _line_of(file, start, first["line"])
        sentence += f", {n_rejected:,} rejected; line {line}: {shown(str(first['reason'])).rstrip('.')}"
    return sentence + "." + (f" {shown(said['notice'])}" if said.get("notice") else "")


def rejected_of(said: dict[str, Any]) -> int:
    """The lines that the server did not read."""
    return int(said.get("n_rejected", len(said.get("rejected", ()))))


def count_answer(counts: Counter[str], said: dict[str, Any]) -> None:
    """Add what the server counted: ``trajectories`` that it stored, ``known`` ones, ``rejected`` lines."""
    for name in ("trajectories", "known"):
        counts[name] += said.get(name, 0)
    counts["rejected"] += rejected_of(said)


def counts_text(counts: Counter[str]) -> str:
    """The counts of many pushes, as the beginning of a sentence. ``refused`` counts files."""
    stored = f"{counts['trajectories']:,} trajectories stored, {counts['known']:,} known"
    return f"{stored}, {counts['rejected']:,} rejected; {counts['refused']:,} files refused"


def _line_of(file: IO[bytes], start: int, number: int) -> int:
    """The 1-based line that was pushed as line ``number`` from byte ``start`` on. Blank lines are not pushed."""
    file.seek(0)
    at, pushed, line = 0, 0, 0
    while pushed < number and (text := file.readline()):
        line += 1
        pushed += at >= start and bool(text.strip())
        at += len(text)
    return line


def is_trajectory(line: bytes) -> bool:
    """Whether a line is a trajectory by itself. In other formats, several lines belong to one session."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return False
    if not isinstance(value, dict):
        return False
    return value.get("format") == "rollout-inspector" or bool(
        value.keys() & {"nodes", "traces", "token_ids", "message_log", "response_mask", "trajectory"}
    )


def end_of_lines(file: IO[bytes], start: int, stop: int, most: int, is_complete: bool) -> int:
    """Where whole lines end, at most ``most`` bytes after ``start``, or after one line that is longer. Raises
    :class:`PushError` for a line that the server would refuse. No more of it than that is read."""
    file.seek(start)
    end = start
    while end < stop:
        line = file.readline(min(stop - end, MAX_LINE_BYTES + 1))
        if len(line) > MAX_LINE_BYTES:
            raise PushError(f"A line has more than {MAX_LINE_BYTES >> 20} MB. Import the file on the server.", 413)
        if not line.endswith(b"\n"):
            if not is_complete:
                break
            try:
                json.loads(line)  # the writer left the last end of line out
            except (ValueError, RecursionError):
                break
        if end > start and end + len(line) - start > most:
            break
        end += len(line)
    return end


def lines_between(file: IO[bytes], start: int, end: int) -> Iterator[bytes]:
    """The lines of these bytes."""
    file.seek(start)
    while start < end:
        line = file.readline()
        start += len(line)
        yield line
