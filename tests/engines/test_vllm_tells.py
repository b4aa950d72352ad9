"""What vLLM 0.32 tells beside the tokens reaches the step that a launch stores: real vLLM, by either model runner."""

import os
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from rollout_inspector.streams.alternatives import kept_at
from rollout_inspector.streams.strategies import Context
from rollout_inspector.streams.trajectory import ids_array
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load
from rollouts.sampling.engines import Generation, GenerationRequest, Sampling
from rollouts.sampling.engines.engine_thread import EngineThread
from rollouts.sampling.engines.vllm_engine import VllmEngine
from rollouts.sampling.loop import RolloutJob
from tests.loop.harness import Harness

pytestmark = pytest.mark.vllm
V2 = bool(os.environ.get("TRITON_INTERPRET"))
"""Model Runner V2 works here: see ``runner_v2``. Kept sets need it."""
PROMPT = ids_array(np.random.default_rng(1).integers(0, 500, 70))


@pytest.fixture(scope="module")
def engine(vllm_available: bool, tiny_tokenizer: Path) -> Iterator[VllmEngine]:
    """The options of a model in ``INSPECTOR_MODELS`` go to vLLM as they are."""
    masks = {"return_sampling_mask": True} if V2 else {}
    built = VllmEngine(tiny_tokenizer, max_model_len=192, max_live=4, enable_prefix_caching=False, **masks)
    yield built  # the last test closes it


def sample(engine: VllmEngine, sampling: Sampling, versions: tuple[str, ...] = ()) -> Generation:
    """A completion; after each three steps the weights get the next version, as an update with ``pause(keep)`` does."""
    engine.add(GenerationRequest("r", PROMPT, sampling))
    done: list[Generation] = []
    for version in versions:
        for _ in range(3):
            done += engine.step()
        engine.llm_engine.set_weight_version(version)
    while engine.has_unfinished():
        done += engine.step()
    (generation,) = done
    return generation


def test_options_reach_vllm_and_its_runner_is_the_one_meant(engine: VllmEngine) -> None:
    config = engine.llm_engine.vllm_config
    assert config.use_v2_model_runner is V2 and config.cache_config.enable_prefix_caching is False
    again = [sample(engine, Sampling(max_tokens=2, top_k=5, seed=1)).cached_tokens for _ in range(2)]
    assert again == [0, 0]


def test_an_update_within_a_completion_gives_one_step_with_two_spans(engine: VllmEngine) -> None:
    plain = sample(engine, Sampling(max_tokens=12, seed=5))
    assert plain.policy_version == "" and "policy_versions" not in plain.extra  # nobody has named the weights
    updated = sample(engine, Sampling(max_tokens=12, seed=5), ("v8",))
    spans = updated.extra["policy_versions"]
    assert [version for version, _ in spans] == ["default", "v8"] and updated.policy_version == "v8"
    assert sum(count for _, count in spans) == 12 and min(count for _, count in spans) > 0
    assert updated.completion_ids.tolist() == plain.completion_ids.tolist()  # the weights only got another name
    later = sample(engine, Sampling(max_tokens=4, seed=5))
    assert later.policy_version == "v8" and "policy_versions" not in later.extra


@pytest.mark.parametrize("stop", [(), ("never there",)])
def test_kept_sets_are_told_by_the_runner_that_has_them(engine: VllmEngine, stop: tuple[str, ...]) -> None:
    cut = sample(engine, Sampling(max_tokens=6, temperature=1.6, top_p=0.9, top_k=20, seed=11, stop=stop))
    whole = sample(engine, Sampling(max_tokens=6, temperature=1.0, seed=11, stop=stop))
    if V2:
        assert cut.kept_set is not None and whole.kept_set is not None
        assert (cut.kept_set >= 1).all() and (cut.kept_set <= 20).all() and cut.kept_set.max() > 1
        assert len(cut.kept_set) == 6 and (whole.kept_set == engine.vocab_size).all()
        sets = [kept_at(cut.kept_set, cut.kept_ids, n).tolist() for n in range(6)]
        assert [len(one) for one in sets] == cut.kept_set.tolist() and whole.kept_ids is None
        assert all(token in kept for token, kept in zip(cut.completion_ids.tolist(), sets, strict=True))
    else:
        assert cut.kept_set is cut.kept_ids is whole.kept_set is None


def test_a_small_launch_runs_on_it(engine: VllmEngine, tiny_tokenizer: Path) -> None:
    """The loop of a launch: token in, token out. It is the last test here, because it closes the engine."""
    tokenizer = load(tiny_tokenizer)
    context = Context(tokenizer, renderer(tokenizer, tokenizer.chat_template or ""), tokenizer.stop_ids)
    harness = Harness(tokenizer, context, folder=str(tiny_tokenizer))
    limits = harness.limits(sampling={"max_tokens": 24, "seed": 3, "top_k": 50}, max_turns=2)
    jobs = [RolloutJob(n, task) for n, task in enumerate(harness.tasks(2))]
    assert harness.run(EngineThread(lambda: engine), jobs, limits) == ((), "")
    assert {len(steps) > 0 for steps in harness.steps.values()} == {True} and len(harness.done) == 2
    for steps in harness.steps.values():
        for step in steps:
            assert step.logprobs is not None and len(step.logprobs) == len(step.completion_ids) > 0
            assert (step.kept_set is not None) is V2 and (step.kept_set is None or step.kept_set.max() <= 50)
        for before, after in pairwise(steps):
            assert after.prompt_ids[: len(before.stream)].tolist() == before.stream.tolist()
