"""Calls of servers that answer with choices: OpenAI's Chat Completions and Completions, and vLLM's and SGLang's own.
vLLM's ``/inference/v1/generate`` has token ids in request and answer, SGLang's ``/generate`` a ``meta_info``."""

from collections.abc import Sequence
from typing import Any

Calls = list[tuple[dict[str, Any], dict[str, Any]]]
"""Request and answer of each time that the model was asked, in the shape of Chat Completions."""


def _add(fields: dict[str, Any], name: str, value: Any) -> None:
    """Add to the text or the list that a field holds. A list grows in place: an answer may come in 100,000 events."""
    if isinstance(value, list):
        fields.setdefault(name, []).extend(value)
    else:
        fields[name] = fields.get(name, "") + value


def join_stream(events: Sequence[dict[str, Any]], broken_off: bool) -> dict[str, Any]:
    """The answer that a stream of choices adds up to. ``broken_off``: choices without an end were aborted."""
    answer: dict[str, Any] = {}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        event = dict(event)
        for part in event.pop("choices", None) or []:
            _add_part(choices.setdefault(part.get("index") or 0, {"index": part.get("index") or 0}), part)
        answer.update({name: value for name, value in event.items() if value is not None})
    if "object" in answer:
        answer["object"] = str(answer["object"]).removesuffix(".chunk")
    for choice in choices.values():
        if choice.get("finish_reason") is None and broken_off:
            choice["finish_reason"] = "abort"
    answer["choices"] = [choices[index] for index in sorted(choices)]
    return answer


def _add_part(choice: dict[str, Any], part: dict[str, Any]) -> None:
    for name, value in part.items():
        if value is None or name == "index":
            continue
        if name == "delta":
            _add_delta(choice.setdefault("message", {"role": "assistant"}), value)
        elif name in ("token_ids", "text", "sampling_mask"):
            _add(choice, name, value)
        elif name == "logprobs":
            logprobs = choice.setdefault("logprobs", {})
            for key, items in value.items():
                if isinstance(items, list):
                    _add(logprobs, key, items)
        else:
            choice[name] = value


def _add_delta(message: dict[str, Any], delta: dict[str, Any]) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls":
            for call in value:
                _add_tool_call(message.setdefault("tool_calls", []), call)
        elif isinstance(value, str) and name != "role":
            _add(message, name, value)
        else:
            message[name] = value


def _add_tool_call(calls: list[dict[str, Any]], part: dict[str, Any]) -> None:
    index = part.get("index") or 0
    while len(calls) <= index < 1000:
        calls.append({"function": {"name": "", "arguments": ""}})
    call = calls[index]
    call |= {name: value for name, value in part.items() if name not in ("index", "function") and value is not None}
    for name, value in (part.get("function") or {}).items():
        _add(call["function"], name, value or "")


def generate_calls(request: dict[str, Any], answer: dict[str, Any]) -> Calls:
    """A call of vLLM's ``/inference/v1/generate``. The ids of its request are the prompt where the answer has none."""
    ids = request.pop("token_ids", None)
    if answer.get("prompt_token_ids") is None:
        answer["prompt_token_ids"] = ids
    return [(request, answer)]


def join_sglang(events: Sequence[Any], broken_off: bool) -> Any:
    """The answers of a stream of SGLang's ``/generate``: each event repeats what came before, unless it is told not to.
    The events of several answers of one call come in any order, by ``index``."""
    answers: dict[int, dict[str, Any]] = {}
    for event in events:
        index = event.get("index") or 0
        before = answers.get(index, {})
        answers[index] = {**event, **_grown(before, event)}
    for last in answers.values():
        meta = last.get("meta_info") or {}
        if broken_off and meta.get("finish_reason") is None:
            last["meta_info"] = {**meta, "finish_reason": {"type": "abort"}}
    return [answers[index] for index in sorted(answers)]


def _grown(before: dict[str, Any], event: dict[str, Any]) -> dict[str, Any]:
    """The parts of an answer after an event that holds only what is new, and none where it holds everything."""
    ids, new_ids = before.get("output_ids") or [], event.get("output_ids") or []
    count = (event.get("meta_info") or {}).get("completion_tokens")
    if count == len(new_ids) or (count is None and new_ids[: len(ids)] == ids):
        return {}
    return {"output_ids": [*ids, *new_ids], "text": str(before.get("text") or "") + str(event.get("text") or "")}


def sglang_calls(request: dict[str, Any], answer: Any) -> Calls:
    """A call of SGLang's ``/generate``, one answer or a list of them."""
    answers = answer if isinstance(answer, list) else [answer]
    prompt = request.pop("input_ids", None)
    choices = []
    for index, part in enumerate(answers):
        meta = part.get("meta_info") or {}
        reason = meta.get("finish_reason")
        end = reason if isinstance(reason, dict) else {"type": reason}
        choice = {"index": index, "text": part.get("text"), "meta_info": meta, "finish_reason": end.get("type"),
                  "matched_stop": end.get("matched")}
        if meta.get("output_token_logprobs") is None:
            choice["token_ids"] = part.get("output_ids")
        choices.append(choice)
    return [(request, {"choices": choices, "prompt_token_ids": prompt})]
