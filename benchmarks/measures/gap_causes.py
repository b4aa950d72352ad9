"""Measure how many planted causes of a gap are named right: ``python -m benchmarks.measures.gap_causes [--mixed]``.

The bundled runs of training are read as they are. Then faults are planted into the policy of the clean one: the hidden
states of the demo policy on its rows are computed once, and each case makes its own log-probabilities from them, with a
moved or rounded last layer, disturbed states, another temperature, or a column that is damaged afterwards.
"""

import argparse
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import product

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.settings")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from numpy.typing import NDArray

from rollout_inspector.diagnose import examine
from rollout_inspector.diagnose.gap.cause_kinds import CAUSES
from rollout_inspector.diagnose.gap.report import causes_of
from rollout_inspector.diagnose.gap.tokens import GapCollector
from rollout_inspector.formats import Source, read
from rollout_inspector.streams.trajectory import Row, Step, Trajectory
from rollouts.gallery import TRAINING_RUNS, TrainingRun
from rollouts.sampling.demo_policy import MODEL_DIR

Values = NDArray[np.float32]
PARTS = (range(30), range(15), range(8), range(10, 30))
"""Training steps of the made runs that are read: all, the first ones, the last ones."""
VOCABULARY = 256
"""Ids that the planted policy has, so that a case takes part of a second."""


# --- the made runs as they are


@cache
def made(run: TrainingRun) -> tuple[Trajectory, ...]:
    """The trajectories of a bundled run."""
    return tuple(one for one in read(Source.of_path(run.path))[1] if isinstance(one, Trajectory))


def named_of_made(run: TrainingRun, steps: range) -> tuple[str, ...]:
    """What is named when only some training steps are read."""
    collector = GapCollector()
    for one in made(run):
        if one.training_step in steps:
            kinds: dict[int, set[str]] = defaultdict(set)
            if run.cause == "row_retokenized":
                for found in examine(one, None).findings:
                    kinds[found.row or 0].add(found.kind)
            collector.add(one, enumerate(one.rows), kinds=kinds)
    return tuple(sorted(one.cause for one in causes_of(collector.done())[0]))


# --- cases that are planted into the clean one


@dataclass(frozen=True, eq=False)
class Policy:
    """The demo policy on the trained tokens of the clean run. N tokens, V ids, H values of a state."""

    trajectories: tuple[Trajectory, ...]
    row: NDArray[np.int64]
    """``[N]``: index of the trajectory."""
    offset: NDArray[np.int64]
    """``[N]``: offset in its row."""
    states: Values
    """``[N, H]``: what the last layer reads for the token."""
    head: Values
    """``[V, H]``: the last layer, of the likeliest ids alone."""


@cache
def policy(steps: int) -> Policy:
    """The policy on the trained tokens of the first training steps; one forward pass for each row."""
    from transformers import AutoModelForCausalLM

    (clean,) = (one for one in TRAINING_RUNS if not one.cause)
    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, local_files_only=True, dtype=torch.float32).eval()
    torch.set_num_threads(1)
    rows, offsets, states = [], [], []
    held = tuple(one for one in made(clean) if (one.training_step or 0) < steps)
    with torch.inference_mode():
        for n, one in enumerate(held):
            (row,) = one.rows
            at = np.flatnonzero(row.loss_mask)
            found = model.model(input_ids=torch.from_numpy(row.ids.astype(np.int64))[None]).last_hidden_state[0]
            states.append(found.numpy()[at - 1])
            rows.append(np.full(len(at), n))
            offsets.append(at)
    head, state = model.lm_head.weight.detach().numpy(), np.concatenate(states)
    likely = np.argsort(-np.exp(log_softmax(state[::7] @ head.T)).sum(0))[:VOCABULARY]
    return Policy(held, np.concatenate(rows), np.concatenate(offsets), state, head[np.sort(likely)])


@dataclass(frozen=True)
class Setting:
    """The run that a fault is planted into."""

    name: str
    kernels: str
    """How far both sides differ without a fault: ``float32``, ``bfloat16``, or ``coarse`` noise on each logit."""
    steps: int = 30
    rows: int = 8
    """Trajectories of a step, of two prompts: 2, 4, 6 or 8."""
    drift: float = 0.3
    """How far an update moves the policy."""
    part: float = 1.0
    """The share of the rows that a fault of the sampler or the trainer touches: one engine of several, say."""


SETTINGS = (
    Setting("float32", "float32"),
    Setting("bfloat16", "bfloat16"),
    Setting("coarse", "coarse"),
    Setting("few steps", "bfloat16", steps=8),
    Setting("few rows", "bfloat16", rows=2),
    Setting("slow training", "bfloat16", drift=0.15),
    Setting("three steps", "bfloat16", steps=3),
    Setting("part of the rows", "bfloat16", part=0.4),
)


class Case:
    """A run of a setting: what both sides say of its tokens, before a fault is planted."""

    def __init__(self, setting: Setting, seed: int) -> None:
        self.random = np.random.default_rng([seed, 77])
        self.setting, whole = setting, policy(setting.steps)
        step = np.array([one.training_step for one in whole.trajectories])
        # Four trajectories of each of two prompts stand together; a smaller run keeps as many of both.
        self.kept = np.flatnonzero(np.arange(len(step)) % 4 < setting.rows // 2)
        use = np.isin(whole.row, self.kept)
        self.row = np.searchsorted(self.kept, whole.row[use])
        self.offset = whole.offset[use]
        self.states = whole.states[use]
        self.head = whole.head
        self.of = [whole.trajectories[one] for one in self.kept]
        self.step = step[self.kept]
        first = np.flatnonzero(np.r_[True, (self.row[1:] != self.row[:-1]) | (np.diff(self.offset) != 1)])
        n = len(self.row)
        self.stretch = np.cumsum(np.isin(np.arange(n), first)) - 1
        self.position = np.arange(n) - first[self.stretch]
        self.ids = np.zeros(n, np.int64)
        self.sampler = self.trainer = np.zeros(n, np.float32)
        self.versions: list[list[str]] | None = None
        self.kinds: list[tuple[str, ...]] = [()] * len(self.of)
        self.repeats: list[float | None] = [None] * len(self.of)
        self.cut = [False] * len(self.of)
        self.workers = [""] * len(self.of)
        self.extras: list[dict[str, object]] = [{} for _ in self.of]
        self.left_out = np.zeros(n, np.bool_)
        self.touched = (self.random.random(len(self.of)) < setting.part)[self.row]
        direction = self.random.normal(0, 1, self.head.shape)
        self.direction = (direction / np.abs(direction).mean() * np.abs(self.head).mean()).astype(np.float32)

    # -- logits

    def logits(self, side: str, states: Values | None = None, moved: Values | float = 0.0) -> Values:
        """``[N, V]`` of one side. ``moved``: how far along a direction the last layer went, by token ``[N]``."""
        states = self.states if states is None else states
        if self.setting.kernels == "bfloat16" and side == "sampler":
            left, right = torch.from_numpy(states).bfloat16(), torch.from_numpy(self.head).bfloat16()
            found = (left @ right.T).float().numpy()
        else:
            found = states @ self.head.T
        if np.any(moved):
            found += (states @ self.direction.T) * np.reshape(np.asarray(moved, np.float32), (-1, 1))
        if self.setting.kernels == "coarse":
            found += np.float32(0.04) * self.random.standard_normal(found.shape, np.float32)
        return found

    def drift(self, step: NDArray[np.int64]) -> Values:
        """How far training has moved the last layer at a step, along the direction ``[N]``."""
        return (self.setting.drift * np.sqrt(step * (1 + step / 30))).astype(np.float32)

    # -- sampling

    def sample(self, sampler: Values, trainer: Values) -> None:
        """Draw each token by the sampler's logits, and keep what both sides say of it."""
        left, right = log_softmax(sampler), log_softmax(trainer)
        drawn = np.log(np.maximum(self.random.standard_exponential(left.shape, np.float32), 1e-30))
        self.ids = np.argmax(left - drawn, axis=1)
        at = np.arange(len(self.ids))
        rounding = self.random.normal(0, 1e-6, (2, len(at)))
        self.sampler, self.trainer = (
            np.minimum(side[at, self.ids] + off, 0).astype(np.float32)
            for side, off in zip((left, right), rounding, strict=True)
        )

    def some_rows(self, share: float) -> NDArray[np.bool_]:
        """``[R]``: a share of the rows, at least three."""
        found = self.random.random(len(self.of)) < share
        found[self.random.permutation(len(found))[:3]] = True
        return found

    # -- reading

    def values(self) -> Iterator[tuple[Trajectory, tuple[str, ...]]]:
        """The trajectories as a file would bring them."""
        for n, one in enumerate(self.of):
            (row,) = one.rows
            here = (self.row == n) & ~self.left_out
            ids = row.ids.copy()
            mask = np.zeros(len(ids), np.bool_)
            sides = np.zeros((2, len(ids)), np.float32)
            places = self.offset[here]
            mask[places], ids[places] = True, self.ids[here]
            sides[:, places] = self.sampler[here], self.trainer[here]
            extra: dict[str, object] = {} if self.repeats[n] is None else {"routing": {"repeats": self.repeats[n]}}
            if self.workers[n]:
                extra["worker"] = self.workers[n]
            extra |= self.extras[n]
            edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
            versions = self.versions[n] if self.versions is not None else [""] * len(edges)
            reason = "length" if self.cut[n] else ""
            steps = tuple(
                Step(ids[:start], ids[start:stop], policy_version=version, finish_reason=reason)
                for (start, stop), version in zip(edges, versions, strict=False)
            )
            made_row = Row(
                ids, mask, sides[0], columns={"trainer_logprobs": sides[1]}, step_indices=tuple(range(len(steps))),
                extra=extra,
            )
            yield replace(one, steps=steps, rows=(made_row,)), self.kinds[n]

    def named(self) -> tuple[str, ...]:
        collector = GapCollector()
        for value, kinds in self.values():
            collector.add(value, enumerate(value.rows), kinds={0: kinds})
        self.found = causes_of(collector.done())
        return tuple(sorted(one.cause for one in self.found[0]))


def log_softmax(logits: Values) -> Values:
    highest = logits.max(1, keepdims=True)
    with np.errstate(divide="ignore"):
        return logits - highest - np.log(np.exp(logits - highest).sum(1, keepdims=True))


def kept_by(logits: Values, top_p: float = 1.0, top_k: int = 0) -> Values:
    """The logits that top-p and top-k leave; the others are minus infinity."""
    order = np.argsort(-logits, axis=1)
    shares = np.take_along_axis(np.exp(log_softmax(logits)), order, 1)
    out = np.cumsum(shares, axis=1) - shares >= top_p
    if top_k:
        out[:, top_k:] = True
    back = np.zeros_like(out)
    np.put_along_axis(back, order, out, 1)
    return np.where(back, -np.inf, logits).astype(np.float32)


# --- faults. Each plants itself into a case; a first part samples, a second part damages what was sampled


def on_policy(case: Case) -> None:
    moved = case.drift(case.step[case.row])
    case.sample(case.logits("sampler", moved=moved), case.logits("trainer", moved=moved))


def weights_not_delivered(case: Case, n: int) -> None:
    """Never delivered, or not from the third part of the training on."""
    step = case.step[case.row]
    last = (0, case.setting.steps // 3)[n % 2]
    sampled = np.where(case.touched, np.minimum(step, last), step)
    case.sample(case.logits("sampler", moved=case.drift(sampled)), case.logits("trainer", moved=case.drift(step)))


def weights_rounded_away(case: Case, n: int) -> None:
    """The engine takes each update and stays where it was; or it holds the weights on a grid that is too coarse."""
    step = case.step[case.row]
    moved = case.drift(step)
    if n % 2:
        grid = np.float32(2.0) * np.abs(case.direction).mean()
        on_grid = np.round(case.head / grid) * grid  # what both begin with
        case.head = on_grid
        sampler = case.logits("sampler")
        for at in np.unique(step):
            here = np.flatnonzero((step == at) & case.touched)
            delivered = np.round((on_grid + moved[step == at][0] * case.direction) / grid) * grid
            sampler[here] = case.states[here] @ delivered.T
        still = np.flatnonzero(~case.touched)
        sampler[still] += (case.states[still] @ case.direction.T) * moved[still, None]
        case.extras = [{"engine_dtype": "bfloat16", "trainer_dtype": "float32"} for _ in case.of]
    else:
        sampler = case.logits("sampler", moved=np.where(case.touched, case.drift(0 * step), moved))
        turns = [len(np.unique(case.stretch[case.row == row])) for row in range(len(case.of))]
        case.versions = [[f"v{at}"] * n_turns for at, n_turns in zip(case.step, turns, strict=True)]
    case.sample(sampler, case.logits("trainer", moved=moved))


def stale_cache(case: Case, n: int) -> None:
    """The prompt of all steps keeps its old keys and values: the states of its rows are those of a mixture."""
    first: dict[bytes, int] = {}
    again = np.zeros(len(case.of), np.bool_)
    for at, one in enumerate(case.of):
        (row,) = one.rows
        prompt = row.ids[: int(np.flatnonzero(row.loss_mask)[0])].tobytes()
        again[at] = first.setdefault(prompt, int(case.step[at])) < case.step[at]
    again = again[case.row] & case.touched
    moved = case.drift(case.step[case.row])
    size = (0.25, 0.5)[n % 2] * case.states.std()
    off = case.random.normal(0, size, case.states.shape) * again[:, None]
    case.sample(
        case.logits("sampler", (case.states + off).astype(np.float32), moved), case.logits("trainer", moved=moved)
    )


def temperature(case: Case, n: int) -> None:
    left, right = ((1.0, 1.2), (0.7, 1.0), (1.2, 1.0), (1.0, 0.8))[n % 4]
    moved = case.drift(case.step[case.row])
    divided = np.where(case.touched, right, left)[:, None].astype(np.float32)
    case.sample(case.logits("sampler", moved=moved) / left, case.logits("trainer", moved=moved) / divided)


def top_p_renormalised(case: Case, n: int) -> None:
    kept = ({"top_p": 0.9}, {"top_k": 3}, {"top_p": 0.8}, {"top_p": 0.95})[n % 4]
    moved = case.drift(case.step[case.row])
    logits = case.logits("sampler", moved=moved)
    sampled = np.where(case.touched[:, None], kept_by(logits, **kept), logits)
    case.sample(sampled, case.logits("trainer", moved=moved))


def unexplained(case: Case, n: int) -> None:
    """The trainer holds another checkpoint, from the first step on; or its position encoding is off."""
    moved = case.drift(case.step[case.row])
    if n % 2:
        # A last layer that has moved spreads a disturbance further: the fault keeps its size.
        size = 0.3 * case.states.std() / np.sqrt(1 + moved * moved)
        off = (case.random.normal(0, 1, case.states.shape) * size[:, None]).astype(np.float32)
        case.sample(case.logits("sampler", moved=moved), case.logits("trainer", case.states + off, moved))
    else:
        case.sample(case.logits("sampler", moved=moved), case.logits("trainer", moved=moved + np.float32(0.12)))


def other_inputs(case: Case, n: int) -> None:
    """The trainer reads some rows after another prompt: their states are half those of other rows."""
    moved = case.drift(case.step[case.row])
    rows = case.some_rows((0.1, 0.25)[n % 2])[case.row]
    other = np.roll(case.states, len(case.states) // 3 + 7, axis=0)
    read = np.where(rows[:, None], (case.states + other) / 2, case.states).astype(np.float32)
    case.sample(case.logits("sampler", moved=moved), case.logits("trainer", read, moved))


SAMPLED: dict[str, Callable[[Case, int], None]] = {
    one.__name__: one
    for one in (
        weights_not_delivered, weights_rounded_away, stale_cache, temperature, top_p_renormalised, other_inputs,
        unexplained,
    )
}
"""Faults that lie in what samples or scores."""


def columns_shifted(case: Case, n: int) -> None:
    """All rows or a part, on one side, by one or two tokens, in the whole row or in each stretch of it."""
    lag = (1, -1, 2, 1)[n % 4]
    rows = case.some_rows((1.0, 0.3)[n % 2])
    column = np.roll(case.trainer, lag) if n % 3 else np.roll(case.sampler, lag)
    where = rows[case.row]
    inner = where & (case.position >= max(lag, 0))
    if n % 3:
        case.trainer = np.where(inner, column, np.where(where, 0, case.trainer)).astype(np.float32)
    else:
        case.sampler = np.where(inner, column, np.where(where, 0, case.sampler)).astype(np.float32)


def placeholder(case: Case, n: int) -> None:
    """Whole rows of one side, or the last part of a row, or its last completion."""
    rows = case.some_rows((0.1, 0.5)[n % 2])[case.row]
    last = np.zeros(len(case.row), np.bool_)
    for row in range(len(case.of)):
        here = np.flatnonzero(case.row == row)
        last[here[len(here) // 2 :] if n % 3 == 1 else here[-20:] if n % 3 == 2 else here] = True
    if n % 2:
        case.sampler = np.where(rows & last, 0, case.sampler).astype(np.float32)
    else:
        case.trainer = np.where(rows & last, 0, case.trainer).astype(np.float32)


def near_context_limit(case: Case, n: int) -> None:
    """Rows are cut at a limit that a third of them reaches, and the last tokens before it are wrong on one side."""
    lengths = np.array([int(case.offset[case.row == row].max()) + 1 for row in range(len(case.of))])
    limit = int(np.quantile(lengths, 0.7))
    case.left_out |= case.offset >= limit
    for row, one in enumerate(case.of):
        (held,) = one.rows
        if len(held.ids) > limit:
            case.of[row] = replace(one, rows=(Row(held.ids[:limit], held.loss_mask[:limit]),))
            case.cut[row] = True
    reached = np.array(case.cut)[case.row]
    window = (8, 24)[n % 2]
    where = reached & (case.offset >= limit - window) & ~case.left_out
    off = np.abs(case.random.normal(0, (0.8, 2.0)[n % 2], len(where)))
    case.trainer = (case.trainer - where * off).astype(np.float32)


def first_token(case: Case, n: int) -> None:
    """The trainer's values of first tokens are those of another position."""
    first = np.r_[True, (np.diff(case.row) != 0) | (np.diff(case.offset) != 1)]
    case.trainer = (case.trainer - case.random.uniform(0.5, 3, len(first)) * first).astype(np.float32)


def heavy_tokens(case: Case, n: int) -> None:
    """Two frequent ids, or one token in some hundreds wherever it stands."""
    if n % 2:
        counts = Counter(case.ids.tolist())
        ids = [one for one, k in counts.items() if 0.002 * len(case.ids) < k < 0.02 * len(case.ids)]
        heavy = np.isin(case.ids, case.random.choice(ids, 2, replace=False))
        case.trainer = (case.trainer - 1.5 * heavy).astype(np.float32)
    else:
        heavy = case.random.random(len(case.ids)) < 1 / 300
        case.trainer = (case.trainer - heavy * case.random.uniform(1, 4, len(heavy))).astype(np.float32)


def row_retokenized(case: Case, n: int) -> None:
    """From some place on the ids of a row are others, and the sampled values lie over them."""
    rows = case.some_rows((0.3, 0.1)[n % 2])
    for row in np.flatnonzero(rows):
        here = np.flatnonzero(case.row == row)
        late = here[int(case.random.integers(0, max(len(here) // 2, 1))) :]
        case.sampler[late] = np.roll(case.sampler[late], 1)
        case.trainer[late] -= np.where(case.random.random(len(late)) < 0.3, case.random.exponential(4, len(late)), 0)
        case.kinds[row] = ("row_not_sampled",)


def routing_repeated(case: Case, n: int) -> None:
    """All rows have some natural repeats; those of a fault have many, and the experts of other tokens."""
    rows = case.some_rows(0.25)
    natural = (0.0, 0.1)[n % 2]
    case.repeats = [float(natural + case.random.uniform(0, 0.04) + 0.4 * bool(one)) for one in rows]
    off = case.random.normal(0, 0.35, len(case.row)) * rows[case.row] * np.minimum(-2 * case.sampler, 1)
    case.trainer = np.minimum(case.trainer + off, -1e-5).astype(np.float32)


def one_worker(case: Case, n: int) -> None:
    """One of eight workers disturbs its log-probabilities: other kernels, or other weights."""
    case.workers = [f"gpu-{row % 8}" for row in range(len(case.of))]
    bad = np.array([name == "gpu-3" for name in case.workers])[case.row]
    size = (0.35, 1.0)[n % 2]
    off = case.random.normal(0, size, len(case.row)) * bad * np.minimum(-2 * case.sampler, 1)
    case.trainer = np.minimum(case.trainer + off, -1e-5).astype(np.float32)


def packing_leak(case: Case, n: int) -> None:
    """Two or four sequences in a pack; those behind the first read the one before, most at their start."""
    case.extras = [{"pack_index": row % (2, 4)[n % 2]} for row in range(len(case.of))]
    behind = np.array([bool(extra["pack_index"]) for extra in case.extras])[case.row]
    far = np.exp(-(case.offset - case.offset.min()) / 100)
    off = case.random.normal(0, (0.4, 1.0)[n % 2], len(case.row)) * behind * far * np.minimum(-2 * case.sampler, 1)
    case.trainer = np.minimum(case.trainer + off, -1e-5).astype(np.float32)


def mixed_versions(case: Case, n: int) -> None:
    """The first completion of some rows comes from older weights."""
    rows = case.some_rows(0.5) & (case.step >= 3)
    first = np.zeros(len(case.row), np.bool_)
    for row in range(len(case.of)):
        here = case.row == row
        first |= here & (case.stretch == case.stretch[here].min())
        if (case.stretch[here].max() == case.stretch[here].min()) and rows[row]:
            rows[row] = False
    step = case.step[case.row]
    old = rows[case.row] & first
    lag = np.where(old, np.minimum(step, (3, 6)[n % 2]), 0)
    case.sample(case.logits("sampler", moved=case.drift(step - lag)), case.logits("trainer", moved=case.drift(step)))
    case.versions = []
    for row, at in enumerate(case.step):
        turns = len(np.unique(case.stretch[case.row == row]))
        older = f"v{max(at - (3, 6)[n % 2], 0)}"
        case.versions.append([older if rows[row] else f"v{at}"] + [f"v{at}"] * (turns - 1))


DAMAGED: dict[str, Callable[[Case, int], None]] = {
    one.__name__: one
    for one in (
        row_retokenized, placeholder, columns_shifted, routing_repeated, one_worker, packing_leak, mixed_versions,
        near_context_limit, first_token, heavy_tokens,
    )
}
"""Faults that are planted after sampling."""


def planted(setting: Setting, seed: int, *causes: str) -> Case:
    """A run with these causes."""
    case = Case(setting, seed)
    ways = [one for one in causes if one in SAMPLED]
    if ways:
        SAMPLED[ways[0]](case, seed)
    else:
        on_policy(case)
    for one in causes:
        if one in DAMAGED:
            DAMAGED[one](case, seed)
    return case


MIXED = (
    ("placeholder", "weights_not_delivered"), ("placeholder", "temperature"), ("heavy_tokens", "temperature"),
    ("columns_shifted", "weights_not_delivered"), ("near_context_limit", "weights_not_delivered"),
    ("row_retokenized", "weights_not_delivered"), ("row_retokenized", "temperature"),
    ("columns_shifted", "placeholder"), ("heavy_tokens", "placeholder"), ("heavy_tokens", "weights_not_delivered"),
    ("row_retokenized", "stale_cache"), ("routing_repeated", "weights_not_delivered"), ("placeholder", "stale_cache"),
)
"""Two causes in one run."""


@dataclass
class Tally:
    """What was named of one kind of cases."""

    cases: int = 0
    right: int = 0
    wrong: Counter[str] = field(default_factory=Counter)

    def count(self, wanted: Sequence[str], found: Sequence[str], where: str) -> None:
        self.cases += 1
        if tuple(sorted(wanted)) == tuple(sorted(found)):
            self.right += 1
        else:
            self.wrong[f"{where}: {', '.join(found) or 'nothing'}"] += 1


def measure(seeds: Iterable[int], settings: Sequence[Setting] = SETTINGS) -> dict[str, Tally]:
    """Plant nothing, and every cause, by every setting and seed."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for seed, setting in product(seeds, settings):
        tallies["clean"].count((), planted(setting, seed).named(), setting.name)
        for cause in CAUSES:
            tallies[cause].count((cause,), planted(setting, seed, cause).named(), f"{setting.name}, seed {seed}")
    return tallies


def measure_mixed(seeds: Iterable[int], settings: Sequence[Setting] = SETTINGS) -> dict[str, Tally]:
    """Plant two causes in one run."""
    tallies: dict[str, Tally] = defaultdict(Tally)
    for seed, setting, pair in product(seeds, settings, MIXED):
        found = planted(setting, seed + 1, *pair).named()
        tallies[" + ".join(pair)].count(pair, found, f"{setting.name}, seed {seed}")
    return tallies


def table(tallies: Mapping[str, Tally]) -> Iterator[str]:
    """The tallies as lines of a table."""
    for name, tally in tallies.items():
        wrong = "; ".join(f"{what} ({n})" for what, n in tally.wrong.most_common())
        yield f"| {name} | {tally.cases} | {tally.right} | {wrong} |"


def share(tallies: Iterable[Tally]) -> str:
    counted = list(tallies)
    right, cases = sum(one.right for one in counted), sum(one.cases for one in counted)
    return f"{right} of {cases} ({right / max(cases, 1):.1%})"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="cases of each cause and setting (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, metavar="SEED", help="the first seed (default: %(default)s)")
    parser.add_argument("--mixed", action="store_true", help="also two causes in one run")
    options = parser.parse_args()
    begun, seeds = time.process_time(), range(options.first, options.first + options.seeds)
    bundled: dict[str, Tally] = defaultdict(Tally)
    for run in TRAINING_RUNS:
        for steps in PARTS:
            bundled[run.name].count((run.cause,) if run.cause else (), named_of_made(run, steps), f"{steps}")
    single = measure(seeds)
    both = measure_mixed(seeds) if options.mixed else {}
    print("\n".join(["| planted | cases | right | named instead |", "|---|---|---|---|"]))
    print("\n".join([*table(bundled), *table(single), *table(both)]))
    print(f"The made runs and parts of them: {share(bundled.values())}.")
    print(f"Clean ones: nothing is named on {share([single['clean']])}.")
    print(f"One cause is named, and no other: {share(one for name, one in single.items() if name != 'clean')}.")
    if both:
        print(f"Two causes are named, and no other: {share(both.values())}.")
    print(f"{time.process_time() - begun:.0f} s of processor time")
    return 0


if __name__ == "__main__":
    sys.exit(main())
