"""The smallest records of the formats, and what reads and writes them."""

import json
from typing import Any

from rollout_inspector import formats
from rollout_inspector.formats import Rejected, Source
from rollout_inspector.streams.trajectory import Trajectory

CALL = {
    "session_id": "s1", "tokenizer": "qwen3", "reward": 1.0, "created_at": 5,
    "request": {"model": "m", "messages": [{"role": "user", "content": "2+2?"}], "tools": [{"type": "function"}],
                "chat_template_kwargs": {"enable_thinking": False}, "temperature": 1.0, "max_tokens": 9},
    "response": {"id": "c1", "prompt_token_ids": [1, 2, 3], "choices": [{
        "index": 0, "token_ids": [10, 11], "logprobs": {"content": [{"logprob": -0.1}, {"logprob": -0.2}]},
        "message": {"role": "assistant", "content": "4", "reasoning_content": None, "tool_calls": []},
        "finish_reason": "stop", "stop_reason": 151645, "text": "4<end>"}]},
}

GYM: dict[str, Any] = {
    "responses_create_params": {"input": [{"role": "user", "content": "2+2?"}], "tools": []},
    "response": {"id": "r1", "model": "m", "output": [
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]},
        {"type": "function_call", "name": "calc", "arguments": "{\"e\":\"2+2\"}", "call_id": "c1",
         "prompt_token_ids": [1, 2, 3], "generation_token_ids": [10, 11], "generation_log_probs": [-0.5, -0.3]},
        {"type": "function_call_output", "call_id": "c1", "output": "4"},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "4"}],
         "prompt_token_ids": [1, 2, 3, 10, 11, 20], "generation_token_ids": [30], "generation_log_probs": [-0.1]}]},
    "reward": 1.0, "_ng_task_index": 0, "_ng_rollout_index": 2, "mask_sample": False,
    "routed_experts": "nrlre1:u1:1x1x1:AA==",
}

TRAIN = {
    "content": [["", ""]], "rewards": [1.0], "input_lengths": [3], "token_ids": [[1, 2, 3, 0, 0]], "idx": 7,
    "token_loss_mask": [[0, 1, 1, 0, 0]], "sample_loss_mask": [1.0], "advantages": [[0.0, 0.5, 0.5, 0, 0]],
    "generation_logprobs": [[0.0, -1.0, -2.0, 0, 0]], "prev_logprobs": [[0.0, -1.0, -2.0, 0, 0]],
}


def jsonl(*values: Any) -> bytes:
    return b"".join((value if isinstance(value, bytes) else json.dumps(value).encode()) + b"\n" for value in values)


def read(data: bytes, name: str = "auto") -> tuple[str, list[Trajectory], list[Rejected]]:
    chosen, items = formats.read(Source.of_bytes(data), name)
    found = list(items)
    return (
        chosen.name,
        [item for item in found if isinstance(item, Trajectory)],
        [item for item in found if isinstance(item, Rejected)],
    )


def changed(value: dict[str, Any], *path: Any, to: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(value))
    place = copy
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = to
    return copy


def own_line(value: Trajectory) -> bytes:
    import io

    from rollout_inspector.formats import FORMATS

    file = io.BytesIO()
    FORMATS["own_jsonl"].write([value], file)  # type: ignore[misc]
    return file.getvalue()
