"""An example of each format, and how chance damages it."""

import copy
import io
import json
import random
from typing import Any

from rollout_inspector import formats
from rollout_inspector.formats.writers.exports import EXPORTS, write
from rollout_inspector.streams.trajectory import Trajectory
from tests.samples.formats import CALL, GYM, TRAIN
from tests.samples.people_files import ALPACA, ATIF, BATCH, OPENRLHF, PAIR, PREFERENCES, SHAREGPT, SLIME
from tests.samples.reader_shapes import EVENT, HARBOR, RLLM_EPISODE, SGLANG
from tests.samples.text_formats import AREAL, ART, EVALS, MESSAGES, SWIFT, VERL
from tests.samples.trainer_formats import ATROPOS, CAPTURE, EXPORT, LEGACY, LIGHTNING, RLLM, SKYRL_OBSERVED, TRACE_04
from tests.storage.build import chain

ODD: list[Any] = [
    None, -1, 0, 2**31, 2**70, 1.5, True, "", "\0", "x" * 300, [], {}, [[]], {"a": []}, "\ud800", 1e308, -0.0, [None],
    ["1"], [-5], [1, [2]], "token_id:x", [{}], {"role": 1}, [1e308, 1e308], 10**30,
]


def own(value: Trajectory) -> Any:
    file = io.BytesIO()
    formats.FORMATS["own_jsonl"].write([value], file)  # type: ignore[misc]
    return json.loads(file.getvalue())


def exported(name: str) -> Any:
    file = io.BytesIO()
    write(EXPORTS[name], [chain("t", 2)], file)
    return json.loads(file.getvalue())


EXAMPLES = {
    "recorded_calls": CALL, "nemo_gym": GYM, "nemo_rl": TRAIN, "token_capture": CAPTURE, "verifiers_traces": TRACE_04,
    "verifiers_legacy": LEGACY, "prime_rl_export": EXPORT, "skyrl": SKYRL_OBSERVED, "rllm": RLLM, "verl": VERL,
    "skyrl_evals": EVALS, "areal": AREAL, "completions": SWIFT, "messages": MESSAGES, "art": ART,
    "agent_lightning": LIGHTNING, "atropos": ATROPOS, "rllm_steps": RLLM_EPISODE, "sglang": SGLANG, "harbor": HARBOR,
    "agent_lightning_events": EVENT, "agent_lightning_archive": {"rollout": {"rollout_id": "r"}, "events": [EVENT]},
    "miles_columns": {
        "sample_index": 1, "response_length": 2, "total_length": 3, "tokens": [1, 2, 3], "loss_mask": [1, 0],
        "rollout_log_probs": [-0.5, 0.0]},
    "own_jsonl": own(chain(hostile="")),
    "own_parquet": {"external_id": "a", "record": json.dumps(own(chain("a", hostile="")))},
    "verl_agent_loop": exported("verl"), "trl_rollouts": exported("trl"), "prime_rl_samples": exported("prime_rl"),
    "tinker_data": exported("tinker"), "nemo_message_log": exported("nemo_message_log"), "sft_rows": exported("sft"),
    "preference_rows": PAIR, "slime_samples": SLIME, "openrlhf_experience": OPENRLHF, "batch_output": BATCH,
    "atif": ATIF, "sharegpt": SHAREGPT, "alpaca": ALPACA, "preferences": PREFERENCES,
}


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        found += places(item, (*path, key))
    return found


def mutate_value(rng: random.Random, value: Any) -> None:
    path = rng.choice(places(value))
    place = value
    for key in path[:-1]:
        place = place[key]
    action = rng.random()
    if action < 0.2 and isinstance(place, dict):
        del place[path[-1]]
    elif action < 0.3 and isinstance(place, list):
        place.append(copy.deepcopy(rng.choice(ODD)))
    else:
        place[path[-1]] = copy.deepcopy(rng.choice(ODD))


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    at = rng.randrange(len(changed))
    action = rng.random()
    if action < 0.3:
        del changed[at : at + rng.randint(1, 40)]
    elif action < 0.6:
        changed[at] = rng.randrange(256)
    elif action < 0.8:
        changed[at:at] = bytes(rng.randrange(256) for _ in range(rng.randint(1, 5)))
    else:
        changed[at:at] = changed[: rng.randint(0, 200)]
    return bytes(changed)


def changed_values(rng: random.Random, name: str) -> list[Any]:
    """One to three examples of a format, a few of their values changed."""
    values = [json.loads(json.dumps(EXAMPLES[name])) for _ in range(rng.randint(1, 3))]
    for _ in range(rng.randint(0, 3)):
        target = rng.choice(values)
        if places(target):
            mutate_value(rng, target)
    return values
