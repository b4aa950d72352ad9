"""The damage of findings: both gradients are those of a loss written here, and the shares of findings sum to 1."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.loss_weights.damage import damage_case
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.prefix import merged_rows
from rollout_inspector.streams.trajectory import Origin, Row, Step, Trajectory, ids_array
from rollouts.sampling.demo_policy import MODEL_DIR
from tests.samples.demo_engine import demo_engine

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore")
ADVANTAGE = 0.7


@pytest.fixture(scope="module")
def engine() -> Any:
    return demo_engine()


def ids(seed: int, n: int) -> np.ndarray:
    return ids_array(np.random.default_rng(seed).integers(0, 1190, n))


def steps() -> tuple[Step, Step]:
    """A prompt of 8, a completion of 5, an observation of 6, a completion of 4: a row of 23."""
    first = Step(ids(0, 8), ids(1, 5))
    return first, Step(np.concatenate([first.stream, ids(2, 6)]), ids(3, 4))


def row(*masked: tuple[int, int], ids_of: np.ndarray | None = None, **more: Any) -> Row:
    """The row of the steps with other mask values in some stretches."""
    (base,) = merged_rows(steps())
    mask = base.loss_mask.copy()
    for start, stop in masked:
        mask[start:stop] ^= True
    stream = base.ids if ids_of is None else ids_of
    advantages = np.where(mask, np.float32(ADVANTAGE), np.float32(0))
    return Row(stream, mask, columns={"advantages": advantages, **more}, step_indices=(0, 1))


def finding(kind: str, *places: tuple[int, int], step: int | None = None) -> Finding:
    return Finding(Axis.ROW, kind, Severity.ERROR, step, 0, places=places)


def gradient(engine: Any, terms: Sequence[tuple[np.ndarray, np.ndarray]]) -> np.ndarray:
    """The gradient of sum(weight * log p(token)) by torch.autograd, as a vector."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float64, attn_implementation="eager")
    loss = torch.zeros((), dtype=torch.float64)
    for stream, weights in terms:
        tokens = torch.from_numpy(stream.astype(np.int64))
        logits = model(input_ids=tokens[None]).logits[0]
        for at in np.flatnonzero(weights):
            loss = loss + weights[at] * torch.log_softmax(logits[at - 1], dim=-1)[tokens[at]]
    loss.backward()
    return np.concatenate([parameter.grad.numpy().ravel() for parameter in model.parameters()])


def agrees(measured: dict[str, Any], as_is: np.ndarray, sampled: np.ndarray) -> None:
    size, row_size = np.linalg.norm(sampled), np.linalg.norm(as_is)
    assert measured["cosine"] == pytest.approx(as_is @ sampled / size / row_size, abs=1e-5)
    assert measured["relative_error"] == pytest.approx(np.linalg.norm(as_is - sampled) / size, rel=1e-5)
    assert measured["norm_ratio"] == pytest.approx(row_size / size, rel=1e-5)


def weights(stream_length: int, *stretches: tuple[int, int]) -> np.ndarray:
    values = np.zeros(stream_length)
    for start, stop in stretches:
        values[start:stop] += ADVANTAGE
    return values


def test_a_wide_and_a_narrow_mask_are_those_of_autograd(engine: Any) -> None:
    wide, narrow = (13, 19), (8, 9)
    value = Trajectory("a", steps(), (row(wide, narrow),))
    findings = [finding("observation_trained", wide), finding("sampled_masked", narrow)]
    measured = engine.damage(damage_case(value, findings, None))
    stream = value.rows[0].ids
    sampled = gradient(engine, [(stream, weights(23, (8, 13), (19, 23)))])
    as_is = gradient(engine, [(stream, weights(23, (9, 13), (13, 19), (19, 23)))])
    agrees(measured, as_is, sampled)
    apart = as_is - sampled
    # Leave one out: the rows with one of both faults mended.
    mended = [
        gradient(engine, [(stream, weights(23, (9, 13), (19, 23)))]),
        gradient(engine, [(stream, weights(23, (8, 13), (13, 19), (19, 23)))]),
    ]
    for number, gradient_without in enumerate(mended, start=1):
        share = (as_is - gradient_without) @ apart / (apart @ apart)
        assert measured["shares"][number] == pytest.approx(share, abs=1e-5)
    assert sum(measured["shares"].values()) == pytest.approx(1, abs=1e-5)


def test_a_row_of_other_ids_is_compared_with_what_the_policy_read(engine: Any) -> None:
    other = steps()[1].stream.copy()
    other[10] = 5
    value = Trajectory("a", steps(), (row(ids_of=other),))
    measured = engine.damage(damage_case(value, [finding("whitespace_changed", (10, 11), step=1)], None))
    sampled = gradient(engine, [(steps()[1].stream, weights(23, (8, 13), (19, 23)))])
    as_is = gradient(engine, [(other, weights(23, (8, 13), (19, 23)))])
    agrees(measured, as_is, sampled)
    assert measured["shares"] == {1: 1.0}


def test_a_token_that_is_trained_twice_counts_twice(engine: Any) -> None:
    again = replace(merged_rows(steps()[:1])[0], step_indices=(0,))
    value = Trajectory("a", steps(), (row(), replace(again, columns={"advantages": np.full(13, 0.7, np.float32)})))
    measured = engine.damage(damage_case(value, [finding("trained_twice", (8, 13), step=0)], None))
    whole = weights(23, (8, 13), (19, 23))
    stream = value.rows[0].ids
    agrees(measured, gradient(engine, [(stream, whole + weights(23, (8, 13)))]), gradient(engine, [(stream, whole)]))


def test_what_grpo_clips_is_out_of_the_gradient(engine: Any) -> None:
    trainer = np.full(23, -1.0, np.float32)
    sampler = trainer.copy()
    sampler[8:10] = -4.0  # ratio e^3
    first, second = (replace(step, logprobs=np.full(len(step.completion_ids), -1, np.float32)) for step in steps())
    shifted = replace(row(trainer_logprobs=trainer), logprobs=sampler)
    value = Trajectory("a", (first, second), (shifted,))
    case = damage_case(value, [finding("columns_shifted", (8, 10))], None)
    assert case.rule == "grpo"
    measured = engine.damage(case)
    stream = shifted.ids
    sampled = gradient(engine, [(stream, weights(23, (8, 13), (19, 23)))])
    agrees(measured, gradient(engine, [(stream, weights(23, (10, 13), (19, 23)))]), sampled)


def test_rows_without_steps_are_mended_by_their_origins_or_their_findings(engine: Any) -> None:
    wide = (13, 19)
    alone = replace(row(wide), step_indices=())
    by_finding = engine.damage(damage_case(Trajectory("a", (), (alone,)), [finding("observation_trained", wide)], None))
    origin = np.where(row().loss_mask, np.uint8(Origin.SAMPLED), np.uint8(Origin.OBSERVATION))
    by_origin = engine.damage(damage_case(Trajectory("a", (), (replace(alone, origin=origin),)), [], None))
    assert by_finding["relative_error"] == pytest.approx(by_origin["relative_error"], rel=1e-6)
    assert by_finding["relative_error"] > 0
    assert by_finding["shares"] == {1: 1.0} and by_origin["shares"] == {0: 1.0}  # no finding explains it


def test_nothing_wrong_is_no_damage_and_rows_of_steps_neither(engine: Any) -> None:
    for value in (Trajectory("a", steps(), (row(),)), Trajectory("a", steps())):
        measured = engine.damage(damage_case(value, [finding("whitespace_changed", (9, 10), step=1)], None))
        assert (measured["cosine"], measured["relative_error"], measured["norm_ratio"]) == (1, 0, 1)
        assert measured["shares"] == {}


def test_a_gradient_of_zero_is_not_defined_as_0(engine: Any) -> None:
    nothing = replace(row((8, 13), (19, 23)), columns={})
    measured = engine.damage(damage_case(Trajectory("a", steps(), (nothing,)), [], None))
    assert (measured["cosine"], measured["relative_error"], measured["norm_ratio"]) == (None, 1, 0)
    measured = engine.damage(damage_case(Trajectory("a", (), (replace(nothing, step_indices=()),)), [], None))
    assert measured["cosine"] is measured["relative_error"] is measured["norm_ratio"] is None


@pytest.mark.parametrize(
    ("value", "kind", "words"),
    [
        (Trajectory("a", (), (row(),)), "token_ids_missing", "not those of the engine"),
        (Trajectory("a", (), (replace(row(), loss_mask=np.ones(4, np.bool_)),)), "length_mismatch", "another length"),
        (Trajectory("a", (), (replace(row(), step_indices=()),)), "mask_overrun", "without steps"),
    ],
)
def test_what_nobody_knows_is_refused_with_a_sentence(value: Trajectory, kind: str, words: str) -> None:
    with pytest.raises(Refusal, match=words):
        damage_case(value, [finding(kind, (0, 1))], None)


def test_the_last_layers_stand_for_a_model_and_say_so(engine: Any) -> None:
    value = Trajectory("a", steps(), (row((13, 19)),))
    case = damage_case(value, [finding("observation_trained", (13, 19))], None)
    exact, some = engine.damage(case), engine.damage(case, 2)
    assert exact["layers"] == "" and some["layers"] == "the last 2 of 4 layers"
    assert some["relative_error"] != exact["relative_error"]
    assert all(parameter.requires_grad for parameter in engine._model.parameters())


def test_the_norm_of_a_token_is_that_of_its_gradient_in_the_output_layer(engine: Any) -> None:
    value = Trajectory("a", steps(), (row(),))
    (norms,) = engine.damage(damage_case(value, [], None))["norms"]
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32, attn_implementation="eager")
    head = model.get_output_embeddings().weight
    tokens = torch.from_numpy(value.rows[0].ids.astype(np.int64))
    for at in (8, 20):
        states = model.model(input_ids=tokens[None], use_cache=False).last_hidden_state[0, at - 1].detach()
        output = head.detach().clone().requires_grad_(True)
        (ADVANTAGE * torch.log_softmax(output @ states, -1)[tokens[at]]).backward()
        assert norms[at] == pytest.approx(float(output.grad.norm()), rel=1e-3)
    assert norms[0] == norms[14] == 0
