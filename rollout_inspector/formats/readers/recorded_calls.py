"""Recorded calls: one engine call a line, request and response as they went to an OpenAI-compatible vLLM server.

Lines of one ``session_id`` are one trajectory, in file order; sessions may interleave. A line without a session is a
trajectory by itself, so bare answers of a server are read too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.formats.readers.sessions import Session, read_sessions, session_parts
from rollout_inspector.formats.registry import Format, Rejected, has_keys
from rollout_inspector.formats.sglang_meta import META, sampled, versions
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.formats.top_logprobs import alternatives_of, id_named
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Request, Step, Trajectory, ids_array

_REQUEST = ("messages", "tools", "chat_template_kwargs", "temperature", "top_p", "top_k")
_CHOICE = ("index", "token_ids", "logprobs", "message", "text", "finish_reason", "stop_reason", "prompt_token_ids",
           "meta_info")
_LINE = ("session_id", "tokenizer", "request", "response", "reward", "group", "trajectory_stop_reason",
         "policy_version")


def read(source: Source) -> Iterator[Trajectory | Rejected]:
    return read_sessions(source, _session_id, _add_line)


def _session_id(value: Mapping[str, Any], number: int) -> str:
    response = value.get("response", value)
    response = response if isinstance(response, dict) else {}
    session_id = value.get("session_id")
    if session_id is None:
        # Bare answers: ids of a server are unique, and a missing one is made from the place.
        session_id = response.get("id") or response.get("request_id") or f"line-{number}"
    return shapes.text(session_id, "session_id", 200) or f"line-{number}"


def _add_line(session: Session, value: dict[str, Any]) -> None:
    request = shapes.optional_mapping(value.get("request"), "request")
    bare = "response" not in value
    response = value if bare else shapes.mapping(value["response"], "response")
    session.tokenizer = shapes.text(value.get("tokenizer"), "tokenizer", 200) or session.tokenizer
    session.group = shapes.text(value.get("group"), "group", 200) or session.group
    session.stop_reason = shapes.text(value.get("trajectory_stop_reason"), "trajectory_stop_reason", 60) or (
        session.stop_reason
    )
    reward = shapes.number(value.get("reward"), "reward")
    session.reward = session.reward if reward is None else reward
    version = shapes.text(value.get("policy_version"), "policy_version", 100)
    extra = {"line": {} if bare else shapes.rest(value, _LINE)}
    if bare:
        response = shapes.rest(response, [name for name in _LINE if name != "response"])
    for step in steps_of(request, response, extra, version):
        session.append(step)


def steps_of(
    request: Mapping[str, Any], response: Mapping[str, Any], extra: dict[str, Any], version: str = ""
) -> Iterator[Step]:
    """The steps of one call of an OpenAI-compatible server, one for each choice. Raises :class:`BadLine`.

    ``extra``: further fields of every step. ``version``: the policy version, where no choice tells its own.
    """
    choices = shapes.sequence(response.get("choices"), "response.choices")
    if not choices:
        raise BadLine("response.choices is empty: the call has no answer.")
    extra = {
        **extra,
        "request": shapes.rest(request, _REQUEST),
        "response": shapes.rest(response, ("choices", "prompt_token_ids")),
    }
    limits.current().check_repeated(extra, len(choices), "choices")
    for n, choice in enumerate(choices):
        where = f"response.choices[{n}]"
        yield _step(request, response, shapes.mapping(choice, where), where, extra, version)


def _step(
    request: Mapping[str, Any], response: Mapping[str, Any], choice: Mapping[str, Any], where: str,
    extra: dict[str, Any], version: str,
) -> Step:
    prompt = response.get("prompt_token_ids")
    if prompt is None:
        prompt = choice.get("prompt_token_ids")
    completion, logprobs, alternatives = _completion(choice, where)
    meta = shapes.optional_mapping(choice.get("meta_info"), f"{where}.meta_info")
    if meta and not len(completion):
        completion, logprobs, alternatives = sampled(meta, f"{where}.meta_info")
    own, changed = versions(meta, f"{where}.meta_info")
    reply = choice.get("message")
    extra = {**extra, **changed, "choice": shapes.rest(choice, _CHOICE), "meta_info": shapes.rest(meta, META)}
    if choice.get("index"):
        extra["choice"]["index"] = choice["index"]
    return Step(
        prompt_ids=shapes.optional_ids(prompt, "prompt_token_ids"), completion_ids=completion, logprobs=logprobs,
        **alternatives, finish_reason=shapes.text(choice.get("finish_reason"), f"{where}.finish_reason", 30),
        stop_reason=shapes.text(choice.get("stop_reason"), f"{where}.stop_reason", 100), request=_request(request),
        reply=None if reply is None else shapes.mapping(reply, f"{where}.message"),
        text=shapes.optional_string(choice.get("text"), f"{where}.text"),
        temperature=shapes.number(request.get("temperature"), "request.temperature"),
        top_p=shapes.number(request.get("top_p"), "request.top_p"),
        top_k=shapes.whole(request.get("top_k"), "request.top_k"), policy_version=own or version,
        extra={name: item for name, item in extra.items() if item},
    )


def _request(request: Mapping[str, Any]) -> Request | None:
    if request.get("messages") is None:
        return None
    return Request(
        shapes.messages(request["messages"], "request.messages"),
        shapes.optional_tools(request.get("tools"), "request.tools"),
        shapes.optional_mapping(request.get("chat_template_kwargs"), "request.chat_template_kwargs"),
    )


def _completion(choice: Mapping[str, Any], where: str) -> tuple[Ids, Floats | None, dict[str, Any]]:
    """Ids, logprobs and alternatives, from ``token_ids`` or from tokens written as ``token_id:123``."""
    logprobs_field = choice.get("logprobs")
    entries: Sequence[Any] | None = None
    values: Any = None
    tokens: Any = None
    top: Any = None
    if isinstance(logprobs_field, list):
        values = logprobs_field
        if logprobs_field and isinstance(logprobs_field[0], dict):
            entries = logprobs_field
    elif logprobs_field is not None:
        logprobs_field = shapes.mapping(logprobs_field, f"{where}.logprobs")
        if logprobs_field.get("content") is not None:
            entries = shapes.sequence(logprobs_field["content"], f"{where}.logprobs.content")
        else:
            values, tokens, top = (
                logprobs_field.get("token_logprobs"),
                logprobs_field.get("tokens"),
                logprobs_field.get("top_logprobs"),
            )
    if entries is not None:
        entries = [shapes.mapping(entry, f"{where}.logprobs[{n}]") for n, entry in enumerate(entries)]
        values = [entry.get("logprob") for entry in entries]
        tokens = [entry.get("token") for entry in entries]
        top = [entry.get("top_logprobs") for entry in entries]
    logprobs = shapes.optional_floats(values, f"{where}.logprobs")
    ids = NO_IDS
    if choice.get("token_ids") is not None:
        ids = shapes.ids(choice["token_ids"], f"{where}.token_ids")
    elif isinstance(tokens, list) and tokens:
        token_ids = [id_named(token, f"{where}.logprobs") for token in tokens]
        known_ids = [token_id for token_id in token_ids if token_id is not None]
        ids = ids_array(known_ids) if len(known_ids) == len(token_ids) else NO_IDS
    return ids, logprobs, alternatives_of(top, ids, f"{where}.logprobs.top_logprobs")


def detect(values: Sequence[Any]) -> bool:
    first = values[0]
    return (has_keys(first, "response") and has_keys(first["response"], "choices")) or (
        has_keys(first, "choices") and isinstance(first["choices"], list)
    )


FORMAT = Format(
    "recorded_calls", "Recorded calls (requests and answers of a vLLM server)", detect, read,
    cut=partial(session_parts, session_id=_session_id), by_line=False,
)
