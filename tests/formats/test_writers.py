"""What the published frameworks write with their own code is imported, and compared field by field with its source."""

import dataclasses
import io
import json
import logging
import os
import re
from collections.abc import Mapping
from pathlib import Path
from queue import Queue
from threading import Thread
from types import SimpleNamespace
from typing import Any, Literal, Optional, Union

import numpy as np
import pytest
from pydantic import BaseModel, Field, ValidationError

from rollout_inspector import formats
from rollout_inspector.formats import Source
from rollout_inspector.formats.writers.exports import EXPORTS, rows_of, write
from rollout_inspector.streams.trajectory import Trajectory
from tests.conftest import ROOT
from tests.formats.published import importable, taken_from
from tests.samples.writers import SOURCES, agent_loop_output, same_row, same_steps, skyrl_batch, split, verifiers_traces


def imported(name: str, data: bytes | Path) -> list[Trajectory]:
    file = Source.of_path(data) if isinstance(data, Path) else Source.of_bytes(data)
    chosen, items = formats.read(file)
    found = list(items)
    assert chosen.name == name and all(isinstance(one, Trajectory) for one in found), found
    return found  # type: ignore[return-value]


def lines(values: list[Any]) -> bytes:
    return b"".join(json.dumps(one).encode() + b"\n" for one in values)


def exported(name: str, *values: Trajectory) -> list[Any]:
    file = io.BytesIO()
    write(EXPORTS[name], values, file)
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_the_docs_name_the_versions_that_are_tested() -> None:
    pins = [path.read_text() for path in (ROOT / "tests/formats").glob("requirements-*.txt")]
    said = (ROOT / "docs/formats.md").read_text()
    for name, version in re.findall(r"^([\w-]+)==(\S+)$", "\n".join(pins), re.MULTILINE):
        assert f"{name} {version}" in said or name in ("prime-pydantic-config", "renderers"), name


# -- SkyRL


def merged_by_skyrl(batch: Mapping[str, Any]) -> dict[str, Any]:
    helpers = ["_is_prefix", "_slice_generator_output", "_merge_single_trajectory", "merge_stepwise_output"]

    def joined(slices: list[dict[str, Any]], step_wise: bool) -> dict[str, Any]:
        lists = [key for key, value in slices[0].items() if isinstance(value, list)]
        return {key: [item for one in slices for item in one[key]] for key in lists}

    around = {"concatenate_generator_outputs": joined}
    code = taken_from("skyrl", "skyrl/train/generators/utils.py", helpers, around)
    return dict(code.merge_stepwise_output({**batch, "rollout_metrics": None, "rollout_expert_indices": None}))


def test_skyrl_steps() -> None:
    batch = skyrl_batch()
    validator = ["validate_generator_output", "_validate_step_wise_fields"]
    around = {"np": np, "logger": logging.getLogger("skyrl")}
    code = taken_from("skyrl", "skyrl/train/utils/trainer_utils.py", validator, around)
    code.validate_generator_output(len(batch["response_ids"]), batch, step_wise=True)
    found = imported("skyrl", lines([batch]))
    for one, value in zip(found, SOURCES, strict=True):
        same_steps(one, value)
        assert (one.external_id, one.group, one.reward) == (value.external_id, value.group, value.reward)
    for one, value in zip(imported("skyrl", lines([merged_by_skyrl(batch)])), SOURCES, strict=True):
        (row,), (other,) = rows_of(one), rows_of(value)
        assert row.ids.tolist() == other.ids.tolist() and row.loss_mask.tolist() == other.loss_mask.tolist()
    (ours,) = exported("skyrl_step_wise", *SOURCES)
    theirs = merged_by_skyrl(ours)  # their merge of our steps gives one row for each trajectory
    assert [p + r for p, r in zip(theirs["prompt_token_ids"], theirs["response_ids"], strict=True)] == [
        rows_of(value)[0].ids.tolist() for value in SOURCES
    ]


# -- verl


def test_verl_values() -> None:
    kind, written = agent_loop_output(), b""
    for value in SOURCES:
        prompt, response, mask, logprobs = split(value)
        one = kind(
            prompt_ids=prompt, response_ids=response, response_mask=mask, response_logprobs=logprobs,
            reward_score=value.reward, num_turns=2 * len(value.steps), metrics={"tool_calls": 0.5},
        )
        written += one.model_dump_json().encode() + b"\n"
    for one, value in zip(imported("verl_agent_loop", written), SOURCES, strict=True):
        same_row(one, value)
        assert one.reward == value.reward and one.extra["num_turns"] == 2 * len(value.steps)
    with pytest.raises(ValidationError, match="metrics"):
        kind.model_validate({"prompt_ids": [1], "response_ids": [2], "response_mask": [1]})
    for line, theirs in zip(exported("verl", *SOURCES), written.splitlines(), strict=True):
        accepted = kind.model_validate(line, strict=True).model_dump()
        wanted = kind.model_validate_json(theirs).model_dump()
        for name in ("prompt_ids", "response_ids", "response_mask", "response_logprobs", "reward_score", "num_turns"):
            assert accepted[name] == wanted[name], name


# -- TRL


def test_trl_completions(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    around = {
        "Base": type("Base", (), {"log": lambda *_: None}), "is_rich_available": lambda: False, "pd": pandas,
        "os": os, "math": None, "strip_images_from_messages": lambda messages: messages,
    }
    kind = taken_from(
        "trl", "trl/trainer/grpo_trainer.py", ["GRPOTrainer"], around, {"GRPOTrainer": ["log"]}
    ).GRPOTrainer
    trainer = kind()
    trainer.model, trainer.state = SimpleNamespace(training=True), SimpleNamespace(global_step=3)
    trainer._metrics, trainer.accelerator = {"train": {}}, SimpleNamespace(is_main_process=True)
    trainer.args = SimpleNamespace(report_to=[], output_dir=str(tmp_path))
    trainer.log_completions, trainer.log_unique_prompts, trainer.num_completions_to_print = True, False, None
    (tmp_path / "completions").mkdir()
    for prompt, completion in (
        ("p", "c"),
        ([{"role": "user", "content": "p"}], [{"role": "assistant", "content": "c"}]),
    ):
        trainer._logs = {
            "prompt": [prompt] * 2, "completion": [completion] * 2, "advantages": [0.5, -0.5], "extra": {},
            "rewards": {"right": [1.0, 0.0], "form": [0.25, 0.25]}, "images": None,
        }
        trainer.log({})
        found = imported("completions", tmp_path / "completions" / "completions_00003.parquet")
        assert [(one.reward, one.extra["advantage"]) for one in found] == [(1.25, 0.5), (0.25, -0.5)]
        assert found[0].reward_parts == {"right": 1.0, "form": 0.25}
        (step,) = found[0].steps
        assert step.text == "c" or step.reply == {"role": "assistant", "content": "c"}


# -- verifiers


def test_verifiers_episodes(tmp_path: Path) -> None:
    """The second schema of traces, which prime-rl writes too: what a call was is in ``calls``, not on its node."""
    with verifiers_traces() as (modules, traces):
        store = modules.load("verifiers.v1.utils.trace_store")
        for made, value in zip(traces, SOURCES, strict=True):
            for node in made.nodes:
                if node.sampled:
                    node.advantages = [0.5] * len(node.logprobs)
                    node.trainer_logprobs = [2 * one for one in node.logprobs]
            store.write_episode(
                tmp_path, modules.episode.WireEpisode(id=value.external_id, task=made.task, traces=[made])
            )
    (written,) = json.loads((tmp_path / "traces.jsonl").read_bytes().splitlines()[0])["traces"]
    assert not any("finish_reason" in node for node in written["nodes"])
    assert written["calls"][0].keys() >= {"model", "error"} and written["calls"][-1].keys() >= {"usage", "node"}
    for one, value in zip(imported("verifiers_traces", tmp_path / "traces.jsonl"), SOURCES, strict=True):
        same_steps(one, value, places=1e-4)  # the writer rounds
        assert (one.external_id, one.group, one.reward) == (value.external_id, value.group, value.reward)
        for step, other in zip(one.steps, value.steps, strict=True):
            assert step.request is not None and other.request is not None
            assert step.request.messages == other.request.messages and step.request.tools == other.request.tools
            assert step.reply == other.reply
            assert (step.finish_reason, step.temperature) == ("stop", 0.5)
            usage, endpoint = step.extra["call"]["usage"], step.extra["call"]["endpoint"]
            assert (usage["completion_tokens"], endpoint) == (len(other.completion_ids), "/chat/completions")
        (call,) = one.extra["calls"]
        assert (call["error"]["status_code"], call["error"]["message"]) == (503, "busy")
        (row,), (other_row,) = one.rows, rows_of(value)
        assert row.ids.tolist() == other_row.ids.tolist() and row.loss_mask.tolist() == other_row.loss_mask.tolist()
        assert row.columns["advantages"].tolist() == (0.5 * row.loss_mask).tolist()
        wanted = np.nan_to_num(np.asarray(other_row.logprobs)) * 2
        assert row.columns["trainer_logprobs"].tolist() == pytest.approx(wanted.tolist(), abs=1e-4)


# -- tinker


def test_tinker_data() -> None:
    absent = ["distro"]
    with importable("tinker", "tinker.types", absent=absent) as load:
        kind = load("tinker.types.datum").Datum
        model_input = load("tinker.types._pydantic_types.model_input").ModelInput
        written = []
        for value in SOURCES:
            prompt, response, mask, logprobs = split(value)
            ids, before = prompt + response, len(prompt) - 1
            inputs = {
                "target_tokens": np.array(ids[1:]), "mask": np.array([0.0] * before + mask, dtype=np.float32),
                "logprobs": np.array([0.0] * before + logprobs, dtype=np.float32),
            }
            datum = kind(model_input=model_input.from_ints(ids[:-1]), loss_fn_inputs=inputs)

            def plain(item: Any) -> Any:
                return item.tolist() if hasattr(item, "tolist") else item.model_dump()

            written.append(json.loads(json.dumps(dataclasses.asdict(datum), default=plain)))
        for one, value in zip(imported("tinker_data", lines(written)), SOURCES, strict=True):
            same_row(one, value)
        for line, theirs in zip(exported("tinker", *SOURCES), written, strict=True):
            given = {name: np.array(item) for name, item in line.items() if name != "model_input" and item is not None}
            ours = kind(model_input=model_input.from_ints(line["model_input"]), loss_fn_inputs=given)
            assert ours.model_input.to_ints() == [
                t for chunk in theirs["model_input"]["chunks"] for t in chunk["tokens"]
            ]
            for name, tensor in theirs["loss_fn_inputs"].items():
                assert ours.loss_fn_inputs[name].tolist() == pytest.approx(tensor["_numpy"])


# -- ms-swift


def test_swift_completions(tmp_path: Path) -> None:
    around = {
        "json": json, "os": os, "Queue": Queue, "Thread": Thread, "is_master": lambda: True, "logger": None,
        "Literal": Literal, "Union": Union, "check_json_format": lambda value: value, "dist": None,
    }
    writer = taken_from("ms-swift", "swift/utils/io_utils.py", ["JsonlWriter"], around).JsonlWriter(
        str(tmp_path / "completions.jsonl")
    )
    writer.append(
        {"gen_step": [1, 1], "prompt": ["a", "b"], "completion": ["Ä", "B"], "Accuracy": [1.0, 0.0],
         "advantages": [0.5, -0.5]}
    )
    found = imported("completions", tmp_path / "completions.jsonl")
    assert [(one.steps[0].text, one.reward, one.extra["advantages"]) for one in found] == [
        ("Ä", 1.0, 0.5), ("B", 0.0, -0.5),
    ]


# -- ART


def test_art_groups(tmp_path: Path) -> None:
    with importable("art", "art.utils", absent=["litellm"]) as load:
        kinds, writer = load("art.trajectories"), load("art.utils.trajectory_logging")
        from openai.types.chat.chat_completion import Choice

        def made(value: Trajectory) -> Any:
            last = value.steps[-1]
            assert last.request is not None and last.reply is not None
            messages = [
                Choice(finish_reason="stop", index=0, message=one) if one["role"] == "assistant" else one  # type: ignore[arg-type]
                for one in (*last.request.messages, last.reply)
            ]
            return kinds.Trajectory(
                messages_and_choices=messages, reward=value.reward, tools=list(last.request.tools or ()),
                metadata={"id": value.external_id},
            )

        groups = [kinds.TrajectoryGroup([made(one) for one in SOURCES if one.group == name]) for name in ("a", "b")]
        writer.write_trajectory_groups_parquet(groups, tmp_path / "art.parquet")
    for one, value in zip(imported("art", tmp_path / "art.parquet"), SOURCES, strict=True):
        assert (one.group, one.reward) == ("0" if value.group == "a" else "1", value.reward)
        assert one.extra == {"metadata": {"id": value.external_id}}
        for step, other in zip(one.steps, value.steps, strict=True):
            assert step.request is not None and other.request is not None and other.reply is not None
            wanted = [{**message, "content": message["content"] or ""} for message in other.request.messages]
            assert list(step.request.messages) == wanted and step.request.tools == other.request.tools
            assert step.reply == {**other.reply, "content": other.reply["content"] or ""}


# -- atropos and agent-lightning


def test_atropos_groups() -> None:
    made = taken_from(
        "atroposlib", "atroposlib/envs/server_handling/managed_server.py", ["SequenceNode", "ManagedServer"],
        {"BaseModel": BaseModel, "Optional": Optional, "Dict": dict, "List": list, "Any": Any},
        {"ManagedServer": ["_create_sequence_node"]}, lazy=False,
    )
    groups = []
    for name in ("a", "b"):
        nodes = []
        for value in (one for one in SOURCES if one.group == name):
            node = None
            for step in value.steps:
                node = made.ManagedServer()._create_sequence_node(
                    "", None, step.prompt_ids.tolist(), step.completion_ids.tolist(),
                    np.asarray(step.logprobs, dtype=np.float64).tolist(), "", extending_node=node,
                )
            nodes.append((node, value.reward))
        groups.append(
            {"tokens": [one.tokens for one, _ in nodes], "masks": [one.masked_tokens for one, _ in nodes],
             "scores": [reward for _, reward in nodes], "inference_logprobs": [one.logprobs for one, _ in nodes]}
        )
    found = imported("atropos", lines(groups))
    for one, value in zip(found, SOURCES, strict=True):
        same_row(one, value)
        assert one.reward == value.reward
    assert [one.group for one in found] == ["line-1", "line-1", "line-2"]


def test_agent_lightning_rollouts() -> None:
    made = taken_from(
        "agentlightning", "agentlightning/types/core.py", ["Triplet", "RolloutLegacy"],
        {"BaseModel": BaseModel, "Optional": Optional, "Dict": dict, "List": list, "Any": Any, "Task": dict,
         "Field": Field}, lazy=False,
    )
    written = []
    for value in SOURCES:
        triplets = [
            made.Triplet(
                prompt={"token_ids": step.prompt_ids.tolist()},
                response={"token_ids": step.completion_ids.tolist(),
                          "logprobs": [{"logprob": float(one)} for one in np.asarray(step.logprobs)]},
                reward=value.reward if step is value.steps[-1] else None,
            )
            for step in value.steps
        ]
        written.append(made.RolloutLegacy(rollout_id=value.external_id, triplets=triplets).model_dump(mode="json"))
    for one, value in zip(imported("agent_lightning", lines(written)), SOURCES, strict=True):
        same_steps(one, value)
        assert (one.external_id, one.reward) == (value.external_id, value.reward)
