"""Answers of SGLang's ``/generate``, one a line, alone or beside their request. ``meta_info`` holds what was sampled.
Lines of one ``session_id`` are one trajectory, in the order of the file."""

from collections.abc import Mapping, Sequence
from typing import Any

from rollout_inspector.formats import limits, sglang_meta, shapes
from rollout_inspector.formats.call_fields import other_fields
from rollout_inspector.formats.readers.sessions import Session, session_format
from rollout_inspector.formats.registry import NO_REQUESTS, has_keys
from rollout_inspector.streams.trajectory import Step

_LINE = ("session_id", "request", "response", "reward", "group", "tokenizer", "input_ids", "training_step")
_ANSWER = ("meta_info", "text", "output_ids", "input_ids")


def _session_id(value: Mapping[str, Any], number: int) -> str:
    session_id = value.get("session_id")
    meta = value.get("meta_info")
    if session_id is None and isinstance(meta, dict):
        session_id = meta.get("id")
    return shapes.text(session_id, "session_id", 200) or f"line-{number}"


def _add_line(session: Session, value: dict[str, Any]) -> None:
    request = shapes.optional_mapping(value.get("request"), "request")
    bare = "response" not in value
    reply = value if bare else value["response"]
    answers = reply if isinstance(reply, list) else [reply]
    session.tokenizer = session.tokenizer or shapes.text(value.get("tokenizer"), "tokenizer", 200)
    session.group = shapes.text(value.get("group"), "group", 200) or session.group
    reward = shapes.number(value.get("reward"), "reward")
    session.reward = session.reward if reward is None else reward
    extra = {
        "line": {} if bare else shapes.rest(value, _LINE),
        "request": shapes.rest(request, ("input_ids", "sampling_params")),
    }
    if "training_step" in value:
        session.extra["training_step"] = value["training_step"]
    limits.current().check_repeated(extra, len(answers), "answers")
    for n, answer in enumerate(answers):
        where = "response" if len(answers) == 1 else f"response[{n}]"
        ids = request.get("input_ids", value.get("input_ids"))
        session.append(_step(request, shapes.mapping(answer, where), ids, where, extra))


def _step(
    request: Mapping[str, Any], answer: Mapping[str, Any], prompt_ids: Any, where: str, extra: dict[str, Any]
) -> Step:
    meta = shapes.mapping(answer.get("meta_info"), f"{where}.meta_info")
    place = f"{where}.meta_info"
    ids, logprobs, alternatives = sglang_meta.sampled(meta, place)
    output = answer.get("output_ids")
    output_ids = shapes.optional_ids(output, f"{where}.output_ids")
    if logprobs is None:
        ids = output_ids
    scored, read_ids = sglang_meta.prompt(meta, place), answer.get("input_ids")
    if prompt_ids is None:
        prompt_ids = read_ids
    prompt = scored if prompt_ids is None and scored is not None else shapes.optional_ids(
        prompt_ids, f"{where}: input_ids"
    )
    others = other_fields(
        prompt, ids, request,
        {"meta_info.prompt_tokens": meta.get("prompt_tokens"), "input_ids of the answer": read_ids,
         "meta_info.input_token_logprobs": None if scored is None else scored.tolist()},
        {"meta_info.completion_tokens": meta.get("completion_tokens"), "output_ids": output,
         "meta_info.output_token_logprobs": sglang_meta.token_texts(meta)},
    )
    settings = shapes.optional_mapping(request.get("sampling_params"), "request.sampling_params")
    finish_reason, stop_reason = sglang_meta.finish(meta, place)
    version, changed = sglang_meta.versions(meta, place)
    extra_fields = {
        **extra,
        **changed,
        **others,
        "sampling_params": shapes.rest(settings, ("temperature", "top_p", "top_k")),
        "meta_info": shapes.rest(meta, sglang_meta.META),
        "response": shapes.rest(answer, (*_ANSWER, *_LINE)),
    }
    return Step(
        prompt_ids=prompt, completion_ids=ids, logprobs=logprobs, **alternatives, finish_reason=finish_reason,
        stop_reason=stop_reason,
        text=shapes.optional_string(answer.get("text"), f"{where}.text"),
        temperature=shapes.spare(shapes.number, settings.get("temperature"), "sampling_params.temperature"),
        top_p=shapes.spare(shapes.number, settings.get("top_p"), "sampling_params.top_p"),
        top_k=shapes.spare(shapes.whole, settings.get("top_k"), "sampling_params.top_k"), policy_version=version,
        extra={name: item for name, item in extra_fields.items() if item not in ({}, [], None)},
    )


def _is_answer(value: Any) -> bool:
    return has_keys(value, "meta_info") and isinstance(value["meta_info"], dict)


def detect(values: Sequence[Any]) -> bool:
    record = values[0]
    if has_keys(record, "response"):
        response = record["response"]
        return _is_answer(response[0] if isinstance(response, list) and response else response)
    return _is_answer(record)


FORMAT = session_format("sglang", "SGLang answers (meta_info)", detect, _session_id, _add_line, NO_REQUESTS)
