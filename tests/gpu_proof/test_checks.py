"""The checks of the GPU proof must fail for what they claim to find; beside each stands a run that passes."""

from dataclasses import replace

import numpy as np
import pytest

from rollout_inspector.streams.trajectory import Step, Trajectory, ids_array
from tools.gpu_proof.bare import plan
from tools.gpu_proof.checks import check_ids, check_logprobs
from tools.gpu_proof.engine import Witness


class Letters:
    """Ids are letters, but "ab" has an id of its own (9), which the encoder prefers."""

    def decode(self, ids):
        return "".join("ab" if int(one) == 9 else "abcdefgh"[int(one)] for one in ids)

    def encode(self, text):
        ids, place = [], 0
        while place < len(text):
            merged = text[place : place + 2] == "ab"
            ids.append(9 if merged else "abcdefgh".index(text[place]))
            place += 1 + merged
        return ids_array(ids)


def score(streams):
    """A model that likes small ids."""
    return [-0.5 - ids.astype(np.float32) for ids in streams]


def step(prompt, completion):
    prompt, completion = ids_array(prompt), ids_array(completion)
    return Step(prompt, completion, score([completion])[0])


TWO_STEPS = Trajectory("0", (step([3], [0, 1]), step([3, 0, 1, 4], [9, 2])))


def seen(*steps, key=5):
    witness = Witness()
    for index, one in enumerate(steps):
        witness.sent[f"{key}.{index}.77"] = one.prompt_ids
        witness.received[f"{key}.{index}.77"] = one.completion_ids
    return witness


def ids_report(trajectory, witness):
    return check_ids([(5, trajectory)], witness)


def test_equal_ids_pass():
    report = ids_report(TWO_STEPS, seen(*TWO_STEPS.steps))
    assert report.passed
    assert (report.steps, report.tokens_in, report.tokens_out) == (2, 5, 4)


@pytest.mark.parametrize(
    ("stored", "field"),
    [
        (replace(TWO_STEPS.steps[1], prompt_ids=ids_array([3, 0, 1, 5])), "wrong_prompts"),
        (replace(TWO_STEPS.steps[1], completion_ids=ids_array([9, 3])), "wrong_completions"),
    ],
)
def test_one_other_id_is_found(stored, field):
    report = ids_report(Trajectory("0", (TWO_STEPS.steps[0], stored)), seen(*TWO_STEPS.steps))
    assert not report.passed and getattr(report, field) == 1


def test_a_step_that_was_never_asked_for_is_found():
    report = ids_report(TWO_STEPS, seen(TWO_STEPS.steps[0]))
    assert not report.passed and report.unknown_requests == 1


def test_a_request_that_was_not_stored_is_found():
    report = ids_report(Trajectory("0", TWO_STEPS.steps[:1]), seen(*TWO_STEPS.steps))
    assert not report.passed and report.unknown_requests == 1


def test_a_step_that_does_not_extend_the_one_before_is_found():
    steps = (step([3], [0, 1]), step([3, 9, 4], [2]))
    report = ids_report(Trajectory("0", steps), seen(*steps))
    assert not report.passed and report.broken_steps == 1


def test_nothing_is_no_proof():
    assert not check_ids([], Witness()).passed


def test_stored_logprobs_agree_and_retokenized_ones_do_not():
    report = check_logprobs([TWO_STEPS], score, Letters(), tolerance=1e-3)
    assert report.agrees and report.tokens == 4 and report.highest == 0
    # The first completion, "a" + "b", becomes the one id 9; the second one keeps its ids.
    assert (report.completions, report.retokenized) == (2, 1)
    assert report.retokenized_mean == pytest.approx(abs(-9.5 - (-0.5 - 1.5)))
    assert report.retokenized_disagrees


def test_logprobs_that_belong_to_other_ids_are_found():
    first = replace(TWO_STEPS.steps[0], logprobs=TWO_STEPS.steps[0].logprobs - 0.1)
    report = check_logprobs([Trajectory("0", (first, TWO_STEPS.steps[1]))], score, Letters(), tolerance=1e-3)
    assert not report.agrees and report.mean == pytest.approx(0.05)


def test_a_canonical_run_is_no_witness_for_retokenization():
    canonical = Trajectory("0", (step([3], [9, 2]),))
    report = check_logprobs([canonical], score, Letters(), tolerance=1e-3)
    assert report.agrees and not report.retokenized_disagrees


def test_the_bare_loop_gets_the_same_work():
    work = plan(TWO_STEPS, seed=3)
    assert (work.prompt, work.lengths, work.deltas) == ([3], (2, 2), ([4],))
