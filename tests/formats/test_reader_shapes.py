"""Values of rLLM, SGLang, harbor and agent-lightning's gateway: each is read, and what is wrong has a sentence."""

from typing import Any

import numpy as np
import pytest

from rollout_inspector.streams.trajectory import OTHER_FIELDS
from tests.samples.formats import changed, jsonl, read
from tests.samples.reader_shapes import EVENT, HARBOR, MESSAGES, RLLM_EPISODE, RLLM_STEP, SGLANG

REWARD = {"event_id": "e2", "event_type": "reward", "rollout_id": "r", "attempt_id": "pod-1", "data": {"value": 0.5}}


def one(*values: Any) -> Any:
    """Format and trajectory of a file that holds one."""
    name, found, rejected = read(jsonl(*values))
    assert rejected == [] and len(found) == 1, rejected
    return name, found[0]


def reason(*values: Any, name: str = "auto") -> str:
    _, found, rejected = read(jsonl(*values), name)
    assert found == [] and len(rejected) == 1
    return rejected[0].reason


def test_an_rllm_episode() -> None:
    name, found = one(RLLM_EPISODE)
    assert (name, found.external_id, found.group) == ("rllm_steps", "task-9:0", "task-9")
    assert (found.reward, found.stop_reason, found.extra["task"]) == (1.0, "env_done", {"question": "2+2?"})
    first, second = found.steps
    assert first.prompt_ids.tolist() == [1, 2] and first.completion_ids.tolist() == [3, 4]
    assert first.logprobs.tolist() == [-0.5, -0.25] and [first.policy_version, second.policy_version] == ["7", ""]
    assert (first.text, first.finish_reason, first.reply["content"]) == ("4", "stop", "4") and first.request is None
    assert first.extra["messages"] == MESSAGES and "prompt_ids" not in first.extra
    (row,) = found.rows
    assert row.ids.tolist() == [1, 2, 3, 4, 5, 6] and row.loss_mask.tolist() == [False, False, True, True, False, True]
    assert row.columns["advantages"].tolist() == [0, 0, 0.5, -0.5, 0, 2]


def test_an_rllm_trajectory_and_a_step_alone() -> None:
    trajectory = RLLM_EPISODE["trajectories"][0]
    assert one(trajectory)[1].external_id == "u1" and one(RLLM_STEP)[1].external_id == "line-1"
    # A step that no trainer has seen brings no rows.
    assert one({**RLLM_STEP, "advantage": None})[1].rows == ()


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        ({**RLLM_EPISODE, "trajectories": [{"steps": []}]}, "the trajectory made no call"),
        ({**RLLM_STEP, "advantage": [1.0]}, "has 1 elements for 2 response_ids"),
        ({**RLLM_STEP, "prompt_ids": [1, {"image": 0}]}, "element 1 is an object"),
    ],
)
def test_what_is_wrong_with_an_rllm_value_is_said(value: dict[str, Any], sentence: str) -> None:
    assert sentence in reason(value, name="rllm_steps")


def test_an_answer_of_sglang() -> None:
    name, found = one(SGLANG)
    (step,) = found.steps
    assert (name, found.external_id, found.reward) == ("sglang", "s", 1.0)
    assert step.prompt_ids.tolist() == [1, 2] and step.completion_ids.tolist() == [3, 4]
    assert step.logprobs.tolist() == [-0.5, -0.25] and (step.temperature, step.top_p, step.top_k) == (0.7, 0.9, -1)
    assert (step.policy_version, step.finish_reason, step.stop_reason, step.text) == ("12", "stop", "4", "4.")
    assert step.alternative_ids is not None and step.extra["meta_info"]["cached_tokens"] == 1
    assert step.extra["sampling_params"] == {"max_new_tokens": 9} and "output_ids" not in step.extra


def test_a_bare_answer_of_sglang_has_the_prompt_that_it_scored() -> None:
    answer = changed(SGLANG["response"], "meta_info", "input_token_logprobs", to=[[None, 1, None], [-2.0, 2, None]])
    found = one(answer)[1]
    assert found.external_id == "r1" and found.steps[0].prompt_ids.tolist() == [1, 2]
    short = changed(answer, "meta_info", "prompt_tokens", to=5)  # the others came from a cache
    assert one(short)[1].steps[0].prompt_ids.tolist() == []
    other = one(changed(SGLANG, "response", "output_ids", to=[3]))[1].steps[0]
    assert other.completion_ids.tolist() == [3, 4] and other.extra[OTHER_FIELDS]["completion"]["output_ids"] == [3]


def test_a_pair_without_an_id_is_named() -> None:
    bad = changed(SGLANG, "response", "meta_info", "output_token_logprobs", to=[[-0.5]])
    assert "output_token_logprobs[0] must hold a log-probability and a token id" in reason(bad)


def test_meta_info_of_a_chat_answer_is_read() -> None:
    call = {
        "session_id": "s",
        "request": {"messages": MESSAGES},
        "response": {
            "prompt_token_ids": [1, 2],
            "choices": [
                {
                    "index": 0,
                    "message": {"role": "assistant", "content": "4"},
                    "meta_info": SGLANG["response"]["meta_info"],
                }
            ],
        },
    }
    name, found = one(call)
    assert name == "recorded_calls" and found.steps[0].completion_ids.tolist() == [3, 4]
    assert found.steps[0].policy_version == "12" and found.steps[0].logprobs.tolist() == [-0.5, -0.25]
    assert one(changed(call, "policy_version", to="3"))[1].steps[0].policy_version == "12"


def test_a_harbor_trial() -> None:
    name, found = one(HARBOR)
    assert (name, found.external_id, found.group, found.tokenizer) == ("harbor", "sum__a1", "sum", "qwen3")
    assert found.reward == 1.0 and found.reward_parts == {"reward": 1.0, "style": 0.5}
    assert [step.prompt_ids.tolist() for step in found.steps] == [[1, 2], [1, 2, 3, 20], [9]]
    assert found.steps[1].logprobs.tolist() == [-0.25, -0.125] and found.steps[2].logprobs is None
    assert found.steps[0].extra == {"finish": "tool", "rollout_detail": 0}
    assert found.extra["agent_result"] == {"n_input_tokens": 7, "metadata": {"n_episodes": 2}}
    detail = HARBOR["agent_result"]["rollout_details"][0]
    assert len(one(detail)[1].steps) == 2 and one({"rollout_details": [detail], "reward": 2.0})[1].reward == 2.0


@pytest.mark.parametrize(
    ("value", "sentence"),
    [
        (changed(HARBOR, "agent_result", to=None), "has no rollout_details"),
        (changed(HARBOR, "agent_result", "rollout_details", 0, "logprobs", to=[[-0.5]]), "has 1 turns for 2"),
        (changed(HARBOR, "agent_result", "rollout_details", to=[{"prompt_token_ids": [], "completion_token_ids": []}]),
         "the agent made no call"),
    ],
)
def test_what_is_wrong_with_a_trial_is_said(value: dict[str, Any], sentence: str) -> None:
    assert sentence in reason(value)


def test_events_of_agent_lightning() -> None:
    later = changed(EVENT, "data", "response", "prompt_token_ids", to=[1, 2, 3, 4, 5])
    tool = {**REWARD, "event_type": "tool_result", "data": {"output": "x"}}
    failed = changed(EVENT, "data", "response", to={"error": "timeout"})
    name, found = one(EVENT, tool, failed, later, REWARD)
    assert (name, found.external_id, found.group) == ("agent_lightning_events", "r-pod-1", "r")
    assert found.reward == 0.5 and found.tokenizer == "qwen-7b"
    assert found.extra == {"other_events": {"tool_result": 1}, "calls_without_answer": 1}
    assert [step.prompt_ids.tolist() for step in found.steps] == [[1, 2], [1, 2, 3, 4, 5]]
    step = found.steps[0]
    assert step.logprobs.tolist() == [-0.5, -0.25] and step.policy_version == "42" and step.temperature == 0.7
    assert step.request is not None and list(step.request.messages) == MESSAGES


def test_archived_rollouts_of_agent_lightning() -> None:
    other = {**EVENT, "attempt_id": "pod-2"}
    rollout = {"rollout_id": "r", "status": "succeeded", "config": {"image": "a"}, "metadata": {"training_step": 9}}
    line = {"rollout": rollout, "events": [EVENT, REWARD, other, {**REWARD, "attempt_id": "pod-3"}], "resources": None}
    name, (first, second), rejected = read(jsonl(line))
    assert (name, rejected) == ("agent_lightning_archive", [])
    assert [one.external_id for one in (first, second)] == ["r-pod-1", "r-pod-2"]
    assert [one.reward for one in (first, second)] == [0.5, None] and first.stop_reason == "succeeded"
    assert first.training_step == 9 and "config" not in first.extra and len(first.steps) == 1
    assert "the rollout made no call" in reason({**line, "events": [REWARD]})
    assert "events[0] must be a JSON object" in reason({**line, "events": [5]})


def test_trimmed_events_are_read() -> None:
    data = {"prompt_token_ids": [1, 2], "response_token_ids": [3], "server": {"model": "qwen-7b", "version": 4}}
    step = one({**EVENT, "data": data})[1].steps[0]
    assert step.prompt_ids.tolist() == [1, 2] and step.completion_ids.tolist() == [3] and step.policy_version == "4"


def test_an_attempt_without_a_call_is_rejected() -> None:
    assert "'r-pod-1' holds no call" in reason(REWARD)
    raw = changed(EVENT, "data", "response", to=[{"choices": []}])
    assert "raw chunks" in reason(raw)


def test_policy_versions_of_areal() -> None:
    line: dict[str, Any] = {
        "task_id": 42, "sample_idx": 0, "seqlen": 5, "prompt_len": 2, "head_version": 5, "tail_version": 6,
        "version_rle": [[5, 1], [6, 2]], "reward": 1.0, "prompt": "2+2?", "completion": "4.",
    }
    step = one(line)[1].steps[0]
    assert step.policy_version == "6" and step.extra["policy_versions"] == [["5", 1], ["6", 2]]
    assert one({**line, "tail_version": None})[1].steps[0].policy_version == "6"
    assert "version_rle[1] must hold a policy version" in reason({**line, "version_rle": [[5, 1], [6]]})


def test_float_columns_are_of_32_bits() -> None:
    assert one(RLLM_EPISODE)[1].rows[0].columns["advantages"].dtype == np.float32
