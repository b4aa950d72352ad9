"""SkyRL: streams what a generator returns. Tested with skyrl 0.3.0.

    return SkyRlStream(super().get_generator(cfg, tokenizer, inference_engine_client))

That is the last line of ``get_generator`` in a subclass of ``BasePPOExp``. A ``GeneratorOutput`` goes as it is, in
parts that a push takes, and the format ``skyrl`` reads it.
"""

import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, is_dataclass
from typing import Any

from rollout_inspector.client.adapters.stream import RolloutStream

MAX_PART_IDS = 500_000  # Ids in one line; a longer batch becomes several.
_LISTS = ("prompt_token_ids", "response_ids", "rewards", "loss_masks", "stop_reasons", "rollout_logprobs",
          "trajectory_ids", "is_last_step")


class SkyRlStream:
    """A generator around a generator. Without a ``stream``, ``options`` go to a new :class:`RolloutStream`."""

    def __init__(self, generator: Any, stream: RolloutStream | None = None, **options: Any) -> None:
        if not callable(getattr(generator, "generate", None)):
            raise TypeError(f"{type(generator).__name__} has no generate(). SkyRlStream stands around a generator.")
        self._generator = generator
        self._stream = stream or RolloutStream(**options)
        self._start, self._n = secrets.token_hex(2), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generator, name)

    async def generate(self, input_batch: Any, *args: Any, **kwargs: Any) -> Any:
        """What the generator returns. Batches of an evaluation are left out."""
        before = self._version()
        output = await self._generator.generate(input_batch, *args, **kwargs)
        about = input_batch.get("batch_metadata") if isinstance(input_batch, Mapping) else None
        if getattr(about, "training_phase", "train") != "eval":
            step = getattr(about, "global_step", None)
            self._n += 1
            prefix = f"step-{'x' if step is None else step}/{self._start}-{self._n}-"
            versions = sorted({str(version) for version in (before, self._version()) if version is not None})
            self._stream.send_made(lambda: list(parts(output, versions)), prefix, step)
        return output

    def _version(self) -> Any:
        return getattr(getattr(self._generator, "inference_engine_client", None), "weight_version", None)


def parts(output: Mapping[str, Any], versions: list[str]) -> Iterator[dict[str, Any]]:
    """A ``GeneratorOutput`` as lines. The steps of a trajectory stay together."""
    n = len(output["response_ids"])
    lists = {name: list(output[name]) for name in _LISTS if output.get(name) is not None}
    for name, values in lists.items():
        if len(values) != n:
            raise ValueError(f"{name} has {len(values)} elements for {n} response_ids.")
    if "trajectory_ids" in lists:
        lists["trajectory_ids"] = [
            asdict(item) if is_dataclass(item) else item  # type: ignore[arg-type]
            for item in lists["trajectory_ids"]
        ]
    version = (
        {"policy_version": versions[0]} if len(versions) == 1 else {"weight_versions": versions} if versions else {}
    )
    start = size = 0
    for i in range(n):
        size += len(lists["prompt_token_ids"][i]) + len(lists["response_ids"][i])
        ends = "is_last_step" not in lists or lists["is_last_step"][i]
        if i == n - 1 or (ends and size >= MAX_PART_IDS):
            yield {**{name: values[start : i + 1] for name, values in lists.items()}, **version}
            start, size = i + 1, 0
