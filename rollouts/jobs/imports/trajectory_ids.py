"""Which id each trajectory of an import in shards has. It is the id that a single worker would have chosen. A file that
uses an id twice loses the later line. If an earlier file has an id, it and its group get the name of the file in front.
Workers keep a hash of every id, so that only ids that occur twice are looked at."""

from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.formats import Rejected

MAX_NAME = 200
Named = tuple[str, str]  # External id and group.


@dataclass
class NamedPart:
    """The trajectories of a file, or of a part of it, in their order."""

    file: str  # The name of the file, the same for all of its parts.
    number: int  # The number of the file, because two files may have one name.
    hashes: list[int] = field(default_factory=list)  # Of the id of each trajectory, as the file has it.
    lines: list[int] = field(default_factory=list)  # The line of each trajectory.


Names = tuple[dict[int, Named], dict[int, Named], dict[int, Rejected]]
"""What becomes of the trajectories whose ids occur twice; a place counts the trajectories of all parts. Place -> what
the file says; place -> what is stored; place -> why the trajectory is left out."""


def hash_of(name: str) -> int:
    """The same number in every process."""
    return int.from_bytes(blake2b(name.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "little")


def packed(values: Sequence[int], kind: str) -> str:
    """Whole numbers as text, for a JSON column."""
    return b64encode(np.array(values, dtype=kind).tobytes()).decode()


def unpacked(text: str, kind: str) -> list[int]:
    """The numbers of :func:`packed`."""
    values: list[int] = np.frombuffer(b64decode(text), dtype=kind).tolist()
    return values


def prefixed(file: str, name: str) -> str:
    """An id or a group with the name of its file in front."""
    return f"{file}:{name}"[-MAX_NAME:]


def resolve(
    parts: Sequence[NamedPart], renamed: Iterable[int], load: Callable[[list[int]], Mapping[int, Named]]
) -> Names:
    """The names of all trajectories whose ids occur more than once, and of those that are stored under another id.
    ``renamed``: the places of these. ``load`` returns what the files say at places."""
    hashes: NDArray[np.uint64] = np.array([part_hash for part in parts for part_hash in part.hashes], dtype=np.uint64)
    values, counts = np.unique(hashes, return_counts=True)
    recorded: dict[int, Named] = {}
    names: Names = recorded, {}, {}
    more = _places(hashes, values[counts > 1]) | set(renamed)
    while more:
        recorded |= load(sorted(more))
        names = _named(parts, recorded)
        new_hashes = [hash_of(name) for place, (name, _) in names[1].items() if name != recorded[place][0]]
        more = _places(hashes, np.array(new_hashes, dtype=np.uint64)) - set(recorded)
    return names


def _places(hashes: NDArray[np.uint64], of: NDArray[np.uint64]) -> set[int]:
    return set(np.flatnonzero(np.isin(hashes, of)).tolist())


def _named(parts: Sequence[NamedPart], recorded: Mapping[int, Named]) -> Names:
    final: dict[int, Named] = {}
    rejected: dict[int, Rejected] = {}
    used_names: set[str] = set()
    in_file: set[tuple[int, str]] = set()
    starts = [0, *accumulate(len(part.hashes) for part in parts)]
    for place, part, line in _located(parts, starts, sorted(recorded)):
        name, group = recorded[place]
        if (part.number, name) in in_file:
            rejected[place] = Rejected(line, f"The id {name!r} was used on an earlier line of this file.")
            continue
        in_file.add((part.number, name))
        if name in used_names:
            name, group = prefixed(part.file, name), group and prefixed(part.file, group)
        if name in used_names:
            rejected[place] = Rejected(None, f"The id {name!r} is in this run already.")
            continue
        used_names.add(name)
        final[place] = name, group
    return dict(recorded), final, rejected


def _located(
    parts: Sequence[NamedPart], starts: Sequence[int], places: Iterable[int]
) -> Iterable[tuple[int, NamedPart, int]]:
    """(place, its part, its line) of places in ascending order."""
    n = 0
    for place in places:
        while place >= starts[n + 1]:
            n += 1
        yield place, parts[n], parts[n].lines[place - starts[n]]
