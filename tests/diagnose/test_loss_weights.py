"""Weights of tokens under the losses, against derivatives of the losses as their papers write them."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.gap.token_classes import TokenClasses
from rollout_inspector.diagnose.loss_weights.figures import WeightSums, moved
from rollout_inspector.diagnose.loss_weights.row_weights import (
    common_advantage, loss_inputs, row_weights, with_columns_of
)
from rollout_inspector.diagnose.loss_weights.rules import MEANS, RULES, LossRule
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Row, Step, Trajectory

LOSSES = ("uncorrected", "grpo", "tis", "icepop", "gspo")
Batch = list[tuple[list[float], list[float], list[float]]]
"""By row: sampler's log-probabilities, trainer's, advantages, of its trained tokens."""


def term(rule: str, now: list[float], at: list[float], sampler: list[float], advantages: list[float], t: int) -> float:
    """The objective of one token, as its source writes it. ``now`` varies; ``at`` is what a stopped gradient holds."""
    a = advantages[t]
    if rule == "uncorrected":
        return a * now[t]
    ratio, fixed = math.exp(now[t] - sampler[t]), math.exp(at[t] - sampler[t])
    if rule == "grpo":
        return min(ratio * a, min(max(ratio, 0.8), 1.2) * a)
    if rule == "tis":
        return min(fixed, 2.0) * math.exp(now[t] - at[t]) * a
    if rule == "icepop":
        return fixed * math.exp(now[t] - at[t]) * a if 0.5 <= fixed <= 5.0 else 0.0
    n = len(now)
    s = math.exp(sum(at[i] - sampler[i] for i in range(n)) / n) * math.exp(now[t] - at[t])
    return min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a)


def objective(rule: str, mean: str, batch: Batch, now: list[list[float]]) -> float:
    """Minus the loss of a batch, by plain loops."""
    total, tokens = 0.0, sum(len(sampler) for sampler, _, _ in batch)
    for (sampler, trainer, advantages), values in zip(batch, now, strict=True):
        terms = [term(rule, values, trainer, sampler, advantages, t) for t in range(len(sampler))]
        scale = {"row_mean": 1 / (len(batch) * len(terms)), "row_sum": 1 / len(batch), "token_mean": 1 / tokens}[mean]
        total += scale * sum(terms)
    return total


def derivatives(rule: str, mean: str, batch: Batch, h: float = 1e-6) -> list[list[float]]:
    """The derivative of the objective by each log-probability of the trainer, by central differences."""
    found = []
    for i, (_, trainer, _) in enumerate(batch):
        of_row = []
        for t in range(len(trainer)):
            ends = []
            for step in (h, -h):
                now = [list(one[1]) for one in batch]
                now[i][t] += step
                ends.append(objective(rule, mean, batch, now))
            of_row.append((ends[0] - ends[1]) / (2 * h))
        found.append(of_row)
    return found


def some_batch(seed: int, spread: float) -> Batch:
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(4):
        n = int(rng.integers(1, 9))
        sampler = (-rng.random(n) - 0.01).astype(np.float32).astype(float)
        trainer = (sampler + rng.normal(0, spread, n)).astype(np.float32).astype(float)
        advantages = np.full(n, rng.normal()).astype(np.float32).astype(float)
        made.append((sampler.tolist(), trainer.tolist(), advantages.tolist()))
    return made


def row_of_values(sampler: list[float], trainer: list[float], advantages: list[float]) -> Row:
    """A row with a masked token before each trained one, so that offsets and counts differ."""
    n = len(sampler)
    wide = {name: np.full(2 * n, 77.0, np.float32) for name in ("sampler", "trainer", "advantages")}
    for name, values in (("sampler", sampler), ("trainer", trainer), ("advantages", advantages)):
        wide[name][1::2] = values
    return Row(
        np.arange(2 * n, dtype=np.int32), np.arange(2 * n) % 2 == 1, wide["sampler"],
        columns={"trainer_logprobs": wide["trainer"], "advantages": wide["advantages"]},
    )


@pytest.mark.parametrize("mean", ("row_mean", "row_sum", "token_mean"))
@pytest.mark.parametrize("rule", LOSSES)
def test_weights_are_the_derivatives_of_the_loss(rule: str, mean: str) -> None:
    assert set(RULES) == set(LOSSES) and set(MEANS) == {"row_mean", "row_sum", "token_mean"}
    seen = np.zeros(3, dtype=int)
    for seed, spread in ((1, 0.05), (2, 0.5), (3, 2.0), (4, 1e-4)):
        batch = some_batch(seed, spread)
        tokens = sum(len(one[0]) for one in batch)
        for values, wanted in zip(batch, derivatives(rule, mean, batch), strict=True):
            row = row_of_values(*values)
            inputs = loss_inputs(row)
            assert inputs is not None and inputs.lacks == () and inputs.offsets.tolist() == [*range(1, len(row.ids), 2)]
            found = row_weights(inputs, RULES[rule])
            n = len(wanted)
            scale = {"row_mean": 1 / (len(batch) * n), "row_sum": 1 / len(batch), "token_mean": 1 / tokens}[mean]
            assert found.values * scale == pytest.approx(wanted, rel=1e-4, abs=1e-7)
            seen += [int(found.clipped.sum()), int(found.masked.sum()), n]
    # The rules did what they are for: a comparison in which nothing is clipped would prove nothing.
    assert (seen[0] > 0) == (rule in ("grpo", "tis", "gspo")) and (seen[1] > 0) == (rule == "icepop")


def test_gspo_of_whole_sequences_has_the_gradient_of_its_token_form() -> None:
    """Zheng et al., equation 5: the mean over rows of min(s A, clip(s) A), with one s for a row, by differences."""
    batch = [one for one in some_batch(7, 3e-4) if len(one[0]) > 1]
    assert len({len(one[0]) for one in batch}) > 1
    kept = 0
    for sampler, trainer, advantages in batch:
        a = advantages[0]

        def objective_of_row(now: list[float], sampler: list[float] = sampler, a: float = a) -> float:
            s = math.exp(sum(x - y for x, y in zip(now, sampler, strict=True)) / len(now))
            return min(s * a, min(max(s, 1 - 3e-4), 1 + 4e-4) * a) / len(batch)

        inputs = loss_inputs(row_of_values(sampler, trainer, advantages))
        assert inputs is not None
        found = row_weights(inputs, RULES["gspo"]).values / (len(batch) * len(sampler))
        for t in range(len(sampler)):
            ends = [objective_of_row([x + h * (i == t) for i, x in enumerate(trainer)]) for h in (1e-6, -1e-6)]
            assert found[t] == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-4, abs=1e-9)
            kept += bool(found[t])
    assert kept


def test_sums_are_those_of_the_batch_written_out() -> None:
    """Shares of a kind by tokens, rows and trajectories, over two training steps of unequal size."""
    batches = {1: some_batch(5, 0.5), 2: some_batch(6, 0.5)[:2]}
    sums, weights = WeightSums(), {}
    for step, batch in batches.items():
        for n, values in enumerate(batch):
            one = Trajectory(f"{step}-{n}", rows=(row_of_values(*values),), training_step=step)
            places = (finding("odd", row=0, places=((0, 2),)),) if n == 1 else ()
            weights[step, n] = sums.add(one, one.rows, None, places)
    assert (sums.trajectories, sums.rows, sums.batches) == (6, 6, 2)
    assert sums.tokens == sum(len(values[0]) for batch in batches.values() for values in batch)
    for mean in MEANS:
        for index, rule in enumerate(RULES):
            sizes = {step: [[abs(d) for d in of] for of in derivatives(rule, mean, b)] for step, b in batches.items()}
            whole = sum(sum(map(sum, of)) for of in sizes.values())
            at, inside = sum(of[1][0] for of in sizes.values()), sum(sum(of[1]) for of in sizes.values())
            assert sums.share("tokens", "odd", mean)[index] == pytest.approx(at / whole, rel=1e-4)
            assert sums.share("rows", "odd", mean)[index] == pytest.approx(inside / whole, rel=1e-4)
            assert sums.share("trajectories", "odd", mean)[index] == pytest.approx(inside / whole, rel=1e-4)
    report = sums.report()
    assert [one["known"] for one in report["rules"]] == [sums.tokens] * 5 and report["advantages"] == {
        "column": sums.tokens
    }
    assert moved(weights.values(), weights.values(), "row_mean") == [0.0] * 5


def weight_column(row: Row, rule: LossRule, advantage: float | None = None) -> NDArray[np.float32]:
    """The weights of a rule as a column of the row, float32 ``[T]``; NaN where nothing is trained or decidable."""
    column = np.full(len(row.ids), np.nan, dtype=np.float32)
    inputs = loss_inputs(row, advantage)
    if inputs is not None:
        column[inputs.offsets] = row_weights(inputs, rule).values
    return column


def test_a_column_that_is_missing_is_named_and_nothing_is_made_up() -> None:
    whole = row_of_values([-1.0, -2.0], [-1.1, -2.0], [1.0, 1.0])
    cases = {
        "advantages": replace(whole, columns={"trainer_logprobs": whole.columns["trainer_logprobs"]}),
        "sampler": replace(whole, logprobs=None),
        "trainer": replace(whole, columns={"advantages": whole.columns["advantages"]}),
    }
    words = {"advantages": "column “advantages”", "sampler": "sampler’s", "trainer": "trainer_logprobs"}
    for lacking, row in cases.items():
        sums = WeightSums()
        sums.add(Trajectory("a", rows=(row,)), [row], None)
        for line in sums.report()["rules"]:
            decidable = line["rule"] == "uncorrected" and lacking != "advantages"
            assert line["known"] == (2 if decidable else 0)
            assert [words[lacking] in why["sentence"] for why in line["why_not"]] == ([] if decidable else [True])
    # An advantage of the whole trajectory stands in for the column, and for that alone.
    assert weight_column(cases["advantages"], RULES["tis"], 2.0)[1::2] == pytest.approx([2 * math.exp(-0.1), 2.0])
    assert np.isnan(weight_column(cases["trainer"], RULES["tis"], 2.0)).all()


def test_values_that_are_no_numbers_leave_tokens_undecided() -> None:
    row = row_of_values([-1.0, -np.inf, -1.0], [-1.0, -1.0, np.nan], [1.0, 1.0, 1.0])
    assert np.isnan(weight_column(row, RULES["grpo"])[1::2]).tolist() == [False, True, True]
    assert np.isnan(weight_column(row, RULES["gspo"])[1::2]).all()  # one ratio for the row, and a part is not known
    assert weight_column(row, RULES["uncorrected"])[1::2].tolist() == [1, 1, 1]
    far = row_of_values([-1.0, -500.0], [-500.0, -0.1], [-1.0, -1.0])
    assert np.isfinite(weight_column(far, RULES["grpo"])[1::2]).all()
    sums, odd = WeightSums(), replace(row, loss_mask=row.loss_mask[:-1])
    sums.add(Trajectory("a", rows=(odd,)), [odd], 1.0)
    assert (sums.left_out, sums.tokens) == (1, 0) and sums.share("tokens", "odd", "row_mean") == [None] * 5


def finding(kind: str, step: int | None = None, row: int | None = None, **place: Any) -> Finding:
    return Finding(Axis.ROW, kind, Severity.ERROR, step, row, **place)


def two_steps() -> Trajectory:
    ids = [np.arange(start, start + 4, dtype=np.int32) for start in (0, 10, 20)]
    logprobs = np.full(4, -0.5, np.float32)
    first = Step(ids[0], ids[1], logprobs)
    return Trajectory("a", (first, Step(np.concatenate([ids[0], ids[1], ids[2]]), ids[1], logprobs)))


def test_a_finding_of_a_step_is_placed_in_the_rows_that_train_it() -> None:
    one = two_steps()
    rows = merged_rows(one.steps)
    assert len(rows) == 1
    sums = WeightSums()
    sums.add(one, rows, 1.0, [finding("odd", step=1, places=((12, 14),)), finding("else")])
    assert sums.share("tokens", "odd", "token_mean")[0] == pytest.approx(2 / 8)
    assert sums.share("rows", "odd", "token_mean")[0] == 1.0 and sums.share("rows", "else", "row_sum")[0] == 0.0
    assert sums.share("trajectories", "else", "row_sum")[0] == 1.0
    # The same finding where a source holds rows of another frame: a row for each step, the second without its prompt.
    cut = (replace(rows[0], step_indices=(0,)), Row(rows[0].ids[8:], rows[0].loss_mask[8:], step_indices=(1,)))
    held = replace(one, rows=cut)
    sums = WeightSums()
    sums.add(held, held.rows, 1.0, [finding("odd", step=1, places=((12, 14),))])
    assert sums.share("tokens", "odd", "token_mean")[0] == pytest.approx(2 / 12)
    assert sums.share("tokens", "odd", "row_mean")[0] == pytest.approx(2 / 4 / 2)


def test_rows_of_a_strategy_have_a_trainers_value_only_where_it_read_the_same() -> None:
    stored = row_of_values([-1.0] * 4, [-1.2] * 4, [0.5] * 4)
    assert common_advantage([stored]) == 0.5 and common_advantage([row_of_values([-1.0], [-1.0], [np.nan])]) is None
    assert common_advantage([stored, row_of_values([-1.0], [-1.0], [1.0])]) is None
    other = Row(stored.ids.copy(), stored.loss_mask, stored.logprobs)
    other.ids[4] = 999
    made = with_columns_of(other, [row_of_values([-1.0], [-9.0], [0.5]), stored], with_advantages=False)
    assert np.isfinite(made.columns["trainer_logprobs"]).tolist() == [True] * 4 + [False] * 4
    assert "advantages" not in made.columns and with_columns_of(other, [], True) is other
    column = weight_column(made, RULES["tis"], 0.5)
    assert np.isfinite(column).tolist() == [False, True, False, True] + [False] * 4
    assert column[1] == pytest.approx(0.5 * math.exp(-0.2))


def test_more_rows_move_weight_where_the_mean_is_over_rows() -> None:
    """Two trajectories of one training step; other rows cut the first into two."""
    sums, rows = WeightSums(), [row_of_values([-1.0] * 4, [-1.0] * 4, [1.0] * 4) for _ in range(2)]
    before = [sums.add(Trajectory(str(n), rows=(row,)), [row], None) for n, row in enumerate(rows)]
    short = row_of_values([-1.0] * 2, [-1.0] * 2, [1.0] * 2)
    after = [sums.add(Trajectory("0"), [short, short], None), before[1]]
    assert moved(before, after, "row_mean") == pytest.approx([2 / 3 - 1 / 2] * 5)
    assert moved(before, after, "token_mean") == pytest.approx([0.0] * 5)
    assert moved([], [], "token_mean") == [None] * 5


class Digits:
    """A codec of twelve tokens: ten digits, white space, a control token."""

    vocab_size = 12
    special_ids = (11,)

    def token_bytes(self, ids: np.ndarray) -> list[bytes]:
        return [b"0123456789"[n : n + 1] if n < 10 else (b" ", b"<stop>")[n - 10] for n in ids.tolist()]


def test_classes_of_tokens_share_the_whole_weight() -> None:
    sums = WeightSums(TokenClasses(Digits()))  # type: ignore[arg-type]
    rows = [row_of_values([-1.0] * 3, [-1.0, -1.0, -5.0], [1.0] * 3), row_of_values([-1.0], [-1.0], [3.0])]
    rows = [
        replace(row, ids=np.array(ids, np.int32))
        for row, ids in zip(rows, ([10, 1, 10, 11, 10, 7], [10, 3]), strict=True)
    ]
    for row in rows:
        sums.add(Trajectory("a", rows=(row,)), [row], None)
    lines = {line["rule"]: {one["class"]: one for one in line["classes"]} for line in sums.report()["rules"]}
    assert {name: one["known"] for name, one in lines["icepop"].items()} == {"control": 1, "digits": 3}
    assert (lines["icepop"]["digits"]["masked"], lines["icepop"]["control"]["masked"]) == (1, 0)
    assert lines["icepop"]["digits"]["share"]["token_mean"] == pytest.approx((1 + 3) / 5)
    assert lines["uncorrected"]["control"]["share"]["row_mean"] == pytest.approx((1 / 3) / (1 + 3))
    for line in lines.values():
        for mean in MEANS:
            assert sum(one["share"][mean] for one in line.values()) == pytest.approx(1.0)
    assert WeightSums().report()["rules"][0]["classes"] == []
