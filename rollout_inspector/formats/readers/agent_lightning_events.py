"""agent-lightning events: one event a line, or the archived events of one rollout a line.

``model_request`` holds a call, ``reward`` the reward.

The gateway of agent-lightning records each call that passes it, request and assembled answer. Events of one attempt of
a rollout are one trajectory, in the order of the file.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.readers.recorded_calls import steps_of
from rollout_inspector.formats.readers.sessions import Session, session_format
from rollout_inspector.formats.registry import batch_format, having
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.trajectory import Step, Trajectory

_ROLLOUT = ("rollout_id", "status", "config")
_DATA = ("request", "response", "server", "model", "model_version", "prompt_token_ids", "response_token_ids")
_EVENT = ("event_type", "rollout_id", "attempt_id", "data")
MAX_TYPES = 50  # Types of other events that are counted for a trajectory.


def _attempt(value: Mapping[str, Any], number: int) -> str:
    rollout = shapes.text(value.get("rollout_id"), "rollout_id", 120)
    attempt = shapes.text(value.get("attempt_id"), "attempt_id", 70)
    return "-".join(part for part in (rollout or f"line-{number}", attempt) if part)


def _add_line(session: Session, value: dict[str, Any]) -> None:
    kind = shapes.text(value.get("event_type"), "event_type", 100)
    data = shapes.optional_mapping(value.get("data"), "data")
    session.group = session.group or shapes.text(value.get("rollout_id"), "rollout_id", 120)
    if kind == "reward":
        reward = shapes.number(data.get("value"), "data.value")
        session.reward = session.reward if reward is None else reward
    elif kind == "model_request":
        _add_call(session, value, data)
    else:
        others = session.extra.setdefault("other_events", {})
        if kind in others or len(others) < MAX_TYPES:
            others[kind] = others.get(kind, 0) + 1


def _add_call(session: Session, value: Mapping[str, Any], data: Mapping[str, Any]) -> None:
    request = shapes.optional_mapping(data.get("request"), "data.request")
    if isinstance(data.get("response"), list):
        raise BadLine("data.response is a list of raw chunks. Export the events with a gateway that assembles them.")
    response = shapes.optional_mapping(data.get("response"), "data.response")
    server = shapes.spare(shapes.optional_mapping, data.get("server"), "data.server") or {}
    is_trimmed = "response_token_ids" in data  # events queried in the format of triplets
    if not response.get("choices") and not is_trimmed:
        session.extra["calls_without_answer"] = session.extra.get("calls_without_answer", 0) + 1
        return
    version = data.get("model_version")
    version = shapes.text(server.get("version") if version is None else version, "data.model_version", 100)
    model = shapes.text(server.get("model"), "data.server.model", 200)
    session.tokenizer = session.tokenizer or model or shapes.text(data.get("model"), "data.model", 200)
    extra = {"line": {**shapes.rest(value, _EVENT), **shapes.rest(data, _DATA)}}
    if is_trimmed and not response:
        session.append(Step(
            prompt_ids=shapes.optional_ids(data.get("prompt_token_ids"), "data.prompt_token_ids"),
            completion_ids=shapes.optional_ids(data["response_token_ids"], "data.response_token_ids"),
            policy_version=version,
            extra={name: item for name, item in shapes.rest(value, _EVENT).items() if item is not None},
        ))
        return
    for step in steps_of(request, response, extra, version):
        session.append(step)


def _archived(value: Any, number: int) -> list[Trajectory]:
    """The attempts of an archived rollout, each a trajectory."""
    value = shapes.mapping(value, "The line")
    rollout = shapes.mapping(value.get("rollout"), "rollout")
    sessions: dict[str, Session] = {}
    for n, item in enumerate(shapes.sequence(value.get("events"), "events")):
        event = shapes.mapping(item, f"events[{n}]")
        name = _attempt({"rollout_id": rollout.get("rollout_id"), **event}, number)
        _add_line(sessions.setdefault(name, Session(name)), event)
    extra = {name: item for name, item in shapes.rest(rollout, _ROLLOUT).items() if item not in (None, {}, [])}
    status = shapes.text(rollout.get("status"), "rollout.status", 60)
    limits.current().check_repeated(extra, len(sessions), "attempts")
    sampled_sessions = [session for session in sessions.values() if session.steps]
    if not sampled_sessions:
        raise BadLine("events holds no model_request: the rollout made no call.")
    return [
        replace(session.trajectory(), stop_reason=status, extra={**extra, **session.extra})
        for session in sampled_sessions
    ]


FORMATS = (
    session_format(
        "agent_lightning_events", "agent-lightning events (model_request)",
        having("event_type", "rollout_id", "data"), _attempt, _add_line,
    ),
    batch_format(
        "agent_lightning_archive", "agent-lightning archived rollouts", having("rollout", "events"), _archived
    ),
)
