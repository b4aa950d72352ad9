"""Measures the demo policy: whole episodes on held-out problems, token in and token out."""

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from rollouts.sampling.demo_policy import MODEL_DIR
from rollouts.sampling.environments import ENVIRONMENTS, Episode, Outcome


@dataclass(frozen=True)
class Report:
    """Counts over ``episodes``; ``completions`` counts assistant turns."""

    episodes: int
    right: int
    called_tool: int
    completions: int
    truncated: int
    """Completions cut by the token limit."""
    noncanonical: int
    """Completions whose decoded text is encoded to other ids."""
    stop_reasons: dict[str, int]
    wrong: list[str]
    """The texts of the episodes that went wrong."""

    @property
    def share_right(self) -> float:
        return self.right / self.episodes if self.episodes else 0.0


@dataclass
class _Running:
    """One episode under way. Its ids grow by sampled ids and by what the template adds; none is encoded again."""

    episode: Episode
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    ids: list[int]
    outcome: Outcome | None = None


def evaluate(
    model_dir: Path = MODEL_DIR,
    n: int = 60,
    seed: int = 0,
    temperature: float = 0.0,
    max_tokens: int = 96,
    max_turns: int = 5,
) -> Report:
    """Run ``n`` episodes of the calculator environment. Temperature 0 is greedy."""
    torch.manual_seed(seed)
    tokenizer = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(model_dir, local_files_only=True).eval()
    environment = ENVIRONMENTS["calculator"]()
    running = []
    for task in environment.tasks(n, seed):
        prompt = tokenizer.apply_chat_template(
            task.messages, tools=task.tools, add_generation_prompt=True, tokenize=False
        )
        ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
        running.append(_Running(environment.start(task), list(task.messages), task.tools, ids))
    completions = truncated = noncanonical = 0
    for _turn in range(max_turns):
        live = [dialogue for dialogue in running if dialogue.outcome is None]
        if not live:
            break
        for dialogue, completion in zip(live, _generate(model, tokenizer, live, temperature, max_tokens), strict=True):
            completions += 1
            dialogue.ids += completion
            noncanonical += tokenizer(tokenizer.decode(completion), add_special_tokens=False)["input_ids"] != completion
            if completion[-1] != tokenizer.eos_token_id:
                truncated += 1
                dialogue.outcome = dialogue.episode.truncated("length")
                continue
            _advance(tokenizer, dialogue, completion)
    outcomes = [dialogue.outcome or dialogue.episode.truncated("max_turns") for dialogue in running]
    reasons = sorted({outcome.stop_reason for outcome in outcomes})
    return Report(
        episodes=n,
        right=sum(outcome.reward == 1.0 for outcome in outcomes),
        called_tool=sum(outcome.reward_parts["called_tool"] == 1.0 for outcome in outcomes),
        completions=completions,
        truncated=truncated,
        noncanonical=noncanonical,
        stop_reasons={reason: sum(outcome.stop_reason == reason for outcome in outcomes) for reason in reasons},
        wrong=[
            _tail(tokenizer.decode(dialogue.ids))
            for dialogue, o in zip(running, outcomes, strict=True)
            if o.reward != 1.0
        ],
    )


def _generate(model: Any, tokenizer: Any, live: list[_Running], temperature: float, max_tokens: int) -> list[list[int]]:
    """One completion per episode, stop token included."""
    longest = max(len(dialogue.ids) for dialogue in live)
    pad = tokenizer.pad_token_id
    ids = torch.tensor([[pad] * (longest - len(dialogue.ids)) + dialogue.ids for dialogue in live])
    attention = torch.tensor([[0] * (longest - len(dialogue.ids)) + [1] * len(dialogue.ids) for dialogue in live])
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None}
    if temperature > 0:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        out = model.generate(
            input_ids=ids,
            attention_mask=attention,
            max_new_tokens=max_tokens,
            eos_token_id=tokenizer.eos_token_id,
            **sampling,
        )
    completions = []
    for row in out[:, longest:].tolist():
        stop = row.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in row else len(row)
        completions.append(row[:stop])
    return completions


def _advance(tokenizer: Any, one: _Running, completion: list[int]) -> None:
    """Pass the parsed message to the environment, then add the ids of what the template writes after it."""
    message = tokenizer.parse_response(completion, prefix="")
    outcome = one.episode.step(message)
    one.messages.append(message)
    if outcome.done:
        one.outcome = outcome
        return
    before = tokenizer.apply_chat_template(one.messages, tools=one.tools, tokenize=False)
    one.messages += outcome.messages
    after = tokenizer.apply_chat_template(one.messages, tools=one.tools, tokenize=False, add_generation_prompt=True)
    # The template ends a message with a line end after <|im_end|>; the completion stops before it.
    one.ids += tokenizer("\n" + after[len(before) :], add_special_tokens=False)["input_ids"]


def _tail(text: str) -> str:
    return text[text.index("<|im_start|>user") :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=MODEL_DIR)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--max-tokens", type=int, default=96)
    parser.add_argument("--show-wrong", action="store_true")
    arguments = parser.parse_args()
    report = evaluate(arguments.model, arguments.episodes, arguments.seed, arguments.temperature, arguments.max_tokens)
    counts = asdict(report)
    wrong = counts.pop("wrong")
    print(json.dumps(counts | {"share_right": round(report.share_right, 3)}))
    if arguments.show_wrong:
        print("\n----\n".join(wrong))


if __name__ == "__main__":
    main()
