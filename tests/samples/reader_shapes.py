"""Records in the shapes that other programs write."""

from typing import Any

MESSAGES = [{"role": "user", "content": "2+2?"}]

RLLM_STEP: dict[str, Any] = {
    "prompt_ids": [1, 2], "response_ids": [3, 4], "logprobs": [-0.5, -0.25],
    "chat_completions": [*MESSAGES, {"role": "assistant", "content": "4", "reasoning": "sum"}],
    "observation": None, "thought": "sum", "action": "4", "model_response": "4", "info": {}, "reward": 0.0,
    "model_output": {"text": "4", "prompt_ids": [1, 2], "completion_ids": [3, 4], "logprobs": [-0.5, -0.25],
                     "finish_reason": "stop", "weight_version": 6},
    "done": True, "mc_return": 0.0, "advantage": [0.5, -0.5], "weight_version": 7,
}

RLLM_EPISODE: dict[str, Any] = {
    "id": "task-9:0", "task": {"question": "2+2?"}, "termination_reason": "env_done", "is_correct": True, "metrics": {},
    "info": {}, "trajectories": [
        {"uid": "u1", "name": "solver", "task": None, "reward": 1.0, "info": {}, "steps": [
            RLLM_STEP, {**RLLM_STEP, "prompt_ids": [1, 2, 3, 4, 5], "response_ids": [6], "logprobs": [-0.1],
                        "model_output": None, "advantage": 2.0, "weight_version": None}]},
    ],
}

SGLANG: dict[str, Any] = {
    "session_id": "s", "reward": 1.0, "request": {
        "input_ids": [1, 2], "sampling_params": {"temperature": 0.7, "top_p": 0.9, "top_k": -1, "max_new_tokens": 9},
        "return_logprob": True},
    "response": {"text": "4.", "output_ids": [3, 4], "meta_info": {
        "id": "r1", "finish_reason": {"type": "stop", "matched": 4}, "prompt_tokens": 2, "completion_tokens": 2,
        "weight_version": "12", "cached_tokens": 1, "output_token_logprobs": [[-0.5, 3, "4"], [-0.25, 4, None]],
        "output_top_logprobs": [[[-0.5, 3, None], [-1.0, 8, None]], [[-0.2, 9, None], [-0.25, 4, None]]]}},
}

HARBOR: dict[str, Any] = {
    "id": "0b", "task_name": "sum", "trial_name": "sum__a1", "agent_info": {
        "name": "terminus-2", "version": "2.0", "model_info": {"name": "qwen3", "provider": "hosted_vllm"}},
    "agent_result": {"n_input_tokens": 7, "metadata": {"n_episodes": 2}, "rollout_details": [
        {"prompt_token_ids": [[1, 2], [1, 2, 3, 20]], "completion_token_ids": [[3], [4, 5]],
         "logprobs": [[-0.5], [-0.25, -0.125]], "extra": {"finish": ["tool", "stop"], "short": [1]}},
        {"prompt_token_ids": [[9]], "completion_token_ids": [[8]]}]},
    "verifier_result": {"rewards": {"reward": 1.0, "style": 0.5}}, "exception_info": None,
}

EVENT: dict[str, Any] = {
    "event_id": "e1", "event_type": "model_request", "rollout_id": "r", "attempt_id": "pod-1", "timestamp": 5.0,
    "data": {
        "model": "gpt-4", "request": {"model": "gpt-4", "messages": MESSAGES, "temperature": 0.7},
        "server": {"model": "qwen-7b", "version": 42, "endpoint": "http://model:8000/v1"}, "latency_ms": 10.0,
        "response": {"id": "c", "prompt_token_ids": [1, 2], "choices": [
            {"index": 0, "token_ids": [3, 4], "finish_reason": "stop", "message": {"role": "assistant", "content": "4"},
             "logprobs": {"content": [{"logprob": -0.5}, {"logprob": -0.25}]}}]},
    },
}
