"""The real engines against a plain forward of the same model: the ids are its, and the log-probabilities are its."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from rollout_inspector.streams.alternatives import unpacked
from rollout_inspector.streams.trajectory import Ids, ids_array
from rollouts.sampling.engines import Engine, GenerationRequest, RequestRefused, Sampling, build_engine, engine_spec
from rollouts.sampling.engines.scoring import score_streams


@pytest.fixture(scope="module", params=["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, tiny_tokenizer: Path) -> Iterator[Engine]:
    if request.param == "vllm":
        request.getfixturevalue("vllm_available")
    built = build_engine(request.param, str(tiny_tokenizer), max_model_len=512)
    yield built
    built.close()


@pytest.fixture(scope="module")
def reference(tiny_tokenizer: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_tokenizer, local_files_only=True, dtype=torch.float32).eval()


def prompt(seed: int, length: int) -> Ids:
    return ids_array(np.random.default_rng(seed).integers(0, 500, length))


def run(engine: Engine, requests: list[GenerationRequest]) -> dict[str, Any]:
    for one in requests:
        engine.add(one)
    done = {}
    while engine.has_unfinished():
        done.update((generation.request_id, generation) for generation in engine.step())
    return done


def logits_of(reference: Any, ids: Ids, completion: Ids) -> torch.Tensor:
    """The model's own logits before each completion token ``[C, V]``."""
    stream = torch.from_numpy(np.concatenate([ids, completion]).astype(np.int64))[None]
    with torch.inference_mode():
        out: torch.Tensor = reference(input_ids=stream).logits[0, len(ids) - 1 : -1]
    return out


def test_greedy_takes_the_likeliest_token_at_every_place(engine: Engine, reference: Any) -> None:
    # 300 tokens: more than one chunk of a prompt.
    prompts = [prompt(n, length) for n, length in enumerate((3, 40, 111, 300))]
    requests = [GenerationRequest(str(n), ids, Sampling(temperature=0, max_tokens=24)) for n, ids in enumerate(prompts)]
    done = run(engine, requests)
    for n, ids in enumerate(prompts):
        completion = done[str(n)].completion_ids
        logits = logits_of(reference, ids, completion)
        chosen = logits.gather(1, torch.from_numpy(completion.astype(np.int64))[:, None])[:, 0]
        # A tie within rounding may fall either way.
        assert float((logits.max(dim=1).values - chosen).max()) < 1e-3
        expected = torch.log_softmax(logits, dim=1).gather(1, torch.from_numpy(completion.astype(np.int64))[:, None])
        np.testing.assert_allclose(done[str(n)].logprobs, expected[:, 0].numpy(), atol=2e-3)


def test_scores_are_those_of_a_plain_forward(engine: Engine, reference: Any) -> None:
    # 500 tokens: more than one forward of the transformers engine.
    streams = [prompt(20 + n, length) for n, length in enumerate((2, 33, 500))]
    for ids, scores in zip(streams, score_streams(streams, engine), strict=True):
        told = torch.log_softmax(logits_of(reference, ids[:1], ids[1:]), dim=1)
        expected = told.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
        np.testing.assert_allclose(scores[1:], expected.numpy(), atol=2e-3)


def test_scores_at_another_temperature_are_those_of_the_scaled_logits(engine: Engine, reference: Any) -> None:
    ids = prompt(30, 300)
    if not engine_spec(engine.name).scores_at_temperature:
        with pytest.raises(
            RequestRefused, match=r"scores at temperature 1 alone. For 0.6 choose the engine transformers"
        ):
            score_streams([ids], engine, 0.6)
        return
    told = torch.log_softmax(logits_of(reference, ids[:1], ids[1:]) / 0.6, dim=1)
    expected = told.gather(1, torch.from_numpy(ids[1:].astype(np.int64))[:, None])[:, 0]
    np.testing.assert_allclose(score_streams([ids], engine, 0.6)[0][1:], expected.numpy(), atol=2e-3)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
def test_logprobs_are_those_of_the_distribution_sampled_from(
    engine: Engine, reference: Any, temperature: float
) -> None:
    ids = prompt(5, 80)
    sampling = Sampling(temperature=temperature, max_tokens=40, seed=3, alternatives=3)
    generation = run(engine, [GenerationRequest("a", ids, sampling)])["a"]
    logits = logits_of(reference, ids, generation.completion_ids) / temperature
    chosen = torch.from_numpy(generation.completion_ids.astype(np.int64))[:, None]
    distribution = torch.log_softmax(logits, dim=1)
    np.testing.assert_allclose(generation.logprobs, distribution.gather(1, chosen)[:, 0].numpy(), atol=2e-3)
    told = unpacked(generation.alternative_ids, generation.alternative_logprobs, 40)
    assert told is not None
    alternative_ids, alternative_logprobs = told
    np.testing.assert_allclose(alternative_logprobs, distribution.topk(3).values.numpy(), atol=2e-3)
    at = distribution.gather(1, torch.from_numpy(alternative_ids.astype(np.int64))).numpy()
    np.testing.assert_allclose(alternative_logprobs, at, atol=2e-3)
    if generation.entropy is not None:
        entropy = torch.distributions.Categorical(logits=logits).entropy()
        np.testing.assert_allclose(generation.entropy, entropy.numpy(), atol=5e-3)


@pytest.mark.parametrize("cut", [{"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.3}])
def test_cuts_keep_the_unlikely_out_and_renormalise(engine: Engine, reference: Any, cut: dict[str, Any]) -> None:
    ids = prompt(6, 50)
    sampling = Sampling(temperature=1.0, max_tokens=60, seed=4, **cut)
    generation = run(engine, [GenerationRequest("a", ids, sampling)])["a"]
    logits = logits_of(reference, ids, generation.completion_ids)
    probabilities = torch.softmax(logits, dim=1)
    for place, token in enumerate(generation.completion_ids.tolist()):
        row = probabilities[place]
        ordered, order = row.sort(descending=True)
        if "top_k" in cut:
            kept = order[:3]
        elif "top_p" in cut:
            kept = order[: int((ordered.cumsum(0) < 0.5).sum()) + 1]
        else:
            kept = order[ordered >= 0.3 * ordered[0]]
        assert token in kept.tolist()
        expected = float(torch.log(row[token] / row[kept].sum()))
        assert abs(float(generation.logprobs[place]) - expected) < 5e-3


def test_a_warm_cache_changes_nothing(engine: Engine, reference: Any) -> None:
    """Turns of several trajectories, interleaved, siblings with one prompt among them."""
    streams = {f"t{n}": prompt(20 + n // 3, 70 + n // 3) for n in range(9)}
    for turn in range(3):
        requests = [
            GenerationRequest(f"{name}.{turn}", ids, Sampling(max_tokens=10 + 3 * n, seed=100 * turn + n))
            for n, (name, ids) in enumerate(streams.items())
        ]
        done = run(engine, requests)
        for name, ids in streams.items():
            generation = done[f"{name}.{turn}"]
            logits = logits_of(reference, ids, generation.completion_ids)
            chosen = torch.from_numpy(generation.completion_ids.astype(np.int64))[:, None]
            expected = torch.log_softmax(logits, dim=1).gather(1, chosen)[:, 0].numpy()
            np.testing.assert_allclose(generation.logprobs, expected, atol=2e-3)
            streams[name] = np.concatenate([ids, generation.completion_ids, ids_array([3, 5, 7 + turn])])


def test_an_abort_leaves_the_others_as_they_were(engine: Engine) -> None:
    # Longer than what an engine makes room for at first: its cache has grown when the aborts come.
    requests = [
        GenerationRequest(str(n), prompt(30 + n, 300), Sampling(temperature=0, max_tokens=20)) for n in range(4)
    ]
    expected = run(engine, requests)
    for one in requests:
        engine.add(one)
    done = {}
    for name in ("0", "2"):
        for _ in range(3):
            done.update((generation.request_id, generation) for generation in engine.step())
        engine.abort(name)
    done.update(run(engine, []))
    assert set(done) == {"1", "3"}
    for name in done:
        assert done[name].completion_ids.tolist() == expected[name].completion_ids.tolist()
