"""Faults of a teacher's column: planted in runs of a toy student, and none where the teacher only differs."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from rollout_inspector.diagnose.gap.cause_kinds import TEACHER_CAUSES
from rollout_inspector.diagnose.gap.report import causes_in, gap_report
from rollout_inspector.diagnose.gap.teacher import TeacherFigures, teacher_causes
from tests.samples.gap_runs import Made, tokens_of
from tests.samples.teacher_runs import PLANTED, clean

SEEDS = range(18)


def named(rows: list[Made]) -> tuple[str, ...]:
    return tuple(cause.cause for cause in teacher_causes(tokens_of(rows))[0])


def test_a_teacher_that_differs_has_no_fault() -> None:
    assert {seed: named(clean(seed)) for seed in SEEDS} == dict.fromkeys(SEEDS, ())


@pytest.mark.parametrize("cause", PLANTED)
def test_a_planted_fault_is_named_and_no_other(cause: str) -> None:
    """A temperature that a weak student cannot show is not named: once in ten runs at most. A wrong name never is."""
    names = Counter(named(PLANTED[cause](seed)) for seed in SEEDS)
    assert set(names) <= {(cause,), ()}
    assert names[(cause,)] >= 0.9 * len(SEEDS)


def test_the_noise_of_the_engine_is_held_against_the_signal() -> None:
    tokens = tokens_of(clean(1))
    mean = float(tokens.size.mean())
    assert "noise is not measured" in teacher_causes(tokens)[1]["replica_noise"]
    (cause,) = teacher_causes(replace(tokens, noise=(0.6 * mean, mean)))[0]
    assert cause.cause == "replica_noise" and f"{0.6 * mean:.3g} nats" in cause.evidence
    assert teacher_causes(replace(tokens, noise=(0.1 * mean, mean)))[0] == []
    assert TeacherFigures.of(replace(tokens, noise=(0.1 * mean, mean))).noise_share == pytest.approx(0.1, rel=1e-4)


def test_the_tokens_that_carry_the_loss_are_counted() -> None:
    tokens = tokens_of(clean(0))
    sampler = np.full(len(tokens), -1.0, np.float32)
    trainer = sampler.copy()
    trainer[:8], trainer[8:108] = -11.0, -1.19  # 80 nats in eight tokens, 19 in a hundred
    figures = TeacherFigures.of(replace(tokens, sampler=sampler, trainer=trainer))
    assert figures.carriers == 8 and figures.carriers_share == 8 / len(tokens)
    assert figures.reverse_kl == pytest.approx(99 / len(tokens), rel=1e-4)
    assert TeacherFigures.of(replace(tokens, trainer=tokens.sampler)).carriers == 0


def test_the_report_of_a_teacher_names_its_faults_alone() -> None:
    report = gap_report(tokens_of(PLANTED["other_vocabulary"](0)), teacher=True)
    assert [cause["cause"] for cause in report["causes"]] == ["other_vocabulary"]
    assert set(report["decidable_now"]) == set(causes_in(report)) == set(TEACHER_CAUSES)
    assert report["teacher"]["reverse_kl"] == report["k1"] > 1
    assert gap_report(tokens_of(clean(0)))["teacher"] is None
