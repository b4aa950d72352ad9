"""The processes of a worker and what each costs, by what they are (Linux; elsewhere the worker's own alone)."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

NAMES = {
    "engines": "engine",
    "storage_process": "storage process",
    "push_process": "push process",
    "sandbox/worker": "template sandboxes",
    "tokenizers/worker": "tokenizers",
    "gunicorn": "web",
}
"""A word of the command line, and what the process is."""


def family(root: int | None = None, name: str = "worker") -> dict[int, str]:
    """A process (default: this one) and all that descend from it, by key, and what each is."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
    found = {root or os.getpid(): name}
    for pid in sorted(parents):  # a child's number is larger, but for the time when numbers begin again
        if parents[pid] in found:
            found[pid] = _what(pid)
    return found


def _what(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return "other"
    return next((name for word, name in NAMES.items() if word in command), "other")


def sums(measure: Callable[[int], float], processes: dict[int, str]) -> Counter[str]:
    """What is measured of each process, added up by what they are; one that has ended counts nothing."""
    found: Counter[str] = Counter()
    for pid, name in processes.items():
        try:
            found[name] += measure(pid)  # type: ignore[assignment]
        except OSError:
            continue
    return found


def megabytes(pid: int) -> float:
    """Resident memory."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def processor_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
