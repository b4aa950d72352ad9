"""agent-lightning rollouts: one rollout a line, with a triplet of prompt, response and reward for each call."""

from collections.abc import Sequence
from typing import Any

from rollout_inspector.formats import shapes
from rollout_inspector.formats.call_fields import other_fields
from rollout_inspector.formats.registry import NO_REQUESTS, has_keys, line_format
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.formats.top_logprobs import alternatives_of
from rollout_inspector.streams.trajectory import Step, Trajectory


def _rollout(value: Any, number: int) -> Trajectory:
    value = shapes.mapping(value, "The line")
    if "triplets" not in value:
        raise BadLine(
            "A triplet alone does not say which rollout it belongs to. Write one line for each rollout: "
            '{"rollout_id": ..., "final_reward": ..., "triplets": [...]}.'
        )
    triplets = [
        shapes.mapping(item, f"triplets[{n}]") for n, item in enumerate(shapes.sequence(value["triplets"], "triplets"))
    ]
    if not triplets:
        raise BadLine("triplets is empty: the rollout made no call.")
    rewards = [shapes.number(triplet.get("reward"), f"triplets[{n}].reward") for n, triplet in enumerate(triplets)]
    final = shapes.number(value.get("final_reward"), "final_reward")
    if final is None:  # agent-lightning takes the last reward of a call then
        final = next((reward for reward in reversed(rewards) if reward is not None), None)
    return Trajectory(
        shapes.text(value.get("rollout_id"), "rollout_id", 200) or f"line-{number}",
        tuple(_step(triplet, f"triplets[{n}]") for n, triplet in enumerate(triplets)),
        reward=final,
        extra=shapes.rest(value, ("rollout_id", "triplets", "final_reward")),
    )


def _step(value: dict[str, Any], where: str) -> Step:
    prompt = shapes.mapping(value.get("prompt"), f"{where}.prompt")
    response = shapes.mapping(value.get("response"), f"{where}.response")
    logprobs, top, texts = response.get("logprobs"), None, None
    if logprobs is not None:
        # Entries as an OpenAI-compatible server writes them, or the numbers alone.
        entries = shapes.sequence(logprobs, f"{where}.response.logprobs")
        logprobs = [entry.get("logprob") if isinstance(entry, dict) else entry for entry in entries]
        texts = [entry.get("token") if isinstance(entry, dict) else None for entry in entries]
        top = [entry.get("top_logprobs") if isinstance(entry, dict) else None for entry in entries]
    ids = shapes.optional_ids(response.get("token_ids"), f"{where}.response.token_ids")
    prompt_ids = shapes.optional_ids(prompt.get("token_ids"), f"{where}.prompt.token_ids")
    extra_fields = {
        **other_fields(prompt_ids, ids, prompt, {}, {"logprobs": texts}),
        "prompt": shapes.rest(prompt, ("token_ids",)),
        "response": shapes.rest(response, ("token_ids", "logprobs")),
        **shapes.rest(value, ("prompt", "response")),
    }
    return Step(
        prompt_ids=prompt_ids,
        completion_ids=ids,
        logprobs=shapes.optional_floats(logprobs, f"{where}.response.logprobs"),
        **alternatives_of(top, ids, f"{where}.response.logprobs"),
        extra={name: item for name, item in extra_fields.items() if item not in (None, {}, [])},
    )


def detect(values: Sequence[Any]) -> bool:
    record = values[0]
    is_triplet = has_keys(record, "prompt", "response") and has_keys(record["prompt"], "token_ids")
    return is_triplet or (has_keys(record, "triplets") and isinstance(record["triplets"], list))


FORMAT = line_format("agent_lightning", "agent-lightning rollouts", detect, _rollout, NO_REQUESTS)
