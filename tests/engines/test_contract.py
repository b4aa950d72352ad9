"""One class that every engine passes: a fake that passes it too may stand in for a model in other tests."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.streams.alternatives import entropy_at_least, unpacked
from rollout_inspector.streams.trajectory import Ids, ids_array
from rollout_inspector.text.tokenizers import load
from rollouts.sampling.engines import (
    Engine, EngineError, Generation, GenerationRequest, RequestRefused, Sampling, build_engine, check_generation,
    check_request, engine_spec
)
from rollouts.sampling.engines.protocol import EngineInfo
from rollouts.sampling.engines.scoring import max_scored_length, score_streams

MAX_MODEL_LEN = 192
ENGINES = ["scripted", "transformers", pytest.param("vllm", marks=pytest.mark.vllm)]


@pytest.fixture(scope="module", params=ENGINES)
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    if request.param == "scripted":
        built = build_engine("scripted", str(request.getfixturevalue("tiny_tokenizer")), max_model_len=MAX_MODEL_LEN)
    else:
        if request.param == "vllm":
            request.getfixturevalue("vllm_available")
        folder: Path = request.getfixturevalue("tiny_tokenizer")
        built = build_engine(request.param, str(folder), max_model_len=MAX_MODEL_LEN)
    yield built
    built.close()


def prompt(seed: int, length: int = 60) -> Ids:
    return ids_array(np.random.default_rng(seed).integers(0, 500, length))


def run(engine: Engine, requests: list[GenerationRequest], most_steps: int = 2000) -> dict[str, Generation]:
    for request in requests:
        engine.add(request)
    done: dict[str, Generation] = {}
    for _ in range(most_steps):
        if not engine.has_unfinished():
            return done
        for generation in engine.step():
            assert generation.request_id not in done
            done[generation.request_id] = generation
    raise AssertionError("the engine never finished")


def one(engine: Engine, ids: Ids, name: str = "one", **sampling: Any) -> Generation:
    return run(engine, [GenerationRequest(name, ids, Sampling(**sampling))])[name]


class TestContract:
    def test_facts(self, engine: Engine) -> None:
        assert engine.version and engine.logprobs_mode == "processed"
        assert engine.max_model_len == MAX_MODEL_LEN and engine.vocab_size >= 500

    def test_max_tokens_ends_with_length(self, engine: Engine) -> None:
        request = GenerationRequest("a", prompt(1), Sampling(max_tokens=7, seed=1))
        generation = run(engine, [request])["a"]
        assert (len(generation.completion_ids), generation.finish_reason, generation.stop_reason) == (7, "length", "")
        assert generation.completion_ids.dtype == np.int32 and generation.logprobs.dtype == np.float32
        check_generation(generation, request, engine.vocab_size)

    def test_a_stop_text_ends_with_the_token_that_completes_it(self, engine: Engine, tiny_tokenizer: Path) -> None:
        codec = load(tiny_tokenizer)
        free = one(engine, prompt(2), temperature=0, max_tokens=24)
        # A text over the seam of two tokens, which is not there before.
        pieces = codec.token_bytes(free.completion_ids)
        cuts = [(n, pieces[n - 1][-1:] + pieces[n][:1]) for n in range(6, 24) if pieces[n - 1] and pieces[n]]
        n, text = next((n, t) for n, t in cuts if t.isascii() and t not in b"".join(pieces[:n]))
        stopped = one(engine, prompt(2), temperature=0, max_tokens=24, stop=("never there", text.decode()))
        assert stopped.completion_ids.tolist() == free.completion_ids[: n + 1].tolist()
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", text.decode())
        assert len(stopped.logprobs) == n + 1 and not engine.has_unfinished()
        both = [GenerationRequest(name, prompt(2), Sampling(temperature=0, max_tokens=24, stop=stop))
                for name, stop in (("with", (text.decode(),)), ("without", ()))]
        done = run(engine, both)
        assert len(done["with"].completion_ids) == n + 1 and len(done["without"].completion_ids) == 24

    def test_the_stop_token_is_part_of_the_completion(self, engine: Engine) -> None:
        free = one(engine, prompt(2), temperature=0, max_tokens=12)
        stop = int(free.completion_ids[4])
        stopped = one(engine, prompt(2), temperature=0, max_tokens=12, stop_token_ids=(stop,))
        first = free.completion_ids.tolist().index(stop)
        assert stopped.completion_ids.tolist() == free.completion_ids[: first + 1].tolist()
        assert len(stopped.logprobs) == first + 1
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", str(stop))

    def test_the_models_limit_ends_with_length(self, engine: Engine) -> None:
        generation = one(engine, prompt(3, MAX_MODEL_LEN - 5), max_tokens=100, seed=3)
        assert len(generation.completion_ids) == 5 and generation.finish_reason == "length"

    def test_scores_are_the_logprobs_of_its_completions_while_others_sample(self, engine: Engine) -> None:
        asked = {"a": Sampling(max_tokens=30, seed=1), "b": Sampling(max_tokens=9, seed=2, stop=("never there",))}
        done = {name: run(engine, [GenerationRequest(name, prompt(7), how)])[name] for name, how in asked.items()}
        streams = [np.concatenate([prompt(7), one.completion_ids]) for one in done.values()]
        for name, how in asked.items():
            engine.add(GenerationRequest(f"{name} again", prompt(7), how))
        again = {one.request_id: one for one in engine.step()}
        first, empty, second, one_id = score_streams([streams[0], streams[0][:0], streams[1], streams[0][:1]], engine)
        for scores, generation in ((first, done["a"]), (second, done["b"])):
            assert scores.dtype == np.float32 and np.isnan(scores[0]) and np.isfinite(scores[1:]).all()
            np.testing.assert_allclose(scores[60:], generation.logprobs, atol=1e-4)
        assert not len(empty) and len(one_id) == 1
        again |= run(engine, [])  # what was under way is not lost
        assert {name: one.completion_ids.tolist() for name, one in again.items()} == {
            f"{name} again": one.completion_ids.tolist() for name, one in done.items()
        }

    def test_the_mass_of_a_kept_set_is_the_sum_of_its_probabilities(self, engine: Engine, monkeypatch: Any) -> None:
        if not engine_spec(engine.name).sums_kept_sets:
            return
        monkeypatch.setattr("rollouts.sampling.engines.transformers_engine.CHUNK", 64)
        ids = prompt(7, 150)  # more than one forward
        everything = np.arange(engine.vocab_size, dtype=np.int32)
        other = (ids + 1) % engine.vocab_size
        sets = {5: ids[5:6], 6: everything, 7: np.r_[ids[7:8], other[7:8]], 8: ids_array([-4, 10**6]), 149: ids[149:]}
        sizes = np.array([len(sets.get(place, ())) for place in range(len(ids))])
        changed = ids.copy()
        changed[7] = other[7]
        scores, scores_of_other = score_streams([ids, changed], engine)
        masses, nothing = score_streams([ids, ids[:0]], engine, kept=[
            (sizes, np.concatenate(list(sets.values())).astype(np.int32)), (sizes[:0], ids[:0]),
        ])
        assert masses.dtype == np.float32 and not len(nothing)
        assert np.flatnonzero(np.isfinite(masses)).tolist() == [5, 6, 7, 149]  # an id that the model lacks has no mass
        both = np.logaddexp(scores[7], scores_of_other[7])
        np.testing.assert_allclose(masses[[5, 6, 7, 149]], [scores[5], 0, both, scores[149]], atol=1e-5)

    def test_a_given_completion_is_decoded_with_the_same_logprobs_while_others_sample(self, engine: Engine) -> None:
        sampled = one(engine, prompt(7), max_tokens=30, seed=1, temperature=1.0)
        other = one(engine, prompt(9), max_tokens=30, seed=4)
        given = sampled.completion_ids.copy()
        given[20] = (given[20] + 1) % 500
        requests = [
            GenerationRequest(name, prompt(7), Sampling(max_tokens=30), forced_ids=ids)
            for name, ids in (("same", sampled.completion_ids), ("changed", given))
        ]
        requests.append(GenerationRequest("other", prompt(9), Sampling(max_tokens=30, seed=4)))
        if engine.name == "vllm":  # Model Runner V2 has it alone, and the CPU build takes V1
            with pytest.raises(RequestRefused, match="trace replay is not enabled"):
                engine.add(requests[0])
            return
        done = run(engine, requests)
        for request in requests:
            check_generation(done[request.request_id], request, engine.vocab_size)
        assert done["other"].completion_ids.tolist() == other.completion_ids.tolist()
        np.testing.assert_allclose(done["same"].logprobs, sampled.logprobs, atol=1e-4)
        np.testing.assert_allclose(done["changed"].logprobs[:20], sampled.logprobs[:20], atol=1e-4)
        scores = score_streams([np.concatenate([prompt(7), given])], engine)[0]
        np.testing.assert_allclose(done["changed"].logprobs, scores[60:], atol=1e-4)
        assert done["changed"].logprobs[20] != sampled.logprobs[20]
        wrong = GenerationRequest("same", prompt(7), Sampling(max_tokens=30), forced_ids=given)
        with pytest.raises(EngineError, match="decoded other ids than it was given"):
            check_generation(done["same"], wrong, engine.vocab_size)

    def test_streams_that_it_cannot_score_are_refused_with_a_sentence(self, engine: Engine) -> None:
        longest = MAX_MODEL_LEN - (not engine_spec(engine.name).scores_full_context)
        assert max_scored_length(EngineInfo.of(engine)) == longest
        assert len(score_streams([prompt(8, longest)], engine)[0]) == longest
        with pytest.raises(RequestRefused, match=f"{longest + 1} tokens, and this engine scores at most {longest}"):
            score_streams([prompt(8), prompt(8, longest + 1)], engine)
        for bad in (-1, engine.vocab_size):
            with pytest.raises(RequestRefused, match=f"the id {bad}, and the model's ids run from 0"):
                score_streams([ids_array([1, bad])], engine)

    def test_a_seed_repeats_alone_and_in_a_batch(self, engine: Engine) -> None:
        sampling = Sampling(temperature=1.0, top_p=0.95, max_tokens=20, seed=11)
        alone = run(engine, [GenerationRequest("a", prompt(4), sampling)])["a"]
        others = [
            GenerationRequest(f"b{n}", prompt(50 + n, 20 + 9 * n), Sampling(max_tokens=30, seed=n)) for n in range(6)
        ]
        batched = run(engine, [*others[:3], GenerationRequest("a", prompt(4), sampling), *others[3:]])["a"]
        assert batched.completion_ids.tolist() == alone.completion_ids.tolist()
        np.testing.assert_allclose(batched.logprobs, alone.logprobs, atol=1e-4)

    def test_alternatives_are_told_and_change_no_token(self, engine: Engine) -> None:
        spec = engine_spec(engine.name)
        plain = Sampling(top_p=0.9, max_tokens=12, seed=5)
        without = run(engine, [GenerationRequest("w", prompt(12), plain)])["w"]
        asked = {
            "two": replace(plain, alternatives=2),
            "none": plain,
            "most": replace(plain, alternatives=spec.most_alternatives, stop=("never there",)),
        }
        done = run(engine, [GenerationRequest(name, prompt(12), one) for name, one in asked.items()])
        for name, one in asked.items():
            found = done[name]
            check_generation(found, GenerationRequest(name, prompt(12), one), engine.vocab_size)
            assert found.completion_ids.tolist() == without.completion_ids.tolist()
            np.testing.assert_allclose(found.logprobs, without.logprobs, atol=1e-5)
            if not one.alternatives:
                assert found.alternative_ids is found.alternative_logprobs is found.entropy is None
                continue
            told = unpacked(found.alternative_ids, found.alternative_logprobs, 12)
            assert told is not None
            alternative_ids, alternative_logprobs = told
            assert alternative_ids.shape[1] <= one.alternatives
            if name == "two":
                assert alternative_ids.shape == (12, 2)
            for token, logprob, ids, values in zip(
                found.completion_ids, found.logprobs, alternative_ids, alternative_logprobs, strict=True
            ):
                there = np.isfinite(values)
                assert (np.diff(values[there]) <= 0).all() and np.exp(values[there]).sum() <= 1 + 1e-4
                assert len(set(ids[there].tolist())) == there.sum()
                if token in ids[there]:
                    np.testing.assert_allclose(values[ids == token][0], logprob, atol=1e-5)
                else:
                    assert logprob <= values[-1] + 1e-5
            assert (found.entropy is not None) == spec.knows_entropy
            if found.entropy is not None:
                assert found.entropy.shape == (12,) and (found.entropy >= entropy_at_least(told) - 1e-3).all()
        with pytest.raises(RequestRefused, match="alternatives is 21"):
            engine.add(GenerationRequest("bad", prompt(12), replace(plain, alternatives=21)))

    def test_a_request_may_come_while_others_are_under_way(self, engine: Engine) -> None:
        late = GenerationRequest("late", prompt(5), Sampling(temperature=0, max_tokens=9))
        expected = run(engine, [late])["late"]
        engine.add(GenerationRequest("early", prompt(6), Sampling(temperature=0, max_tokens=40)))
        assert all(not engine.step() for _ in range(3))
        done = run(engine, [late])
        assert set(done) == {"early", "late"} and len(done["early"].completion_ids) == 40
        assert done["late"].completion_ids.tolist() == expected.completion_ids.tolist()

    def test_an_aborted_request_never_returns(self, engine: Engine) -> None:
        kept = GenerationRequest("kept", prompt(7), Sampling(temperature=0, max_tokens=12))
        expected = run(engine, [kept])["kept"]
        for name in ("first", "second"):
            engine.add(GenerationRequest(name, prompt(8), Sampling(max_tokens=100)))
        engine.add(kept)
        engine.step()
        engine.abort("first")
        engine.step()
        engine.abort("second")
        engine.abort("nobody")
        done = run(engine, [])
        assert set(done) == {"kept"}
        assert done["kept"].completion_ids.tolist() == expected.completion_ids.tolist()
        engine.abort("kept")
        assert not engine.has_unfinished()

    @pytest.mark.parametrize(
        ("ids", "sampling", "words"),
        [
            ([], {}, "empty"),
            ([5, -1], {}, "id -1"),
            ([5, 10**6], {}, "id 1000000"),
            ([5] * MAX_MODEL_LEN, {}, "limit"),
            ([5], {"max_tokens": 0}, "max_tokens"),
            ([5], {"temperature": -1.0}, "temperature"),
            ([5], {"top_p": 0.0}, "top_p"),
        ],
    )
    def test_what_cannot_be_served_is_refused_in_words(
        self, engine: Engine, ids: list[int], sampling: dict[str, Any], words: str
    ) -> None:
        with pytest.raises(RequestRefused, match=words):
            engine.add(GenerationRequest("bad", ids_array(ids), Sampling(**sampling)))
        assert not engine.has_unfinished()
        assert len(one(engine, prompt(9), max_tokens=2).completion_ids) == 2

    def test_an_engines_own_objection_is_a_refusal_and_not_its_death(self, engine: Engine) -> None:
        try:
            assert len(one(engine, prompt(9), "hot", temperature=9.0, max_tokens=2).completion_ids) == 2
        except RequestRefused as refusal:
            assert "temperature" in str(refusal)
        assert not engine.has_unfinished()
        assert len(one(engine, prompt(9), max_tokens=2).completion_ids) == 2

    def test_a_next_turn_goes_on_from_the_same_ids(self, engine: Engine) -> None:
        first = one(engine, prompt(10), "turn", temperature=0, max_tokens=40)
        stream = np.concatenate([prompt(10), first.completion_ids, ids_array([7, 8, 9])])
        warm = one(engine, stream, "turn2", temperature=0, max_tokens=8)
        # The same prompt behind another first token shares nothing with what is kept.
        if engine.name != "scripted":
            assert warm.cached_tokens >= 64
        assert one(engine, prompt(11), "other", temperature=0, max_tokens=4).cached_tokens == 0
        again = one(engine, stream, "again", temperature=0, max_tokens=8)
        assert again.completion_ids.tolist() == warm.completion_ids.tolist()

    def test_more_requests_than_the_batch_holds(self, engine: Engine) -> None:
        requests = [
            GenerationRequest(f"r{n}", prompt(n % 7, 30 + n % 50), Sampling(max_tokens=1 + n % 11, seed=n))
            for n in range(150)
        ]
        done = run(engine, requests)
        assert len(done) == 150
        assert [len(done[f"r{n}"].completion_ids) for n in range(150)] == [1 + n % 11 for n in range(150)]


def test_an_unknown_engine_and_a_missing_model_are_sentences(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="no engine named 'warp'"):
        build_engine("warp", "")
    with pytest.raises(EngineError, match=r"holds no config\.json"):
        build_engine("transformers", str(tmp_path))


GOOD = Generation("x", ids_array([1, 2]), np.array([-0.5, -0.25], dtype=np.float32), "stop")
REQUEST = GenerationRequest("x", ids_array([1]), Sampling(max_tokens=2))


def test_a_sound_generation_passes() -> None:
    check_request(REQUEST, 10, 10)
    check_generation(GOOD, REQUEST, 10)


@pytest.mark.parametrize(
    ("ids", "logprobs", "words"),
    [
        ([], [], "without a single token"),
        ([1, 2], [-0.5], "2 ids and 1 log"),
        ([1, 99], [-0.5, -0.5], "id 99"),
        ([1, 2, 3], [-0.5] * 3, "3 tokens where 2"),
        ([1, 2], [-0.5, float("nan")], "not a number"),
        ([1, 2], [float("-inf"), -0.5], "not a number"),
        ([1, 2], [-0.5, 0.5], "above 0"),
    ],
)
def test_nonsense_from_an_engine_is_an_error(ids: list[int], logprobs: list[float], words: str) -> None:
    with pytest.raises(EngineError, match=words):
        check_generation(Generation("x", ids_array(ids), np.array(logprobs, dtype=np.float32), "stop"), REQUEST, 10)


@pytest.mark.parametrize(
    ("ids", "logprobs", "entropy", "words"),
    [
        ([1, 2, 3, 4], [-0.5, -1, -0.25, -np.inf], [0.5, 0.0], ""),
        ([1, 2, 3], [-0.5] * 3, None, "do not fit"),
        ([1, 99, 3, 4], [-0.5] * 4, None, "no id from 0 to 9"),
        ([1, 2, 3, 4], [-0.5, 0.5, -1, -1], None, "above 0"),
        ([1, 2, 3, 4], [-0.5, float("nan"), -1, -1], None, "no number"),
        (None, None, [0.5, -1.0], "entropy"),
        (None, None, [0.5, float("nan")], "entropy"),
    ],
)
def test_alternatives_that_make_no_sense_are_an_error(
    ids: list[int] | None, logprobs: list[float] | None, entropy: list[float] | None, words: str
) -> None:
    def floats(values: list[float] | None) -> Any:
        return None if values is None else np.array(values, dtype=np.float32)

    made = replace(
        GOOD, alternative_ids=None if ids is None else ids_array(ids), alternative_logprobs=floats(logprobs),
        entropy=floats(entropy),
    )
    with pytest.raises(EngineError, match=words) if words else nullcontext():
        check_generation(made, REQUEST, 10)
