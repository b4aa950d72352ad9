"""Records of the formats that trainers write."""

from typing import Any

CAPTURE = {
    "schema_version": 1, "rollout_id": "r1", "model_call_id": "c", "model": "m", "prompt_token_ids": [1, 2],
    "generation_token_ids": [10, 11], "generation_log_probs": [-0.5, -0.3], "token_item_index": 0, "created_at": 1,
    "output_items": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}]}],
}

TRACE: dict[str, Any] = {
    "id": "e1", "rewards": {"right": 1.0, "form": 0.5},
    "traces": [{"nodes": [
        {"message": {"role": "user", "content": "2+2?"}, "sampled": False, "token_ids": [1, 2], "mask": [False, False]},
        {"parent": 0, "message": {"role": "assistant", "content": "4"}, "sampled": True, "token_ids": [3, 10, 11],
         "mask": [False, True, True], "logprobs": [-0.5, -0.3]},
        {"parent": 1, "message": {"role": "tool", "content": "x"}, "token_ids": [20], "mask": [False]},
        {"parent": 2, "message": {"role": "assistant", "content": "5"}, "sampled": True, "token_ids": [3, 30],
         "mask": [False, True], "logprobs": [-0.1]},
        {"parent": 0, "message": {"role": "assistant", "content": "6"}, "sampled": True, "token_ids": [3, 40],
         "mask": [False, True], "logprobs": [-0.2]}],
        "calls": [{"node": 1, "model": "m", "finish_reason": "tool_calls"}, {"node": 3, "finish_reason": "stop"}]}],
}

_TOOL = {"type": "function", "name": "calc", "description": "", "parameters": {}}

_CALL = {"id": "c1", "type": "function", "name": "calc", "arguments": "{}"}


TRACE_04: dict[str, Any] = {"traces": [{
    "tools": [_TOOL],
    "calls": [{"node": 3, "sampling": {"temperature": 0.5, "chat_template_kwargs": {"enable_thinking": False}}}],
    "nodes": [
        {**TRACE["traces"][0]["nodes"][0], "tools": [_TOOL]},
        {"parent": 0, "message": {"role": "assistant", "tool_calls": [_CALL]}, "sampled": True,
         "token_ids": [3, 10, 11], "mask": [False, True, True], "logprobs": [-0.5, -0.3], "advantages": [0.5, 0.5],
         "trainer_logprobs": [-1.0, -0.5], "entropies": None},
        {"parent": 1, "message": {"role": "tool", "content": "4", "tool_call_id": "c1"}, "token_ids": [], "mask": []},
        {"parent": 2, "message": {"role": "assistant", "content": "5"}, "sampled": True, "token_ids": [20, 3, 30],
         "mask": [False, False, True], "logprobs": [-0.1]},
    ],
}]}

LEGACY = {
    "example_id": 3, "reward": 0.5, "trajectory": [{"prompt": [{"role": "user", "content": "?"}],
    "completion": [{"role": "assistant", "content": "!"}], "tokens": {"prompt_ids": [1, 2], "prompt_mask": [0, 0],
    "completion_ids": [3], "completion_mask": [1], "completion_logprobs": [-0.1], "is_truncated": True}}],
}

EXPORT = {
    "schema_version": 1, "token_ids": [1, 2, 3], "loss_mask": [False, True, True], "advantages": [0.0, 0.5, 0.5],
    "inference_logprobs": [0.0, -1.0, None], "trainer_logprobs": [0.0, -1.1, -2.0], "entropy": [0.1, 0.2, 0.3],
    "is_masked": [True, False, False], "env_name": "calc",
}

SKYRL: dict[str, Any] = {
    "prompt_token_ids": [[1, 2], [1, 2, 3, 20], [5]], "response_ids": [[3], [4, 6], [7]],
    "rewards": [[0.0], [0.0, 1.0], [0.5]], "loss_masks": [[1], [1, 1], [1]],
    "stop_reasons": ["tool_call", "stop", "stop"],
    "rollout_logprobs": [[-0.1], [-0.2, -0.3], [-0.4]], "trajectory_ids": ["A", "A", "B"],
    "is_last_step": [False, True, True], "rollout_metrics": {},
}

SKYRL_OBSERVED: dict[str, Any] = {
    **SKYRL, "loss_masks": [[1], [1, 0], [1]], "rollout_logprobs": [[-0.1], [-0.2, 0.0], [-0.4]],
    "rollout_expert_indices": [[[[1]]] * 3, [[[1]]] * 6, [[[1]]] * 2],
}

RLLM = {
    "trace_id": "t", "session_id": "s", "model": "m", "messages": [{"role": "user", "content": "?"}], "tools": [],
    "prompt_token_ids": [1], "completion_token_ids": [2, 3], "logprobs": [-0.1, -0.2], "finish_reason": "stop",
    "weight_version": 4,
}

LIGHTNING: dict[str, Any] = {
    "rollout_id": "ro-1", "task": None, "final_reward": None, "triplets": [
        {"prompt": {"token_ids": [1, 2], "raw_content": [{"role": "user", "content": "?"}], "image_urls": []},
         "response": {"token_ids": [3, 4], "logprobs": [{"token": "a", "logprob": -0.5}, {"logprob": -0.25}]},
         "reward": 0.5, "metadata": {"agent_name": "a"}},
        {"prompt": {"token_ids": [1, 2, 3, 4, 5]}, "response": {"token_ids": [6]}, "reward": None, "metadata": {}}],
}

ATROPOS: dict[str, Any] = {
    "tokens": [[1, 2, 3], [1, 4]], "masks": [[-100, 2, 3], [-100, 4]], "scores": [1.0, -1.0],
    "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -2.0]], "advantages": [[0.0, 0.5, 0.5], [0.0, -0.5]],
    "ref_logprobs": None, "messages": [[{"role": "user", "content": "?"}], []], "overrides": None,
    "group_overrides": {"source": "x"},
}


def episode(name: str, **more: Any) -> dict[str, Any]:
    """A prompt of 2 tokens, a completion of 2, an observation of 1, and a second completion of 2."""
    nodes = [
        {"message": {"role": "user", "content": "2+2?"}, "sampled": False, "token_ids": [1, 2], "mask": [False, False]},
        {"parent": 0, "message": {"role": "assistant", "content": "4"}, "sampled": True, "token_ids": [3, 10, 11],
         "mask": [False, True, True], "logprobs": [-0.5, -0.25]},
        {"parent": 1, "message": {"role": "tool", "content": "4"}, "token_ids": [20], "mask": [False]},
        {"parent": 2, "message": {"role": "assistant", "content": "5"}, "sampled": True, "token_ids": [12, 13],
         "mask": [True, True], "logprobs": [-0.125, -1.0]},
    ]
    trace = {"id": f"t-{name}", "nodes": nodes, "calls": [], "rewards": {"right": {"score": 1.0, "weight": 1.0}}}
    run = {"id": "r", "type": "train", "work": {"type": "train", "step": 3, "policy": {"start": 2, "end": 2}}}
    return {"id": name, "group": {"id": "g"}, "run": run, "traces": [trace], **more}


def update(name: str, info: Any = None, **streams: Any) -> dict[str, Any]:
    branches = [{"index": 0, **streams}] if streams else []
    return {"version": 1, "trace_id": f"t-{name}", "info": info or {}, "branches": branches}


TRAINED = [None, None, None, -0.5, -0.75, None, -0.25, None]
"""What the trainer computed for the tokens of an episode. It did not train the last one."""
