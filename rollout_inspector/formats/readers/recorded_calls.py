"""Recorded calls: one engine call a line, request and response as they went to an OpenAI-compatible vLLM server.

Lines of one ``session_id`` are one trajectory, in file order; sessions may interleave. A line without a session is a
trajectory by itself, so bare answers of a server are read too. So is the output of a batch, as vLLM's ``run_batch`` and
OpenAI write it: the answer stands in ``response.body``, and ``custom_id`` names it.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rollout_inspector.formats import limits, shapes
from rollout_inspector.formats.call_fields import other_fields
from rollout_inspector.formats.readers.nemo_gym import output_steps
from rollout_inspector.formats.readers.sessions import Session, session_format
from rollout_inspector.formats.registry import NO_REQUESTS, has_keys
from rollout_inspector.formats.sglang_meta import META, VERSIONS, sampled, token_texts, versions
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.formats.top_logprobs import alternatives_of, id_named
from rollout_inspector.streams.trajectory import NO_IDS, Floats, Ids, Request, Step

_REQUEST = ("messages", "tools", "chat_template_kwargs", "temperature", "top_p", "top_k")
_CHOICE = ("index", "token_ids", "logprobs", "message", "text", "finish_reason", "stop_reason", "matched_stop",
           "prompt_token_ids", "meta_info", *VERSIONS)
_LINE = ("session_id", "tokenizer", "request", "response", "reward", "group", "trajectory_stop_reason",
         "policy_version", "custom_id", "error")


def _session_id(value: Mapping[str, Any], number: int) -> str:
    response = value.get("response", value)
    response = response if isinstance(response, dict) else {}
    session_id = value.get("session_id", value.get("custom_id"))
    if session_id is None:
        # Bare answers: ids of a server are unique, and a missing one is made from the place.
        session_id = response.get("id") or response.get("request_id") or f"line-{number}"
    return shapes.text(session_id, "session_id", 200) or f"line-{number}"


def _add_line(session: Session, value: dict[str, Any]) -> None:
    request = shapes.optional_mapping(value.get("request"), "request")
    bare = "response" not in value
    is_batch = "custom_id" in value
    response = value if bare else shapes.mapping(value["response"] or {} if is_batch else value["response"], "response")
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
    if is_batch:
        extra["line"] |= shapes.rest(response, ("body",))
        response = shapes.spare(shapes.optional_mapping, response.get("body"), "response.body") or {}
        session.error = shapes.error_text(value.get("error")) or shapes.error_text(response.get("error"))
        session.tokenizer = session.tokenizer or shapes.text(response.get("model"), "response.body.model", 200)
        if not response.get("choices") and not response.get("output"):
            session.error = session.error or "The batch has no answer to this request."
            session.extra |= extra["line"]
            return
        if response.get("choices") is None:
            for step in output_steps(shapes.sequence(response["output"], "response.body.output"))[0]:
                session.append(replace(step, extra={**extra, **step.extra}))
            return
    for step in steps_of(request, response, extra, version):
        session.append(step)


def steps_of(
    request: Mapping[str, Any], response: Mapping[str, Any], extra: dict[str, Any], version: str = ""
) -> Iterator[Step]:
    """The steps of one call of an OpenAI-compatible server, one for each choice. Raises :class:`BadLine`. ``extra``:
    further fields of every step. ``version``: the policy version, where no choice tells its own."""
    choices = shapes.sequence(response.get("choices"), "response.choices")
    if not choices:
        raise BadLine("response.choices is empty: the call has no answer.")
    extra = {
        **extra,
        "request": shapes.rest(request, _REQUEST),
        "response": shapes.rest(response, ("choices", "prompt_token_ids")),
    }
    limits.current().check_repeated(extra, len(choices), "choices")
    usage = response.get("usage") if len(choices) == 1 else None  # it counts all choices
    usage = usage if isinstance(usage, Mapping) else {}
    for n, choice in enumerate(choices):
        where = f"response.choices[{n}]"
        yield _step(request, response, shapes.mapping(choice, where), where, extra, version, usage)


def _step(
    request: Mapping[str, Any], response: Mapping[str, Any], choice: Mapping[str, Any], where: str,
    extra: dict[str, Any], version: str, usage: Mapping[str, Any],
) -> Step:
    prompt = response.get("prompt_token_ids")
    if prompt is None:
        prompt = choice.get("prompt_token_ids")
    prompt_ids = shapes.optional_ids(prompt, "prompt_token_ids")
    completion, logprobs, alternatives, tokens = _completion(choice, where)
    meta = shapes.optional_mapping(choice.get("meta_info"), f"{where}.meta_info")
    if meta and not len(completion):
        completion, logprobs, alternatives = sampled(meta, f"{where}.meta_info")
    spans = {name: choice[name] for name in VERSIONS if choice.get(name) is not None}  # vLLM's
    own, changed = versions({**meta, **spans}, where if spans else f"{where}.meta_info")
    reply = choice.get("message")
    settings = request.get("sampling_params")  # of vLLM's and SGLang's own addresses
    settings = {**(settings if isinstance(settings, Mapping) else {}), **request}
    sent = None if request.get("truncate_prompt_tokens") else request.get("prompt")
    others = other_fields(
        prompt_ids, completion, request,
        {"usage.prompt_tokens": usage.get("prompt_tokens"), "meta_info.prompt_tokens": meta.get("prompt_tokens"),
         "request.prompt": sent, "choice.prompt_token_ids": choice.get("prompt_token_ids")},
        {"usage.completion_tokens": usage.get("completion_tokens"), "logprobs": tokens,
         "meta_info.completion_tokens": meta.get("completion_tokens"),
         "meta_info.output_token_logprobs": token_texts(meta)},
    )
    extra = {**extra, **changed, "choice": shapes.rest(choice, _CHOICE), "meta_info": shapes.rest(meta, META), **others}
    if choice.get("index"):
        extra["choice"]["index"] = choice["index"]
    return Step(
        prompt_ids=prompt_ids, completion_ids=completion, logprobs=logprobs,
        **alternatives, finish_reason=shapes.text(choice.get("finish_reason"), f"{where}.finish_reason", 30),
        stop_reason=_stop_reason(choice, where), request=_request(request),
        reply=None if reply is None else shapes.mapping(reply, f"{where}.message"),
        text=shapes.optional_string(choice.get("text"), f"{where}.text"),
        temperature=shapes.spare(shapes.number, settings.get("temperature"), "request.temperature"),
        top_p=shapes.spare(shapes.number, settings.get("top_p"), "request.top_p"),
        top_k=shapes.spare(shapes.whole, settings.get("top_k"), "request.top_k"), policy_version=own or version,
        extra={name: item for name, item in extra.items() if item},
    )


def _stop_reason(choice: Mapping[str, Any], where: str) -> str:
    """vLLM calls it ``stop_reason``, SGLang ``matched_stop``."""
    name = "stop_reason" if choice.get("stop_reason") is not None else "matched_stop"
    return shapes.text(choice.get(name), f"{where}.{name}", 100)


def _request(request: Mapping[str, Any]) -> Request | None:
    if request.get("messages") is None:
        return None
    return Request(
        shapes.messages(request["messages"], "request.messages"),
        shapes.optional_tools(request.get("tools"), "request.tools"),
        shapes.optional_mapping(request.get("chat_template_kwargs"), "request.chat_template_kwargs"),
    )


def _completion(choice: Mapping[str, Any], where: str) -> tuple[Ids, Floats | None, dict[str, Any], Any]:
    """Ids, logprobs, alternatives and what the logprobs call each token. The ids are ``token_ids``, or those of tokens
    that the logprobs name by their ids (``token_id:123`` of vLLM, ``token_id`` or ``id`` beside the text)."""
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
        numbers = ((entry.get("token_id", entry.get("id")), entry.get("token")) for entry in entries)
        tokens = [text if type(number) is not int else number for number, text in numbers]
        top = [entry.get("top_logprobs") for entry in entries]
        top = top if any(top) else None
    logprobs = shapes.optional_floats(values, f"{where}.logprobs")
    ids = NO_IDS
    if isinstance(tokens, list):
        place = f"{where}.logprobs"
        tokens = [token if (number := id_named(token, place)) is None else number for token in tokens]
    if choice.get("token_ids") is not None:
        ids = shapes.ids(choice["token_ids"], f"{where}.token_ids")
    elif isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
        ids = shapes.ids(tokens, f"{where}.logprobs")
    return ids, logprobs, alternatives_of(top, ids, f"{where}.logprobs.top_logprobs"), tokens


def _detect_batch(values: Sequence[Any]) -> bool:
    first = values[0]
    answer = first.get("response") if has_keys(first, "custom_id", "response") else None
    return has_keys(answer, "body") or (has_keys(first, "custom_id", "response", "error") and answer is None)


def detect(values: Sequence[Any]) -> bool:
    first = values[0]
    return (has_keys(first, "response") and has_keys(first["response"], "choices")) or (
        has_keys(first, "choices") and isinstance(first["choices"], list)
    )


FORMATS = (
    session_format(
        "batch_output", "Batch output (vLLM run_batch, OpenAI)", _detect_batch, _session_id, _add_line, NO_REQUESTS
    ),
    session_format(
        "recorded_calls", "Recorded calls (requests and answers of a vLLM server)", detect, _session_id, _add_line
    ),
)
