"""Causes of the gap: planted in runs of a toy policy, and none on clean ones."""

from dataclasses import replace

import numpy as np
import pytest

from rollout_inspector.diagnose.gap.cause_kinds import CAUSES
from rollout_inspector.diagnose.gap.report import causes_of, gap_report
from rollout_inspector.diagnose.gap.token_classes import TokenClass, TokenClasses
from rollout_inspector.diagnose.gap.tokens import GapCollector
from rollout_inspector.streams.trajectory import Row, Step, Trajectory
from tests.samples import gap_runs
from tests.samples.gap_runs import LENGTH, PLANTED, PROMPT, Made, ToyRun, tokens_of
from tests.samples.gap_shapes import SHAPES, shaped_gap

SEEDS = range(4)


def named(rows: list[Made]) -> tuple[str, ...]:
    return tuple(one.cause for one in causes_of(tokens_of(rows))[0])


def test_every_cause_is_planted() -> None:
    assert set(PLANTED) == set(CAUSES)


@pytest.mark.parametrize("cause", CAUSES)
def test_a_planted_cause_is_named_and_no_other(cause: str) -> None:
    found = {seed: named(PLANTED[cause](seed)) for seed in SEEDS}
    assert found == dict.fromkeys(SEEDS, (cause,))


def test_no_cause_is_named_where_both_agree_to_rounding() -> None:
    assert {seed: named(gap_runs.clean(seed)) for seed in range(6)} == dict.fromkeys(range(6), ())


@pytest.mark.parametrize(
    "more",
    [{"rounding": 0.015}, {"steps": 24, "groups": 2}, {"drift": 0.06}],
    ids=["coarse kernels", "many steps", "small updates"],
)
def test_causes_are_told_apart_in_other_runs(more: dict[str, float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each cause is named alone, and the clean run names none. benchmarks/measures/gap_causes.py has a real policy."""

    class OtherRun(ToyRun):
        def __init__(self, seed: int, **settings: float) -> None:
            super().__init__(seed, **{**settings, **more})  # type: ignore[arg-type]

    monkeypatch.setattr(gap_runs, "ToyRun", OtherRun)
    assert {cause: named(plant(10)) for cause, plant in PLANTED.items()} == {cause: (cause,) for cause in PLANTED}
    assert named(gap_runs.clean(10)) == ()


def test_a_fault_of_an_engine_of_several_is_named_without_its_name() -> None:
    """A part of the rows of each step comes from old weights, or from a trainer with another temperature."""
    for other, cause in (
        (ToyRun(3).rows(lambda step: 0), "weights_not_delivered"),
        (ToyRun(3).rows(temperature=(1.0, 0.7)), "temperature"),
    ):
        rows = ToyRun(3).rows()
        rows[1::3] = other[1::3]
        assert named(rows) == (cause,)


def test_a_moved_column_and_lost_weights_are_both_named() -> None:
    rows = ToyRun(4).rows(lambda step: 0)
    for made in rows:
        made.trainer = np.roll(made.trainer, 1)
    assert named(rows) == ("columns_shifted", "weights_not_delivered")


def test_heavy_ids_are_named_behind_a_temperature() -> None:
    rows = ToyRun(5).rows(temperature=(1.0, 0.8))
    for made in rows:
        made.trainer = made.trainer - 2.5 * np.isin(made.ids, (7, 40)) * made.mask
    assert named(rows) == ("heavy_tokens", "temperature")
    assert named(ToyRun(5).rows(temperature=(1.0, 0.8))) == ("temperature",)


def test_other_inputs_are_named_at_the_first_step() -> None:
    """Four rows of 32 at one step; where all rows disagree as much, no rule says that the inputs differ."""
    rows = ToyRun(6, steps=1, groups=8).rows()
    for made in rows[3::8]:
        made.trainer = np.minimum(rows[25].trainer - 3.0, 0) * made.mask
    assert named(rows) == ("other_inputs",)
    for made in rows:
        made.trainer = np.minimum(np.roll(rows[25].trainer, 3) - 3.0, 0) * made.mask
    assert "other_inputs" not in named(rows)


def test_what_needs_several_steps_says_so_and_what_a_cause_of_all_tokens_hides() -> None:
    report = gap_report(tokens_of(gap_runs.weights_not_delivered(1)))
    assert [one["decidable_now"] for one in report["causes"]] == [False]
    later = {name for name, now in report["decidable_now"].items() if not now}
    assert later == {"stale_cache", "weights_not_delivered", "weights_rounded_away"}
    assert "may hide it" in report["undecided"]["heavy_tokens"]


def test_workers_that_share_a_cause_are_not_accused() -> None:
    """Every other cause, in rows that name their worker."""
    for cause, plant in PLANTED.items():
        rows = plant(2)
        for n, made in enumerate(rows):
            made.worker = made.worker or f"gpu-{n % 8}"
        assert named(rows) == (cause,)
    rows = gap_runs.clean(1)
    for n, made in enumerate(rows):
        made.worker = f"gpu-{n % 8}"
    assert named(rows) == ()


def test_a_worker_is_found_in_calls_rows_and_records() -> None:
    ids, mask = np.array([1, 2, 3], np.int32), np.array([False, True, True])
    values = np.array([0, -1, -1], np.float32)
    columns = {"trainer_logprobs": values}
    row, step = Row(ids, mask, values, columns=columns), Step(ids[:1], ids[1:])
    values_of = {
        "": Trajectory("a", (), (row,)), "r": Trajectory("a", (), (replace(row, extra={"replica": "r"}),)),
        "3": Trajectory("a", (), (row,), extra={"dp_rank": 3}),
        "w": Trajectory("a", (replace(step, extra={"worker": "w"}),), (replace(row, step_indices=(0,)),)),
    }
    for name, value in values_of.items():
        collector = GapCollector()
        collector.add(value, enumerate(value.rows))
        assert collector.done().workers == [name]


def test_measures_and_confident_disagreements() -> None:
    """https://docs.nvidia.com/nemo/rl: token_mult_prob_error is the mean of exp(|d|)."""
    ids, mask = np.arange(4, dtype=np.int32), np.ones(4, np.bool_)
    sampler = np.array([-0.1, -0.1, -0.1, -3.0], np.float32)
    trainer = np.array([-0.1, -2.5, -0.1, -6.0], np.float32)
    collector = GapCollector()
    collector.add(Trajectory("a"), [(0, Row(ids, mask, sampler, columns={"prev_logprobs": trainer}))])
    report = gap_report(collector.done())
    assert report["measures"]["bitwise_equal"] == 0.5
    error = report["measures"]["token_multiplicative_error"]
    assert error == pytest.approx((2 + np.exp(2.4) + np.exp(3)) / 4, rel=1e-5)
    assert {name: report["measures"][name] for name in ("k1", "k2", "k3", "ess")} == {
        name: report[name] for name in ("k1", "k2", "k3", "ess")
    }
    (confident,) = report["confident"]
    assert (confident["trajectory"], confident["row"], confident["offset"]) == ("a", 0, 1)
    assert report["confident_tokens"] == 1
    lines = report["parts"]["position in the completion"]
    assert [line["confident"] for line in lines] == [0, 1, 0]
    assert [(line["low"], line["high"]) for line in lines] == [(0, 0), (1, 0), (1, 0)]  # d: 0, -2.4, 0 and -3
    empty = gap_report(GapCollector().done())
    assert set(empty["measures"].values()) == {None} and empty["confident"] == []


def test_lost_weights_are_named_at_the_step_that_shows_them() -> None:
    """trl#5312: a sleeping engine wakes with old weights; nothing but the size of the gap says so at that step."""
    for seed in range(3):
        rows = ToyRun(seed, steps=4).rows(lambda step: min(step, 1))
        until = {last: [made for made in rows if made.step <= last] for last in (1, 2, 3)}
        assert named(until[1]) == ()
        for last in (2, 3):
            (cause,) = causes_of(tokens_of(until[last]))[0]
            assert (cause.cause, cause.from_step) == ("weights_not_delivered", 2)


def test_a_jump_in_a_part_of_the_rows_or_at_old_prompts_is_no_lost_update() -> None:
    rows = ToyRun(3, steps=3).rows(lambda step: min(step, 1))
    for made, clean in zip(rows[1::2], ToyRun(3, steps=3).rows()[1::2], strict=True):
        made.sampler, made.trainer, made.ids = clean.sampler, clean.trainer, clean.ids
    assert "weights_not_delivered" not in named(rows)
    old = ToyRun(3, steps=3).rows(lambda step: min(step, 1), prompt_of=lambda step, group: group)
    assert "weights_not_delivered" not in named(old)


def test_the_precision_of_both_sides_says_whether_an_update_can_be_rounded_away() -> None:
    sides = {
        ("bf16", "float32"): "weights_rounded_away", ("fp8_e4m3", "bfloat16"): "weights_rounded_away",
        ("bfloat16", "torch.bfloat16"): "weights_not_delivered", ("float32", "bf16"): "weights_not_delivered",
        ("", "float32"): "weights_not_delivered", ("odd", "float32"): "weights_not_delivered",
    }
    for (engine, trainer), cause in sides.items():
        rows = gap_runs.weights_not_delivered(0)
        for made in rows:
            made.extra = {"rollout_dtype": engine, "actor_dtype": trainer}
        assert named(rows) == (cause,), (engine, trainer)
        for made in rows:  # the engine says itself that it took no update
            made.versions = ("v0",) * gap_runs.TURNS
        assert named(rows) == ("weights_not_delivered",)


def test_rounded_weights_are_named_from_one_step_by_confident_disagreements() -> None:
    rows = [made for made in ToyRun(1, drift=1.0).rows(lambda step: 0) if made.step == 4]
    for made in rows:
        made.extra = {"engine_dtype": "bfloat16", "trainer_dtype": "float32"}
    assert named(rows) == ("weights_rounded_away",)
    for made in rows:
        made.step = 0  # nothing was updated yet
    assert "weights_rounded_away" not in named(rows)


def test_sequences_of_a_pack_that_all_disagree_leak_nothing() -> None:
    rows = gap_runs.unexplained(2)
    for n, made in enumerate(rows):
        made.extra = {"pack_index": n % 2}
    assert named(rows) == ("unexplained",)
    rows = gap_runs.clean(2)
    for made in rows:
        made.extra = {"pack_index": 0}
    assert causes_of(tokens_of(rows))[1]["packing_leak"] == "Every row stands first in its pack."


def test_two_causes_in_one_run_are_both_named() -> None:
    rows = gap_runs.weights_not_delivered(0)
    for made in rows[::8]:
        made.trainer[PROMPT : PROMPT + 20] = 0.0
    assert named(rows) == ("placeholder", "weights_not_delivered")


def test_repeated_routing_is_named_behind_lost_weights_by_the_quietest_step_alone() -> None:
    """Three of four rows repeat their routing, so the first step is less than three times as quiet as the next."""
    for seed in (4, 5, 6):
        run = ToyRun(seed)
        rows = run.rows(lambda step: 0)
        for n, made in enumerate(rows):
            made.routing = 0.3 * (n % 4 > 0)
        assert named(rows) == ("weights_not_delivered",)
        for made in rows:
            if made.routing:
                made.trainer += run.random.choice([-0.15, 0.15], LENGTH) * made.mask
        assert named(rows) == ("routing_repeated", "weights_not_delivered")


def test_a_gap_of_certain_tokens_alone_has_a_cause() -> None:
    """No token is uncertain enough to say which steps are quiet."""
    rows = gap_runs.clean(0)
    for made in rows:
        made.sampler, made.trainer = -0.001 * made.mask, -0.03 * made.mask
    assert named(rows) == ("top_p_renormalised",)


def test_the_first_step_that_shows_it_is_named_long_before_the_last() -> None:
    run = ToyRun(5, steps=30, groups=1)
    (found,) = causes_of(tokens_of(run.rows(lambda step: min(step, 12))))[0]
    assert found.cause == "weights_not_delivered" and found.from_step in (13, 14)
    early = causes_of(tokens_of([made for made in run.rows(lambda step: min(step, 12)) if made.step <= 20]))[0]
    assert [one.cause for one in early] == ["weights_not_delivered"]


def test_growth_of_a_policy_that_is_delivered_late_but_delivered_is_not_called_lost() -> None:
    rows = ToyRun(2, steps=16).rows(lambda step: step - step % 4)
    assert "weights_not_delivered" not in named(rows)


def test_a_cause_without_its_column_is_undecided_and_says_so() -> None:
    causes, undecided = causes_of(tokens_of(gap_runs.without_steps(gap_runs.unexplained(1))))
    assert [one.cause for one in causes] == ["unexplained"]
    assert undecided["weights_not_delivered"].startswith("No training step and no policy version is recorded. To")
    assert set(undecided) == {
        "row_retokenized", "one_worker", "routing_repeated", "packing_leak", "mixed_versions", "stale_cache",
        "weights_not_delivered", "weights_rounded_away",
    }
    assert undecided["row_retokenized"].startswith("No row has engine calls")
    assert "unexplained" not in causes_of(tokens_of(gap_runs.clean(1)))[1]


def test_what_another_cause_hides_is_undecided() -> None:
    causes, undecided = causes_of(tokens_of(gap_runs.temperature(0)))
    assert [one.cause for one in causes] == ["temperature"]
    for name in ("stale_cache", "weights_not_delivered", "weights_rounded_away"):
        assert "“Temperature on one side” lies over all tokens and hides it" in undecided[name]


def test_repeats_that_a_model_makes_by_nature_accuse_no_row() -> None:
    rows = gap_runs.unexplained(0)
    for n, made in enumerate(rows):
        made.routing = 0.1 + 0.01 * (n % 4)
    causes, undecided = causes_of(tokens_of(rows))
    assert [one.cause for one in causes] == ["unexplained"]
    assert "none shows the gap without" in undecided["routing_repeated"]
    for made in rows:
        made.routing = 0.9
    assert named(rows) == ("routing_repeated",)


def test_easy_prompts_that_grow_hard_are_no_lost_weights() -> None:
    """Kernels differ more where tokens are uncertain; each log-probability has the same noise of its logit."""
    run = ToyRun(3, steps=16)
    run.weights = [run.weights[0] * (3 - 0.15 * step) for step in range(run.steps)]
    rows = run.rows()
    for made in rows:
        doubt = 1 - np.exp(np.minimum(made.sampler, made.trainer))
        made.trainer = np.minimum(made.sampler + run.random.normal(0, 0.1, len(doubt)) * doubt, 0) * made.mask
    means = [line["mean_abs"] for line in gap_report(tokens_of(rows))["steps"]]
    assert means[-1] > 2.5 * means[0] and "weights_not_delivered" not in named(rows)


def test_policy_versions_stand_for_training_steps() -> None:
    rows = gap_runs.weights_not_delivered(0)
    for made in rows:
        made.versions = (f"step-{made.step}",) * gap_runs.TURNS
    found = causes_of(tokens_of(gap_runs.without_steps(rows)))[0]
    assert [(one.cause, one.from_step) for one in found] == [("weights_not_delivered", None)]


def test_certain_tokens_are_no_placeholders_and_a_mask_is_obeyed() -> None:
    rows = gap_runs.clean(0)
    for made in rows:
        made.sampler[PROMPT : PROMPT + 20] = 0.0
        made.trainer[PROMPT : PROMPT + 20] = -0.004
    assert named(rows) == ()
    for made in rows:  # no part of the loss: whatever stands there is not compared
        made.trainer = np.where(made.mask, made.trainer, -30.0)
    assert named(rows) == ()


def test_the_example_of_a_cause_is_a_token_that_shows_it() -> None:
    rows = gap_runs.placeholder(1)
    report = gap_report(tokens_of(rows))
    (cause,) = report["causes"]
    example = cause["example"]
    assert example["sampler"] == 0.0 > example["trainer"] and cause["tokens"] == 12 * len(rows[::8])
    assert int(example["trajectory"][1:]) % 8 == 0 and PROMPT + 10 <= example["offset"] < PROMPT + 22


def test_figures_and_worst_tokens_are_those_of_the_tokens() -> None:
    rows = gap_runs.unexplained(3)
    report = gap_report(tokens_of(rows))
    places = [(n, int(at)) for n, made in enumerate(rows) for at in np.flatnonzero(made.mask)]
    sides = [[np.float32(side) for side in (rows[n].sampler[at], rows[n].trainer[at])] for n, at in places]
    d = np.array([right - left for left, right in sides], np.float64)
    assert report["tokens"] == len(d) and report["mean_abs"] == pytest.approx(np.abs(d).mean())
    assert report["k1"] == pytest.approx(-d.mean()) and report["k2"] == pytest.approx((d * d).mean() / 2)
    assert report["k3"] == pytest.approx((np.exp(d) - 1 - d).mean())
    assert report["ratio"] == pytest.approx(np.exp(d).mean())
    worst = np.argsort(-np.abs(d), kind="stable")[:50]
    assert [(int(one["trajectory"][1:]), one["offset"]) for one in report["worst"]] == [places[at] for at in worst]
    for lines in report["parts"].values():
        assert sum(line["tokens"] for line in lines) == len(d)
        assert sum(line["share"] for line in lines) == pytest.approx(1)
    turns = {line["name"]: line["mean_abs"] for line in report["parts"]["turn"]}
    first = [at < PROMPT + gap_runs.TURN for _, at in places]
    means = {f"turn {n}": pytest.approx(np.abs(d[np.array(first) == (n == 0)]).mean()) for n in (0, 1)}
    assert turns == means
    assert [line["training_step"] for line in report["steps"]] == list(range(12))


def test_a_run_without_both_sides_has_no_figures() -> None:
    report = gap_report(GapCollector().done())
    assert [report[name] for name in ("tokens", "mean_abs", "k3", "causes", "worst")] == [0, None, None, [], []]
    row = Row(np.arange(4, dtype=np.int32), np.ones(4, np.bool_), np.zeros(4, np.float32))
    collector = GapCollector()
    collector.add(Trajectory("a"), [(0, row), (1, replace(row, columns={"prev_logprobs": np.zeros(3, np.float32)}))])
    assert (len(collector.done()), collector.done().rows_without) == (0, 2)


IDS = np.arange(8, dtype=np.int32)
MASK = np.array([0, 0, 1, 1, 0, 1, 1, 1], np.bool_)
BOTH = Row(IDS, MASK, np.zeros(8, np.float32), columns={"trainer_logprobs": np.zeros(8, np.float32)})
CALLS = (Step(IDS[:2], IDS[2:4], policy_version="10"), Step(IDS[:5], IDS[5:], policy_version="9"))


@pytest.mark.parametrize(
    ("row", "steps", "versions"),
    [
        (replace(BOTH, step_indices=(0, 1)), CALLS, ["10", "10", "9", "9", "9"]),
        (replace(BOTH, extra={"version_rle": [[9, 5], [10, 3]]}), (), ["9", "9", "10", "10", "10"]),
        (replace(BOTH, extra={"version_rle": [["a", 1], ["b", 4]]}), (), ["a", "b", "b", "b", "b"]),
        (replace(BOTH, extra={"version_rle": [[9, 1]], "weight_version": 9}), (), ["9"] * 5),
        (replace(BOTH, extra={"policy_versions": [1, 1, 1, 1, 1, 1, 2, 2]}), (), ["1", "1", "1", "2", "2"]),
        (BOTH, (), [None] * 5),
    ],
    ids=["calls", "runs over the row", "runs over trained tokens", "one for the row", "one for each token", "none"],
)
def test_the_version_of_each_token(row: Row, steps: tuple[Step, ...], versions: list[str | None]) -> None:
    collector = GapCollector()
    collector.add(Trajectory("a", steps), [(0, row)])
    found = collector.done()
    assert [found.versions[at] if at >= 0 else None for at in found.version] == versions
    assert found.turn.tolist() == [0, 0, 1, 1, 1] and found.position.tolist() == [0, 1, 0, 1, 2]
    assert list(found.versions) == sorted({one for one in versions if one}, key=lambda one: (len(one), one))


def test_the_lag_of_a_token_is_that_behind_the_newest_version_of_its_step() -> None:
    collector = GapCollector()
    for step, versions in ((0, ("1", "1")), (1, ("1", "3")), (2, ("2", "2"))):
        calls = tuple(replace(call, policy_version=version) for call, version in zip(CALLS, versions, strict=True))
        collector.add(Trajectory(str(step), calls, training_step=step), [(0, replace(BOTH, step_indices=(0, 1)))])
    found = collector.done()
    assert found.lag.tolist() == [0] * 5 + [2, 2, 0, 0, 0] + [1] * 5
    lines = {line["name"]: line["tokens"] for line in gap_report(found)["parts"]["policy lag"]}
    assert lines == {"the newest": 8, "1 version older": 5, "2 versions older": 2}
    assert replace(found, rows=[replace(row, training_step=None) for row in found.rows]).lag.tolist() == (
        [0] * 5 + [2, 2, 0, 0, 0] + [0] * 5
    )


class ToyCodec:
    """A vocabulary of whole pieces."""

    name, bos_id, eos_id = "toy", None, None
    pieces = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", " ", "\n\n", "42", " 7", "word")
    vocab_size, special_ids = len(pieces), frozenset({4})

    def token_bytes(self, ids: np.ndarray) -> list[bytes]:
        return [self.pieces[one].encode() for one in ids]


def test_classes_of_tokens() -> None:
    classes = TokenClasses(ToyCodec())  # type: ignore[arg-type]
    row = np.array([9, 0, 9, 7, 1, 5, 6, 7, 8, 2, 9, 7, 3, 9, 4, -1, 99], np.int32)
    c, t, r, w, d, o = TokenClass
    assert classes.of_row(row).tolist() == [o, c, r, r, c, w, w, d, d, c, t, t, c, o, c, o, o]
    collector = GapCollector(classes=classes)
    values = np.linspace(-1, -2, len(row)).astype(np.float32)
    both = Row(row, np.ones(len(row), np.bool_), values, columns={"prev_logprobs": values - 1})
    collector.add(Trajectory("a"), [(0, both)])
    lines = gap_report(collector.done())["parts"]["token class"]
    assert {line["name"]: line["tokens"] for line in lines} == {
        "control": 5, "tool call": 2, "reasoning": 2, "white space": 2, "digits": 2, "other": 4
    }


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", [0.6, 0.7, 0.8, 1.2])
def test_a_temperature_is_named_whatever_the_logits_are(shape: str, t: float) -> None:
    """https://github.com/volcengine/verl/issues/4252, https://github.com/huggingface/trl/issues/4772."""
    raw = shaped_gap(shape, 1, sampled=t, trainer=t, recorded=t)  # the engine reports raw values
    alone = shaped_gap(shape, 2, trainer=t)  # the trainer divides, and the engine does not
    engine = shaped_gap(shape, 3, sampled=t, sampler=t)
    for tokens, sharp, whose in (
        (raw, t < 1, "the engine reports log-probabilities from before its temperature"),
        (alone, t < 1, "the trainer has another temperature"), (engine, t > 1, "the trainer has another temperature"),
    ):
        (cause,) = causes_of(tokens)[0]
        assert cause.cause == "temperature"
        assert f"likelier to the {'trainer' if sharp else 'sampler'}" in cause.evidence
        assert whose in cause.evidence and "factor" not in cause.evidence
        assert (f"record temperature {t:g}." in cause.evidence) == (tokens is raw)


@pytest.mark.parametrize("shape", SHAPES)
def test_what_moves_likely_tokens_both_ways_is_no_temperature(shape: str) -> None:
    assert [cause.cause for cause in causes_of(shaped_gap(shape, 4, top_p=0.9))[0]] == ["top_p_renormalised"]
    assert "temperature" not in [cause.cause for cause in causes_of(shaped_gap(shape, 5, noise=0.8))[0]]
    assert causes_of(shaped_gap(shape, 6))[0] == []


@pytest.mark.parametrize("shape", SHAPES)
def test_noise_of_low_precision_is_no_alarm(shape: str) -> None:
    tokens = shaped_gap(shape, 7, noise=0.06)
    causes, undecided = causes_of(tokens)
    assert causes == [] and (shape in ("sure", "heavy tails", "language") or "FP8" in undecided["unexplained"])


def test_half_of_the_rows_with_more_noise_are_no_noise_of_low_precision() -> None:
    quiet, loud = shaped_gap("normal", 8, noise=0.02), shaped_gap("normal", 8, noise=0.2)
    one_worker = loud.row % 8 == 0
    trainer = np.where(one_worker, quiet.sampler + loud.d, quiet.trainer).astype(np.float32)
    assert [cause.cause for cause in causes_of(replace(quiet, trainer=trainer))[0]] == ["unexplained"]
