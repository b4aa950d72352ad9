"""Sixty faults of a capturing proxy, four for each property. Each is one that a gateway of this kind can have."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from rollout_inspector.gauntlet.vocabulary import END, OTHER_END, decode, encode, render
from tests.gauntlet.proxy import Fault, Fields, Proxy


def choices(line: Fields) -> list[Fields]:
    return list(line["response"]["choices"])


def messages(line: Fields) -> list[Fields]:
    return list(line["request"].get("messages") or [])


def of_choices(change: Any) -> Any:
    """A change of each captured choice in place."""

    def changed(proxy: Proxy, line: Fields) -> list[Fields]:
        for choice in choices(line):
            change(choice)
        return [line]

    return changed


# -- ids equal


def no_start(_: Proxy, line: Fields) -> list[Fields]:
    line["response"]["prompt_token_ids"] = (line["response"].get("prompt_token_ids") or [0])[1:]
    return [line]


def encoded_again(choice: Fields) -> None:
    choice["token_ids"] = [*encode(decode(choice["token_ids"])), *choice["token_ids"][-1:]]


def prompt_of_text(_: Proxy, line: Fields) -> list[Fields]:
    line["response"]["prompt_token_ids"] = encode(decode(line["response"].get("prompt_token_ids") or []))
    return [line]


def logprobs_shifted(choice: Fields) -> None:
    content = (choice.get("logprobs") or {}).get("content")
    if content:
        content.insert(0, content.pop())


# -- streams


def no_first_event(_: Proxy, event: Fields) -> Fields | None:
    return None if event.get("prompt_token_ids") else event


def no_textless_event(_: Proxy, event: Fields) -> Fields | None:
    parts = event["choices"]
    textless = parts and all(part.get("delta") == {} and not part.get("finish_reason") for part in parts)
    return None if textless else event


def no_last_event(_: Proxy, event: Fields) -> Fields | None:
    return None if any(part.get("finish_reason") for part in event["choices"]) else event


# -- retries, cancel


def no_aborted(_: Proxy, line: Fields) -> list[Fields]:
    return [] if choices(line)[0].get("finish_reason") == "abort" else [line]


def aborted_as_stopped(choice: Fields) -> None:
    if choice.get("finish_reason") == "abort":
        choice["finish_reason"] = "stop"


def half_of_aborted(choice: Fields) -> None:
    if choice.get("finish_reason") == "abort":
        choice["token_ids"] = choice["token_ids"][:3]
        choice["logprobs"] = None
        choice["message"]["content"] = "~"


# -- choices


def first_choice(_: Proxy, line: Fields) -> list[Fields]:
    line["response"]["choices"] = choices(line)[:1]
    return [line]


def ids_of_first_choice(_: Proxy, line: Fields) -> list[Fields]:
    for choice in choices(line):
        choice["token_ids"] = choices(line)[0]["token_ids"]
    return [line]


def one_choice(_: Proxy, fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name != "n"}


def choices_reversed(_: Proxy, line: Fields) -> list[Fields]:
    line["response"]["choices"] = choices(line)[::-1]
    return [line]


# -- compaction


def is_shorter(proxy: Proxy, line: Fields) -> bool:
    """Whether a conversation has fewer messages than it had in the call before."""
    lengths = proxy.memory.setdefault("lengths", {})
    session = (line["session_id"], line.get("agent"))
    before, lengths[session] = lengths.get(session, 0), len(messages(line))
    return bool(before > len(messages(line)))


def split_where_shorter(proxy: Proxy, line: Fields) -> list[Fields]:
    parts = proxy.memory.setdefault("parts", {})
    parts[line["session_id"]] = parts.get(line["session_id"], 0) + is_shorter(proxy, line)
    return [{**line, "session_id": f"{line['session_id']}/{parts[line['session_id']]}"}]


def always_appended(proxy: Proxy, line: Fields) -> list[Fields]:
    """The prompt of a call is taken for the stream before and the newest message."""
    if is_shorter(proxy, line):
        newest = render(messages(line)[-1:])[1:]
        line["response"]["prompt_token_ids"] = [*proxy.memory["stream", line["session_id"]], *newest]
    ids = line["response"].get("prompt_token_ids") or []
    proxy.memory["stream", line["session_id"]] = [*ids, *choices(line)[0]["token_ids"]]
    return [line]


def not_where_shorter(proxy: Proxy, line: Fields) -> list[Fields]:
    return [] if is_shorter(proxy, line) else [line]


def begun_again_where_shorter(proxy: Proxy, line: Fields) -> list[Fields]:
    if is_shorter(proxy, line):
        proxy.captured[:] = [other for other in proxy.captured if other["session_id"] != line["session_id"]]
    return [line]


# -- sub-agents


def agent_of_before(proxy: Proxy, line: Fields) -> list[Fields]:
    if "agent" in line:
        before = proxy.memory.get("agent", "nobody")
        proxy.memory["agent"] = line["agent"]
        line["agent"] = before
    return [line]


def no_agents(_: Proxy, line: Fields) -> list[Fields]:
    return [] if "agent" in line else [line]


def agents_apart(proxy: Proxy, line: Fields) -> list[Fields]:
    proxy.n_calls["agents"] += 1
    return [{**line, "session_id": f"{line['agent']}-{proxy.n_calls['agents']}"} if "agent" in line else line]


def newest_agent(proxy: Proxy, line: Fields) -> list[Fields]:
    """A call after those of sub-agents is taken for one of the last of them."""
    if "agent" in line:
        proxy.memory[line["session_id"]] = line["agent"]
        return [{**line, "session_id": line["agent"]}]
    return [{**line, "session_id": proxy.memory.get(line["session_id"], line["session_id"])}]


# -- rewritten arguments


def rewrite(found: Any) -> None:
    """Write the arguments of calls in a message anew."""
    for call in (found or {}).get("tool_calls") or ():
        call["function"]["arguments"] = json.dumps(json.loads(call["function"]["arguments"]), sort_keys=True)


def arguments_of_reply(choice: Fields) -> None:
    rewrite(choice.get("message"))


def arguments_of_request(_: Proxy, line: Fields) -> list[Fields]:
    for message in messages(line):
        rewrite(message)
    return [line]


def arguments_for_client(_: Proxy, answer: Fields) -> Fields:
    for choice in answer["choices"]:
        rewrite(choice.get("message"))
    return answer


def arguments_of_prompt(_: Proxy, line: Fields) -> list[Fields]:
    """The prompt is rendered again, with arguments written anew."""
    changed = json.loads(json.dumps(messages(line)))
    for message in changed:
        rewrite(message)
    if changed:
        line["response"]["prompt_token_ids"] = render(changed, line["request"].get("tools"))
    return [line]


# -- version change


def last_version(choice: Fields) -> None:
    spans = choice.get("weight_versions") or []
    if spans:
        choice["weight_versions"] = [{**spans[-1], "start": 0}]


def spans_shifted(choice: Fields) -> None:
    spans = choice.get("weight_versions") or []
    if len(spans) > 1:
        spans[0]["end"] += 1
        spans[1]["start"] += 1


def first_version(proxy: Proxy, line: Fields) -> list[Fields]:
    for choice in choices(line):
        for span in choice.get("weight_versions") or ():
            span["version"] = proxy.memory.setdefault("version", span["version"])
    return [line]


def no_versions_of_streams(_: Proxy, line: Fields) -> list[Fields]:
    for choice in choices(line):
        if line["request"].get("stream"):
            choice.pop("weight_versions", None)
    return [line]


# -- wrong stop token


def end_added(choice: Fields) -> None:
    if choice.get("finish_reason") != "abort" and choice["token_ids"][-1:] not in ([END], [OTHER_END]):
        choice["token_ids"] = [*choice["token_ids"], END]


def end_replaced(choice: Fields) -> None:
    choice["token_ids"] = [END if token == OTHER_END else token for token in choice["token_ids"]]


def end_cut(choice: Fields) -> None:
    if choice["token_ids"][-1:] in ([END], [OTHER_END]):
        choice["token_ids"] = choice["token_ids"][:-1]


def always_stopped(choice: Fields) -> None:
    choice["finish_reason"] = "stop"


# -- lost and doubled calls


def not_each_seventh(proxy: Proxy, line: Fields) -> list[Fields]:
    proxy.n_calls["lines"] += 1
    return [] if proxy.n_calls["lines"] % 7 == 0 else [line]


def no_long_answer(_: Proxy, line: Fields) -> list[Fields]:
    return [] if len(choices(line)[0]["token_ids"]) > 1000 else [line]


def newest_unwritten(_: Proxy, lines: list[Fields]) -> list[Fields]:
    return lines[:-3]


def cut_file(_: Proxy, data: bytes) -> bytes:
    return data[:-100]


def twice(_: Proxy, line: Fields) -> list[Fields]:
    return [line, line]


def streams_twice(_: Proxy, line: Fields) -> list[Fields]:
    return [line, line] if line["request"].get("stream") else [line]


def newest_again(_: Proxy, lines: list[Fields]) -> list[Fields]:
    return [*lines, *lines[-5:]]


# -- order


def newest_first(_: Proxy, lines: list[Fields]) -> list[Fields]:
    return lines[::-1]


def by_first_message(_: Proxy, line: Fields) -> list[Fields]:
    return [{**line, "session_id": str(messages(line)[:1])}]


def in_slots(proxy: Proxy, line: Fields) -> list[Fields]:
    proxy.n_calls["lines"] += 1
    return [{**line, "session_id": f"slot-{proxy.n_calls['lines'] % 4}"}]


def first_turn_apart(_: Proxy, line: Fields) -> list[Fields]:
    is_first = not any(message["role"] == "assistant" for message in messages(line))
    return [{**line, "session_id": f"first of {line['session_id']}"} if is_first else line]


# -- answers unchanged


def numbers_rewritten(_: Proxy, body: bytes) -> bytes:
    return json.dumps(json.loads(body)).encode()


def no_vendor(_: Proxy, answer: Fields) -> Fields:
    return {name: value for name, value in answer.items() if not name.startswith("x_")}


def known_fields(_: Proxy, fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if not name.startswith("x_")}


# -- masks


def all_trained(_: Proxy, row: Fields) -> Fields:
    first = (row["response_mask"] + [1]).index(1)
    return {**row, "response_mask": [int(n >= first) for n in range(len(row["response_mask"]))]}


def stop_untrained(_: Proxy, row: Fields) -> Fields:
    pairs = zip(row["response_mask"], row["response_ids"], strict=True)
    return {**row, "response_mask": [int(value and token != END) for value, token in pairs]}


def mask_shifted(_: Proxy, row: Fields) -> Fields:
    return {**row, "response_mask": [0, *row["response_mask"][:-1]]}


def row_logprobs_shifted(_: Proxy, row: Fields) -> Fields:
    return {**row, "response_logprobs": [0.0, *row["response_logprobs"][:-1]]}


def _all() -> Iterator[Fault]:
    def of(breaks: str, **faults: Fault) -> Iterator[Fault]:
        for name, fault in faults.items():
            yield replace(fault, name=name, breaks=breaks)

    def line(change: Any) -> Fault:
        return Fault(line=change)

    def choice(change: Any) -> Fault:
        return Fault(line=of_choices(change))

    def habit(name: str) -> Fault:
        return Fault(habits=frozenset([name]))

    yield from of(
        "ids equal", start_lost=line(no_start), completion_encoded_again=choice(encoded_again),
        prompt_encoded_again=line(prompt_of_text), logprobs_shifted=choice(logprobs_shifted),
    )
    yield from of(
        "streams", first_event_lost=Fault(kept=no_first_event), textless_events_lost=Fault(kept=no_textless_event),
        last_event_lost=Fault(kept=no_last_event), stream_held_back=habit("holds streams back"),
    )
    yield from of(
        "retries", error_captured=habit("captures errors"), answers_cached=habit("caches"),
        cut_stream_ended=habit("ends cut streams"), error_renamed=Fault(status=lambda _, status: 418),
    )
    yield from of(
        "cancel", engine_not_stopped=habit("reads on"), left_call_lost=line(no_aborted),
        left_call_stopped=choice(aborted_as_stopped), left_call_halved=choice(half_of_aborted),
    )
    yield from of(
        "choices", first_choice_alone=line(first_choice), one_choices_ids=line(ids_of_first_choice),
        one_choice_asked=Fault(request=one_choice), choices_reversed=line(choices_reversed),
    )
    yield from of(
        "compaction", split=line(split_where_shorter), taken_for_appended=line(always_appended),
        first_call_lost=line(not_where_shorter), calls_before_lost=line(begun_again_where_shorter),
    )
    yield from of(
        "sub-agents", agent_of_call_before=line(agent_of_before), agents_lost=line(no_agents),
        agents_scattered=line(agents_apart), parent_taken_for_agent=line(newest_agent),
    )
    yield from of(
        "rewritten arguments", reply_rewritten=choice(arguments_of_reply), request_rewritten=line(arguments_of_request),
        answer_rewritten=Fault(answer=arguments_for_client), prompt_rewritten=line(arguments_of_prompt),
    )
    yield from of(
        "version change", last_version_alone=choice(last_version), spans_shifted=choice(spans_shifted),
        first_version_kept=line(first_version), streams_without=line(no_versions_of_streams),
    )
    yield from of(
        "wrong stop token", stop_added=choice(end_added), stop_replaced=choice(end_replaced), stop_cut=choice(end_cut),
        always_stopped=choice(always_stopped),
    )
    yield from of(
        "lost call", each_seventh=line(not_each_seventh), long_answers=line(no_long_answer),
        newest_unwritten=Fault(lines=newest_unwritten), file_cut=Fault(file=cut_file),
    )
    yield from of(
        "doubled call", each_line=line(twice), streams_twice=line(streams_twice),
        engine_asked_twice=habit("asks twice"), newest_again=Fault(lines=newest_again),
    )
    yield from of(
        "order", newest_first=Fault(lines=newest_first), by_first_message=line(by_first_message),
        in_slots=line(in_slots), first_turn_apart=line(first_turn_apart),
    )
    yield from of(
        "answers unchanged", numbers_rewritten=Fault(raw_answer=numbers_rewritten),
        vendor_field_lost=Fault(answer=no_vendor), ids_leaked=habit("leaks ids"),
        request_field_lost=Fault(request=known_fields),
    )
    yield from of(
        "masks", all_trained=Fault(row=all_trained), stop_untrained=Fault(row=stop_untrained),
        mask_shifted=Fault(row=mask_shifted), logprobs_of_rows_shifted=Fault(row=row_logprobs_shifted),
    )


FAULTS = tuple(_all())
