"""Records of files that people have: rows of data sets, samples of trainers, batches, preferences, agents' logs."""

from typing import Any

from tests.samples.text_formats import MESSAGES

SFT_MASKS: dict[str, Any] = {
    "input_ids": [1, 2, 3, 4, 0], "completion_mask": [0, 0, 1, 1, 0], "assistant_masks": [0, 1, 0, 1, 0],
    "attention_mask": [1, 1, 1, 1, 0], "length": 4,
}

PAIR: dict[str, Any] = {
    "prompt_input_ids": [1, 2], "chosen_input_ids": [3, 4], "rejected_input_ids": [5], "ref_chosen_logps": -1.5,
}

SLIME: dict[str, Any] = {
    "group_index": 4, "index": 9, "prompt": "2+2?", "tokens": [1, 2, 3, 20, 4], "response": "4", "response_length": 3,
    "label": "4", "reward": {"score": 0.5, "form": 1.0, "why": "short"}, "loss_mask": [1, 0, 1],
    "weight_versions": ["7", "8"], "rollout_log_probs": [-0.5, 0.0, -0.25], "status": "truncated",
    "metadata": {"source": "x"}, "remove_sample": False, "spec_info": {"spec_verify_ct": 0},
}

OPENRLHF: dict[str, Any] = {
    "sequences": [[0, 1, 2, 3], [1, 2, 3, 0]], "attention_mask": [[0, 1, 1, 1], [1, 1, 1, 0]],
    "action_mask": [[0, 1, 1], [0, 1, 0]], "rollout_log_probs": [[0.0, -0.5, -0.25], [0.0, -1.0, 0.0]],
    "action_log_probs": [[0.0, -0.5, -0.5], [0.0, -1.5, 0.0]], "advantages": [[0.0, 1.0, 1.0], [0.0, -1.0, 0.0]],
    "rewards": [1.0, 0.0], "truncated": [0.0, 1.0], "prompts": ["a", "b"], "labels": ["A", "B"], "info": {"step": 3},
}

BATCH: dict[str, Any] = {
    "id": "vllm-1", "custom_id": "task-1", "error": None, "response": {
        "status_code": 200, "request_id": "r", "body": {
            "id": "c", "object": "chat.completion", "model": "m", "prompt_token_ids": [1, 2], "choices": [
                {"index": 0, "token_ids": [3, 4], "finish_reason": "length",
                 "message": {"role": "assistant", "content": "4"},
                 "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}]}},
}

_AGENT = {
    "step_id": 2, "source": "agent", "message": "I list.", "reasoning_content": "hm", "model_name": "m",
    "tool_calls": [{"tool_call_id": "c1", "function_name": "bash", "arguments": {"command": "ls"}}],
    "observation": {"results": [{"source_call_id": "c1", "content": "a.txt"}]},
    "metrics": {"prompt_tokens": 2, "prompt_token_ids": [1, 2], "completion_token_ids": [3, 4],
                "logprobs": [-0.5, -0.25]},
}

ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.6", "session_id": "s1", "agent": {"name": "terminus-2", "model_name": "m"},
    "steps": [{"step_id": 1, "source": "user", "message": "List files"}, _AGENT,
              {**_AGENT, "step_id": 3, "is_copied_context": True}],
    "final_metrics": {"total_steps": 3},
    "subagent_trajectories": [{"agent": {"name": "helper"}, "steps": [_AGENT]}],
}

SHAREGPT: dict[str, Any] = {
    "id": "c7", "system": "Be short.", "conversations": [
        {"from": "human", "value": "?"}, {"from": "gpt", "value": "!"},
        {"from": "observation", "value": "x"}, {"from": "gpt", "value": "."}],
}

ALPACA: dict[str, Any] = {
    "instruction": "Add.", "input": "2+2", "output": "4", "system": "Be short.", "history": [["Hi", "Hello"]],
    "source": "x",
}

PREFERENCES: dict[str, Any] = {
    "prompt": MESSAGES["messages"][:1], "chosen": MESSAGES["messages"][1:2], "score": 0.25,
    "rejected": [{"role": "assistant", "content": "c"}],
}
