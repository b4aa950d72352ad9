"""Formats of trainers and environments: the documented shape is read; what breaks its rules is rejected."""

import json
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import diagnose
from rollout_inspector.formats import Source, detect
from tests.samples.formats import changed, jsonl, read
from tests.samples.trainer_formats import (
    ATROPOS, CAPTURE, EXPORT, LEGACY, LIGHTNING, RLLM, SKYRL, SKYRL_OBSERVED, TRACE, TRACE_04
)
from tests.storage.build import assert_same


def test_captured_calls_are_ordered_by_prompt_length() -> None:
    later = changed(CAPTURE, "prompt_token_ids", to=[1, 2, 10, 11, 5])
    name, (one,), rejected = read(jsonl(later, CAPTURE))
    assert (name, rejected, one.external_id, one.tokenizer) == ("token_capture", [], "r1", "m")
    assert [step.prompt_ids.tolist() for step in one.steps] == [[1, 2], [1, 2, 10, 11, 5]]
    assert one.steps[0].reply == {"role": "assistant", "content": "4"}
    _, found, (refused,) = read(jsonl(changed(CAPTURE, "schema_version", to=2)))
    assert not found and "schema_version is 2" in refused.reason


def test_a_tree_of_messages_becomes_steps() -> None:
    name, (one,), rejected = read(jsonl(TRACE))
    assert (name, rejected, one.external_id, one.reward) == ("verifiers_traces_0_3", [], "e1", 1.5)
    assert [step.prompt_ids.tolist() for step in one.steps] == [[1, 2, 3], [1, 2, 3, 10, 11, 20, 3], [1, 2, 3]]
    assert [step.completion_ids.tolist() for step in one.steps] == [[10, 11], [30], [40]]
    assert [step.finish_reason for step in one.steps] == ["tool_calls", "stop", ""]
    assert one.steps[1].logprobs is not None and one.steps[1].logprobs.tolist() == pytest.approx([-0.1])
    assert one.steps[1].extra["new_messages"] == [{"role": "tool", "content": "x"}]


def test_a_trace_of_verifiers_0_4_has_whole_requests_and_the_trainers_columns() -> None:
    """The root has the tools, the path has the messages; columns are as compact as logprobs."""
    (trace,) = TRACE_04["traces"]
    nodes = trace["nodes"]
    (one,) = read(jsonl({"traces": [trace]}))[1]
    first, last = one.steps
    assert first.request is not None and last.request is not None
    function = {"name": "calc", "description": "", "parameters": {}}
    assert first.request.tools == last.request.tools == ({"type": "function", "function": function},)
    assert [message["role"] for message in last.request.messages] == ["user", "assistant", "tool"]
    wire = {"id": "c1", "type": "function", "function": {"name": "calc", "arguments": "{}"}}
    assert last.request.messages[1] == first.reply == {"role": "assistant", "content": None, "tool_calls": [wire]}
    assert last.request.chat_template_kwargs == {"enable_thinking": False} and last.temperature == 0.5
    (row,) = one.rows
    assert row.ids.tolist() == [1, 2, 3, 10, 11, 20, 3, 30] and row.step_indices == (0, 1)
    assert np.flatnonzero(row.loss_mask).tolist() == [3, 4, 7] and row.columns.keys() == {
        "advantages",
        "trainer_logprobs",
    }
    assert row.columns["trainer_logprobs"].tolist()[:7] == [0, 0, 0, -1.0, -0.5, 0, 0]
    assert np.isnan(row.columns["advantages"][7])  # the trainer wrote none on this node
    assert "new_messages" not in last.extra and "advantages" not in first.extra

    untold = {**trace, "nodes": [{**nodes[0], "tools": None}, *nodes[1:]]}
    del untold["nodes"][0]["tools"]  # older: tools of the trace alone
    (older,) = read(jsonl({"traces": [untold]}))[1]
    assert [step.request for step in older.steps] == [None, None]
    (none,) = read(jsonl({"traces": [{**untold, "tools": []}]}))[1]
    assert none.steps[0].request is not None and none.steps[0].request.tools is None
    wrong = changed({"traces": [trace]}, "traces", 0, "nodes", 1, "trainer_logprobs", to=[-1.0])
    _, found, (rejected,) = read(jsonl(wrong))
    assert not found and "nodes[1].trainer_logprobs has 1 elements for 2 sampled tokens" in rejected.reason


def test_a_compact_logprob_stays_with_its_token_when_the_mask_has_a_hole() -> None:
    node = {"message": {"role": "assistant"}, "sampled": True, "token_ids": [1, 2, 3, 4], "mask": [0, 1, 0, 1],
            "logprobs": [-0.5, -0.25]}
    _, (one,), _ = read(jsonl({"traces": [{"nodes": [node]}]}))
    logprobs = one.steps[0].logprobs
    assert logprobs is not None and logprobs[[0, 2]].tolist() == [-0.5, -0.25] and np.isnan(logprobs[1])


def test_rewards_with_weights_and_rewards_that_were_not_scored() -> None:
    """verifiers writes a score with its weight, and null where scoring did not run; the task is the group."""
    rewards = {"right": {"score": 1.0, "weight": 0.5}, "form": {"score": 1.0, "weight": 1.0}, "late": None}
    (trace,) = TRACE["traces"]
    written = {**trace, "id": "t1", "rewards": rewards, "task": {"type": "T", "data": {}, "key": "task-7"}}
    written["calls"] = [{"node": 1, "sampling": {"temperature": 0.5}}]
    _, (one,), rejected = read(jsonl({"traces": [written]}))
    assert (rejected, one.external_id, one.group, one.reward) == ([], "t1", "task-7", 1.5)
    assert one.reward_parts == {"right": 0.5, "form": 1.0} and one.steps[0].temperature == 0.5
    _, (one,), _ = read(jsonl({"traces": [{**written, "rewards": {"late": None}}], "group": {"id": "g"}}))
    assert (one.reward, one.reward_parts, one.group) == (None, {}, "g")
    _, found, (refused,) = read(jsonl({"traces": [{**written, "rewards": {"right": {"score": "1"}}}]}))
    assert not found and "rewards.right.score must be a number, not a text" in refused.reason
    _, found, (refused,) = read(jsonl({"traces": []}, TRACE))
    assert len(found) == 1 and "traces is empty" in refused.reason


@pytest.mark.parametrize("parent", [5, 1, -1, "0"])
def test_a_node_hangs_on_an_earlier_one(parent: Any) -> None:
    _, found, (rejected,) = read(jsonl(changed(TRACE, "traces", 0, "nodes", 1, "parent", to=parent)))
    assert not found and "nodes[1].parent" in rejected.reason


def test_steps_of_older_verifiers() -> None:
    name, (one,), _ = read(jsonl(LEGACY))
    assert (name, one.reward, one.group, one.steps[0].finish_reason) == ("verifiers_legacy", 0.5, "3", "length")
    assert one.steps[0].completion_ids.tolist() == [3] and one.steps[0].reply == {"role": "assistant", "content": "!"}


def test_exported_rows_bring_the_trainers_columns() -> None:
    name, (one,), _ = read(jsonl(EXPORT))
    (row,) = one.rows
    assert name == "prime_rl_export" and row.loss_mask.tolist() == [False, True, True]
    assert set(row.columns) == {"advantages", "trainer_logprobs", "entropy", "is_masked"}
    assert row.logprobs is not None and np.isnan(row.logprobs[2]) and row.extra == {"env_name": "calc"}


def test_the_reward_beside_each_token_is_the_rows_and_a_column_of_nulls_is_none() -> None:
    (one,) = read(jsonl({**EXPORT, "rewards": [0.5, 0.5, 0.5], "mismatch_kl": [None, None, None]}))[1]
    assert one.reward == 0.5 and "rewards" in one.rows[0].columns and "mismatch_kl" not in one.rows[0].columns
    (one,) = read(jsonl({**EXPORT, "rewards": [0.5, 0.0, 0.5]}))[1]
    assert one.reward is None


def test_a_step_wise_batch_is_trajectories_of_steps() -> None:
    name, (a, b), rejected = read(jsonl(SKYRL))
    assert (name, rejected, a.external_id, b.external_id, a.reward, b.reward) == ("skyrl", [], "A", "B", 1.0, 0.5)
    assert [step.completion_ids.tolist() for step in a.steps] == [[3], [4, 6]] and a.rows == ()
    masked = read(jsonl(changed(SKYRL, "loss_masks", to=[[1], [1, 0], [1]])))[1][0]
    assert [row.step_indices for row in masked.rows] == [(0,), (1,)]
    assert masked.rows[1].loss_mask.tolist() == [False] * 4 + [True, False]


def test_a_reward_may_be_one_number_for_each_step() -> None:
    _, found, rejected = read(jsonl(changed(SKYRL, "rewards", to=[0.0, 1.0, 0.5])))
    assert rejected == [] and [(one.external_id, one.reward) for one in found] == [("A", 1.0), ("B", 0.5)]


def test_a_step_of_skyrl_ends_where_its_mask_ends() -> None:
    """skyrl_gym_generator.py writes ``output_ids + obs_ids``; ``merge_stepwise_output`` joins several steps."""
    a, b = read(jsonl(SKYRL_OBSERVED))[1]
    assert [step.completion_ids.tolist() for step in a.steps] == [[3], [4]] and b.rows == ()
    assert a.steps[1].logprobs is not None and a.steps[1].logprobs.tolist() == pytest.approx([-0.2])
    assert [row.ids.tolist() for row in a.rows] == [[1, 2, 3], [1, 2, 3, 20, 4, 6]]
    assert [f.kind for f in diagnose(a, None) if f.severity == "error"] == []  # the routing counts the whole response
    merged = {key: value[1:] if isinstance(value, list) else value for key, value in SKYRL.items()}
    merged |= {"response_ids": [[4, 6, 7], [7]], "loss_masks": [[1, 0, 1], [1]], "rewards": [[0, 0, 1.0], [0.5]],
               "rollout_logprobs": [[-0.2, 0.0, -0.3], [-0.4]]}
    whole, single = read(jsonl(merged))[1]
    assert whole.steps == () and whole.rows[0].loss_mask.tolist() == [False] * 4 + [True, False, True]
    assert len(single.steps) == 1 and single.rows == ()


def test_a_mask_of_skyrl_is_no_witness_for_itself() -> None:
    """https://github.com/NovaSky-AI/SkyRL/pull/710: the template, and not the mask, tells what was sampled."""
    whole = {key: value for key, value in SKYRL_OBSERVED.items() if key not in ("is_last_step", "trajectory_ids")}
    assert all(row.origin is None for one in read(jsonl(whole))[1] for row in one.rows)


def test_a_row_knows_how_long_its_prompt_was() -> None:
    """What the prompt holds of the assistant's turn, a prefill, was not sampled."""
    batch = {"prompt_ids": [[1, 2, 3]], "completion_ids": [[4, 5]]}
    verl = {"prompt_ids": [1, 2, 3], "response_ids": [4, 5], "response_mask": [1, 1]}
    whole = {"prompt_token_ids": [[1, 2, 3]], "response_ids": [[4, 5]], "loss_masks": [[1, 1]], "rewards": [1.0]}
    for value in (batch, verl, whole):
        assert read(jsonl(value))[1][0].rows[0].extra["prompt_length"] == 3


def test_the_routing_of_a_step_of_verifiers_stands_in_its_tokens() -> None:
    """https://github.com/PrimeIntellect-ai/verifiers/pull/1423"""
    for n, expected in ((4, ["routing_misaligned"]), (3, []), (2, [])):
        (one,) = read(jsonl(changed(LEGACY, "trajectory", 0, "tokens", "routed_experts", to=[[[1, 2]]] * n)))[1]
        assert [f.kind for f in diagnose(one, None) if f.kind == "routing_misaligned"] == expected


def test_the_group_of_a_skyrl_id_is_its_instance() -> None:
    for ids in (["q_7_0", "q_7_0", "q_7_1"], [{"instance_id": "q_7", "repetition_id": n} for n in (0, 0, 1)]):
        found = read(jsonl({**SKYRL, "trajectory_ids": ids}))[1]
        assert [one.group for one in found] == ["q_7", "q_7"] and len({one.external_id for one in found}) == 2
    assert [one.group for one in read(jsonl(SKYRL))[1]] == ["", ""]


def test_a_whole_trajectory_batch_is_rows() -> None:
    batch = {key: value for key, value in SKYRL.items() if key != "is_last_step"}
    batch["trajectory_ids"] = [{"instance_id": "i", "repetition_id": n} for n in range(3)]
    _, found, _ = read(json.dumps(batch, indent=1).encode())  # over many lines
    assert [one.external_id for one in found] == ["i-0", "i-1", "i-2"] and found[0].group == "i"
    row = found[1].rows[0]
    assert row.ids.tolist() == [1, 2, 3, 20, 4, 6] and row.loss_mask.tolist() == [False] * 4 + [True] * 2
    assert row.columns["rewards"].tolist() == [0, 0, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("path", "to", "reason"),
    [
        ("is_last_step", [True], "1 elements for 3"),
        ("trajectory_ids", None, "needs both"),
        ("rewards", [0.0], "1 elements for 3"),
        ("loss_masks", [[1], [1, 2], [1]], "must hold 0 and 1"),
    ],
)
def test_a_batch_that_breaks_its_invariants_is_rejected_whole(path: str, to: Any, reason: str) -> None:
    _, found, (rejected,) = read(jsonl(changed(SKYRL, path, to=to)))
    assert not found and reason in rejected.reason


@pytest.mark.parametrize(
    ("ids", "flags", "says"),
    [
        (["A", "A", "B"], [False, True, False], {"B": "Row 0 of 1 is the last step and is not marked."}),
        (["A", "A", "B"], [False, False, True], {"A": "Row 1 of 2 is the last step and is not marked."}),
        (["A", "A", "B"], [True, True, True], {"A": "Row 0 of 2 is marked as the last step and is not."}),
        (["A", "B", "A"], [False, True, True], {"A": "Row 1 of 2 is element 2 of its batch, and the row before it is"}),
        (["A", "A", "B"], [False, True, True], {}),
        ([None, None, None], [False, True, True], {}),
    ],
)
def test_steps_out_of_order_are_read_and_named(ids: list[Any], flags: list[bool], says: dict[str, str]) -> None:
    _, found, rejected = read(jsonl({**SKYRL, "trajectory_ids": ids, "is_last_step": flags}))
    assert rejected == [] and [len(one.steps) for one in found] == [2, 1]
    findings = {
        one.external_id: [f for f in diagnose(one, None) if f.axis == "row" and f.severity == "error"] for one in found
    }
    loud = {name: [f.evidence for f in those] for name, those in findings.items() if those}
    assert loud.keys() == says.keys() and all(those[0].startswith(says[name]) for name, those in loud.items())
    assert {f.kind for those in findings.values() for f in those} <= {"step_order_invalid"}


def test_expert_routing_is_kept_with_what_it_belongs_to() -> None:
    routing = [[[[1]]] * 4, [[[1]]] * 5, [[[1]]] * 2]
    batch = {**SKYRL, "rollout_expert_indices": routing}
    a, b = read(jsonl(batch))[1]
    kept = [step.extra["routing"] for step in (*a.steps, *b.steps)]
    assert kept == [{"repeats": 1.0, "zero_layers": 0, "length": n} for n in (4, 5, 2)] and not a.extra
    wrong = [(f.kind, f.step) for one in (a, b) for f in diagnose(one, None) if f.severity == "error"]
    assert wrong == [("routing_misaligned", 0)]  # 4 rows for 3 ids; 5 for 6, and 2 for 2, are as they should be
    whole = {**{key: value for key, value in batch.items() if key != "is_last_step"}, "trajectory_ids": ["a", "b", "c"]}
    rows = [(one.extra, one.rows[0].extra["routing"]) for one in read(jsonl(whole))[1]]
    assert rows == [({}, routing) for routing in kept]


def test_gateway_traces() -> None:
    name, (one,), _ = read(jsonl(RLLM, changed(RLLM, "prompt_token_ids", to=[1, 2, 3, 4])))
    assert (name, one.external_id, len(one.steps), one.steps[0].policy_version) == ("rllm", "s", 2, "4")
    assert one.steps[0].request is not None
    bare = {key: value for key, value in RLLM.items() if key != "tools"}
    assert read(jsonl(bare))[1][0].steps[0].request is None  # which tools were rendered is not known


def test_a_gateway_trace_that_stores_what_its_prompt_adds() -> None:
    """rLLM's cumulative mode: the prompt is the stream of the call named, and the ids written."""
    root = {**RLLM, "prompt_delta_token_ids": None, "parent_trace_id": None}
    link = {**root, "trace_id": "u", "prompt_token_ids": [], "prompt_delta_token_ids": [7], "parent_trace_id": "t"}
    last = {**link, "trace_id": "v", "prompt_delta_token_ids": [8], "parent_trace_id": "u"}
    again = {**link, "trace_id": "w", "prompt_delta_token_ids": [9]}
    _, (one,), rejected = read(jsonl(root, link, last, again))
    assert rejected == []
    assert [step.prompt_ids.tolist() for step in one.steps] == [
        [1], [1, 2, 3, 7], [1, 2, 3, 7, 2, 3, 8], [1, 2, 3, 9]
    ]
    _, found, (refused,) = read(jsonl(root, {**link, "parent_trace_id": "x"}))
    assert not found and "continues the call 'x'" in refused.reason


def test_the_tools_of_the_raw_request_make_a_request_whole() -> None:
    bare = {key: value for key, value in RLLM.items() if key != "tools"}
    tools = [{"type": "function", "function": {"name": "f"}}]
    (one,) = read(jsonl({**bare, "raw_request": {"messages": bare["messages"], "tools": tools}}))[1]
    assert one.steps[0].request is not None and one.steps[0].request.tools == tuple(tools)


def test_what_a_trainers_row_says_beside_its_arrays_is_kept() -> None:
    rows: dict[str, dict[str, Any]] = {
        "verl_agent_loop": {"prompt_ids": [1], "response_ids": [2], "response_mask": [1], "num_turns": 4,
                            "metrics": {"tool_calls": 0.5}, "extra_fields": {"row": 0, "turn_scores": [1]}},
        "trl_rollouts": {"prompt_ids": [[1], [1]], "completion_ids": [[2], [3]], "logprobs": [[-1], [-1]],
                         "num_turns": [4, 5], "extra_fields": {"turn_scores": [1]}},
        "skyrl": {"prompt_token_ids": [[1], [1]], "response_ids": [[2], [3]], "loss_masks": [[1], [1]],
                  "num_turns": [4, 5], "rollout_metrics": {"tool_calls": 0.5}, "rollout_expert_indices": None},
        "nemo_message_log": {"message_log": [{"role": "user", "token_ids": [1]}, {"role": "assistant", "token_ids":
                             [2]}], "num_turns": 4},
        "sft_rows": {"input_ids": [1, 2], "labels": [-100, 2], "num_turns": 4},
    }
    for name, value in rows.items():
        found_name, found, rejected = read(jsonl(value))
        assert (found_name, rejected, found[0].extra["num_turns"]) == (name, [], 4)
        assert found[-1].extra["num_turns"] == (5 if len(found) == 2 else 4)
        assert found[0].extra.get("metrics", {"tool_calls": 0.5}) == {"tool_calls": 0.5}
        assert found[0].extra.get("extra_fields", {"turn_scores": [1]}) == {"turn_scores": [1]}
    log = read(jsonl(rows["nemo_message_log"]))[1][0].rows[0]
    assert log.extra == {"messages": [{"role": "user", "n_tokens": 1}, {"role": "assistant", "n_tokens": 1}]}
    sample = {"token_ids": [1, 2], "mask": [0, 1], "temperatures": [1.0, 0.5], "env_name": "calc"}
    (one,) = read(jsonl(sample))[1]
    assert one.rows[0].columns["temperatures"].tolist() == [1.0, 0.5] and one.extra == {"env_name": "calc"}


def test_a_datum_as_tinker_writes_it_itself() -> None:
    tensor = {"dtype": "float32", "shape": [2]}
    lists = {"model_input": [1, 2], "target_tokens": [2, 3], "logprobs": [0.0, -0.5], "mask": [0, 1]}
    written = {
        "model_input": {"chunks": [{"type": "encoded_text", "tokens": [1]}, {"type": "encoded_text", "tokens": [2]}]},
        "loss_fn_inputs": {name: {"data": data, **tensor} for name, data in lists.items() if name != "model_input"},
    }
    name, (one,), rejected = read(jsonl(written))
    assert (name, rejected) == ("tinker_data", [])
    assert_same(one, read(jsonl(lists))[1][0])
    # A dataclass since 0.38: dataclasses.asdict shows the array under its private name.
    fields = {"shape": [2], "sparse_crow_indices": None, "sparse_col_indices": None}
    inputs = {
        name: {"dtype": "float32", "_numpy": data, **fields} for name, data in lists.items() if name != "model_input"
    }
    as_dict = {**written, "loss_fn_inputs": inputs, "model_input_spans": None, "loss_fn_input_spans": None}
    assert_same(read(jsonl(as_dict))[1][0], one)
    sparse = changed(as_dict, "loss_fn_inputs", "target_tokens", "sparse_crow_indices", to=[0, 1])
    assert "loss_fn_inputs.target_tokens is a sparse tensor" in read(jsonl(as_dict, sparse))[2][0].reason
    image = {**written, "model_input": {"chunks": [{"type": "image", "data": "x"}]}}
    _, found, (refused,) = read(jsonl(image))
    assert not found and "model_input.chunks[0].tokens must be a list" in refused.reason


def test_triplets_are_the_calls_of_a_rollout() -> None:
    name, (one,), rejected = read(jsonl(LIGHTNING))
    assert (name, rejected, one.external_id, one.reward) == ("agent_lightning", [], "ro-1", 0.5)
    assert [(step.prompt_ids.tolist(), step.completion_ids.tolist()) for step in one.steps] == [
        ([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6]),
    ]
    assert one.steps[0].logprobs is not None and one.steps[0].logprobs.tolist() == [-0.5, -0.25]
    assert one.steps[1].logprobs is None and one.steps[0].extra["metadata"] == {"agent_name": "a"}
    assert read(jsonl({**LIGHTNING, "final_reward": 1.0}))[1][0].reward == 1.0
    _, found, (alone,) = read(jsonl(LIGHTNING["triplets"][0]))
    assert not found and "Write one line for each rollout" in alone.reason
    assert "made no call" in read(jsonl(LIGHTNING, {"triplets": []}))[2][0].reason


def test_a_scored_group_is_a_row_for_each_sequence() -> None:
    name, found, rejected = read(jsonl(ATROPOS))
    assert (name, rejected, [one.reward for one in found]) == ("atropos", [], [1.0, -1.0])
    assert {one.group for one in found} == {"line-1"} and found[0].extra["group_overrides"] == {"source": "x"}
    (row,) = found[0].rows
    assert row.ids.tolist() == [1, 2, 3] and row.loss_mask.tolist() == [False, True, True]
    assert row.logprobs is not None and np.isnan(row.logprobs[0]) and row.logprobs[1:].tolist() == [-0.5, -0.25]
    assert row.columns["advantages"].tolist() == [0.0, 0.5, 0.5]
    for path, to, says in (
        (("masks", 0), [0, 1, 1], "masks[0] must be -100 or the token's own id"),
        (("scores",), [1.0], "scores has 1 elements for 2 tokens"),
        (("tokens",), [], "the group has no sequence"),
    ):
        _, found, (refused,) = read(jsonl(changed(ATROPOS, *path, to=to)))
        assert not found and says in refused.reason


def test_every_format_is_recognised_by_its_content_alone() -> None:
    from tests.samples.formats import CALL, GYM, TRAIN

    examples = {
        "recorded_calls": CALL, "nemo_gym": GYM, "nemo_rl": TRAIN, "token_capture": CAPTURE,
        "verifiers_traces": TRACE_04, "verifiers_legacy": LEGACY, "prime_rl_export": EXPORT, "skyrl": SKYRL,
        "rllm": RLLM, "agent_lightning": LIGHTNING, "atropos": ATROPOS,
    }
    for name, value in examples.items():
        assert detect(Source.of_bytes(jsonl(value))).name == name
        assert detect(Source.of_bytes(json.dumps(value, indent=2).encode())).name == name


@pytest.mark.parametrize(
    ("rewards", "places"),
    [
        ([[0.0], [0.0, 1.0], [0.5]], {}),
        ([0.0, 1.0, 0.5], {}),
        ([1.0, 1.0, 0.5], {}),  # the reward of the trajectory, on each of its steps
        ([[1.0], [0.0, 1.0], [0.5]], {("A", 0, 2)}),
        ([[0.0], [1.0, 0.0], [0.5]], {("A", 1, 4)}),
        ([0.3, 1.0, 0.5], {("A", 0, 2)}),
    ],
)
def test_skyrl_reads_the_reward_of_the_last_token_of_the_last_step(rewards: Any, places: Any) -> None:
    trajectories = read(jsonl({**SKYRL, "rewards": rewards}))[1]
    found = [(one.external_id, f) for one in trajectories for f in diagnose(one, None) if f.severity == "error"]
    assert {f.kind for _, f in found} <= {"reward_misplaced"}
    assert {(name, f.row, f.start) for name, f in found} == set(places)
    assert [len(one.steps) for one in trajectories] == [2, 1] and trajectories[0].reward == 1.0


def test_rewards_of_another_length_than_a_step_are_named() -> None:
    a, _ = read(jsonl({**SKYRL, "rewards": [[0.0, 0.0], [0.0, 1.0], [0.5]]}))[1]
    assert [f.kind for f in diagnose(a, None) if f.severity == "error"] == ["length_mismatch"]


@pytest.mark.parametrize(
    ("mask", "logprobs", "masked"),
    [
        ([1, 0, 1, 1], [-0.2, -0.3, -0.1, -0.2], [(5, 6)]),
        ([1, 0, 1, 1], None, [(5, 6)]),
        ([0, 1, 1, 1], [-0.2, -0.3, -0.1, -0.2], [(4, 5)]),
        ([1, 1, 0, 0], [-0.2, -0.3, 0.0, 0.0], []),  # the end is what the tool said
        ([1, 1, 1, 1], [-0.2, 0.0, -0.1, -0.2], []),
    ],
)
def test_a_masked_token_that_was_sampled_is_named(mask: Any, logprobs: Any, masked: Any) -> None:
    """The steps stay: a token that has a log-probability is no observation."""
    batch = {
        **SKYRL, "response_ids": [[3], [4, 6, 7, 8], [7]], "loss_masks": [[1], mask, [1]],
        "rewards": [[0.0], [0.0, 0.0, 0.0, 1.0], [0.5]],
        "rollout_logprobs": logprobs and [[-0.1], logprobs, [-0.4]],
    }
    a, _ = read(jsonl(batch))[1]
    assert len(a.steps) == 2
    found = [f for f in diagnose(a, None) if f.severity != "info"]
    assert [(f.start, f.stop) for f in found if f.kind == "sampled_masked"] == masked
    assert {f.kind for f in found} <= {"sampled_masked"}


def test_a_verl_score_stands_at_the_end_of_a_turn() -> None:
    line = {"prompt_ids": [1, 2], "response_ids": [3, 4, 9, 5, 6], "response_mask": [1, 1, 0, 1, 1]}
    for name in ("rm_scores", "token_level_scores", "token_level_rewards"):
        for scores, start in (
            ([0, 0, 0, 0, 1], None), ([0, 0.5, 0, 0, 1], None), ([0.1, 0.2, 0, 0.1, 1], None),
            ([1, 0, 0, 0, 0], 2), ([0, 0, 1, 0, 0], 4),
        ):
            (one,) = read(jsonl({**line, name: scores}))[1]
            found = [f for f in diagnose(one, None) if f.severity != "info"]
            assert [(f.kind, f.start) for f in found] == ([("reward_misplaced", start)] if start else [])
