"""verl: streams the output of each agent loop with its reward. Tested with the shapes of verl 0.9.1.

    actor_rollout_ref.rollout.agent.agent_loop_manager_class=rollout_inspector.client.adapters.verl.StreamingAgentLoopManagerTQ

That is the class for ``main_ppo``; trainers on ``RayPPOTrainer`` name ``StreamingAgentLoopManager``. Each is verl's
manager with workers whose outputs are streamed when their reward is there. The classes are made when they are asked
for, because verl is imported then. Where verl traces some of the samples only, the same samples are streamed.
"""

import secrets
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from importlib import import_module
from typing import Any

from rollout_inspector.client.adapters import records
from rollout_inspector.client.adapters.stream import RolloutStream, shared_stream

_BASES = {
    "": ("verl.experimental.agent_loop.agent_loop", "AgentLoopManager", "AgentLoopWorker"),
    "TQ": ("verl.trainer.ppo.v1.agent_loop_tq", "AgentLoopManagerTQ", "AgentLoopWorkerTQ"),
}
"""Ending of our names -> module, manager and worker of verl."""
_FEEDS_BACK = ("single_turn_agent", "tool_agent")
"""verl's agent loops that prompt with the ids that were sampled, so that each run of them is one call."""
_START = secrets.token_hex(2)
_sample: ContextVar[dict[str, Any] | None] = ContextVar("rollout_inspector_sample", default=None)


class StreamsOutputs:
    """What is put before verl's worker of agent loops. Raises ``ValueError`` without an address or a token."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        trainer = getattr(next(iter((*args, *kwargs.values())), None), "trainer", None)
        shared_stream(str(getattr(trainer, "experiment_name", None) or "verl"))
        super().__init__(*args, **kwargs)

    async def _run_agent_loop(self, sampling_params: Any, trajectory: Mapping[str, Any], **kwargs: Any) -> Any:
        is_wanted = kwargs.get("trace", True) and not trajectory.get("validate")
        about = {
            **trajectory, "agent_name": kwargs.get("agent_name", ""), "session_id": kwargs.get("session_id"),
            "uid": kwargs.get("uid"), "temperature": (sampling_params or {}).get("temperature"),
        }
        token = _sample.set(about if is_wanted else None)
        try:
            return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)  # type: ignore[misc]
        finally:
            _sample.reset(token)

    async def _compute_score(self, *args: Any, **kwargs: Any) -> None:
        """The first argument: the outputs of one agent loop."""
        await super()._compute_score(*args, **kwargs)  # type: ignore[misc]
        about = _sample.get()
        if about is not None:
            send_outputs(args[0] if args else kwargs.get("outputs", ()), about, shared_stream("verl"))


def send_outputs(outputs: Sequence[Any], about: Mapping[str, Any], stream: RolloutStream) -> bool:
    """Stream the outputs of one agent loop as one trajectory. ``about`` is what verl knows of the sample."""
    step = about.get("step")
    step = int(step) if step is not None and int(step) >= 0 else None
    prefix = f"step-{'x' if step is None else step}/{_START}-"
    return stream.send_made(lambda: [record(outputs, about, step)], prefix, step)


def record(outputs: Sequence[Any], about: Mapping[str, Any], step: int | None) -> dict[str, Any]:
    """One trajectory of the ``AgentLoopOutput`` of one agent loop; several outputs are several rows."""
    rows: list[dict[str, Any]] = []
    steps: list[dict[str, Any]] = []
    last = outputs[-1]
    versions = {str(last.extra_fields.get(name)) for name in ("min_global_steps", "max_global_steps")} - {"None"}
    for output in outputs:
        mask, logprobs = output.response_mask, output.response_logprobs
        own = records.calls_of(
            output.prompt_ids, output.response_ids, mask, logprobs, temperature=records.number(about["temperature"]),
            policy_version=versions.copy().pop() if len(versions) == 1 else "", engine="verl",
        )
        is_told = len(outputs) == 1 and (len(own) == 1 or about["agent_name"] in _FEEDS_BACK)
        steps += own if is_told else []
        rows.append(records.row(output.prompt_ids, output.response_ids, mask, logprobs, step_indices=range(len(steps))))
    info = last.extra_fields.get("reward_extra_info")
    number = about.get("session_id") if about.get("session_id") is not None else about.get("rollout_n")
    group = str(about.get("uid") or about.get("sample_index"))
    extra = {"agent_name": about["agent_name"], "num_turns": last.num_turns, "sample_index": str(about["sample_index"])}
    if not steps and versions:
        is_single = len(versions) == 1
        extra |= {"policy_version": versions.pop()} if is_single else {"weight_versions": sorted(versions)}
    return records.trajectory(
        f"{group}-{number}", rows=rows, steps=steps, reward=last.reward_score, group=group, training_step=step,
        reward_parts=info if isinstance(info, Mapping) else None, extra=extra,
    )


def _begin(parent: Any, workers: Any) -> Any:
    """An ``__init__`` after which verl's manager starts our workers."""

    def begin(self: Any, *args: Any, **kwargs: Any) -> None:
        parent.__init__(self, *args, **kwargs)
        self.agent_loop_workers_class = import_module("ray").remote(workers)

    return begin


def _made(name: str) -> Any:
    """A worker or a manager of ours, by its name."""
    for ending, (module, manager, worker) in _BASES.items():
        if name == f"StreamingAgentLoopWorker{ending}":
            base = getattr(import_module(module), worker)
            actor = getattr(base, "__ray_metadata__", None)  # decorated by ray.remote already
            base = base if actor is None else actor.modified_class
            return type(name, (StreamsOutputs, base), {"__module__": __name__})
        if name == f"StreamingAgentLoopManager{ending}":
            workers = __getattr__(f"StreamingAgentLoopWorker{ending}")
            parent = getattr(import_module(module), manager)

            return type(name, (parent,), {"__module__": __name__, "__init__": _begin(parent, workers)})
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    value = globals()[name] = _made(name)
    return value
