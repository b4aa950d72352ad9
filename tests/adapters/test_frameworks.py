"""The adapters against the frameworks' own types, or the shapes of their released source; what is pushed is read."""

import asyncio
import contextlib
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from rollout_inspector import formats
from rollout_inspector.client.adapters import nemo_rl, prime_rl, skyrl, slime, tinker
from rollout_inspector.client.adapters.stream import RolloutStream
from rollout_inspector.formats import Source, policy_versions
from rollout_inspector.streams import alternatives
from rollout_inspector.streams.trajectory import Trajectory
from tests.adapters.conftest import FakeServer
from tests.formats.published import importable, taken_from
from tests.samples.writers import SOURCES, agent_loop_output, same_row, same_steps, skyrl_batch, split, verifiers_traces


@pytest.fixture
def stream(server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RolloutStream]:
    """The stream that the adapters share."""
    made = RolloutStream(server.url, "t", "r", folder=tmp_path)
    monkeypatch.setattr("rollout_inspector.client.adapters.stream._shared", made)
    yield made
    made.close()


def pushed(server: FakeServer, stream: RolloutStream) -> list[Trajectory]:
    """What the server would read of what it got."""
    assert stream.flush() and stream.counts.dropped == 0, stream.counts
    found: list[Any] = []
    for _, _, records in server.pushes:
        data = b"".join(json.dumps(one).encode() + b"\n" for one in records)
        found += formats.read(Source.of_bytes(data))[1]
    assert all(isinstance(one, Trajectory) for one in found), found
    return found


def query(server: FakeServer) -> list[tuple[str, str | None]]:
    """Prefix without the mark of a start, and training step, of each push."""
    return [(asked.get("prefix", "").split("/")[0], asked.get("training_step")) for _, asked, _ in server.pushes]


def versions(one: Trajectory) -> list[str]:
    return [step.policy_version for step in one.steps]


# -- verl 0.9.1


class Loops:
    """What ``hydra.utils.instantiate`` makes: agent loops that return their output."""

    def __init__(self, outputs: list[Any]) -> None:
        self._outputs = iter(outputs)
        self.utils = SimpleNamespace(instantiate=lambda **_: self)

    async def run(self, sampling_params: Any, **_: Any) -> Any:
        return next(self._outputs)


@pytest.fixture
def verl(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Any]], Any]:
    """verl's own worker and manager around outputs, as modules under verl's names."""

    def installed(outputs: list[Any]) -> Any:
        taken = taken_from(
            "verl", "verl/experimental/agent_loop/agent_loop.py", ["AgentLoopWorker"],
            {
                "rollout_trace_attr": lambda **_: contextlib.nullcontext(), "hydra": Loops(outputs),
                "_agent_loop_registry": {"tool_agent": {}, "my_agent": {}}, "DictConfigWrap": lambda *_, **__: None,
                "ToolListWrap": list,
            },
            {"AgentLoopWorker": ["_run_agent_loop", "_compute_score"]},
        )

        class AgentLoopWorker(taken.AgentLoopWorker):  # type: ignore[misc, name-defined]
            def __init__(self) -> None:
                self.config = SimpleNamespace(data={})
                self.llm_client = self.tokenizer = self.processor = self.hf_model_type = None
                self.dataset_cls = self.reward_loop_worker_handles = None
                self.tools: list[Any] = []

            async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
                await self._compute_score([output], kwargs=kwargs)
                return output

        class AgentLoopManager:
            def __init__(self) -> None:
                self.agent_loop_workers_class = AgentLoopWorker

        module = ModuleType("verl.experimental.agent_loop.agent_loop")
        module.__dict__.update(AgentLoopWorker=AgentLoopWorker, AgentLoopManager=AgentLoopManager)
        actors = ModuleType("verl.trainer.ppo.v1.agent_loop_tq")
        decorated = SimpleNamespace(__ray_metadata__=SimpleNamespace(modified_class=AgentLoopWorker))
        actors.__dict__.update(AgentLoopWorkerTQ=decorated, AgentLoopManagerTQ=AgentLoopManager)
        ray = ModuleType("ray")
        ray.remote = lambda kind: kind  # type: ignore[attr-defined]
        for one in (module, actors, ray):
            monkeypatch.setitem(sys.modules, one.__name__, one)
        from rollout_inspector.client.adapters import verl as adapter

        for name in [name for name in vars(adapter) if name.startswith("StreamingAgentLoop")]:
            monkeypatch.delattr(adapter, name)
        return adapter

    return installed


@pytest.mark.parametrize("ending", ["", "TQ"])
def test_verl_outputs_with_their_reward(
    server: FakeServer, stream: RolloutStream, verl: Callable[[list[Any]], Any], ending: str
) -> None:
    kind, outputs = agent_loop_output(), []
    for value in SOURCES:
        prompt, response, mask, logprobs = split(value)
        outputs.append(
            kind(
                prompt_ids=prompt, response_ids=response, response_mask=mask, response_logprobs=logprobs,
                reward_score=value.reward, num_turns=2 * len(value.steps), metrics={},
                extra_fields={"min_global_steps": 6, "max_global_steps": 6, "reward_extra_info": {"acc": 1.0}},
            )
        )
    adapter = verl([*outputs, *outputs[:2], outputs[0]])
    manager = getattr(adapter, f"StreamingAgentLoopManager{ending}")()
    worker = manager.agent_loop_workers_class()
    assert type(worker).__module__ == adapter.__name__ and getattr(adapter, type(worker).__name__) is type(worker)

    async def run() -> None:
        for n in range(len(outputs)):
            about = {"step": 7, "sample_index": n, "rollout_n": 0, "validate": False}
            made = await worker._run_agent_loop({"temperature": 0.5}, about, agent_name="tool_agent", trace=True)
            assert made is outputs[n]
        evaluated = {"step": 7, "sample_index": 0, "rollout_n": 0, "validate": True}
        await worker._run_agent_loop({}, evaluated, agent_name="tool_agent")
        await worker._run_agent_loop({}, {**evaluated, "validate": False}, agent_name="tool_agent", trace=False)
        custom = {"step": 8, "sample_index": 9, "rollout_n": 0, "validate": False}
        await worker._run_agent_loop({}, custom, agent_name="my_agent", session_id=3, uid="u")

    asyncio.run(run())
    *found, custom = pushed(server, stream)
    assert len(found) == len(SOURCES) and query(server)[-1] == ("step-8", "8")
    for n, (one, value) in enumerate(zip(found, SOURCES, strict=True)):
        same_steps(one, value)
        same_row(one, value)
        assert (one.external_id, one.group, one.training_step) == (f"{n}-0", str(n), 7)
        assert one.reward == value.reward and one.reward_parts == {"acc": 1.0} and set(versions(one)) == {"6"}
        assert {step.temperature for step in one.steps} == {0.5}
    # A loop of somebody else may encode again: its calls are not told.
    same_row(custom, SOURCES[0])
    assert custom.steps == () and custom.extra["policy_version"] == "6" and custom.external_id == "u-3"


# -- SkyRL 0.3.0


def generator_output() -> tuple[dict[str, Any], Any]:
    made = taken_from(
        "skyrl", "skyrl/train/generators/base.py", ["TrajectoryID", "BatchMetadata"], {"dataclass": dataclass}
    )
    batch = skyrl_batch()
    batch["trajectory_ids"] = [made.TrajectoryID(**one) for one in batch["trajectory_ids"]]
    more = {"rollout_metrics": {"x": 1}, "rollout_expert_indices": None, "pixel_values": None,
            "trajectory_generation_times": [1.0]}
    return batch | more, made.BatchMetadata


@pytest.mark.parametrize("limit", [1, skyrl.MAX_PART_IDS])
def test_skyrl_batches(server: FakeServer, stream: RolloutStream, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(skyrl, "MAX_PART_IDS", limit)
    output, metadata = generator_output()

    class Generator:
        inference_engine_client = SimpleNamespace(weight_version=4)
        other = "kept"

        async def generate(self, input_batch: Any, disable_tqdm: bool = False) -> Any:
            assert disable_tqdm
            return output

    generator = skyrl.SkyRlStream(Generator(), stream)
    assert generator.other == "kept"
    for phase in ("train", "eval"):
        asked = {"prompts": [], "batch_metadata": metadata(global_step=5, training_phase=phase)}
        assert asyncio.run(generator.generate(asked, disable_tqdm=True)) is output
    output["response_ids"].clear()  # the trainer goes on with it
    found = pushed(server, stream)
    assert len(server.records) == (3 if limit == 1 else 1) and set(query(server)) == {("step-5", "5")}
    for one, value in zip(found, SOURCES, strict=True):
        same_steps(one, value)
        assert (one.external_id, one.group, one.reward) == (value.external_id, value.group, value.reward)
        assert set(versions(one)) == {"4"}


# -- verifiers 0.4.0, prime-rl 0.5.0


def test_verifiers_episodes_as_they_end(server: FakeServer, stream: RolloutStream) -> None:
    with verifiers_traces() as (modules, traces):
        work = {"type": "train", "step": 2, "policy": {"start": 8, "end": 8}}
        episodes = iter(
            modules.episode.WireEpisode(
                id=value.external_id, task=one.task, traces=[one], run={"type": "train", "id": "x", "work": work}
            )
            for one, value in zip(traces, SOURCES, strict=True)
        )

        class Environment:
            async def run_episode(self, task: Any, ctx: Any) -> Any:
                return next(episodes)

        env = prime_rl.stream_episodes(Environment(), stream)
        for _ in SOURCES:
            asyncio.run(env.run_episode("task", ctx=None))
        found = pushed(server, stream)
    for one, value in zip(found, SOURCES, strict=True):
        same_steps(one, value)
        assert (one.external_id, one.group, one.reward) == (value.external_id, value.group, value.reward)
        assert set(versions(one)) == {"8"}


def test_prime_rl_rollouts_of_a_step(server: FakeServer, stream: RolloutStream) -> None:
    """``prime_rl.orchestrator.types.Rollout`` of 0.5.0 is a trace whose ``to_dict`` adds these fields."""
    logged: list[Any] = []
    monitor = SimpleNamespace(
        history=[1], log_samples=lambda rollouts, step: logged.append((rollouts, step)), close=lambda: "closed"
    )
    with verifiers_traces() as (modules, traces):

        class Rollout(modules.trace.WireTrace):  # type: ignore[misc, name-defined]
            def to_dict(self) -> dict[str, Any]:
                out = self.model_dump(
                    mode="json", exclude={"nodes": {"__all__": {"multi_modal_data", "routed_experts"}}}
                )
                return out | {"kind": "train", "env_name": "e", "group_id": "g", "policy_version": 3, "advantage": 0.5}

        rollouts = [Rollout(**dict(one)) for one in traces]
        masks = [node for node in rollouts[0].nodes if node.sampled]
        for node in masks:
            node.sampling_mask = modules.kinds.SamplingMask.from_sampling_mask([[1, 2]] * sum(node.mask))
        kept = prime_rl.PrimeRlStream(monitor, stream)
        kept.log_samples(iter(rollouts), 12)
        assert logged == [(rollouts, 12)] and kept.history == [1] and kept.close() == "closed"
        found = pushed(server, stream)
    assert query(server) == [("step-12", "12")]
    for one, value in zip(found, SOURCES, strict=True):
        same_steps(one, value)
        assert (one.group, one.reward, set(versions(one))) == ("g", value.reward, {"3"})
    sizes = [step.kept_set for step in found[0].steps]
    assert len(sizes) == len(masks) and all(size is not None and (size == 2).all() for size in sizes)
    assert prime_rl.MAX_KEPT == alternatives.MAX_KEPT
    assert all(step.kept_ids is not None and step.kept_ids.tolist()[:2] == [1, 2] for step in found[0].steps)
    assert all(step.kept_set is step.kept_ids is None for one in found[1:] for step in one.steps)


def test_prime_rl_rollouts_of_older_versions(server: FakeServer, stream: RolloutStream) -> None:
    """Dicts with a ``trajectory``, whose tokens the trainer takes out when they are logged."""
    rollouts = [
        {"example_id": 1, "reward": value.reward, "policy_version": 3, "trajectory": [
            {"tokens": {"prompt_ids": step.prompt_ids.tolist(), "completion_ids": step.completion_ids.tolist(),
                        "completion_logprobs": np.asarray(step.logprobs, dtype=np.float64).tolist()}}
            for step in value.steps
        ]}
        for value in SOURCES
    ]

    def compact(kept: Any, step: int) -> None:
        for one in kept:
            one["trajectory"] = None

    prime_rl.PrimeRlStream(SimpleNamespace(log_samples=compact), stream).log_samples(rollouts, step=1)
    for one, value in zip(pushed(server, stream), SOURCES, strict=True):
        same_steps(one, value)
        assert (one.group, one.reward, set(versions(one))) == ("1", value.reward, {"3"})


# -- slime 0.4.0, miles 0.2.1


class Status(Enum):
    COMPLETED = "completed"
    TRUNCATED = "truncated"


@dataclass
class Sample:
    """The fields of ``slime.utils.types.Sample`` that the adapter reads; miles' are the same."""

    group_index: int | None = None
    index: int | None = None
    prompt: str | list[dict[str, str]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: str | None = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] | None = None
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    remove_sample: bool = False
    status: Status = Status.COMPLETED


def slime_samples() -> list[list[Sample]]:
    found = []
    for n, value in enumerate(SOURCES):
        prompt, response, mask, logprobs = split(value)
        found.append(
            Sample(
                n // 2, n, "p", prompt + response, "r", len(response), reward={"acc": value.reward, "len": 1.0},
                loss_mask=mask, rollout_log_probs=logprobs, weight_versions=["5"] * len(value.steps),
            )
        )
    return [found[:2], found[2:]]


def sampled_by_slime(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    return SimpleNamespace(samples=data_source, metrics=None)


def check_samples(found: list[Trajectory]) -> None:
    for n, (one, value) in enumerate(zip(found, SOURCES, strict=True)):
        same_steps(one, value)
        same_row(one, value)
        assert (one.reward, one.reward_parts) == (value.reward, {"acc": value.reward, "len": 1.0})
        assert one.group == str(n // 2) and set(versions(one)) == {"5"} and one.training_step == 4


def test_slime_rollout_function(server: FakeServer, stream: RolloutStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLOUT_INSPECTOR_ROLLOUT_FUNCTION", f"{__name__}.sampled_by_slime")
    monkeypatch.setitem(sys.modules, __name__, sys.modules.get(__name__) or _this_module())
    args, samples = SimpleNamespace(reward_key="acc"), slime_samples()
    assert slime.generate_rollout(args, 4, samples).samples is samples
    slime.generate_rollout(args, 4, samples, evaluation=True)
    check_samples(pushed(server, stream))
    assert query(server) == [("rollout-4", "4")]


def _this_module() -> ModuleType:
    module = ModuleType(__name__)
    module.__dict__.update(globals())
    return module


def test_miles_rollout_classes(server: FakeServer, stream: RolloutStream, monkeypatch: pytest.MonkeyPatch) -> None:
    class RolloutFn:
        def __init__(self, input: Any) -> None:
            self.samples = input.data_source

        async def __call__(self, input: Any) -> Any:
            return SimpleNamespace(samples=self.samples, metrics=None)

    monkeypatch.setattr(slime, "_inner", lambda: RolloutFn)
    begun = SimpleNamespace(args=SimpleNamespace(reward_key="acc"), data_source=slime_samples())
    function = slime.RolloutFunction(begun)
    for evaluation in (False, True):
        made = asyncio.run(function(SimpleNamespace(rollout_id=4, evaluation=evaluation)))
        assert made.samples is begun.data_source
    check_samples(pushed(server, stream))


def test_slime_tells_no_calls_that_it_does_not_know(server: FakeServer, stream: RolloutStream) -> None:
    """A partial rollout goes on with other weights, without a gap between its calls; a removed one is not trained."""
    going_on = Sample(0, 0, tokens=[1, 2, 3, 4], response_length=3, weight_versions=["1", "2"], reward=0.5)
    removed = Sample(0, 1, tokens=[1, 2, 3], response_length=2, remove_sample=True, status=Status.TRUNCATED)
    slime.send_samples([going_on, [removed]], 0, None, stream)
    one, other = pushed(server, stream)
    assert one.steps == () and one.extra["weight_versions"] == ["1", "2"] and one.reward == 0.5
    assert other.rows[0].loss_mask.tolist() == [False] * 3 and len(other.steps) == 1 and other.stop_reason == "length"


def test_without_an_address_a_trainer_does_not_begin(
    server: FakeServer, monkeypatch: pytest.MonkeyPatch, verl: Callable[[list[Any]], Any]
) -> None:
    monkeypatch.setattr("rollout_inspector.client.adapters.stream._shared", None)
    monkeypatch.setattr(slime, "_inner", lambda: pytest.fail("the first rollout was made"))
    with pytest.raises(ValueError, match="ROLLOUT_INSPECTOR_URL"):
        slime.generate_rollout(None, 0, None)
    with pytest.raises(ValueError, match="ROLLOUT_INSPECTOR_URL"):
        verl([]).StreamingAgentLoopWorker()


def test_slime_names_what_is_missing(stream: RolloutStream, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ROLLOUT_INSPECTOR_ROLLOUT_FUNCTION", raising=False)
    with pytest.raises(ImportError, match="ROLLOUT_INSPECTOR_ROLLOUT_FUNCTION"):
        slime.generate_rollout(None, 0, None)
    monkeypatch.setenv("ROLLOUT_INSPECTOR_ROLLOUT_FUNCTION", "rollout_inspector.client.adapters.slime.generate_rollout")
    with pytest.raises(ImportError, match="another function"):
        slime.generate_rollout(None, 0, None)


# -- NeMo RL 0.5.0


def test_nemo_rl_training_data(server: FakeServer, stream: RolloutStream) -> None:
    """``grpo_train`` logs lists, right-padded to one length, and texts."""
    parts = [split(value) for value in SOURCES]
    longest = max(len(prompt) + len(response) for prompt, response, _, _ in parts)

    def padded(values: list[Any]) -> list[Any]:
        return values + [0] * (longest - len(values))

    log_data = {
        "content": ["text"] * 3, "rewards": [value.reward for value in SOURCES],
        "input_lengths": [len(prompt) + len(response) for prompt, response, _, _ in parts],
        "token_ids": [padded(prompt + response) for prompt, response, _, _ in parts],
        "token_loss_mask": [padded([0] * len(prompt) + mask) for prompt, _, mask, _ in parts],
        "sample_loss_mask": [1.0] * 3,
        "generation_logprobs": [padded([0.0] * len(prompt) + logprobs) for prompt, _, _, logprobs in parts],
        "prev_logprobs": [padded([0.0] * len(prompt) + logprobs) for prompt, _, _, logprobs in parts],
    }
    written: list[str] = []
    logger = SimpleNamespace(log_batched_dict_as_jsonl=lambda to_log, filename: written.append(filename))
    assert nemo_rl.stream_logger(logger, stream) is logger
    logger.log_batched_dict_as_jsonl({"content": ["x"]}, "val_data_step2.jsonl")
    logger.log_batched_dict_as_jsonl(log_data, "train_data_step2.jsonl")
    found = pushed(server, stream)
    assert written == ["val_data_step2.jsonl", "train_data_step2.jsonl"] and query(server) == [("step-2", "2")]
    for n, (one, value) in enumerate(zip(found, SOURCES, strict=True)):
        same_row(one, value)
        assert (one.external_id, one.reward) == (str(n), value.reward)
        assert len(one.rows[0].columns["prev_logprobs"]) == len(one.rows[0].ids)
    logger.log_batched_dict_as_jsonl({"content": ["x"]}, "train_data_step3.jsonl")  # of a version before 0.5
    assert stream.counts.dropped_unreadable == 1


# -- tinker-cookbook 0.6.1


def test_tinker_groups(server: FakeServer, stream: RolloutStream) -> None:
    around = {"dataclass": dataclass, "field": field, "safezip": lambda *lists: list(zip(*lists, strict=True))}
    kinds = taken_from(
        "tinker-cookbook", "tinker_cookbook/rl/types.py", ["Transition", "Trajectory", "TrajectoryGroup"], around
    )
    action = taken_from("tinker-cookbook", "tinker_cookbook/completers.py", ["TokensWithLogprobs"], around)
    with importable("tinker", "tinker.types", absent=["distro"]) as load:
        model_input = load("tinker.types.model_input").ModelInput
        groups = []
        for value in SOURCES:
            transitions = [
                kinds.Transition(
                    ob=model_input.from_ints(step.prompt_ids.tolist()),
                    ac=action.TokensWithLogprobs(
                        tokens=step.completion_ids.tolist(),
                        maybe_logprobs=np.asarray(step.logprobs, dtype=np.float64).tolist(),
                    ),
                    reward=0.0, episode_done=step is value.steps[-1],
                )
                for step in value.steps
            ]
            one = kinds.Trajectory(transitions, model_input.from_ints([]), "done")
            groups.append(kinds.TrajectoryGroup([one], [value.reward], [{}]))
        done: list[Any] = []

        async def step(config: Any, i_batch: int, *args: Any) -> str:
            done.append(args)
            return "sampling client"

        train = SimpleNamespace(do_train_step_and_get_sampling_client=step)
        assert tinker.stream_training(train, stream) is stream
        given = ("client", "checkpoints", None, "tokenizer", [], groups)
        assert asyncio.run(train.do_train_step_and_get_sampling_client("config", 6, *given)) == "sampling client"
        assert done == [given]
        found = pushed(server, stream)
    assert query(server) == [("step-6", "6")]
    for n, (trajectory, value) in enumerate(zip(found, SOURCES, strict=True)):
        same_steps(trajectory, value)
        assert (trajectory.external_id, trajectory.reward, trajectory.stop_reason) == (f"{n}-0", value.reward, "done")


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: skyrl.SkyRlStream(object(), url="http://x", token="t"),
        lambda: prime_rl.PrimeRlStream(object(), url="http://x", token="t"),
        lambda: prime_rl.stream_episodes(object(), url="http://x", token="t"),
        lambda: nemo_rl.stream_logger(object(), url="http://x", token="t"),
        lambda: tinker.stream_training(object(), url="http://x", token="t"),
    ],
)
def test_another_object_gets_a_sentence_at_the_start(wrong: Callable[[], Any]) -> None:
    with pytest.raises(TypeError, match=r"has no \w+"):
        wrong()


def test_a_call_of_another_version_stops_no_training(
    server: FakeServer, stream: RolloutStream, verl: Callable[[list[Any]], Any]
) -> None:
    """What the trainer hands over goes on as it is; what is not known of it is counted."""
    logged: list[Any] = []

    class Monitor:  # of prime-rl before 0.2
        def log_samples(self, input_tokens: Any, output_tokens: Any, step: int) -> None:
            logged.append((input_tokens, output_tokens, step))

    prime_rl.PrimeRlStream(Monitor(), stream).log_samples(input_tokens=[[1]], output_tokens=[[2]], step=4)
    assert logged == [([[1]], [[2]], 4)] and stream.counts.dropped_unreadable == 1

    class Worker:  # of verl before 0.9
        async def _compute_score(self, output: Any, prompts: Any, kwargs: Any) -> None:
            logged.append((output, prompts, kwargs))

    adapter = verl([])
    worker = type("Ours", (adapter.StreamsOutputs, Worker), {})()
    token = adapter._sample.set({"step": 1, "agent_name": "a", "sample_index": 0, "temperature": 1.0})
    asyncio.run(worker._compute_score("output", "prompts", kwargs={}))
    adapter._sample.reset(token)
    assert logged[-1] == ("output", "prompts", {}) and stream.counts.dropped_unreadable == 2

    class Generator:
        async def generate(self, prompts: Any) -> Any:
            return {"texts": prompts}

    assert asyncio.run(skyrl.SkyRlStream(Generator(), stream).generate(["p"])) == {"texts": ["p"]}
    assert stream.counts.dropped_unreadable == 3
    logger = SimpleNamespace(log_batched_dict_as_jsonl=lambda to_log, filename: logged.append(filename))
    nemo_rl.stream_logger(logger, stream).log_batched_dict_as_jsonl([], Path("train_data_step1.jsonl"))
    assert logged[-1] == Path("train_data_step1.jsonl") and stream.counts.dropped_unreadable == 4


def test_a_policy_version_of_the_record_goes_to_the_calls_that_tell_none() -> None:
    read = policy_versions.of_record
    assert read({"policy_version": 3}) == "3" and read({"weight_version": "v2"}) == "v2"
    assert read({"policy_version": True}) == read({"policy_version": None}) == read({}) == ""
