"""prime-rl and verifiers: streams rollouts as the formats ``verifiers_traces`` and ``verifiers_legacy`` read them.

    monitor = PrimeRlStream(setup_monitor(...))      # in the orchestrator of prime-rl
    env = stream_episodes(env)                        # an environment of verifiers, without a trainer

Tested with verifiers 0.4.0, and with the shapes of prime-rl 0.5.0.
"""

import secrets
from collections.abc import Iterator, Mapping
from typing import Any

from rollout_inspector.client.adapters.records import plain
from rollout_inspector.client.adapters.stream import RolloutStream
from rollout_inspector.client.client import line_of

MAX_KEPT = 32  # Ids of kept sets of a token, on the mean: the server stores those of larger sets not at all.
_HEAVY = ("multi_modal_data", "routed_experts", "sampling_mask")  # Fields of a node that hold raw tensors.


class PrimeRlStream:
    """A monitor around a monitor. Without a ``stream``, ``options`` go to a new :class:`RolloutStream`."""

    def __init__(self, monitor: Any, stream: RolloutStream | None = None, **options: Any) -> None:
        if not callable(getattr(monitor, "log_samples", None)):
            raise TypeError(f"{type(monitor).__name__} has no log_samples(). PrimeRlStream stands around a monitor.")
        self._monitor = monitor
        self._stream = stream or RolloutStream(**options)
        self._start = secrets.token_hex(2)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._monitor, name)

    def log_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Stream the rollouts of a training step, then do what the monitor does with them."""
        if args and isinstance(args[0], Iterator):  # it can be read once only
            args = (list(args[0]), *args[1:])
        arguments = dict(zip(("rollouts", "step"), args, strict=False)) | kwargs
        step = arguments.get("step")
        prefix = f"step-{step}/{self._start}-"
        self._stream.send_made(lambda: [record(rollout) for rollout in arguments["rollouts"]], prefix, step)
        return self._monitor.log_samples(*args, **kwargs)

    def close(self) -> Any:
        """Send what waits, and close the monitor."""
        self._stream.settle()
        return self._monitor.close() if hasattr(self._monitor, "close") else None


def stream_episodes(env: Any, stream: RolloutStream | None = None, **options: Any) -> Any:
    """Returns the environment of verifiers, whose finished episodes are streamed from now on."""
    if not callable(getattr(env, "run_episode", None)):
        raise TypeError(
            f"{type(env).__name__} has no run_episode(). stream_episodes knows environments of verifiers 0.4."
        )
    into = stream or RolloutStream(**options)
    run_episode = env.run_episode

    async def run(*args: Any, **kwargs: Any) -> Any:
        episode = await run_episode(*args, **kwargs)
        into.send_made(lambda: [record(episode)])
        return episode

    env.run_episode = run
    return env


def record(rollout: Any) -> dict[str, Any] | bytes:
    """A rollout, trace or episode as one line: by ``to_dict`` and ``to_record``, or by ``model_dump``. A plain mapping
    is written at once, because prime-rl later takes the tokens out of it."""
    if isinstance(rollout, Mapping):
        return line_of(rollout)
    record: dict[str, Any] = rollout.to_dict() if hasattr(rollout, "to_dict") else {}
    if hasattr(rollout, "to_record"):
        try:
            record |= rollout.to_record(float_decimals=None)  # otherwise verifiers rounds log-probabilities
        except TypeError:  # versions that never round
            record |= rollout.to_record()
    record = record or rollout.model_dump(mode="json", exclude={"nodes": {"__all__": set(_HEAVY)}})
    traces = zip(getattr(rollout, "traces", [rollout]), record.get("traces", [record]), strict=False)
    for trace, line in traces:
        for node, fields in zip(getattr(trace, "nodes", ()), line.get("nodes", ()), strict=False):
            if (mask := getattr(node, "sampling_mask", None)) is not None:
                fields["sampling_mask"] = {"counts": plain(mask.counts)}
                ids = getattr(mask, "ids", None)
                if ids is not None and len(ids) <= MAX_KEPT * len(mask.counts):
                    fields["sampling_mask"]["ids"] = plain(ids)
    return record
