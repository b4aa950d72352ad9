"""The tokens of a run that have log-probabilities of sampler and trainer, as arrays over the whole run.
:class:`GapCollector` takes trajectories one after the other; :meth:`GapCollector.done` joins what it holds. An array
over tokens is ``[N]``, in the order of trajectories, rows and offsets. Only tokens under the loss mask are held."""

import hashlib
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.figures import trainer_column
from rollout_inspector.diagnose.gap.token_classes import TokenClasses
from rollout_inspector.diagnose.row_checks import RUN_LENGTHS, run_lengths
from rollout_inspector.streams.trajectory import Ids, Mask, Row, Step, Trajectory

Ints = NDArray[np.int32]
Reals = NDArray[np.float32]
CUT = "length"  # The reason of a completion that was cut by its length.
ROUTING = "routing"
"""The key in ``extra`` of a row or trajectory with the summary of its routing array: ``repeats``, ``zero_layers``."""
CACHED = ("num_cached_tokens", "cached_tokens", "prefix_cached_tokens")
"""Keys in ``extra`` of a step or row: how many tokens of the prompt the engine took from its cache."""
WORKERS = ("worker", "worker_id", "rollout_worker", "engine_id", "server", "replica", "dp_rank")
"""Keys in ``extra`` of a step, a row or a trajectory that name who sampled it."""
KEPT_MASS = "kept_logprob_mass"
"""A column of a row: the logarithm of the mass of the tokens that top-p and top-k left, by the sampler's policy."""
PACKED = ("pack_index", "packed_index", "index_in_pack", "sequence_in_pack")
"""Keys in ``extra`` of a row or trajectory: how many sequences stand before it in the packed row of the trainer."""
PRECISIONS = (
    ("engine_dtype", "rollout_dtype", "sampler_dtype", "generation_dtype"),
    ("trainer_dtype", "policy_dtype", "actor_dtype", "training_dtype"),
)
"""Keys in ``extra`` of a step, a row or a trajectory with the precision that sampler and trainer hold weights in."""
BITS = {"float32": 23, "fp32": 23, "float16": 10, "fp16": 10, "half": 10, "bfloat16": 7, "bf16": 7, "fp8": 3, "fp4": 1}
"""Bits of the fraction of each precision: what an update must reach to change a weight."""
CONFIDENT, CONFIDENT_DROP = math.log(0.5), 2.0
"""A confident disagreement: a probability of one half at least for the sampler, and 2 nats less for the trainer."""
VERSIONS = ("policy_version", "weight_version", "policy_versions", "version")
"""Keys in ``extra`` of a row or trajectory without steps that name the policy that sampled it."""


@dataclass(frozen=True)
class GapRow:
    """What is known of a row that has compared tokens."""

    trajectory: str  # The code or the id of its trajectory.
    row: int  # Its index in the trajectory.
    length: int  # Ids of the row.
    training_step: int | None = None
    prompt: bytes = b""
    """Digest of the ids before the first trained token; empty = the row begins with a trained token."""
    kinds: frozenset[str] = frozenset()  # The kinds of the findings in the row.
    is_cut: bool | None = None  # Whether its last completion was cut by its length; None = not recorded.
    repeats: float | None = None
    """Share of the routing rows that repeat the row before, from 0 to 1; None = no routing is recorded."""
    cached: int | None = None  # Prompt tokens that came from the prefix cache; None = not recorded.
    top_p: float | None = None
    temperature: float | None = None
    has_calls: bool = False  # Its trajectory holds engine calls.
    worker: str = ""
    """The engine that sampled it, where several are told apart; empty = not recorded, or several in one row."""
    packed: int | None = None  # Sequences before it in the packed row that the trainer read; None = not recorded.
    precisions: tuple[str, ...] = ("", "")  # What sampler and trainer hold weights in; empty = not recorded.


@dataclass(frozen=True, eq=False)
class GapTokens:
    """The compared tokens of a run."""

    rows: Sequence[GapRow]  # The rows, in order; each has compared tokens.
    row: Ints  # ``[N]``: index in :attr:`rows`, ascending.
    offset: Ints  # ``[N]``: offset in the row.
    ids: Ids  # ``[N]``: token ids.
    sampler: Reals  # ``[N]``: log-probabilities in nats.
    trainer: Reals  # ``[N]``: log-probabilities in nats.
    position: Ints  # ``[N]``: tokens between this one and the first of its trained stretch.
    turn: Ints  # ``[N]``: how many trained stretches of its row lie before its stretch.
    version: Ints  # ``[N]``: index in :attr:`versions`; -1 = not recorded.
    versions: Sequence[str]
    """Policy versions, the oldest first as far as their numbers or their order of appearance tell."""
    kind: NDArray[np.uint8] | None = None
    """``[N]``: a :class:`~rollout_inspector.diagnose.gap.token_classes.TokenClass`; None = no tokenizer was used."""
    columns: Mapping[str, int] = field(default_factory=dict)  # The trainer's column -> rows that were compared with it.
    scored: Mapping[str, Reals] = field(default_factory=dict)
    """Further columns ``[N]`` that engines made later, by name; NaN = no value."""
    kept_mass: Reals | None = None
    """``[N]``: the logarithm of the mass that top-p and top-k left, 0 = all of it; None = no row records it."""
    noise: tuple[float, float] | None = None
    """Mean and 99th percentile of the absolute difference of an engine against itself; None = not measured."""
    rows_without: int = 0  # Rows with trained tokens that lack a side, or hold it in another length.

    def __len__(self) -> int:
        return len(self.row)

    @cached_property
    def d(self) -> Reals:
        """``[N]``: trainer - sampler."""
        return self.trainer - self.sampler

    @cached_property
    def size(self) -> Reals:
        """``[N]``: the absolute d."""
        return np.abs(self.d)

    @cached_property
    def uncertainty(self) -> Reals:
        """``[N]``: 1 - probability, by the mean of both log-probabilities. The noise of kernels grows with it."""
        values: Reals = -np.expm1((self.sampler + self.trainer) / 2)
        return np.maximum(values, 0, out=values)

    @cached_property
    def confident(self) -> Mask:
        """The confident disagreements ``[N]``."""
        return (self.sampler >= CONFIDENT) & (self.d <= -CONFIDENT_DROP)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """``[R + 1]``: where the tokens of each row begin, and the number of all."""
        return np.searchsorted(self.row, np.arange(len(self.rows) + 1, dtype=self.row.dtype))

    @cached_property
    def step_of_row(self) -> NDArray[np.int64]:
        """``[R]``: the training step of each row; -1 = not recorded."""
        return np.array([-1 if row.training_step is None else row.training_step for row in self.rows], np.int64)

    @cached_property
    def workers(self) -> list[str]:
        """The workers that are recorded, in order of their names; empty among them = of some rows none is."""
        return sorted({row.worker for row in self.rows})

    @cached_property
    def worker(self) -> NDArray[np.int64]:
        """``[R]``: index in :attr:`workers`."""
        place = {name: n for n, name in enumerate(self.workers)}
        return np.array([place[row.worker] for row in self.rows], np.int64)

    @cached_property
    def newest(self) -> Ints:
        """``[R]``: the newest version of each row; -1 = none is recorded."""
        return np.maximum.reduceat(self.version, self.starts[:-1])

    @cached_property
    def lag(self) -> Ints:
        """``[N]``: by how many versions the token is older than the newest one; -1 = not recorded. The newest one is
        that of the rows up to the same training step. Without steps it is that of the row."""
        newest, steps = self.newest, self.step_of_row
        if len(steps) and steps.min() >= 0:
            _, of = np.unique(steps, return_inverse=True)
            newest_of_step = np.full(int(of.max()) + 1, -1, np.int32)
            np.maximum.at(newest_of_step, of, newest)
            newest = np.maximum.accumulate(newest_of_step)[of]
        return np.where(self.version < 0, np.int32(-1), self.of_rows(newest) - self.version)

    @cached_property
    def sums_of_ids(self) -> list[NDArray[Any]]:
        """The sum of the absolute d of each token id from 0 on, and its tokens."""
        return self.by_id(self.ids >= 0)

    def by_id(self, where: Mask) -> list[NDArray[Any]]:
        """The same of the tokens ``where``, which have ids. No vocabulary has more than 4 million."""
        ids = np.minimum(values_at(self.ids, where), 4_000_000).astype(np.int64)
        return [np.bincount(ids, weights=values_at(self.size, where)), np.bincount(ids)]

    def of_rows(self, values: NDArray[Any]) -> NDArray[Any]:
        """The value ``[R]`` of its row for each token ``[N]``."""
        return np.repeat(values, np.diff(self.starts))

    def per_row(self, values: Reals | NDArray[np.float64] | Mask, keep: Mask | None = None) -> NDArray[np.float64]:
        """Sums over the tokens of each row ``[R]``. ``keep`` ``[N]``: only these tokens."""
        if keep is not None and not keep.all():
            values = values * keep
        if values.dtype == np.bool_:
            return np.add.reduceat(values.view(np.uint8), self.starts[:-1], dtype=np.int32).astype(np.float64)
        return np.add.reduceat(values, self.starts[:-1], dtype=np.float64)


def values_at(values: NDArray[Any], where: Mask) -> NDArray[Any]:
    """The values of some tokens, without a copy where these are all."""
    return values if where.all() else values[where]


class GapCollector:
    """Gathers the compared tokens of a run."""

    def __init__(
        self, sampler: str = "", trainer: str = "", classes: TokenClasses | None = None, more: Sequence[str] = (),
        kept: str = "",
    ) -> None:
        """``sampler``, ``trainer``: names of columns of the rows; empty = the sampled log-probabilities, and the first
        of :data:`TRAINER_LOGPROBS`. ``classes`` names the class of each token. ``more``: further columns to keep.
        ``kept``: the column that stands in for :data:`KEPT_MASS` where a row records none; empty = there is none."""
        self._names, self._classes = (sampler, trainer), classes
        self._kinds: list[NDArray[np.uint8]] = []
        self._more: dict[str, list[Reals]] = {name: [] for name in (*more, KEPT_MASS)}
        self._kept = kept
        self._rows: list[GapRow] = []
        self._parts: list[tuple[Ints, Ids, Reals, Reals, Ints, Ints, Ints]] = []
        self._versions: dict[str, int] = {}
        self._columns: dict[str, int] = {}
        self._without = 0

    def add(
        self, value: Trajectory, rows: Iterable[tuple[int, Row]], name: str = "",
        kinds: Mapping[int, Collection[str]] | None = None,
    ) -> None:
        """Take rows of a trajectory with their indices. ``name``: of the trajectory on pages; empty = its external id.
        ``kinds``: index of a row -> the kinds of its findings."""
        for index, row in rows:
            self._add_row(value, index, row, name or value.external_id, frozenset((kinds or {}).get(index, ())))

    def done(self) -> GapTokens:
        """All that was taken. Versions are put in order."""
        order, versions = _in_order(list(self._versions))
        names = [np.concatenate(columns) for columns in zip(*self._parts, strict=True)] if self._parts else _EMPTY
        offset, ids, sampler, trainer, position, turn, version = names
        counts = [len(part[0]) for part in self._parts]
        more = {name: np.concatenate(columns) for name, columns in self._more.items() if columns}
        mass = more.pop(KEPT_MASS, None)
        row = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        return GapTokens(
            self._rows, row, offset, ids, sampler, trainer, position, turn, order[version], versions,
            np.concatenate(self._kinds) if self._kinds else None, self._columns, more,
            np.nan_to_num(mass) if mass is not None and np.isfinite(mass).any() else None, rows_without=self._without,
        )

    def _add_row(self, value: Trajectory, index: int, row: Row, name: str, kinds: frozenset[str]) -> None:
        n = len(row.ids)
        if len(row.loss_mask) != n or not row.loss_mask.any():
            return
        sampler_name, trainer_name = self._names
        trainer_name = trainer_name or trainer_column(row)
        sampler = row.columns.get(sampler_name) if sampler_name else row.logprobs
        trainer = row.columns.get(trainer_name)
        if sampler is None or trainer is None or not len(sampler) == len(trainer) == n:
            self._without += 1
            return
        trained = np.flatnonzero(row.loss_mask).astype(np.int32)
        starts = np.flatnonzero(np.diff(trained, prepend=np.int32(-2)) != 1)
        turns = (np.cumsum(np.bincount(starts, minlength=len(trained))) - 1).astype(np.int32)
        use = np.isfinite(sampler[trained]) & np.isfinite(trainer[trained])
        if not use.any():
            self._without += 1
            return
        version = self._version(value, row, turns, len(starts))
        offset, turn = trained[use], turns[use]
        position = (trained - trained[starts][turns])[use]
        self._parts.append((offset, row.ids[offset], sampler[offset], trainer[offset], position, turn, version[use]))
        if self._classes is not None:
            self._kinds.append(self._classes.of_row(row.ids)[offset])
        for column_name, parts in self._more.items():
            column = row.columns.get(column_name)
            if column is None and column_name == KEPT_MASS:
                column = row.columns.get(self._kept)
            parts.append(np.full(len(offset), np.nan, np.float32) if column is None else column[offset])
        self._columns[trainer_name] = self._columns.get(trainer_name, 0) + 1
        self._rows.append(_row_of(value, index, row, name, kinds, int(trained[0])))

    def _version(self, value: Trajectory, row: Row, turns: Ints, n_turns: int) -> Ints:
        """The number of the policy version of each trained token ``[n]``, in order of appearance; -1 = unknown."""
        steps = [value.steps[index] for index in row.step_indices if index < len(value.steps)]
        versions_of_steps = [self._number(step.policy_version) for step in steps if len(step.completion_ids)]
        if versions_of_steps and len(versions_of_steps) == n_turns:
            return np.array(versions_of_steps, np.int32)[turns]
        lengths = [len(step.completion_ids) for step in steps]
        if versions_of_steps and sum(lengths) == len(turns):
            return np.repeat(np.array([self._number(s.policy_version) for s in steps], np.int32), lengths)
        if versions_of_steps:
            return np.full(len(turns), versions_of_steps[0] if len(set(versions_of_steps)) == 1 else -1, np.int32)
        recorded = _told(row.extra, value.extra, RUN_LENGTHS)
        if (runs := run_lengths(recorded)) is not None and sum(n for _, n in runs) in (len(row.ids), len(turns)):
            spread = np.repeat([self._number(version) for version, _ in runs], [n for _, n in runs]).astype(np.int32)
            return spread if len(spread) == len(turns) else spread[row.loss_mask]
        for key in VERSIONS:
            recorded = _told(row.extra, value.extra, key)
            if isinstance(recorded, list) and len(recorded) in (len(row.ids), len(turns)) and recorded:
                numbers = np.array([self._number(str(name)) for name in recorded], np.int32)
                return numbers if len(recorded) == len(turns) else numbers[row.loss_mask]
            if isinstance(recorded, str | int | float) and not isinstance(recorded, bool):
                return np.full(len(turns), self._number(str(recorded)), np.int32)
        versions = {step.policy_version for step in value.steps}
        return np.full(len(turns), self._number(versions.pop()) if len(versions) == 1 else -1, np.int32)

    def _number(self, version: str) -> int:
        return self._versions.setdefault(version, len(self._versions)) if version else -1


_EMPTY: list[Any] = [np.zeros(0, kind) for kind in (*[np.int32] * 2, *[np.float32] * 2, *[np.int32] * 3)]


def _told(extra: Mapping[str, Any], more: Mapping[str, Any], key: str) -> Any:
    value = extra.get(key)
    return more.get(key) if value is None else value


def _in_order(versions: Sequence[str]) -> tuple[Ints, list[str]]:
    """For each number of a version its place in order ``[V + 1]`` (the last stands for -1), and the ordered versions.
    Versions that end with a number are ordered by it, if all do; else they stay in order of appearance."""
    numbers = [version[len(version.rstrip("0123456789")) :] for version in versions]
    order = np.argsort(np.array(list(map(float, numbers))), kind="stable") if all(numbers) else np.arange(len(versions))
    place = np.full(len(versions) + 1, -1, np.int32)
    place[order] = np.arange(len(versions), dtype=np.int32)
    return place, [versions[int(index)] for index in order]


def _row_of(value: Trajectory, index: int, row: Row, name: str, kinds: frozenset[str], first: int) -> GapRow:
    steps = [value.steps[index] for index in row.step_indices if index < len(value.steps)] or list(value.steps)
    reasons = [step.finish_reason for step in steps if step.finish_reason]
    stopped = _told(row.extra, value.extra, "finish_reason") or value.stop_reason
    is_cut = reasons[-1] == CUT if reasons else (str(stopped) == CUT if stopped else None)
    routing = _told(row.extra, value.extra, ROUTING)
    repeats = routing.get("repeats") if isinstance(routing, Mapping) else None
    counts = [count for key in CACHED for step in steps[:1] if isinstance(count := step.extra.get(key), int)]
    counts += [count for key in CACHED if isinstance(count := _told(row.extra, value.extra, key), int)]
    prompt = hashlib.blake2b(row.ids[:first].tobytes(), digest_size=8).digest() if first else b""
    return GapRow(
        name, index, len(row.ids), value.training_step, prompt, kinds, is_cut,
        float(repeats) if isinstance(repeats, int | float) else None, counts[0] if counts else None,
        next((step.top_p for step in steps if step.top_p is not None), None),
        next((step.temperature for step in steps if step.temperature is not None), None), bool(value.steps),
        _one_name(value, row, steps, WORKERS),
        next((n for key in PACKED if isinstance(n := _told(row.extra, value.extra, key), int)), None),
        tuple(_one_name(value, row, steps, keys).removeprefix("torch.").lower() for keys in PRECISIONS),
    )


def _one_name(value: Trajectory, row: Row, steps: Sequence[Step], keys: Sequence[str]) -> str:
    """The one worker, or precision, of a row; empty = none is named, or its calls name several."""
    for key in keys:
        names = {str(name)[:100] for step in steps if isinstance(name := step.extra.get(key), str | int)}
        if not names and isinstance(name := _told(row.extra, value.extra, key), str | int):
            names = {str(name)[:100]}
        if names:
            return names.pop() if len(names) == 1 else ""
    return ""
