"""A NeMo Gym file of any size, from the demo policy's conversations: several turns, tools, planted breaks and drift."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rollout_inspector.text.tokenizers.loaded import LoadedTokenizer
from tools.demo_policy.dialogues import random_dialogue

SENTENCES = [
    sentence.strip() + "."
    for sentence in (Path(__file__).parents[1] / "tools" / "demo_policy" / "prose.txt").read_text().split(".")
    if len(sentence) > 20
]
SYSTEM = "<|im_start|>system\nYou answer arithmetic questions with the calculator.<|im_end|>\n"
CALLS = 8
"""Engine calls of a rollout. Each samples about 270 tokens; the last prompt is about 2,000 long."""


def write_gym_file(path: Path, codec: LoadedTokenizer, size: int, calls: int = CALLS) -> int:
    """Write rollouts until the file has ``size`` bytes; gives how many. The same arguments write the same file."""
    rng = random.Random(7)
    noise = np.random.default_rng(7)
    n = 0
    with path.open("wb") as file:
        while file.tell() < size:
            file.write(json.dumps(rollout(n, rng, noise, codec, calls)).encode() + b"\n")
            n += 1
    return n


def rollout(n: int, rng: random.Random, noise: np.random.Generator, codec: LoadedTokenizer, calls: int) -> Any:
    """One of twenty breaks (the engine reads a completion as other ids than it sampled), one of ten drifts."""
    first, *pairs = _turns(rng, calls)
    question, prompt = first
    break_at = rng.randrange(1, calls) if calls > 1 and n % 20 == 0 else None
    drift_at = rng.randrange(calls) if n % 10 == 5 else None
    prompts = codec.encode_batch([SYSTEM + prompt, *[text for _, _, _, text in pairs]])
    completions = codec.encode_batch([text for _, _, text, _ in pairs])
    ids = prompts[0].tolist()
    items: list[dict[str, Any]] = []
    for turn, (reply, observed, _, _) in enumerate(pairs):
        sampled = completions[turn].tolist()
        if turn in (break_at, drift_at):
            sampled = _split_one(sampled, codec)
        items += reply
        items[-1] |= {
            "prompt_token_ids": list(ids),
            "generation_token_ids": sampled,
            "generation_log_probs": (-noise.exponential(0.3, len(sampled)).astype(np.float32)).tolist(),
        }
        items += observed
        ids += (completions[turn].tolist() if turn == break_at else sampled) + prompts[turn + 1].tolist()
    return {
        "responses_create_params": {"input": [{"role": "user", "content": question}], "tools": []},
        "response": {"id": f"r{n}", "model": "demo", "output": items},
        "reward": float(rng.random() < 0.6),
        "_ng_task_index": n // 8,
        "_ng_rollout_index": n % 8,
        "agent_ref": {"name": "calculator"},
    }


def _turns(rng: random.Random, calls: int) -> list[Any]:
    """(question, text of the first prompt), then for each call (its items, what follows, its text, what is added)."""
    found: list[Any] = []
    while len(found) < calls + 1:
        user, *rest = random_dialogue(rng).messages
        asked = f"<|im_start|>user\n{user['content']}<|im_end|>\n<|im_start|>assistant\n"
        if not found:
            found.append((user["content"], asked))
        else:
            items, observed, text, added = found[-1]
            found[-1] = (
                items, [*observed, {"type": "message", "role": "user", "content": user["content"]}], text, added + asked
            )
        for message in rest:
            if message["role"] == "tool":
                items, observed, text, _ = found[-1]
                observed = [{"type": "function_call_output", "call_id": "c", "output": message["content"]}]
                shown = f"<tool_response>\n{message['content']}\n</tool_response>"
                found[-1] = (items, observed, text, f"\n<|im_start|>user\n{shown}<|im_end|>\n<|im_start|>assistant\n")
            else:
                found.append((*_reply(rng, message), "\n"))
    return found[: calls + 1]


def _reply(rng: random.Random, message: dict[str, Any]) -> tuple[list[Any], list[Any], str]:
    said = " ".join([*rng.choices(SENTENCES, k=rng.randint(4, 14)), message["content"]]).strip()
    items: list[Any] = [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": said}]}]
    text = said
    for call in message.get("tool_calls", ()):
        arguments = json.dumps(call["function"]["arguments"])
        items.append({"type": "function_call", "name": "calculator", "arguments": arguments, "call_id": "c"})
        text += f'\n<tool_call>\n{{"name": "calculator", "arguments": {arguments}}}\n</tool_call>'
    return items, [], text + "<|im_end|>"


def _split_one(ids: Sequence[int], codec: LoadedTokenizer) -> list[int]:
    """The same text in other ids: one token of two letters or more as its bytes."""
    found = list(ids)
    for place, piece in enumerate(codec.token_bytes(found)):
        if len(piece) > 1 and piece.isalpha():
            found[place : place + 1] = [
                token for byte in piece for token in codec.encode(bytes([byte]).decode()).tolist()
            ]
            break
    return found
