"""ATIF ``trajectory.json``, as harbor's agents write it: steps of user, system and agent, ids in the agent's metrics.

A step of the agent is one call of the model. Facts: https://harborframework.com/docs/agents/trajectory-format
"""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.registry import PART_OF_REQUESTS, batch_format, has_keys
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Message, Step, Trajectory

_TRAJECTORY = ("steps", "session_id", "subagent_trajectories")
_STEP = ("source", "message", "reasoning_content", "tool_calls", "observation", "metrics")
_METRICS = ("prompt_token_ids", "completion_token_ids", "logprobs")
MAX_AGENTS = 1000  # Sub-agents of a line, however deep they stand in one another.


def _batch(value: Any, number: int) -> list[Trajectory]:
    """The trajectory of a line and those of its sub-agents, in one group."""
    decoded = limits.Decoded()
    root = shapes.mapping(value, "The line")
    name = shapes.text(root.get("session_id") or root.get("trajectory_id"), "session_id", 180) or f"line-{number}"
    agents = [root]
    for agent in agents:
        children = agent.get("subagent_trajectories") or []
        agents += [shapes.mapping(child, "subagent_trajectories") for child in shapes.sequence(children, "sub-agents")]
        if len(agents) > MAX_AGENTS:
            raise BadLine(f"The line holds more than {MAX_AGENTS:,} sub-agents.")
    return [
        _trajectory(agent, f"{name}-{n}" if n else name, name if len(agents) > 1 else "", decoded)
        for n, agent in enumerate(agents)
    ]


def _trajectory(value: Mapping[str, Any], name: str, group: str, decoded: limits.Decoded) -> Trajectory:
    steps: list[Step] = []
    new_messages: list[Message] = []
    for n, item in enumerate(shapes.sequence(value.get("steps"), "steps")):
        where = f"steps[{n}]"
        item = shapes.mapping(item, where)
        is_agent = item.get("source") == "agent"
        message = _message(item, "assistant" if is_agent else "system" if item.get("source") == "system" else "user")
        if is_agent and item.get("is_copied_context") is not True:
            step = _step(item, message, new_messages, where)
            decoded.add(where, len(step.prompt_ids) + len(step.completion_ids), len(new_messages))
            steps.append(step)
            new_messages = []
        else:
            new_messages.append(message)
        new_messages += _results(item)
    agent = value.get("agent")
    agent = agent if isinstance(agent, dict) else {}
    return Trajectory(
        name, tuple(steps), group=group, tokenizer=shapes.text(agent.get("model_name"), "agent.model_name", 200),
        extra={key: field for key, field in shapes.rest(value, _TRAJECTORY).items() if field not in (None, {}, [])},
    )


def _step(value: Mapping[str, Any], reply: Message, new_messages: Sequence[Message], where: str) -> Step:
    metrics = shapes.spare(shapes.optional_mapping, value.get("metrics"), f"{where}.metrics") or {}
    extra = {
        # What was rendered with the messages, tools and the agent's own prompt, is not in the file: no whole request.
        "new_messages": list(new_messages), **shapes.rest(value, _STEP), "metrics": shapes.rest(metrics, _METRICS),
    }
    prompt, completion = (shapes.optional_ids(metrics.get(key), f"{where}.metrics.{key}") for key in _METRICS[:2])
    return Step(
        prompt_ids=prompt, completion_ids=completion,
        logprobs=shapes.optional_floats(metrics.get("logprobs") or None, f"{where}.metrics.logprobs"),
        reply=reply, extra={key: field for key, field in extra.items() if field not in (None, {}, [])},
    )


def _message(value: Mapping[str, Any], role: str) -> Message:
    message: dict[str, Any] = {"role": role, "content": value.get("message")}
    if value.get("reasoning_content"):
        message["reasoning_content"] = value["reasoning_content"]
    calls = value.get("tool_calls")
    calls = [call for call in calls if isinstance(call, dict)] if isinstance(calls, list) else []
    if calls:
        message["tool_calls"] = [
            {"id": call.get("tool_call_id"), "type": "function",
             "function": {"name": call.get("function_name"), "arguments": call.get("arguments")}}
            for call in calls
        ]
    return message


def _results(value: Mapping[str, Any]) -> list[Message]:
    """The messages that a step's observation adds."""
    observation = value.get("observation")
    results = observation.get("results") if isinstance(observation, dict) else None
    return [
        {"role": "tool", "tool_call_id": result.get("source_call_id"), "content": result.get("content")}
        for result in (results if isinstance(results, list) else ()) if isinstance(result, dict)
    ]


def detect(values: Sequence[Any]) -> bool:
    record = values[0]
    if not has_keys(record, "steps", "agent") or not isinstance(record["steps"], list):
        return False
    return str(record.get("schema_version")).startswith("ATIF") or any(
        has_keys(step, "step_id", "source") for step in record["steps"][:1]
    )


FORMAT = batch_format("atif", "ATIF trajectory.json (harbor)", detect, _batch, PART_OF_REQUESTS)
