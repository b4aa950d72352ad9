"""Figures of the gap between trainer and sampler, against sums over the tokens themselves."""

import json

import numpy as np
import pytest

from rollout_inspector.diagnose.gap.figures import GapFigures, added, effective_share, gap_of_rows, pairs_of
from rollout_inspector.streams.trajectory import Row

RANDOM = np.random.default_rng(3)


def row(sampler: object, trainer: object, mask: object | None = None, **more: object) -> Row:
    logprobs = np.asarray(sampler, dtype=np.float32)
    held = np.ones(len(logprobs), dtype=bool) if mask is None else np.asarray(mask, dtype=bool)
    ids = np.arange(len(logprobs), dtype=np.int32)
    return Row(ids, held, logprobs, columns={"trainer_logprobs": np.asarray(trainer, dtype=np.float32)})


def test_sums_and_quantiles_are_those_of_the_tokens() -> None:
    d = RANDOM.normal(0, 0.3, 20_000)
    found = GapFigures.of(d)
    assert found.tokens == len(d) and found.mean_abs == pytest.approx(np.abs(d).mean())
    assert found.mean_k3 == pytest.approx((np.exp(d) - 1 - d).mean())
    assert (found.lowest, found.highest) == (d.min(), d.max()) and found.largest == np.abs(d).max()
    for share in (0.01, 0.5, 0.99):
        assert found.size_quantile(share) == pytest.approx(np.quantile(np.abs(d), share), rel=0.1)
    assert found.quantile(0.01) == pytest.approx(np.quantile(d, 0.01), rel=0.1)
    assert found.quantile(0.99) == pytest.approx(np.quantile(d, 0.99), rel=0.1)
    w = np.exp(d)
    assert effective_share(found) == pytest.approx(w.sum() ** 2 / (len(d) * (w * w).sum()), rel=0.02)


def test_sizes_of_differences_that_all_have_one_sign_are_not_cut_at_zero() -> None:
    for d in (-np.linspace(0.01, 5, 1000), np.linspace(0.01, 5, 1000)):
        found = GapFigures.of(d)
        for share in (0.5, 0.99, 1.0):
            assert found.size_quantile(share) == pytest.approx(np.quantile(np.abs(d), share), rel=0.1)


def test_parts_add_up_to_the_whole_and_survive_json() -> None:
    d = RANDOM.standard_t(2, 3_000)
    parts = [GapFigures.from_json(json.loads(json.dumps(GapFigures.of(part).to_json()))) for part in np.split(d, 3)]
    whole, sums = GapFigures.of(d), added(parts)
    assert dict(sums.buckets) == dict(whole.buckets)
    assert (sums.tokens, sums.lowest, sums.highest) == (whole.tokens, whole.lowest, whole.highest)
    assert sums.k3 == pytest.approx(whole.k3) and sums.total_square == pytest.approx(whole.total_square)
    assert added([]) == GapFigures() == GapFigures.of(np.zeros(0)) and effective_share(GapFigures()) is None


def test_masked_and_impossible_values_are_never_compared() -> None:
    one = row([-1, -2, np.nan, -np.inf, -1], [-1.5, -9, -1, -1, -1], [1, 0, 1, 1, 1])
    pairs = pairs_of(one)
    assert pairs is not None and pairs[0].tolist() == [0, 4]
    found = gap_of_rows([one])
    assert found is not None and (found.tokens, found.lowest, found.highest) == (2, -0.5, 0.0)


def test_a_side_that_is_missing_or_of_another_length_is_not_compared() -> None:
    good = row([-1, -2], [-1, -2])
    alone = Row(good.ids, good.loss_mask, good.logprobs)
    short = Row(good.ids, good.loss_mask, good.logprobs, columns={"prev_logprobs": np.zeros(1, dtype=np.float32)})
    unsampled = Row(good.ids, good.loss_mask, columns=good.columns)
    assert gap_of_rows([alone, short, unsampled]) is None
    assert gap_of_rows([good, alone]) == GapFigures.of(np.zeros(2))


def test_one_huge_ratio_overflows_nothing() -> None:
    found = gap_of_rows([row([-1e4, -1], [0, -1])])
    assert found is not None and np.isfinite(found.k3) and found.largest == 1e4
    assert json.loads(json.dumps(found.to_json(), allow_nan=False))
