"""slime and miles: streams the samples that a rollout function returns.

    --rollout-function-path rollout_inspector.client.adapters.slime.generate_rollout     # slime, and functions of miles
    --rollout-function-path rollout_inspector.client.adapters.slime.RolloutFunction      # classes of miles

``ROLLOUT_INSPECTOR_ROLLOUT_FUNCTION`` names the function or class that makes the rollouts; without it, it is the
trainer's own. Tested with the shapes of slime 0.4.0 and miles 0.2.1.
"""

import inspect
import os
import secrets
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rollout_inspector.client.adapters import records
from rollout_inspector.client.adapters.stream import RolloutStream, shared_stream

_START = secrets.token_hex(2)


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """What the trainer's rollout function returns. Its samples are streamed, unless they are an evaluation's. Raises
    ``ValueError`` before the first rollout without an address or a token."""
    stream = shared_stream("slime")
    output = _inner()(args, rollout_id, data_source, evaluation=evaluation)
    if not evaluation:
        send_samples(output, rollout_id, getattr(args, "reward_key", None), stream)
    return output


class RolloutFunction:
    """The same for rollout functions of miles that are classes."""

    def __init__(self, input: Any) -> None:
        inner: Any = _inner()
        self._stream = shared_stream("miles")
        self._args = input.args
        self._function: Any
        if isinstance(inner, type):
            self._function = inner(input)
        else:
            self._function = lambda asked: inner(
                input.args, asked.rollout_id, input.data_source, evaluation=asked.evaluation
            )

    @classmethod
    def add_arguments(cls, parser: Any) -> None:
        """The arguments of the class that makes the rollouts."""
        if hasattr(inner := _inner(), "add_arguments"):
            inner.add_arguments(parser)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._function, name)

    async def __call__(self, input: Any) -> Any:
        output = self._function(input)
        if inspect.isawaitable(output):
            output = await output
        if not input.evaluation:
            send_samples(output, input.rollout_id, getattr(self._args, "reward_key", None), self._stream)
        return output


def send_samples(made: Any, rollout_id: int, reward_key: str | None, stream: RolloutStream) -> bool:
    """Stream a ``RolloutFnTrainOutput``, or the lists of samples that older versions return."""
    prefix = f"rollout-{rollout_id}/{_START}-"
    samples = getattr(made, "samples", made)
    return stream.send_made(
        lambda: [record(sample, n, reward_key, rollout_id) for n, sample in enumerate(_flat(samples))],
        prefix, rollout_id,
    )


def record(sample: Any, n: int, reward_key: str | None = None, training_step: int | None = None) -> dict[str, Any]:
    """One trajectory of a ``Sample``. Calls are told where the weight versions count as many as the runs of ids."""
    length = sample.response_length
    ids = records.plain(sample.tokens) or []
    prompt, response = ids[: len(ids) - length], ids[len(ids) - length :]
    mask = [1] * length if sample.loss_mask is None else records.plain(sample.loss_mask) or []
    logprobs = records.plain(sample.rollout_log_probs)
    versions = [str(version) for version in sample.weight_versions or ()]
    calls = records.calls_of(prompt, response, mask, logprobs, engine="SGLang")
    if len(versions) == len(calls):
        calls = [{**call, "policy_version": version} for call, version in zip(calls, versions, strict=True)]
    elif versions or len(calls) > 1:
        calls = []
    rewards = sample.reward if isinstance(sample.reward, dict) else {}
    status = str(getattr(sample.status, "value", sample.status))
    extra: dict[str, Any] = {"status": status, "response": sample.response}
    extra |= {name: getattr(sample, name) for name in ("prompt", "label") if isinstance(getattr(sample, name), str)}
    if versions and not calls:
        extra |= {"policy_version": versions[0]} if len(set(versions)) == 1 else {"weight_versions": versions}
    extra |= {"removed": True} if sample.remove_sample else {}
    trained = [0] * len(mask) if sample.remove_sample else mask
    index = n if sample.index is None else sample.index
    group = "" if sample.group_index is None else str(sample.group_index)
    return records.trajectory(
        f"{group}-{index}-{n}" if group else f"{index}-{n}",
        rows=[records.row(prompt, response, trained, logprobs, step_indices=range(len(calls)))],
        steps=calls, reward=rewards.get(reward_key) if rewards else sample.reward, reward_parts=rewards, group=group,
        stop_reason="length" if status == "truncated" else status, training_step=training_step,
        extra=extra,
    )


def _flat(samples: Any) -> Iterator[Any]:
    """The samples in lists of groups, and in groups of turns."""
    if isinstance(samples, (list, tuple)):
        for item in samples:
            yield from _flat(item)
    else:
        yield samples


def _inner() -> Any:
    """The function or class that makes the rollouts."""
    path = os.environ.get("ROLLOUT_INSPECTOR_ROLLOUT_FUNCTION", "").strip()
    if not path:
        package = next((name for name in ("slime", "miles") if find_spec(name) is not None), None)
        if package is None:
            raise ImportError(
                "Neither slime nor miles is installed. Name a function: ROLLOUT_INSPECTOR_ROLLOUT_FUNCTION."
            )
        path = f"{package}.rollout.sglang_rollout.generate_rollout"
    module, _, name = path.rpartition(".")
    if not module or path.startswith(__name__):
        raise ImportError(f"ROLLOUT_INSPECTOR_ROLLOUT_FUNCTION is {path!r}; it must be the path of another function.")
    return getattr(import_module(module), name)
