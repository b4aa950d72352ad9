"""How a completion was read: where the parts of a reading stand in the tokens, and what no part holds."""

import json
import time
from pathlib import Path

import pytest

from rollout_inspector.streams.messages import ToolCall
from rollout_inspector.streams.trajectory import ids_array
from rollout_inspector.text.replies.audit import Completion, ParserReading, ReadingAudit, audit, reading_of
from rollout_inspector.text.tokenizers import LoadedTokenizer, load
from rollouts.jobs.parser_comparison import differences

SUM = ToolCall("add", {"a": 1, "b": "x\ny é"})
RAW = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": "x\\ny \\u00e9"}}\n</tool_call>'
OTHER = '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'


@pytest.fixture(scope="module")
def codec(tiny_tokenizer: Path) -> LoadedTokenizer:
    return load(tiny_tokenizer)


def completion(codec: LoadedTokenizer, text: str, stop: str = "<|im_end|>") -> Completion:
    return Completion(codec.encode(text + stop), codec, codec.stop_ids)


def told(one: Completion, found: ReadingAudit) -> list[tuple[str, list[str]]]:
    return [(kind, [one.codec.decode(one.ids[a:b]).strip() for a, b in spans]) for kind, _, _, spans in found.pieces]


def test_each_part_has_its_tokens_and_a_call_its_raw_text(codec: LoadedTokenizer) -> None:
    one = completion(codec, f"<think>I add é.</think>\nI look.\n{RAW}\n{OTHER}\nThen I tell.")
    reading = ParserReading("I look.\nThen I tell.", "I add é.", (SUM, ToolCall("sub", "{}")))
    found = audit(one, reading)
    assert told(one, found) == [
        ("reasoning", ["I add é."]), ("content", ["I look.", "Then I tell."]), ("call", [RAW]), ("call", [OTHER]),
    ]
    assert (found.lost, found.n_lost, found.added) == ((), 0, ())
    covered = {place for piece in found.pieces for start, stop in piece[3] for place in range(start, stop)}
    unread = [place for place in range(one.n_said) if place not in covered]
    assert found.n_unread_tokens == len(unread)
    assert codec.decode(one.ids[unread]).split() == ["<think></think>"]
    assert len(one.ids) - one.n_said == 1 and not one.text.endswith("<|im_end|>")


def test_what_a_parser_lost_and_what_it_made_up_is_told_with_places(codec: LoadedTokenizer) -> None:
    one = completion(codec, f"Now I look here.\n{RAW}")
    found = audit(one, ParserReading("", "", (SUM,)))
    assert [text for text, _, _ in found.lost] == ["Now I look here"]
    assert codec.decode(one.ids[found.lost[0][1] : found.lost[0][2]]).strip().startswith("Now I look here")
    found = audit(one, ParserReading("Now I look here. Let me know how it goes.", "", (SUM,)))
    assert found.added == ("Let me know how it goes",) and found.lost == ()
    missing = audit(one, ParserReading(calls=(ToolCall("multiply", {"q": 9}),)))
    assert [piece[3] for piece in missing.pieces] == [[]] and missing.n_unread_tokens == one.n_said
    assert audit(one, ParserReading(error="It failed.")) == ReadingAudit()


def test_a_name_in_the_text_before_a_call_is_not_the_call(codec: LoadedTokenizer) -> None:
    one = completion(codec, f"I use add to add.\n{RAW}")
    found = audit(one, ParserReading("I use add to add.", "", (SUM,)))
    assert told(one, found) == [("content", ["I use add to add."]), ("call", [RAW])]


def test_tokens_that_split_characters_keep_their_places(codec: LoadedTokenizer) -> None:
    half = codec.encode("€")[:1]
    one = Completion(ids_array([*codec.encode("é "), *half, *codec.encode(" It is six.")]), codec, codec.stop_ids)
    assert "\ufffd" in one.text and one.n_said == len(one.ids)
    found = audit(one, ParserReading("It is six."))
    assert told(one, found) == [("content", ["It is six."])]


def test_messages_of_any_source_are_readings() -> None:
    chat = {"role": "assistant", "content": None, "reasoning": "hm", "plan": "first this",
            "tool_calls": [{"function": {"name": "add", "arguments": '{"a": 1}'}}]}
    reading = reading_of(chat)
    assert (reading.content, reading.reasoning, reading.calls) == ("", "hm", (ToolCall("add", {"a": 1}),))
    assert "first this" in reading.held and reading_of(None) == reading_of({}) == ParserReading()
    assert differences(ParserReading("<think>hm</think> I", "", ()), ParserReading("I", "hm"), False) == []
    assert differences(
        ParserReading("I", "", (ToolCall("f", "{bad"),)), ParserReading("I", "", (ToolCall("f", {}),)), False
    ) == ["calls"]
    assert differences(ParserReading(RAW), ParserReading(), False) == ["content"]
    assert differences(ParserReading("I", "", ()), ParserReading("you", "hm"), False) == ["content"]
    assert differences(ParserReading("I", "", ()), ParserReading("I", "hm"), True) == ["reasoning"]


def test_a_hostile_completion_is_looked_through_in_seconds(codec: LoadedTokenizer) -> None:
    for part in ("<tool_call>", "add ", "{", "\\u0041", "a\n"):
        text = part * (300_000 // len(part))
        one = completion(codec, text)
        leaves = {f"k{n}": part for n in range(100)}
        began = time.process_time()
        audit(
            one, ParserReading(text[::-1], text[:1000] + "x" + text, tuple(ToolCall("add", leaves) for _ in range(200)))
        )
        assert time.process_time() - began < 20, part


def test_a_reading_is_the_same_as_another_one_whatever_the_order_of_its_arguments() -> None:
    assert (
        ParserReading(calls=(ToolCall("f", {"a": 1, "b": 2}),)).key
        == ParserReading(calls=(ToolCall("f", {"b": 2, "a": 1}),)).key
    )
    assert (
        ParserReading(calls=(ToolCall("f", json.dumps({"a": 1})),)).key
        != ParserReading(calls=(ToolCall("f", {"a": 1}),)).key
    )
