"""The weights of a run, summed: how much is clipped, masked or not decidable, and what findings hold."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.diagnose.gap.token_classes import TokenClass, TokenClasses
from rollout_inspector.diagnose.loss_weights.row_weights import ADVANTAGES, loss_inputs, missing_words, row_weights
from rollout_inspector.diagnose.loss_weights.rules import MEANS, RULES, RowWeights
from rollout_inspector.streams.align import place_in_row
from rollout_inspector.streams.trajectory import Row, Trajectory

MAX_ALIGNED_TOKENS = 300_000
"""The most tokens of a trajectory whose steps are aligned with the rows of a source, to place findings in these."""
AT, IN_ROW, IN_TRAJECTORY = "tokens", "rows", "trajectories"
"""What holds weight: the tokens at the places of a finding, its rows, its trajectories."""
OF_CLASS = "class"  # What holds weight: the tokens of a class.

Sums = NDArray[np.float64]
"""``[rules, 2]``: the sum of the sizes of weights, and the same with each divided by the trained tokens of its row."""
_RULES = tuple(RULES.values())


def rows_of(finding: Finding, rows: Sequence[Row]) -> list[int]:
    """The rows that a finding is in: the row that it names, else those that train its step."""
    if finding.row is not None:
        return [finding.row] if finding.row < len(rows) else []
    return [n for n, row in enumerate(rows) if finding.step in row.step_indices]


def stretches(finding: Finding, trajectory: Trajectory, rows: Sequence[Row], index: int) -> list[tuple[int, int]]:
    """The tokens ``[start, stop)`` of a row that stand at the places of a finding."""
    step = finding.step
    if step is None or finding.row is not None or not trajectory.rows:
        return list(finding.stretches)  # a row that follows from steps starts with the stream of each of them
    if trajectory.n_ids > MAX_ALIGNED_TOKENS or step >= len(trajectory.steps):
        return []
    places = [place_in_row(trajectory.steps, rows[index], step, start, stop) for start, stop in finding.stretches]
    return [place for place in places if place is not None]


@dataclass(frozen=True, eq=False)
class TrajectoryWeights:
    """The weights of one trajectory before the mean."""

    batch: int | None  # Its training step; the trajectories of one step are one batch.
    tokens: int  # Tokens under the loss mask.
    rows: int  # Rows with such a token.
    sums: Sums
    known: tuple[int, ...] = ()  # By rule: the tokens whose weight is decidable.


class WeightSums:
    """The weights of trajectories, summed batch by batch. A trajectory is added whole."""

    def __init__(self, classes: TokenClasses | None = None) -> None:
        """``classes`` names the class of each token; None = classes are not counted."""
        self._classes = classes
        self._of_classes = np.zeros((len(_RULES), len(TokenClass), 3), dtype=np.int64)
        self.trajectories = self.left_out = self.zero = 0
        self._counts = np.zeros((len(_RULES), 3), dtype=np.int64)
        self.lacks: dict[str, Counter[tuple[str, ...]]] = {rule.slug: Counter() for rule in _RULES}
        self.sources: Counter[str] = Counter()
        self._tokens: Counter[int | None] = Counter()
        self._rows: Counter[int | None] = Counter()
        self._of_steps: dict[int, NDArray[np.int64]] = {}
        self._held: dict[tuple[str, str], dict[int | None, Sums]] = {}

    def add(
        self, trajectory: Trajectory, rows: Sequence[Row], advantage: float | None,
        findings: Sequence[Finding] = (),
    ) -> TrajectoryWeights:
        """Count a trajectory. ``rows``: those that a trainer would read, its stored ones or a strategy's.
        ``advantage``: for rows without a column of advantages."""
        total, of_rows = _none(), {n: _none() for n in range(len(rows))}
        at = {n: self._marked(trajectory, rows, n, findings) for n in range(len(rows))}
        sums_by_group: dict[str, Sums] = defaultdict(_none)
        n_tokens = n_rows = 0
        counts = np.zeros((len(_RULES), 3), dtype=np.int64)
        of_class = np.zeros((len(TokenClass), len(_RULES), 2))
        for n, row in enumerate(rows):
            inputs = loss_inputs(row, advantage)
            if inputs is None:
                self.left_out += 1
                continue
            size = len(inputs.offsets)
            if not size:
                continue
            n_tokens, n_rows = n_tokens + size, n_rows + 1
            self.zero += int(np.count_nonzero(inputs.advantages == 0))
            kinds = self._classes.of_row(row.ids)[inputs.offsets] if self._classes is not None else None
            has = int(np.count_nonzero(np.isfinite(inputs.advantages)))
            self.sources["column" if inputs.has_column else "rewards"] += has
            for index, rule in enumerate(_RULES):
                weights = row_weights(inputs, rule)
                is_known = weights.known
                counts[index] += [np.count_nonzero(flags) for flags in (is_known, weights.clipped, weights.masked)]
                decided = int(np.count_nonzero(is_known))
                lacking = tuple(name for name in inputs.lacks if name == ADVANTAGES or rule.needs_ratio)
                self.lacks[rule.slug][lacking] += size - decided
                sizes = np.abs(np.where(is_known, weights.values, 0.0))
                of_rows[n][index] = sizes.sum(), sizes.sum() / size
                if kinds is not None:
                    self._add_classes(index, kinds, weights, sizes, of_class)
                for kind, mark in at[n].items():
                    part = sizes[mark[inputs.offsets]].sum()
                    sums_by_group[kind][index] += part, part / size
            total += of_rows[n]
        self.trajectories += 1
        batch = trajectory.training_step
        self._counts += counts
        if batch is not None:
            self._of_steps[batch] = self._of_steps.get(batch, 0) + counts
        self._tokens[batch] += n_tokens
        self._rows[batch] += n_rows
        self._hold("", "", batch, total)
        for kind_of_token in TokenClass if self._classes is not None else ():
            self._hold(OF_CLASS, kind_of_token.label, batch, of_class[kind_of_token])
        for kind, sums in sums_by_group.items():
            self._hold(AT, kind, batch, sums)
        for kind in {finding.kind for finding in findings}:
            inside = {n for finding in findings if finding.kind == kind for n in rows_of(finding, rows)}
            self._hold(IN_ROW, kind, batch, sum((of_rows[n] for n in inside), _none()))
            self._hold(IN_TRAJECTORY, kind, batch, total)
        return TrajectoryWeights(batch, n_tokens, n_rows, total, tuple(counts[:, 0].tolist()))

    def _add_classes(
        self, rule: int, kinds: NDArray[np.uint8], found: RowWeights, sizes: Sums, of_class: NDArray[np.float64]
    ) -> None:
        """Count the trained tokens of a row by class; ``of_class`` ``[classes, rules, 2]`` takes their weights."""
        for column, flags in enumerate((found.known, found.clipped, found.masked)):
            self._of_classes[rule, :, column] += np.bincount(kinds[flags], minlength=len(TokenClass))
        weights = np.bincount(kinds, weights=sizes, minlength=len(TokenClass))
        of_class[:, rule, 0] += weights
        of_class[:, rule, 1] += weights / len(kinds)

    def _marked(
        self, trajectory: Trajectory, rows: Sequence[Row], index: int, findings: Sequence[Finding]
    ) -> dict[str, NDArray[np.bool_]]:
        """Kind -> the tokens of a row ``[T]`` that stand at a place of such a finding."""
        marked: dict[str, NDArray[np.bool_]] = {}
        for finding in findings:
            if index in rows_of(finding, rows):
                mark = marked.setdefault(finding.kind, np.zeros(len(rows[index].ids), dtype=np.bool_))
                for start, stop in stretches(finding, trajectory, rows, index):
                    mark[start:stop] = True
        return marked

    def _hold(self, what: str, kind: str, batch: int | None, sums: Sums) -> None:
        of_batch = self._held.setdefault((what, kind), {})
        of_batch[batch] = of_batch[batch] + sums if batch in of_batch else sums.copy()

    @property
    def tokens(self) -> int:
        """Tokens under the loss mask."""
        return self._tokens.total()

    @property
    def rows(self) -> int:
        """Rows with such a token."""
        return self._rows.total()

    @property
    def batches(self) -> int:
        """Training steps; trajectories without one are one batch together."""
        return len(self._tokens)

    def share(self, what: str, kind: str, mean: str) -> list[float | None]:
        """By rule: the share of the weight that findings of a kind hold. None = nothing has a weight."""
        whole = self._normalised(self._held.get(("", ""), {}), mean)
        part = self._normalised(self._held.get((what, kind), {}), mean)
        return [float(a / b) if b > 0 else None for a, b in zip(part, whole, strict=True)]

    def _normalised(self, of_batch: dict[int | None, Sums], mean: str) -> Sums:
        total = np.zeros(len(_RULES))
        for batch, sums in of_batch.items():
            total += of_mean(sums, mean, self._tokens[batch], self._rows[batch])
        return total

    @property
    def kinds(self) -> list[str]:
        """The kinds of the findings that were counted."""
        return sorted(kind for what, kind in self._held if what == IN_TRAJECTORY)

    def report(self, whats: Sequence[str] = (AT, IN_ROW, IN_TRAJECTORY)) -> dict[str, Any]:
        """The figures as JSON: of the tokens, and for each rule what it does to them and what findings hold."""
        groups = [(what, kind) for what in whats for kind in self.kinds]
        groups += [(OF_CLASS, of.label) for of in TokenClass]
        shares = {(*group, mean): self.share(*group, mean) for group in groups for mean in MEANS}
        return {
            "trajectories": self.trajectories,
            "batches": self.batches,
            "rows": self.rows,
            "rows_left_out": self.left_out,
            "tokens": self.tokens,
            "zero_advantage": self.zero,
            "advantages": dict(self.sources),
            "steps": [
                {"training_step": step, **{rule.slug: _named(counts[n]) for n, rule in enumerate(_RULES)}}
                for step, counts in sorted(self._of_steps.items())
            ],
            "rules": [
                {
                    "rule": rule.slug,
                    **_named(self._counts[n]),
                    "why_not": _why_not(self.lacks[rule.slug]),
                    "classes": [
                        {"class": of.label, **_named(self._of_classes[n, of]),
                         "share": {mean: shares[OF_CLASS, of.label, mean][n] for mean in MEANS}}
                        for of in TokenClass if self._of_classes[n, of, 0]  # those that occur; none without classes
                    ],
                    "findings": {
                        kind: {what: {mean: shares[what, kind, mean][n] for mean in MEANS} for what in whats}
                        for kind in self.kinds
                    },
                }
                for n, rule in enumerate(_RULES)
            ],
        }


def _named(counts: NDArray[np.int64]) -> dict[str, int]:
    """Counts ``[3]`` of tokens by name."""
    return dict(zip(("known", "clipped", "masked"), counts.tolist(), strict=True))


def _none() -> Sums:
    return np.zeros((len(_RULES), 2))


def of_mean(sums: Sums, mean: str, tokens: int, rows: int) -> Sums:
    """By rule ``[rules]``: the size of the gradient's weight under a mean over a batch of so many tokens and rows."""
    if not tokens:
        return np.zeros(len(sums))
    return sums[:, 1] / rows if mean == "row_mean" else sums[:, 0] / (rows if mean == "row_sum" else tokens)


def _why_not(lacks: Counter[tuple[str, ...]]) -> list[dict[str, Any]]:
    """Why tokens have no weight: a sentence and the number of tokens, the largest number first."""
    return [
        {
            "sentence": f"They lack {missing_words(columns)}." if columns else "A column has no finite number there.",
            "tokens": n,
        }
        for columns, n in lacks.most_common()
        if n
    ]


def moved(before: Iterable[TrajectoryWeights], after: Iterable[TrajectoryWeights], mean: str) -> list[float | None]:
    """By rule: the share of the weight that other rows move from trajectories to others, from 0 to 1. Half the sum of
    the differences of the trajectories' shares. ``before`` and ``after``: the same trajectories in the same order. None
    = nothing has a weight."""
    old, new = _shares(list(before), mean), _shares(list(after), mean)
    if not len(old):
        return [None] * len(_RULES)
    distance = np.abs(old - new).sum(axis=0) / 2
    return [float(share) if np.isfinite(share) else None for share in distance]


def _shares(of: Sequence[TrajectoryWeights], mean: str) -> Sums:
    """The share of each trajectory in the weight of all ``[trajectories, rules]``; NaN where there is no weight."""
    tokens: Counter[int | None] = Counter()
    rows: Counter[int | None] = Counter()
    for item in of:
        tokens[item.batch] += item.tokens
        rows[item.batch] += item.rows
    weights = np.array([of_mean(item.sums, mean, tokens[item.batch], rows[item.batch]) for item in of])
    with np.errstate(invalid="ignore", divide="ignore"):
        shares: Sums = weights / weights.sum(axis=0, keepdims=True)
    return shares.reshape(len(of), len(_RULES))
