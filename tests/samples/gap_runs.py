"""Runs of a toy policy with a planted cause of a gap. Sampler and trainer are computed; nothing but the fault differs.

The policy is a table of logits by the token before, which moves a little with each update. ``rounding`` is the noise of
kernels: on each log-probability of both sides, of random sign.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose.gap.tokens import GapCollector, GapTokens
from rollout_inspector.streams.trajectory import Row, Step, Trajectory

Reals = NDArray[np.float64]
VOCABULARY = 96
PROMPT, TURNS, TURN, OBSERVATION = 24, 2, 36, 6
"""Tokens of the first prompt, turns, tokens of a completion, tokens between two completions."""
LENGTH = PROMPT + TURNS * TURN + (TURNS - 1) * OBSERVATION


@dataclass
class Made:
    """A row as it is made: arrays ``[LENGTH]``."""

    step: int
    group: int
    ids: NDArray[np.int32]
    mask: NDArray[np.bool_]
    sampler: Reals
    trainer: Reals
    versions: tuple[str, ...] = ()
    kinds: tuple[str, ...] = ()
    finish: str = "stop"
    routing: float | None = None
    cut: int = LENGTH
    worker: str = ""
    extra: dict[str, object] = field(default_factory=dict)
    columns: dict[str, Reals] = field(default_factory=dict)
    top_p: float | None = None


class ToyRun:
    """A run of ``steps`` training steps with groups of four trajectories of one prompt."""

    def __init__(
        self, seed: int, steps: int = 12, groups: int = 3, drift: float = 0.12, rounding: float = 0.006
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.steps, self.groups, self.rounding = steps, groups, rounding
        first = self.random.normal(0, 2.0, (VOCABULARY, VOCABULARY))
        moves = self.random.normal(0, drift, (steps, VOCABULARY, VOCABULARY))
        self.weights = [first + moves[:step].sum(0) for step in range(steps)]
        self.prompts = [self.random.integers(0, VOCABULARY, PROMPT) for _ in range(steps * groups)]

    def rows(
        self,
        sampled_at: Callable[[int], int] = lambda step: step,
        prompt_of: Callable[[int, int], int] | None = None,
        temperature: tuple[float, float] = (1.0, 1.0),
        top_p: float = 1.0,
        top_k: int = 0,
    ) -> list[Made]:
        """Sample all rows. ``sampled_at``: step -> the step whose weights sample. ``temperature``: that the sampler's
        logits are divided by, and the trainer's."""
        found: list[Made] = []
        for step in range(self.steps):
            prompts = [
                self.prompts[prompt_of(step, group) if prompt_of else step * self.groups + group]
                for group in range(self.groups)
            ]
            held = np.repeat(np.array(prompts), 4, axis=0)
            sampler = log_softmax(self.weights[sampled_at(step)] / temperature[0])
            trainer = log_softmax(self.weights[step] / temperature[1])
            found += self._sampled(step, held, kept(sampler, top_p, top_k), trainer)
        return found

    def _sampled(self, step: int, prompts: NDArray[np.int64], sampler: Reals, trainer: Reals) -> list[Made]:
        n = len(prompts)
        ids = np.zeros((n, LENGTH), np.int32)
        ids[:, :PROMPT] = prompts
        mask = np.zeros(LENGTH, np.bool_)
        for turn in range(TURNS):
            at = PROMPT + turn * (TURN + OBSERVATION)
            mask[at : at + TURN] = True
        odds = np.cumsum(np.exp(sampler), axis=1)
        for place in range(PROMPT, LENGTH):
            if mask[place]:
                drawn = self.random.random(n)[:, None] * odds[ids[:, place - 1], -1:]
                ids[:, place] = (odds[ids[:, place - 1]] < drawn).sum(1).clip(0, VOCABULARY - 1)
            else:
                ids[:, place] = self.random.integers(0, VOCABULARY, n)
        before, after = ids[:, :-1], ids[:, 1:]
        left, right = (np.zeros((n, LENGTH)) for _ in range(2))
        left[:, 1:], right[:, 1:] = sampler[before, after], trainer[before, after]
        for side in (left, right):
            side += self.random.normal(0, self.rounding, side.shape)
            side[:] = np.where(mask, np.minimum(side, 0), 0)
        return [
            Made(step, step * self.groups + one // 4, ids[one], mask.copy(), left[one], right[one]) for one in range(n)
        ]


def log_softmax(logits: Reals) -> Reals:
    highest = logits.max(1, keepdims=True)
    return logits - highest - np.log(np.exp(logits - highest).sum(1, keepdims=True))


def kept(logprobs: Reals, top_p: float, top_k: int) -> Reals:
    """The distribution that top-p and top-k leave, renormalised."""
    order = np.argsort(-logprobs, axis=1)
    ordered = np.take_along_axis(np.exp(logprobs), order, 1)
    use = np.cumsum(ordered, axis=1) - ordered < top_p
    if top_k:
        use[:, top_k:] = False
    back = np.zeros_like(use)
    np.put_along_axis(back, order, use, 1)
    left = np.where(back, logprobs, -np.inf)
    return left - np.log(np.exp(left).sum(1, keepdims=True))


def trajectories(rows: list[Made]) -> Iterator[tuple[Trajectory, dict[int, tuple[str, ...]]]]:
    """The rows as trajectories of one row each, with the kinds of their findings."""
    for n, made in enumerate(rows):
        ids, mask = made.ids[: made.cut], made.mask[: made.cut]
        extra = {**made.extra, **({"worker": made.worker} if made.worker else {})}
        if made.routing is not None:
            extra["routing"] = {"repeats": made.routing, "zero_layers": 0, "length": 9}
        row = Row(
            ids, mask, made.sampler[: made.cut].astype(np.float32),
            columns={
                name: values[: made.cut].astype(np.float32)
                for name, values in {"trainer_logprobs": made.trainer, **made.columns}.items()
            },
            step_indices=tuple(range(len(made.versions))),
            extra=extra,
        )
        edges = np.flatnonzero(np.diff(mask.astype(int), prepend=0, append=0)).reshape(-1, 2)
        steps = tuple(
            Step(ids[:start], ids[start:stop], policy_version=version, finish_reason=made.finish, top_p=made.top_p)
            for (start, stop), version in zip(edges, made.versions, strict=False)
        )
        value = Trajectory(
            f"t{n}", steps, (row,), group=str(made.group), training_step=made.step if made.step >= 0 else None,
            stop_reason=made.finish,
        )
        yield value, {0: made.kinds}


def tokens_of(rows: list[Made]) -> GapTokens:
    collector = GapCollector()
    for value, kinds in trajectories(rows):
        collector.add(value, enumerate(value.rows), kinds=kinds)
    return collector.done()


def write_steps(folder: Path, rows: list[Made]) -> None:
    """The rows as NeMo RL writes them: a file for each training step."""
    for step in sorted({made.step for made in rows}):
        lines = [
            {
                "content": [""], "rewards": [1.0], "input_lengths": [len(made.ids)], "token_ids": [made.ids.tolist()],
                "token_loss_mask": [made.mask.astype(int).tolist()], "sample_loss_mask": [1.0],
                "advantages": [made.mask.astype(float).tolist()],
                "generation_logprobs": [made.sampler.round(5).tolist()],
                "prev_logprobs": [made.trainer.round(5).tolist()], "idx": n,
            }
            for n, made in enumerate(rows)
            if made.step == step
        ]
        (folder / f"train_data_step{step}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


# --- the planted causes: seed -> rows


def clean(seed: int) -> list[Made]:
    return ToyRun(seed, rounding=(0.0, 0.004, 0.01)[seed % 3]).rows()


def weights_not_delivered(seed: int) -> list[Made]:
    """All updates are lost, or all from the fourth on."""
    return ToyRun(seed).rows(lambda step: min(step, 4 * (seed % 2)))


def weights_rounded_away(seed: int) -> list[Made]:
    """The engine holds the weights on a coarse grid, or takes no update, though its version counts on."""
    run = ToyRun(seed)
    if seed % 3 != 1:
        first, grid = np.round(run.weights[0]), 1.0 + seed % 2
        run.weights = [weights - run.weights[0] + first * grid for weights in run.weights]
        run.weights += [np.round(weights / grid) * grid for weights in run.weights]
    rows = run.rows(lambda step: 0 if seed % 3 == 1 else step + run.steps)
    for made in rows:
        made.versions = (f"v{made.step}",) * TURNS if seed % 3 else ()
        made.extra = {} if seed % 3 == 1 else {"engine_dtype": "bfloat16", "trainer_dtype": "torch.float32"}
    return rows


def packing_leak(seed: int) -> list[Made]:
    """Two or four sequences in a pack; those behind the first read the one before, most at their start."""
    run = ToyRun(seed, **({"steps": 1, "groups": 8} if seed % 2 else {}))
    rows, size = run.rows(), (2, 4)[seed // 2 % 2]
    for n, made in enumerate(rows):
        made.extra = {"pack_index": n % size}
        if n % size:
            leak = run.random.normal(0, 0.8, LENGTH) * np.exp(-np.arange(LENGTH) / 40)
            made.trainer = np.minimum(made.trainer + leak, 0) * made.mask
    return rows


def stale_cache(seed: int) -> list[Made]:
    """Half of the prompts were read a step before; their prefixes hold values of the old weights."""
    run = ToyRun(seed)
    groups = run.groups

    def prompt_of(step: int, group: int) -> int:
        return (step - 1) * groups + group + 1 if step and group < groups - 1 else step * groups + group

    rows = run.rows(prompt_of=prompt_of)
    seen: set[bytes] = set()
    for step in range(run.steps):
        here = [made for made in rows if made.step == step]
        for made in here:
            if made.ids[:PROMPT].tobytes() in seen:
                made.sampler = np.minimum(made.sampler + run.random.normal(0, 0.3, LENGTH), 0) * made.mask
        seen.update(made.ids[:PROMPT].tobytes() for made in here)
    return rows


def temperature(seed: int) -> list[Made]:
    return ToyRun(seed).rows(temperature=((0.7, 1.0), (1.0, 0.7), (1.2, 1.0), (0.85, 1.0))[seed % 4])


def top_p_renormalised(seed: int) -> list[Made]:
    return ToyRun(seed).rows(**({"top_p": 0.9}, {"top_k": 12}, {"top_p": 0.95})[seed % 3])


def columns_shifted(seed: int) -> list[Made]:
    """All rows, or the rows of one half."""
    rows, lag = ToyRun(seed).rows(), (1, -1, 2, -2)[seed % 4]
    for made in rows[:: 1 + seed % 2]:
        made.trainer = np.roll(made.trainer, lag)
    return rows


def placeholder(seed: int) -> list[Made]:
    """On one side, in each eighth row, over a part of a completion or over all."""
    rows = ToyRun(seed).rows()
    for made in rows[::8]:
        side = made.sampler if seed % 2 else made.trainer
        side[PROMPT + 10 * (seed % 3 > 0) : PROMPT + 22] = 0.0
    return rows


def near_context_limit(seed: int) -> list[Made]:
    """Rows end at different lengths; those that reach the limit are wrong on its last tokens."""
    run = ToyRun(seed, groups=4)
    rows = run.rows()
    for n, made in enumerate(rows):
        if n % 3:
            made.cut = LENGTH - int(run.random.integers(40, 70))
        else:
            made.finish = "length" if seed % 2 else "stop"
            made.trainer[-20:] -= np.abs(run.random.normal(0, 1.0, 20))
    return rows


def heavy_tokens(seed: int) -> list[Made]:
    """Two ids, or one token of 300 wherever it stands."""
    run = ToyRun(seed)
    rows = run.rows()
    ids = run.random.integers(0, VOCABULARY, 2)
    for made in rows:
        heavy = np.isin(made.ids, ids) if seed % 2 else run.random.random(LENGTH) < 1 / 300
        made.trainer = made.trainer - 2.5 * heavy * made.mask
    return rows


def first_token(seed: int) -> list[Made]:
    """The first token of every completion, or of the first of a row."""
    rows = ToyRun(seed).rows()
    for made in rows:
        places = [PROMPT, PROMPT + TURN + OBSERVATION][: 2 - seed % 2]
        made.trainer[places] -= 1.5
    return rows


def row_retokenized(seed: int) -> list[Made]:
    run = ToyRun(seed)
    rows = run.rows()
    for made in rows[:: 3 + seed % 3]:
        made.kinds = ("row_not_sampled",)
        made.trainer[PROMPT + 30 :] -= np.abs(run.random.normal(0, 1.5, LENGTH - PROMPT - 30))
        made.trainer *= made.mask
    return rows


def one_worker(seed: int) -> list[Made]:
    """One of eight workers samples from older weights, or with noise; in one step alone where the seed is odd."""
    run = ToyRun(seed, **({"steps": 1, "groups": 8} if seed % 2 else {}))
    rows, other = run.rows(), ToyRun(seed + 100, **({"steps": 1, "groups": 8} if seed % 2 else {})).rows()
    for n, made in enumerate(rows):
        made.worker = f"gpu-{n % 8}"
        if n % 8 == 5:
            made.trainer = np.where(seed % 3 == 1, other[n].trainer, made.trainer + run.random.normal(0, 0.4, LENGTH))
            made.trainer *= made.mask
    return rows


def routing_repeated(seed: int) -> list[Made]:
    run = ToyRun(seed)
    rows = run.rows()
    for n, made in enumerate(rows):
        made.routing = 0.3 * (n % 4 == seed % 4)
        if made.routing:
            made.trainer += run.random.normal(0, 0.25, LENGTH) * made.mask
    return rows


def mixed_versions(seed: int) -> list[Made]:
    """The first completion of some rows was sampled some updates before the second."""
    run, lag = ToyRun(seed), 3 + seed % 3
    rows, older = run.rows(), run.rows(lambda step: max(step - lag, 0))
    for n, made in enumerate(rows):
        made.versions = (f"v{made.step}",) * TURNS
        if made.step >= lag and n % 2:
            old = older[n]
            half = PROMPT + TURN
            for name in ("ids", "sampler", "trainer"):
                getattr(made, name)[:half] = getattr(old, name)[:half]
            made.versions = (f"v{made.step - lag}", f"v{made.step}")
    return rows


def other_inputs(seed: int) -> list[Made]:
    """The trainer reads another prompt in one row of seven, in one training step where the seed is odd."""
    run = ToyRun(seed, **({"steps": 1, "groups": 8} if seed % 2 else {}))
    rows = run.rows()
    for n, made in enumerate(rows):
        if n % 7 == 5:
            other = rows[(n + 9) % len(rows)]
            made.trainer = np.minimum(other.trainer - run.random.exponential(2.5, LENGTH), 0) * made.mask
    return rows


def unexplained(seed: int) -> list[Made]:
    run = ToyRun(seed)
    rows = run.rows()
    for made in rows:
        made.trainer += run.random.normal(0, 0.15, LENGTH) * made.mask
    return rows


PLANTED: dict[str, Callable[[int], list[Made]]] = {
    one.__name__: one
    for one in (
        row_retokenized, placeholder, columns_shifted, routing_repeated, one_worker, mixed_versions, near_context_limit,
        first_token, heavy_tokens, temperature, top_p_renormalised, stale_cache, weights_not_delivered,
        weights_rounded_away, packing_leak, other_inputs, unexplained,
    )
}
"""Cause -> what plants it."""


def without_steps(rows: list[Made]) -> list[Made]:
    """The rows of a source that records no training step."""
    return [replace(made, step=-1) for made in rows]
