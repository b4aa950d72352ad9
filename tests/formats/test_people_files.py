"""Files that people have are recognised, keep every id, mask and number, and are refused for no field of metadata."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector import formats
from rollout_inspector.formats import FORMATS, Rejected, Source
from rollout_inspector.streams.trajectory import Trajectory
from tests.conftest import missing
from tests.samples.format_mutations import EXAMPLES
from tests.samples.formats import CALL, GYM, changed, jsonl, read
from tests.samples.people_files import ALPACA, ATIF, BATCH, OPENRLHF, PAIR, PREFERENCES, SFT_MASKS, SHAREGPT, SLIME
from tests.samples.trainer_formats import TRACE, TRACE_04


def rows(value: Any, name: str) -> list[tuple[list[int], list[bool]]]:
    recognised, trajectories, rejected = read(jsonl(value))
    assert (recognised, rejected) == (name, [])
    return [(row.ids.tolist(), row.loss_mask.tolist()) for item in trajectories for row in item.rows]


def test_masks_of_a_data_set_say_together_what_is_trained() -> None:
    assert rows(SFT_MASKS, "sft_rows") == [([1, 2, 3, 4], [False, False, False, True])]
    labelled = {**SFT_MASKS, "labels": [-100, -100, 3, -100, -100], "assistant_masks": None}
    assert rows(labelled, "sft_rows") == [([1, 2, 3, 4], [False, False, True, False])]
    collated = {name: [value, value] for name, value in SFT_MASKS.items() if name != "length"}
    assert rows(collated, "sft_rows") == rows(SFT_MASKS, "sft_rows") * 2
    _, _, (refused,) = read(jsonl({**SFT_MASKS, "completion_mask": [1]}))
    assert "A mask has 1 elements for 5 input_ids" in refused.reason


def test_a_generation_of_trl_is_read_a_line_or_padded() -> None:
    row = {"prompt_ids": [1, 2], "completion_ids": [3, 4, 5], "completion_mask": [1, 0, 1]}
    assert rows(row, "trl_rollouts") == [([1, 2, 3, 4, 5], [False, False, True, False, True])]
    padded = {"prompt_ids": [[0, 1], [1, 2]], "prompt_mask": [[0, 1], [1, 1]], "completion_ids": [[3, 0, 0], [4, 5, 6]],
              "completion_mask": [[1, 0, 0], [1, 1, 0]]}
    expected = [([1, 3], [False, True]), ([1, 2, 4, 5], [False, False, True, True])]
    assert rows(padded, "trl_rollouts") == expected
    # verifiers' prompt_mask is a loss mask: nothing is padding.
    assert rows({**row, "prompt_mask": [0, 0]}, "trl_rollouts") == rows(row, "trl_rollouts")


def test_both_answers_of_a_preference_stand_in_one_group() -> None:
    expected = [([1, 2, 3, 4], [False, False, True, True]), ([1, 2, 5], [False, False, True])]
    assert rows(PAIR, "preference_rows") == expected
    whole = {"prompt_input_ids": [1, 2], "chosen_input_ids": [1, 2, 3, 4], "rejected_input_ids": [1, 2, 5]}
    assert rows(whole, "preference_rows") == expected
    by_labels = {"chosen_input_ids": [1, 2, 3], "chosen_labels": [-100, 2, 3],
                 "rejected_ids": [1], "rejected_labels": [1]}
    assert rows(by_labels, "preference_rows") == [([1, 2, 3], [False, True, True]), ([1], [True])]
    for value in (PAIR, PREFERENCES):
        _, (chosen, rejected), _ = read(jsonl(value))
        assert chosen.group == rejected.group != "" and chosen.external_id != rejected.external_id
        assert [item.extra["preference"] for item in (chosen, rejected)] == ["chosen", "rejected"]
    _, _, (refused,) = read(jsonl({"chosen_input_ids": [1], "rejected_input_ids": [2]}))
    assert "neither the prompt's ids nor labels" in refused.reason


@pytest.mark.parametrize("prompt", ["a", PREFERENCES["prompt"], None])
def test_preferences_of_text_are_text(prompt: Any) -> None:
    value = {"prompt": prompt, "chosen": "A", "rejected": "B"}
    if isinstance(prompt, list):
        value = PREFERENCES
    elif prompt is None:
        value = {side: [*PREFERENCES["prompt"], *PREFERENCES[side]] for side in ("chosen", "rejected")}
    name, trajectories, rejected = read(jsonl(value))
    assert (name, rejected, len(trajectories)) == ("preferences", [], 2)
    assert [len(item.steps) for item in trajectories] == [1, 1] and "no token ids" in FORMATS[name].lacks
    if not isinstance(prompt, str):
        requests = [item.steps[0].request for item in trajectories]
        assert [[message["content"] for message in request.messages] for request in requests if request] == [["?"]] * 2


def test_a_sample_of_slime_keeps_what_it_holds() -> None:
    name, (item,), rejected = read(jsonl(SLIME))
    assert (name, rejected, item.external_id, item.group) == ("slime_samples", [], "4-9", "4")
    assert (item.reward, item.reward_parts, item.stop_reason) == (0.5, {"score": 0.5, "form": 1.0}, "length")
    (row,) = item.rows
    assert row.ids.tolist() == SLIME["tokens"] and row.loss_mask.tolist() == [False, False, True, False, True]
    assert row.logprobs is not None and row.logprobs[2:].tolist() == [-0.5, 0.0, -0.25]
    assert row.extra["version_rle"] == [["7", 3], ["8", 2]] and item.extra["weight_versions"] == ["7", "8"]
    assert item.extra["metadata"] == {"source": "x"} and item.extra["status"] == "truncated" and not item.error
    fault = {"index": 10, "status": "failed", "metadata": {"error": "no tool"}}
    samples = [{**SLIME, "remove_sample": True}, {**SLIME, **fault}]
    _, (removed, failed), _ = read(jsonl({"rollout_id": 3, "samples": samples}))
    assert not removed.rows[0].loss_mask.any() and removed.training_step == 3 and failed.error == "no tool"
    _, _, (refused,) = read(jsonl({**SLIME, "response_length": 6}))
    assert "response_length is 6" in refused.reason


def test_the_actions_of_an_experience_stand_at_its_end() -> None:
    name, (first, second), rejected = read(jsonl(OPENRLHF))
    assert (name, rejected) == ("openrlhf_experience", [])
    assert first.rows[0].ids.tolist() == [1, 2, 3] and first.rows[0].loss_mask.tolist() == [False, True, True]
    assert second.rows[0].ids.tolist() == [1, 2, 3] and second.rows[0].loss_mask.tolist() == [False, False, True]
    assert first.rows[0].logprobs is not None and first.rows[0].logprobs[1:].tolist() == [-0.5, -0.25]
    assert first.rows[0].columns["trainer_logprobs"][1:].tolist() == [-0.5, -0.5]
    assert (first.reward, first.stop_reason, second.reward, second.stop_reason) == (1.0, "", 0.0, "length")
    assert first.extra["prompts"] == "a"
    one = {"sequences": [1, 2, 3, 4], "action_mask": [1, 1], "advantages": [0.5, 0.5], "rewards": 1.0}
    assert rows(one, "openrlhf_experience") == [([1, 2, 3, 4], [False, False, True, True])]
    _, _, (refused,) = read(jsonl({**one, "advantages": [0.5]}))
    assert "advantages has 1 elements for 2 actions" in refused.reason


def test_a_batch_is_read_by_its_custom_ids() -> None:
    no_answer = {**BATCH, "custom_id": "task-2", "response": None, "error": {"code": "expired", "message": "too late"}}
    responses = {**BATCH, "custom_id": "task-3", "response": {"status_code": 200, "body": GYM["response"]}}
    name, (answered, failed, steps), rejected = read(jsonl(BATCH, no_answer, responses))
    assert (name, rejected, answered.external_id) == ("batch_output", [], "task-1")
    (step,) = answered.steps
    assert step.prompt_ids.tolist() == [1, 2] and step.completion_ids.tolist() == [3, 4]
    assert (step.finish_reason, answered.stop_reason, answered.tokenizer) == ("length", "length", "m")
    assert (failed.external_id, failed.error, failed.steps) == ("task-2", "expired: too late", ())
    assert [len(step.completion_ids) for step in steps.steps] == [2, 1]
    assert read(jsonl(no_answer, BATCH))[0] == "batch_output"


def test_a_step_of_an_atif_agent_is_a_call() -> None:
    name, (main, helper), rejected = read(jsonl(ATIF))
    assert (name, rejected, main.external_id, helper.external_id) == ("atif", [], "s1", "s1-1")
    (step,) = main.steps  # what was copied was sampled elsewhere
    assert step.prompt_ids.tolist() == [1, 2] and step.completion_ids.tolist() == [3, 4]
    assert step.logprobs is not None and step.logprobs.tolist() == [-0.5, -0.25]
    assert step.reply is not None and step.reply["tool_calls"][0]["function"]["name"] == "bash"
    assert step.extra["new_messages"] == [{"role": "user", "content": "List files"}]
    assert main.tokenizer == "m" and main.group == helper.group == "s1" and len(helper.steps) == 1
    assert read(json.dumps(ATIF, indent=2).encode())[1][0].steps[0].completion_ids.tolist() == [3, 4]


def test_an_alpaca_row_is_a_conversation_of_text() -> None:
    name, (item,), rejected = read(jsonl(ALPACA))
    assert (name, rejected, len(item.steps), item.extra) == ("alpaca", [], 2, {"source": "x"})
    request, reply = item.steps[1].request, item.steps[1].reply
    assert request is not None and reply is not None and reply["content"] == "4"
    assert [(message["role"], message["content"]) for message in request.messages] == [
        ("system", "Be short."), ("user", "Hi"), ("assistant", "Hello"), ("user", "Add.\n\n2+2"),
    ]
    _, (plain,), _ = read(jsonl({"instruction": "Add.", "input": "", "output": "4"}))
    assert plain.steps[0].request is not None and plain.steps[0].request.messages[0]["content"] == "Add."


@pytest.mark.parametrize("text", ["-inf", "NaN", "Infinity", "-Infinity", "nan"])
def test_numbers_that_json_lacks_are_values_as_texts(text: str) -> None:
    for value, name in ((SLIME, "rollout_log_probs"), (OPENRLHF, "rollout_log_probs"), (BATCH, "logprob")):
        data = json.dumps(value).replace("-0.5", json.dumps(text))
        assert json.dumps(text) in data and name in data
        _, trajectories, rejected = read(data.encode())
        assert rejected == []
        arrays = [row.logprobs for item in trajectories for row in (*item.rows, *item.steps)]
        values = np.concatenate([array for array in arrays if array is not None])
        assert np.isnan(values).any() if "nan" in text.lower() else (values == float(text)).any()
    _, _, (refused,) = read(jsonl({**SLIME, "rollout_log_probs": [-0.5, "low", 0.0]}))
    assert "element 1 is a text" in refused.reason


def test_a_prompt_that_merged_with_the_answer_is_not_read_twice() -> None:
    answers = {"chosen_input_ids": [1, 2, 3, 9, 5], "rejected_input_ids": [1, 2, 3, 4, 6]}
    whole = {"prompt_input_ids": [1, 2, 3, 4], **answers}
    assert rows(whole, "preference_rows") == [
        ([1, 2, 3, 9, 5], [False] * 3 + [True] * 2), ([1, 2, 3, 4, 6], [False] * 4 + [True]),
    ]
    _, (chosen, rejected), _ = read(jsonl(whole))
    assert chosen.rows[0].extra["prompt_tail"] == [4] and "prompt_tail" not in rejected.rows[0].extra


def test_sharegpt_is_a_conversation_of_text() -> None:
    name, (item,), rejected = read(jsonl(SHAREGPT))
    assert (name, rejected, item.external_id, len(item.steps)) == ("sharegpt", [], "c7", 2)
    request = item.steps[1].request
    assert request is not None
    assert [message["role"] for message in request.messages] == ["system", "user", "assistant", "tool"]


# -- NeMo Gym as it is written


def test_transitions_are_one_conversation() -> None:
    """Each transition repeats what came before, as agents of aviary write it."""
    items = GYM["response"]["output"]
    question = {"type": "message", "role": "user", "content": "2+2?"}
    transitions = [[question, *items[:3]], [question, *items]]
    _, (flat,), _ = read(jsonl(changed(GYM, "response", "output", to=[question, *items])))
    name, (item,), rejected = read(jsonl(changed(GYM, "response", "output", to=transitions)))
    assert (name, rejected) == ("nemo_gym", []) and len(item.steps) == 2
    for step, same in zip(item.steps, flat.steps, strict=True):
        assert step.prompt_ids.tolist() == same.prompt_ids.tolist() and step.extra == same.extra
        assert step.completion_ids.tolist() == same.completion_ids.tolist()
    # An observation that was shortened later does not make its call a second one.
    shortened = [[question, *items[:3]], [question, *items[:2], {**items[2], "output": "-"}, items[3]]]
    assert len(read(jsonl(changed(GYM, "response", "output", to=shortened)))[1][0].steps) == 2


def test_empty_ids_are_text_without_ids() -> None:
    empty = {name: [] for name in ("prompt_token_ids", "generation_token_ids", "generation_log_probs")}
    output = [{**item, **empty} if "prompt_token_ids" in item else item for item in GYM["response"]["output"]]
    _, (item,), rejected = read(jsonl(changed(GYM, "response", "output", to=output)))
    assert not rejected and not item.n_ids and all(step.logprobs is None for step in item.steps)


def test_an_episode_without_a_call_keeps_its_reward() -> None:
    value = changed(changed(GYM, "response", "output", to=[]), "response", "error", to={"message": "no sandbox"})
    _, (item,), rejected = read(jsonl(value))
    assert not rejected and (item.reward, item.steps, item.error) == (1.0, (), "no sandbox")


def test_the_rollouts_of_nemo_gym_are_read() -> None:
    """The example files in its wheel; its code needs a newer Python."""
    folder = Path(sys.prefix) / "nemo-gym"
    if not folder.is_dir():
        missing("the wheel of nemo-gym is not unpacked (make test does it)")
    problems = []
    n = 0
    for path in sorted(folder.rglob("example_rollouts.jsonl")):
        lines = [json.loads(line) for line in path.read_bytes().splitlines() if line.startswith(b"{")]
        if not lines or not all(isinstance(line.get("response"), dict) for line in lines):
            continue  # a placeholder, or the input of a judge
        n += 1
        _, items = formats.read(Source.of_path(path))
        problems += [(path, item) for item in items if isinstance(item, Rejected) and "earlier line" not in item.reason]
    assert n >= 170 and not problems


# -- ends, errors and groups


def test_why_a_trajectory_ended_comes_from_its_last_call() -> None:
    assert read(jsonl(CALL))[1][0].stop_reason == "stop"
    assert read(jsonl({**CALL, "trajectory_stop_reason": "max_turns"}))[1][0].stop_reason == "max_turns"
    cut = changed(GYM, "response", "incomplete_details", to={"reason": "max_output_tokens"})
    (item,) = read(jsonl(cut))[1]
    assert [step.finish_reason for step in item.steps] == ["", "length"] and item.stop_reason == "length"


def test_a_failed_episode_says_so() -> None:
    value = {"traces": [{"nodes": [], "tools": [], "errors": [{"type": "HarnessError", "message": "it died"}],
                         "task": {"key": "a" * 64, "name": "sum", "prompt": "2+2?"}}]}
    _, (item,), rejected = read(jsonl(value))
    assert not rejected and item.error == "HarnessError: it died" and item.group == "sum"
    from rollout_inspector.streams.preview import preview_of

    assert preview_of(item.steps, extra=item.extra).prompt == "2+2?"
    del value["traces"][0]["task"]["name"]  # type: ignore[index]
    assert read(jsonl(value))[1][0].group == "a" * 64


def test_only_traces_without_tools_lack_them() -> None:
    assert read(jsonl(TRACE_04))[0] == "verifiers_traces" and not FORMATS["verifiers_traces"].lacks
    assert "Before verifiers 0.4" in FORMATS[read(jsonl(TRACE))[0]].lacks
    # The shape of verifiers 0.3.1: the tools of the last call stand on the trace, and on no node.
    older = changed(TRACE_04, "traces", 0, "nodes", 0, to=TRACE["traces"][0]["nodes"][0])
    assert read(jsonl(older))[0] == "verifiers_traces_0_3"


# -- metadata


METADATA = {
    "recorded_calls": ["session_id", "tokenizer", "group", "trajectory_stop_reason", "policy_version",
                       "request.temperature", "request.top_p", "request.top_k", "request.model", "response.id",
                       "response.choices.0.finish_reason", "response.choices.0.stop_reason"],
    "nemo_gym": ["_ng_task_index", "_ng_rollout_index", "id", "response.model", "response.id", "response.error",
                 "response.incomplete_details", "responses_create_params", "agent_ref", "mask_sample", "error"],
    "nemo_rl": ["idx"], "token_capture": ["rollout_id", "model", "schema_version", "model_call_id", "created_at"],
    "verifiers_traces": ["id", "group_id", "group", "run", "info", "traces.0.task", "traces.0.stop_condition",
                         "traces.0.errors", "traces.0.info", "traces.0.calls.0.sampling.temperature",
                         "traces.0.calls.0.finish_reason"],
    "verifiers_legacy": ["example_id", "stop_condition", "error", "info"],
    "prime_rl_export": ["schema_version", "rollout_id", "group_id", "env_name"],
    "rllm": ["session_id", "model", "weight_version", "finish_reason", "temperature"],
    "rllm_steps": ["id", "termination_reason", "task", "trajectories.0.uid", "trajectories.0.steps.0.weight_version"],
    "agent_lightning": ["rollout_id"], "agent_lightning_events": ["rollout_id", "attempt_id", "data.server",
                                                                  "data.model", "data.model_version"],
    "harbor": ["id", "trial_name", "task_name", "exception_info", "agent_info",
               "agent_result.rollout_details.0.extra"],
    "sglang": ["session_id", "group", "tokenizer", "request.sampling_params.temperature",
               "response.meta_info.weight_version", "training_step"],
    "verl": ["step", "gts"], "skyrl_evals": ["stop_reason", "env_class"], "areal": ["task_id", "tail_version"],
    "art": ["group_index"], "messages": ["id"], "sharegpt": ["id", "source"], "alpaca": ["source"],
    "preferences": ["source", "id"],
    "verl_agent_loop": ["extra_fields", "metrics", "num_turns"], "sft_rows": ["length", "position_ids", "source"],
    "preference_rows": ["source", "ref_chosen_logps"],
    "slime_samples": ["index", "group_index", "status", "metadata", "prompt", "label", "weight_versions", "spec_info"],
    "openrlhf_experience": ["prompts", "labels", "info", "index"],
    "atif": ["session_id", "agent", "agent.model_name", "final_metrics", "notes", "schema_version",
             "steps.1.tool_calls", "steps.1.observation", "steps.1.message", "steps.0.message"],
    "batch_output": ["custom_id", "id", "response.status_code", "response.request_id", "response.body.model"],
    "miles_columns": ["status", "metadata"], "own_jsonl": ["group", "tokenizer", "stop_reason"],
    "skyrl": ["stop_reasons.0"], "trl_rollouts": ["external_id.0"], "prime_rl_samples": ["env_name"],
    "agent_lightning_archive": ["rollout.status", "rollout.config"], "nemo_message_log": ["full_rollout", "num_turns"],
    "tinker_data": ["source"], "completions": ["task"], "atropos": ["overrides", "group_overrides"],
}
"""Fields of each format that are no token, mask, number of a token, message or reward."""
ODD: list[Any] = [None, True, -1, 2**70, 1.5, "", "x" * 5000, "a\0b", [], [[1], {}], {}, {"a": {"b": [None]}}]


@pytest.mark.parametrize("name", [name for name in EXAMPLES if name != "own_parquet"])
def test_no_line_is_refused_for_its_metadata(name: str) -> None:
    example = EXAMPLES[name]
    good = read(jsonl(example), name)[1]
    for field in METADATA[name]:
        path = [int(part) if part.isdecimal() else part for part in field.split(".")]
        for odd in ODD:
            if name == "atif" and field == "agent" and not isinstance(odd, dict):
                continue
            _, trajectories, rejected = read(jsonl(changed(example, *path, to=odd)), name)
            assert not rejected, (field, odd, rejected)
            assert [ids_of(item) for item in trajectories] == [ids_of(item) for item in good], (field, odd)


def ids_of(trajectory: Trajectory) -> list[list[int]]:
    streams = [step.stream for step in trajectory.steps] + [row.ids for row in trajectory.rows]
    return [ids.tolist() for ids in streams]


def test_a_long_name_is_cut_and_noted_and_two_stay_two() -> None:
    paths = [f"/models/{'deep/' * 60}{n}" for n in range(2)]
    _, items, rejected = read(jsonl(*(
        changed(changed(GYM, "response", "model", to=path), "_ng_task_index", to=n) for n, path in enumerate(paths)
    )))
    assert not rejected and len({item.tokenizer for item in items}) == 2
    assert all(len(item.tokenizer) == 200 and "longer than 200" in item.extra["left_out"]["response.model"]
               for item in items)


def test_another_episode_of_a_name_is_read_under_its_line() -> None:
    _, items, rejected = read(jsonl(GYM, {**GYM, "reward": 0.0}, GYM))
    assert [item.external_id for item in items] == ["0-2", "0-2-line-2"]
    assert [item.line for item in rejected] == [3]
