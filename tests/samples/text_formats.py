"""Records of the formats that hold text alone."""

from typing import Any

VERL = {"input": "user 2+2?", "output": "4", "gts": "4", "score": 1.0, "step": 3}

EVALS = {"input_prompt": [{"role": "user", "content": "?"}], "output_response": "4<end>", "score": [0.0, 1.0],
         "stop_reason": "stop", "env_class": "calc", "data_source": "x"}

AREAL = {"task_id": "t", "sample_idx": 2, "seqlen": 9, "prompt_len": 4, "head_version": 1, "tail_version": 2,
         "reward": 0.5, "prompt": "?", "completion": "!"}

SWIFT = {"step": [1, 1], "prompt": ["a", "b"], "completion": ["A", "B"], "reward": [0.0, 1.0]}

MESSAGES = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "a"},
            {"role": "user", "content": "??"}, {"role": "assistant", "content": "b"}], "tools": []}

ART: dict[str, Any] = {
    "group_index": 4, "group_metadata": '{"step": 2}', "reward": 0.5, "metadata": '{"id": "t0"}', "logs": ["hm"],
    "tools": '[{"type": "function", "function": {"name": "f"}}]',
    "messages": [{"role": "user", "content": "?", "trainable": False},
                 {"role": "assistant", "content": "for example", "trainable": False},
                 {"role": "assistant", "tool_calls": '[{"id": "c", "type": "function", "function": {"name": "f"}}]',
                  "trainable": True},
                 {"role": "tool", "content": "4", "tool_call_id": "c", "trainable": False},
                 {"role": "assistant", "content": "b", "trainable": True}],
}
