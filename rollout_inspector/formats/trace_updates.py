"""What prime-rl learns of a trace after it ended: ``annotations/``, folders or files of updates beside the traces. An
update names a trace. It has fields that are merged into ``info`` of the trace, and values for the tokens of a branch,
one for each token from the root to the leaf. A null stands where nothing is known. Later updates win."""

import os
import re
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from rollout_inspector.formats import shapes
from rollout_inspector.formats.containers.refusals import FileRefused
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.formats.registry import Rejected
from rollout_inspector.formats.shapes import BadLine

FOLDER = "annotations"
NEWEST = 1
STREAMS = ("advantages", "trainer_logprobs", "entropies", "is_masked")
"""Values for the tokens of a branch, which become fields of the same name of its nodes."""
_FIRST = ("orchestrator", "trainer")  # Producers in the order in which they write. Others follow by name.
_FILE = re.compile(r"[^.].*\.jsonl(\.zst|\.gz)?")
MAX_PROBLEMS = 100  # Updates that are named as rejected; more are counted.


class _Named(msgspec.Struct):
    trace_id: str
    version: int = NEWEST


_decode_name = msgspec.json.Decoder(_Named).decode


class Annotations:
    """The updates of the traces of a folder. They lie in a file of their own; memory holds where each is."""

    def __init__(self, files: Iterable[Path], root: Path) -> None:
        self._file = tempfile.TemporaryFile()  # noqa: SIM115 - it is held as long as this value
        self._places: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._problems: list[Rejected] = []
        self._told_to = ""
        self._n_problems = 0
        at = 0
        for path in files:
            name = path.relative_to(root.parent).as_posix()
            try:
                for line in Source.of_path(path, name).lines():
                    try:
                        data = line.checked()
                        trace_id = _trace_of(data)
                    except BadLine as error:
                        self._reject(f"{name}, line {line.number}: {error}")
                        continue
                    self._places[trace_id].append((at, len(data)))
                    at += self._file.write(data)
            except FileRefused as refusal:
                self._reject(str(refusal))
        self._file.flush()
        if self._n_problems > len(self._problems):
            n_more = self._n_problems - len(self._problems)
            self._problems.append(Rejected(None, f"{n_more:,} more lines of {FOLDER} could not be read."))

    def _reject(self, reason: str) -> None:
        self._n_problems += 1
        if len(self._problems) < MAX_PROBLEMS:
            self._problems.append(Rejected(None, reason))

    def problems(self, source: Source) -> list[Rejected]:
        """What could not be read. Of several files of traces only the first is told."""
        self._told_to = self._told_to or source.path
        return self._problems if self._told_to == source.path else []

    def fold(self, trace: dict[str, Any]) -> dict[str, Any]:
        """The trace with its updates. Raises :class:`BadLine` for an update that cannot be read."""
        for at, n in self._places.get(str(trace.get("id")), ()):
            trace = folded(trace, shapes.mapping(shapes.decode(os.pread(self._file.fileno(), n, at)), FOLDER))
        return trace


def _trace_of(data: bytes) -> str:
    try:
        name = _decode_name(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadLine(f"The line is no update of a trace: {error}.") from None
    if name.version > NEWEST:
        raise BadLine(f"version is {name.version}; this program reads version {NEWEST}.")
    return name.trace_id


def beside(source: Source) -> Annotations | None:
    """The annotations beside a file of traces, or beside its folder. None where there are none."""
    if source.folder is None:
        return None
    for folder in (source.folder / FOLDER, source.folder.parent / FOLDER):
        if folder.is_dir() and not folder.is_symlink():
            files = tuple(_files(folder))
            if files:
                stamps = tuple((path.stat().st_size, path.stat().st_mtime_ns) for path in files)
                return _read(folder, files, stamps)
    return None


@lru_cache(maxsize=1)
def _read(folder: Path, files: tuple[Path, ...], stamps: tuple[tuple[int, int], ...]) -> Annotations:
    """A stream has many files, and all of them share the annotations of the folder."""
    return Annotations(files, folder)


def _files(folder: Path) -> Iterator[Path]:
    """The files of updates, producer after producer. A chunk that is there plain and packed is read once."""
    paths = [path for depth in ("*", "*/*") for path in folder.glob(depth) if _is_file(path)]

    def order(path: Path) -> tuple[int, str, str]:
        producer = path.parent.name if path.parent != folder else path.name.split(".")[0]
        return (_FIRST.index(producer) if producer in _FIRST else len(_FIRST)), producer, path.name

    chosen: dict[tuple[Path, str], Path] = {}
    for path in sorted(paths, key=order):
        chosen.setdefault((path.parent, path.name.split(".jsonl")[0]), path)  # the plain one, which sorts first
    yield from chosen.values()


def _is_file(path: Path) -> bool:
    is_index = path.name.split(".jsonl")[0].endswith("index")
    return bool(_FILE.fullmatch(path.name)) and not is_index and path.is_file() and not path.is_symlink()


def folded(trace: dict[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """The trace with an update: its ``info`` merged, its values on the sampled tokens of the nodes. A node takes the
    values that reach its end and hold one that is known. Raises :class:`BadLine`."""
    info = shapes.optional_mapping(update.get("info"), f"{FOLDER}: info")
    if info:
        trace = {**trace, "info": _merged(trace.get("info"), info)}
    branches = shapes.sequence(update.get("branches") or [], f"{FOLDER}: branches")
    if not branches:
        return trace
    nodes = [dict(node) if isinstance(node, dict) else node for node in trace.get("nodes") or []]
    paths = _paths(nodes)
    for n, item in enumerate(branches):
        where = f"{FOLDER}: branches[{n}]"
        branch = shapes.mapping(item, where)
        index = shapes.whole(branch.get("index"), f"{where}.index", least=0)
        if index is None or index >= len(paths):
            raise BadLine(f"{where}.index is {index}, but the trace has {len(paths)} branches.")
        for name in STREAMS:
            if branch.get(name):
                values = shapes.sequence(branch[name], f"{where}.{name}")
                _spread(
                    nodes, paths[index], name,
                    [float(number) if isinstance(number, bool) else number for number in values],
                )
    return {**trace, "nodes": nodes}


def _spread(nodes: list[Any], path: list[int], name: str, values: list[Any]) -> None:
    """Put the values of a branch on the nodes of its path: one for each True of the mask of a node."""
    at = 0
    for index in path:
        node = nodes[index]
        n = len(node.get("token_ids") or ())
        own, at = values[at : at + n], at + n
        if len(own) < n:
            return
        mask = node.get("mask") or ()
        sampled_values = [value for value, is_sampled in zip(own, mask, strict=False) if is_sampled]
        if any(value is not None for value in sampled_values):
            node[name] = sampled_values


def _paths(nodes: list[Any]) -> list[list[int]]:
    """The nodes from the root to each leaf, in the order of the leaves. Raises :class:`BadLine`."""
    parents: list[int | None] = []
    for n, node in enumerate(nodes):
        parent = shapes.whole(shapes.mapping(node, f"nodes[{n}]").get("parent"), f"nodes[{n}].parent", least=0)
        if parent is not None and parent >= n:
            raise BadLine(f"nodes[{n}].parent is {parent}, but a parent comes before its node.")
        parents.append(parent)
    inner = set(parents)
    paths = []
    for leaf in (n for n in range(len(nodes)) if n not in inner):
        path: list[int] = []
        at: int | None = leaf
        while at is not None:
            path.append(at)
            at = parents[at]
        paths.append(path[::-1])
    return paths


def _merged(old: Any, new: Any) -> Any:
    """Objects merged key by key; of other values the new one."""
    if isinstance(old, dict) and isinstance(new, dict):
        return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}
    return new
