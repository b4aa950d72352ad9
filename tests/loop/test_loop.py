"""The loop: what it appends, when it stops, what it saves."""

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import diagnose
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.strategies import STRATEGIES, StrategyRefused
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Origin, Trajectory
from rollout_inspector.text.replies.parsing import parser
from rollouts.sampling import loop
from rollouts.sampling.engines import EngineError, Generation, build_engine
from rollouts.sampling.engines.engine_thread import EngineThread
from rollouts.sampling.engines.scripted import ScriptedEngine
from rollouts.sampling.environments import ENVIRONMENTS, Outcome, Task
from rollouts.sampling.loop import RolloutJob, step_seed
from tests.conftest import wait_until
from tests.loop.harness import Harness

pytestmark = pytest.mark.usefixtures("short_pauses")

CALL = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "6*7"}}\n</tool_call><|im_end|>'


def one_call_then_answer(prompt: Ids, text: str) -> str:
    return "The answer is 42.<|im_end|>" if "<tool_response>" in text else CALL


def job(harness: Harness, key: Any = "a", **changes: Any) -> RolloutJob:
    task = replace(harness.tasks(1)[0], answer="42")
    return RolloutJob(key, task, **changes)


def test_a_trajectory_grows_by_sampled_ids_and_by_the_templates_delta(harness: Harness) -> None:
    stopped, error = harness.run(harness.scripted(one_call_then_answer), [job(harness)])
    assert (stopped, error) == ((), "")
    first, second = harness.steps["a"]
    done = harness.done["a"]
    assert (done.stop_reason, done.reward, len(harness.steps["a"]), done.error) == ("answered", 1.0, 2, "")
    # Token in, token out: the second prompt starts with everything of the first step, verbatim.
    stream = first.stream
    assert second.prompt_ids[: len(stream)].tolist() == stream.tolist()
    delta = second.prompt_ids[len(stream) :]
    text = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert harness.context.codec.decode(delta) == text
    assert second.delta_origin is not None and len(second.delta_origin) == len(delta)
    observed = harness.context.codec.decode(delta[second.delta_origin == Origin.OBSERVATION])
    assert observed == "42"
    assert first.delta_origin is None


class Updated(ScriptedEngine):
    """Answers as vLLM does where a trainer pauses with ``keep``, updates the weights, names them and resumes."""

    def step(self) -> list[Generation]:
        def fields(ids: list[int]) -> dict[str, Any]:
            spans = [{"version": "v7", "start": 0, "end": 3}, {"version": "v8", "start": 3, "end": len(ids)}]
            return {"weight_versions": spans, "sampling_mask": [[token_id, 1] for token_id in ids]}

        return [
            Generation.of(one.request_id, one.completion_ids.tolist(), one.logprobs.tolist(), one.finish_reason,
                          one.stop_reason, engine_fields=fields(one.completion_ids.tolist()))
            for one in super().step()
        ]


def test_weights_that_change_within_a_call_are_one_step_with_two_spans_and_its_kept_sets(harness: Harness) -> None:
    codec = harness.context.codec
    engine = EngineThread(lambda: Updated(
        script=lambda prompt: codec.encode(one_call_then_answer(prompt, codec.decode(prompt))).tolist(),
        vocab_size=codec.vocab_size,
    ))
    harness.run(engine, [job(harness)])
    first, second = harness.steps["a"]
    n = len(first.completion_ids)
    assert first.kept_set is not None and (first.kept_set == 2).all()
    assert first.kept_ids is not None and first.kept_ids[::2].tolist() == first.completion_ids.tolist()
    assert first.policy_version == "v8" and first.extra == {"policy_versions": [["v7", 3], ["v8", n - 3]]}
    found = diagnose(Trajectory("a", (first, second)), codec)
    assert "mixed_policy_versions" in {finding.kind for finding in found}


def test_a_response_template_is_compiled_once_and_not_for_each_completion(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    from transformers.utils.chat_parsing import response_templates

    parse = parser(harness.tokenizer.hf, harness.context.stop_ids)
    compiled: list[str] = []
    monkeypatch.setattr(response_templates, "_build_field", lambda name, field: compiled.append(name))
    reply = parse(NO_IDS, harness.context.codec.encode(CALL))
    assert reply["tool_calls"][0]["function"] == {"name": "calculator", "arguments": {"expression": "6*7"}}
    assert compiled == []


def test_what_a_step_carries(harness: Harness) -> None:
    harness.run(harness.scripted(one_call_then_answer), [job(harness)])
    first, second = harness.steps["a"]
    assert (first.finish_reason, first.logprobs_mode, first.temperature) == ("stop", "processed", 1.0)
    assert first.stop_reason == str(harness.context.codec.eos_id) and first.engine == "scripted 1"
    assert first.logprobs is not None and len(first.logprobs) == len(first.completion_ids)
    assert first.reply is not None and first.reply["tool_calls"][0]["function"]["name"] == "calculator"
    assert second.request is not None and second.request.tools is not None
    assert [message["role"] for message in second.request.messages] == ["system", "user", "assistant", "tool"]
    assert second.reply is not None and second.reply["content"] == "The answer is 42."


def test_a_noncanonical_sample_stays_as_it_was_sampled(harness: Harness) -> None:
    codec = harness.context.codec
    pieces = [codec.encode(character) for character in "The answer is 42."]
    odd = np.concatenate([*pieces, codec.encode("<|im_end|>")])
    assert len(odd) > len(codec.encode("The answer is 42.<|im_end|>"))

    def script(prompt: Ids) -> list[int]:
        return odd.tolist() if "<tool_response>" in codec.decode(prompt) else codec.encode(CALL).tolist()

    engine = EngineThread(lambda: ScriptedEngine(script=script, vocab_size=codec.vocab_size))
    harness.run(engine, [job(harness)])
    assert harness.steps["a"][1].completion_ids.tolist() == odd.tolist()
    assert harness.done["a"].reward == 1.0


def test_truncation_is_a_non_event(harness: Harness) -> None:
    """Cut in the middle of a call: nothing is dispatched, nothing is synthesised, the buffer ends as it stands."""
    full = harness.context.codec.encode(CALL)
    harness.run(harness.scripted(one_call_then_answer), [job(harness)], harness.limits(sampling={"max_tokens": 9}))
    (step,) = harness.steps["a"]
    assert step.completion_ids.tolist() == full[:9].tolist() and step.finish_reason == "length"
    assert (harness.done["a"].stop_reason, harness.done["a"].reward) == ("length", 0.0)


def test_a_stop_text_ends_a_turn_that_the_template_then_closes(harness: Harness) -> None:
    """The model goes on behind its call; the text ends it there, and the stop token it did not sample has mask 0."""
    chatty = CALL.replace("<|im_end|>", " and then I will say more<|im_end|>")

    def say(prompt: Ids, text: str) -> str:
        return "The answer is 42.<|im_end|>" if "<tool_response>" in text else chatty

    codec = harness.context.codec

    def build() -> ScriptedEngine:
        script = lambda prompt: codec.encode(say(prompt, codec.decode(prompt))).tolist()  # noqa: E731
        return ScriptedEngine(harness.folder, script=script, vocab_size=codec.vocab_size)

    harness.run(EngineThread(build), [job(harness)], harness.limits(sampling={"stop": ("</tool_call>",)}))
    first, second = harness.steps["a"]
    assert codec.decode(first.completion_ids).endswith("</tool_call>")
    assert (first.finish_reason, first.stop_reason) == ("stop", "</tool_call>")
    delta = second.prompt_ids[len(first.stream) :]
    text = "<|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert codec.decode(delta) == text and harness.done["a"].reward == 1.0
    assert second.delta_origin is not None and second.delta_origin[0] == Origin.TEMPLATE


def test_single_turns_are_sampled_as_one_batch(harness: Harness) -> None:
    """SkyRL's ``generate_batched``: the engine has all prompts before it answers the first, each with one message."""
    prompts = [Task([{"role": "user", "content": f"Say {n}."}], answer=str(n)) for n in range(6)]
    batches: list[int] = []

    class Engine(ScriptedEngine):
        def step(self) -> list[Generation]:
            if not batches and len(self._live) < len(prompts):
                time.sleep(0.001)
                return []
            batches.append(len(self._live))
            return super().step()

    codec = harness.context.codec

    def script(prompt: Ids) -> Sequence[int]:
        said = codec.decode(prompt).rpartition("Say ")[2][0]
        return codec.encode(f"I say {said if said != '5' else 'nothing'}<|im_end|>").tolist()

    engine = EngineThread(lambda: Engine(script=script, vocab_size=codec.vocab_size))
    jobs = [RolloutJob(str(n), task) for n, task in enumerate(prompts)]
    harness.run(engine, jobs, environment=ENVIRONMENTS["prompts"](), strategy="step_wise")
    assert batches[0] == len(prompts)
    assert {key: done.reward for key, done in harness.done.items()} == {str(n): float(n != 5) for n in range(6)}
    for key, task in enumerate(prompts):
        (step,), (row,) = harness.steps[str(key)], harness.done[str(key)].rows or ()
        prompt = harness.context.renderer.render_ids(Conversation(task.messages, None, None, True))
        assert step.prompt_ids.tolist() == prompt.tolist()
        assert row.ids.tolist() == step.stream.tolist()
        assert row.ids[row.loss_mask].tolist() == step.completion_ids.tolist()


def test_the_turns_are_limited(harness: Harness) -> None:
    harness.run(harness.scripted(lambda *_: CALL), [job(harness)], harness.limits(max_turns=3))
    assert len(harness.steps["a"]) == 3 and harness.done["a"].stop_reason == "max_turns"


def test_the_models_length_ends_a_trajectory_between_turns(harness: Harness) -> None:
    engine = EngineThread(
        lambda: ScriptedEngine(
            script=lambda _: harness.context.codec.encode(CALL).tolist(),
            vocab_size=harness.context.codec.vocab_size,
            max_model_len=300,
        )
    )
    harness.run(engine, [job(harness)], harness.limits(max_turns=100))
    assert harness.done["a"].stop_reason == "length"
    assert all(len(step.stream) <= 300 for step in harness.steps["a"])


def test_a_call_that_is_no_json_is_answered_not_fatal(harness: Harness) -> None:
    def say(prompt: Ids, text: str) -> str:
        return "So 42.<|im_end|>" if "error" in text.split("assistant")[-2] else "<tool_call>oops</tool_call><|im_end|>"

    harness.run(harness.scripted(say), [job(harness)])
    assert harness.done["a"].error == "" and len(harness.steps["a"]) == 2


class Clock:
    """The loop's clock, which a test can put forward."""

    def __init__(self) -> None:
        self.ahead = 0.0

    def monotonic(self) -> float:
        return time.monotonic() + self.ahead


class Slow:
    """An environment that hangs for one task and answers the others."""

    name = "slow"

    def __init__(self) -> None:
        self.end = threading.Event()

    def tasks(self, n: int, seed: int) -> list[Task]:
        return []

    def start(self, task: Task) -> Any:
        outer = self

        class Episode:
            def step(self, message: Any) -> Outcome:
                if task.index == 1:
                    outer.end.wait()
                if task.index == 2:
                    raise KeyError("lost")
                return Outcome([], True, 1.0, {}, "answered")

            def truncated(self, why: str) -> Outcome:
                return Outcome([], True, 0.0, {}, why)

        return Episode()


def test_an_environment_that_hangs_or_raises_fails_its_own_trajectory(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = harness.tasks(1)[0]
    jobs = [RolloutJob(n, replace(task, index=n)) for n in range(4)]
    clock, slow = Clock(), Slow()
    monkeypatch.setattr(loop, "time", clock)

    def pass_time_once_the_others_are_done() -> bool:
        clock.ahead = 400.0 if len(harness.done) == 3 else clock.ahead
        return False

    engine = harness.scripted(lambda *_: "Hi<|im_end|>")
    limits = harness.limits(environment_seconds=300)
    harness.run(engine, jobs, limits, slow, pass_time_once_the_others_are_done)
    slow.end.set()
    assert "did not answer within 300 seconds" in harness.done[1].error
    assert "KeyError" in harness.done[2].error
    assert [harness.done[n].reward for n in (0, 3)] == [1.0, 1.0]


def test_a_stop_aborts_what_is_under_way(harness: Harness) -> None:
    class Endless(ScriptedEngine):
        aborted: list[str] = []
        started = threading.Event()

        def step(self) -> list[Generation]:
            self.started.set()
            time.sleep(0.001)
            return []

        def abort(self, request_id: str) -> None:
            self.aborted.append(request_id)
            super().abort(request_id)

    built = Endless(vocab_size=harness.context.codec.vocab_size)
    engine = EngineThread(lambda: built)
    jobs = [job(harness, n) for n in range(5)]
    stopped, _ = harness.run(engine, jobs, should_stop=built.started.is_set)
    assert {one.key for one in stopped} == set(range(5)) and not harness.done
    wait_until(lambda: len(built.aborted) == 5, 60, "the engine was told to drop all five")
    assert not built.has_unfinished()
    engine.close()


def test_an_engine_that_died_once_costs_nothing(harness: Harness) -> None:
    deaths = [1]

    class Dying(ScriptedEngine):
        def step(self) -> list[Generation]:
            if deaths:
                deaths.pop()
                raise MemoryError("no room")
            return super().step()

    codec = harness.context.codec

    def script(prompt: Ids) -> list[int]:
        return codec.encode(one_call_then_answer(prompt, codec.decode(prompt))).tolist()

    engine = EngineThread(lambda: Dying(script=script, vocab_size=codec.vocab_size))
    _, error = harness.run(engine, [job(harness, n) for n in range(6)], harness.limits(max_live=2))
    assert not deaths and error == ""
    assert [harness.done[n].reward for n in range(6)] == [1.0] * 6


def test_an_engine_that_dies_again_ends_the_batch_with_the_reason(harness: Harness) -> None:
    class Dead(ScriptedEngine):
        def step(self) -> list[Generation]:
            raise MemoryError("no room")

    engine = EngineThread(lambda: Dead(vocab_size=harness.context.codec.vocab_size))
    _, error = harness.run(engine, [job(harness, n) for n in range(9)], harness.limits(max_live=2))
    assert "MemoryError: no room" in error
    assert all("no room" in one.error for one in harness.done.values()) and len(harness.done) < 9


def test_an_engine_that_cannot_be_built_is_the_batchs_error(harness: Harness) -> None:
    def build() -> ScriptedEngine:
        raise EngineError("There is no model there.")

    assert harness.run(EngineThread(build), [job(harness)])[1] == "There is no model there."


def test_a_panic_of_native_code_fails_its_trajectory_alone(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    """H2: a panic of the tokenizer's native code is no Exception, and left a run without an end."""

    class Panic(BaseException):
        pass

    begin, parse = (
        STRATEGIES["tool_delta"].begin,
        harness.parse or parser(harness.tokenizer.hf, harness.context.stop_ids),
    )
    calls = {"begin": 0, "parse": 0}

    def begin_or_panic(self: Any, *arguments: Any) -> Any:
        calls["begin"] += 1
        if calls["begin"] == 2:
            raise Panic("index out of range")
        return begin(self, *arguments)

    def parse_or_panic(*arguments: Any) -> Any:
        calls["parse"] += 1
        if calls["parse"] == 2:
            raise Panic("index out of range")
        return parse(*arguments)

    monkeypatch.setattr(STRATEGIES["tool_delta"], "begin", begin_or_panic)
    harness.parse = parse_or_panic
    _, error = harness.run(harness.scripted(one_call_then_answer), [job(harness, n) for n in range(5)])
    errors = [one.error for one in harness.done.values() if one.error]
    assert error == "" and len(harness.done) == 5
    assert errors == ["It broke off on an error of the program: Panic: index out of range."] * 2


def test_stored_steps_are_taken_over_and_not_sampled_again(harness: Harness) -> None:
    engine = harness.scripted(one_call_then_answer)
    harness.run(engine, [job(harness, "whole")])
    whole = harness.steps["whole"]
    again = Harness(harness.tokenizer, harness.context)
    again.run(engine, [job(harness, "resumed", steps=(whole[0],))])
    assert len(again.steps["resumed"]) == 2
    assert again.steps["resumed"][1].stream.tolist() == whole[1].stream.tolist()
    assert again.done["resumed"].reward == harness.done["whole"].reward
    # All steps stored, the end not: the trajectory is scored without an engine.
    last = Harness(harness.tokenizer, harness.context)
    last.run(engine, [job(harness, "scored", steps=tuple(whole))])
    assert last.done["scored"].reward == 1.0 and "scored" not in last.steps


def test_a_stored_step_that_no_longer_fits_fails_its_trajectory(harness: Harness) -> None:
    engine = harness.scripted(one_call_then_answer)
    harness.run(engine, [job(harness, "whole")])
    odd = replace(harness.steps["whole"][0], prompt_ids=harness.steps["whole"][0].prompt_ids[:-1])
    harness.run(engine, [job(harness, "odd", steps=(odd,))])
    assert "cannot be taken up again" in harness.done["odd"].error


def test_jobs_that_are_refused_do_not_keep_later_ones_from_their_turn(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = STRATEGIES["tool_delta"].begin
    n = [0]

    def refuse_first(self: Any, *arguments: Any) -> Any:
        n[0] += 1
        if n[0] <= 5:
            raise StrategyRefused("not these")
        return begin(self, *arguments)

    monkeypatch.setattr(STRATEGIES["tool_delta"], "begin", refuse_first)
    jobs = [job(harness, key) for key in range(7)]
    harness.run(harness.scripted(one_call_then_answer), jobs, harness.limits(max_live=2))
    assert [harness.done[key].error for key in range(7)] == ["not these"] * 5 + ["", ""]


def test_each_step_has_a_seed_of_its_own_and_none_without_one() -> None:
    assert step_seed(None, 0) is None
    assert len({step_seed(seed, index) for seed in range(20) for index in range(20)}) == 400
    assert step_seed(3, 4) == step_seed(3, 4)


@pytest.mark.parametrize("name", ["transformers", pytest.param("vllm", marks=pytest.mark.vllm)])
def test_a_real_policy_plays_whole_episodes(harness: Harness, name: str, request: pytest.FixtureRequest) -> None:
    if name == "vllm":
        request.getfixturevalue("vllm_available")
    folder = str(request.getfixturevalue("tiny_tokenizer"))
    engine = EngineThread(lambda: build_engine(name, folder))
    tasks = harness.tasks(12, seed=5)
    try:
        harness.run(engine, [RolloutJob(task.index, task, seed=task.index) for task in tasks],
                    harness.limits(sampling={"temperature": 0.0}, max_live=8))
    finally:
        engine.close()
    assert len(harness.done) == 12 and not any(one.error for one in harness.done.values())
    for steps in harness.steps.values():
        for before, after in pairwise(steps):
            assert after.prompt_ids[: len(before.stream)].tolist() == before.stream.tolist()
    right = sum(one.reward == 1.0 for one in harness.done.values())
    assert right >= 8, f"the demo policy answered {right} of 12"


@pytest.mark.parametrize("strategy", [slug for slug in STRATEGIES if slug != "bridge"])
def test_every_strategy_drives_a_rollout(harness: Harness, strategy: str) -> None:
    answer = "The answer is 42.<|im_end|>"
    engine = harness.scripted(lambda _, text: answer if "42" in text else CALL)
    harness.run(engine, [job(harness)], strategy=strategy)
    done = harness.done["a"]
    assert (done.error, done.reward, len(harness.steps["a"])) == ("", 1.0, 2)
    first, second = harness.steps["a"]
    codec = harness.context.codec
    assert codec.decode(first.completion_ids) == CALL and codec.decode(second.completion_ids) == answer
    assert done.rows is None or sum(int(row.loss_mask.sum()) for row in done.rows) > 0
    if strategy not in ("single_message",):
        # On a prefix-preserving template and canonical samples all of them ask the engine the same.
        expected = Harness(harness.tokenizer, harness.context)
        expected.run(engine, [job(harness)])
        assert second.prompt_ids.tolist() == expected.steps["a"][1].prompt_ids.tolist() or strategy == "per_message"


def test_a_completion_that_a_strategy_cannot_take_fails_its_trajectory(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise StrategyRefused("not this one")

    monkeypatch.setattr(STRATEGIES["tool_delta"], "sampled", refuse)
    harness.run(harness.scripted(one_call_then_answer), [job(harness)])
    assert harness.done["a"].error == "not this one"
