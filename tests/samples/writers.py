"""Rollouts in the types of the frameworks that write them."""

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
from pydantic import BaseModel

from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.streams.trajectory import Request, Step, Trajectory
from tests.formats.published import importable, taken_from

TOOL = {"name": "calc", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}


def source(name: str, turns: int, seed: int, group: str) -> Trajectory:
    """A trajectory as a harness sends it: the model calls a tool, then answers. Ids are random and never canonical."""
    rng = np.random.default_rng(seed)
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Café."}, {"role": "user", "content": f"{seed} + 1?"},
    ]
    prompt, steps = rng.integers(0, 900, 9, dtype=np.int32), []
    for turn in range(turns):
        completion = rng.integers(0, 900, 4 + turn, dtype=np.int32)
        reply: dict[str, Any] = {"role": "assistant", "content": f"It is {turn}."}
        if turn < turns - 1:
            function = {"name": "calc", "arguments": f'{{"n": {turn}}}'}
            call = {"id": f"c{seed}{turn}", "type": "function", "function": function}
            reply = {"role": "assistant", "content": None, "tool_calls": [call]}
        steps.append(
            Step(
                prompt, completion, -rng.random(len(completion), dtype=np.float32), finish_reason="stop",
                request=Request(tuple(messages), ({"type": "function", "function": TOOL},)), reply=reply,
            )
        )
        said = {"role": "tool", "content": str(turn), "tool_call_id": f"c{seed}{turn}"}
        messages = [*messages, reply, said]
        prompt = np.concatenate([prompt, completion, rng.integers(0, 900, 3, dtype=np.int32)])
    return Trajectory(name, tuple(steps), reward=0.25 * seed, group=group)


SOURCES = [source("a-0", 3, 1, "a"), source("a-1", 1, 2, "a"), source("b-0", 4, 3, "b")]


def same_steps(found: Trajectory, wanted: Trajectory, places: float = 0) -> None:
    for one, other in zip(found.steps, wanted.steps, strict=True):
        assert one.prompt_ids.tolist() == other.prompt_ids.tolist()
        assert one.completion_ids.tolist() == other.completion_ids.tolist()
        assert np.asarray(one.logprobs).tolist() == pytest.approx(
            np.asarray(other.logprobs).tolist(), abs=places or 1e-7
        )


def same_row(found: Trajectory, wanted: Trajectory) -> None:
    (row,), (other,) = found.rows, rows_of(wanted)
    assert row.ids.tolist() == other.ids.tolist() and row.loss_mask.tolist() == other.loss_mask.tolist()
    assert row.logprobs is not None and other.logprobs is not None
    assert row.logprobs[row.loss_mask].tolist() == pytest.approx(other.logprobs[other.loss_mask].tolist(), abs=1e-7)


def split(value: Trajectory) -> tuple[list[int], list[int], list[int], list[float]]:
    """Prompt, response, mask and logprobs of the one row, as trainers hold them."""
    (row,), at = rows_of(value), len(value.steps[0].prompt_ids)
    logprobs = np.nan_to_num(np.asarray(row.logprobs, dtype=np.float64))
    return row.ids[:at].tolist(), row.ids[at:].tolist(), row.loss_mask[at:].astype(int).tolist(), logprobs[at:].tolist()


def skyrl_batch() -> dict[str, Any]:
    """Steps as ``SkyRLGymGenerator.agent_loop`` makes them: its own TurnOutput joins the observation to the output."""
    turn_output = taken_from(
        "skyrl", "skyrl/train/generators/skyrl_gym_generator.py", ["TurnOutput"],
        {"dataclass": dataclasses.dataclass},
    ).TurnOutput
    batch: dict[str, Any] = {
        key: [] for key in ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons",
                            "rollout_logprobs", "trajectory_ids", "is_last_step")
    }
    for value in SOURCES:
        for n, step in enumerate(value.steps):
            stream, is_last = step.stream, n == len(value.steps) - 1
            behind = [] if is_last else value.steps[n + 1].prompt_ids[len(stream) :].tolist()
            turn = turn_output(
                output="", output_ids=step.completion_ids.tolist(), new_obs=[], obs_ids=behind, reward=0.0,
                output_logprobs=np.asarray(step.logprobs, dtype=np.float64).tolist(), rollout_expert_indices=None,
            )
            response = turn.output_ids + turn.obs_ids
            rewards = [0.0] * len(response)
            rewards[len(turn.output_ids) - 1] = value.reward if is_last else 0.0
            for key, item in zip(
                batch,
                (step.prompt_ids.tolist(), response, rewards, turn.get_turn_loss_mask(), "stop",
                 turn.get_turn_rollout_logprobs(),
                 {"instance_id": value.group, "repetition_id": int(value.external_id[-1])}, is_last),
                strict=True,
            ):
                batch[key].append(item)
    return batch


def agent_loop_output() -> type[BaseModel]:
    made = taken_from(
        "verl", "verl/experimental/agent_loop/agent_loop.py", ["AgentLoopMetrics", "AgentLoopOutput"],
        {"BaseModel": BaseModel, "Optional": Optional, "Any": Any}, lazy=False,
    )
    kind: type[BaseModel] = made.AgentLoopOutput
    return kind


@contextlib.contextmanager
def verifiers_traces() -> Iterator[tuple[Any, list[Any]]]:
    """verifiers' own modules and a trace of each source, with the record of each call, and of one that failed."""
    absent = ["anthropic", "prime_sandboxes", "tenacity", "aiohttp", "datasets", "mcp", "acp"]
    with importable("verifiers", "verifiers.v1", "verifiers.v1.utils", absent=absent) as load:
        kinds, graph, trace, episode = (load(f"verifiers.v1.{name}") for name in ("types", "graph", "trace", "episode"))

        def message(value: Mapping[str, Any]) -> Any:
            calls = [{"id": call["id"], **call["function"]} for call in value.get("tool_calls", ())]
            role = {"system": "System", "user": "User", "assistant": "Assistant", "tool": "Tool"}[value["role"]]
            return getattr(kinds, f"{role}Message")(**{**value, **({"tool_calls": calls} if calls else {})})

        made = []
        for value in SOURCES:
            task = {"type": "T", "data": {}, "key": value.group}
            one = trace.WireTrace(
                task=task, agent={"config": {}}, rewards={"right": {"score": value.reward, "weight": 1}}
            )
            for step in value.steps:
                assert step.request is not None
                turn = graph.prepare_turn(one, [message(each) for each in step.request.messages], [kinds.Tool(**TOOL)])
                prompt, completion = step.prompt_ids.tolist(), step.completion_ids.tolist()
                tokens = kinds.TurnTokens(
                    prompt_ids=prompt, completion_ids=completion,
                    completion_logprobs=np.asarray(step.logprobs, dtype=np.float64).tolist(),
                )
                reply = message(step.reply or {})
                node = turn.commit(
                    kinds.Response(id="r", created=0, model="m", message=reply, finish_reason="stop", tokens=tokens)
                )
                usage = kinds.Usage(prompt_tokens=len(prompt), completion_tokens=len(completion))
                failed = trace.ModelCall(model="m", error=trace.Error(type="E", message="busy", status_code=503))
                one.calls += [failed] if node == 2 else []
                one.calls.append(
                    trace.ModelCall(node=node, model="m", sampling={"temperature": 0.5}, endpoint="/chat/completions",
                                    finish_reason="stop", usage=usage)
                )
            made.append(one)
        yield SimpleNamespace(trace=trace, episode=episode, kinds=kinds, load=load), made
