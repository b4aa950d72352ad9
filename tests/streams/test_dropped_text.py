"""Sampled text that no message holds: words, their tokens, and the finding that counts such replies."""

import json
import time
import unicodedata
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import Finding, Severity, examine
from rollout_inspector.streams.dropped_text import holds_all, unheld, unheld_tokens
from rollout_inspector.streams.messages import reply_in, texts_of
from rollout_inspector.streams.trajectory import Message, Step, Trajectory, ids_array
from tests.samples.model_setups import model_setup

S = model_setup("stable")
CALL = {"function": {"name": "add", "arguments": {"a": 1}}}
TAGGED = '<tool_call>{"name": "add", "arguments": {"a": 1}}</tool_call>'


def test_words_are_those_of_three_in_a_row() -> None:
    decoded = f"<think>so it is</think>{TAGGED} and then one more"
    held = 'so it is add {"a": 1}'
    assert [decoded[a:b] for a, b in unheld(decoded, held)] == ["and then one more"]
    assert unheld(decoded, held + " and then one more") == [] == unheld("", "x") == unheld("<a><b>", "")
    assert unheld("lost", "") == [(0, 4)] and unheld("one two held", "held") == []
    # A capital whose small letter is two characters is one word, whether or not others are missing.
    assert unheld("İstanbul IS big", "İstanbul is Big!") == []
    assert unheld("İstanbul is big, so it is", "İstanbul is Big!") == []
    assert len(unheld("İstanbul is big, one two three", "İstanbul is Big!")) == 1


@pytest.mark.parametrize(
    "said",
    [
        "naïve café résumé déjà",
        "你好啊",
        "a\n\n\nb\nif\nreturn\ntrue\nc",
        r"\frac{a}{b} \nabla \beta \theta",
        r"C:\new\files\table",
    ],
)
def test_what_json_escapes_is_held(said: str) -> None:
    for ascii in (True, False):
        assert unheld(json.dumps({"name": "add", "arguments": {"text": said}}, ensure_ascii=ascii), f"add {said}") == []


ACCENTED = "Çanakkale’s naïve café, ｗｉｄｅ ﬁsh 東京 हिन्दी 🦀 co\u00adop x\u200by"


@pytest.mark.parametrize("form", ["NFC", "NFD", "NFKC", "NFKD"])
@pytest.mark.parametrize("escape", [str, json.dumps, lambda text: json.dumps(text).upper().replace("\\U", "\\u")])
def test_one_word_in_two_spellings_is_held(form: Any, escape: Any) -> None:
    """Composed and not, wide and narrow, escaped in small and in capital digits, in pairs, with other white space."""
    other = unicodedata.normalize(form, ACCENTED)
    for decoded, held in ((ACCENTED, other), (other, ACCENTED)):
        spaced = held.replace(" ", "\u00a0\n\u3000")
        assert unheld(escape(decoded), spaced) == [] == unheld(decoded, escape(spaced))
        lost = unicodedata.normalize(form, "één twee drieën")
        said = f"{escape(decoded)} {lost}"
        assert [said[start:stop] for start, stop in unheld(said, spaced)] == [lost]


def test_escaped_words_that_are_lost_are_told() -> None:
    decoded = json.dumps({"text": "東京 大阪 京都 held"})
    assert len(unheld(decoded, "held")) == 1 and unheld(decoded, "held 東京 大阪") == []
    assert unheld('"\\ud83e\\udd80 \\ud83e \\u2019"', "") == []  # signs and half a pair are no word


def test_a_stretch_has_its_tokens_although_control_tokens_and_split_characters_stand_before_it() -> None:
    ids = ids_array(
        [*S.codec.encode("<|open|>é held"), *S.codec.encode("€")[:1], *S.codec.encode(" one two three four")]
    )
    special = np.isin(ids, sorted(S.codec.special_ids))
    ((text, start, stop),) = unheld_tokens(ids, special, S.codec.joined_bytes, "é held")
    assert text == "one two three four" and stop == len(ids)
    assert S.codec.decode(ids[start:stop]).strip() == text
    assert unheld_tokens(ids[:0], special[:0], S.codec.joined_bytes, "") == []


@pytest.mark.parametrize("quote", ['<|open|>argument key="{}" type="string"<|end|>', "<|open|>{}<|end|>"])
def test_control_tokens_part_words_and_their_attributes_are_no_text(quote: str) -> None:
    """GLM writes names and values between control tokens, Kimi K3 attributes too. A value may have no spaces."""
    function = {"name": "search", "arguments": {"query": "温度は二十三度です", "top": 3}}
    reply = message("", tool_calls=[{"function": function}])
    call = '<|open|>call tool="search" index="1"<|end|>' if "key" in quote else "<|open|>search"
    arguments = f"{quote.format('query')}温度は二十三度です<|user|>{quote.format('top')}3<|user|>"
    assert lost(trajectory(f"{call}{arguments}", reply)) == []
    skipped = message("assistantfinal4 is it")
    assert lost(trajectory("<|open|>assistant<|user|>final<|end|>4 is it", skipped)) == []
    (finding,) = lost(trajectory(f"{call}{arguments}I also<|tool|>say this", reply))
    assert "“I also say this”" in finding.evidence


@pytest.mark.parametrize(
    ("decoded", "message", "is_held"),
    [
        (f"so it is{TAGGED}<|end|>", {"content": "so it is", "tool_calls": [
            {"function": {"name": "add", "arguments": '{"a": 1}'}}]}, True),
        ("<think>\nwhy\n</think>\nyes<|end|>", {"content": " yes ", "reasoning_content": "why"}, True),
        ("<think>why so then</think>yes", {"content": "yes"}, False),
        ("one two three yes", {"content": "yes"}, False),
        ("foobar is all", {"content": "foo", "reasoning": "bar is all"}, False),  # `foobar` is a word of its own
        ("<lost yes>", {"content": "yes"}, False),  # what stands around it makes no tag
        ("<yes lost>", {"content": "yes"}, False),
        ("yes", {"content": None, "tool_calls": [None, {"function": 1}]}, False),
        ("<|end|>", {"content": ""}, True),
    ],
)
def test_a_reply_that_stands_in_the_text_needs_no_words(decoded: str, message: Message, is_held: bool) -> None:
    """The short way says nothing of its own: where it says yes, no word is missing."""
    assert holds_all(decoded, texts_of(message)) is is_held
    said = reply_in(message)
    assert not is_held or unheld(decoded, said.held if said is not None else "") == []


def trajectory(said: str, reply: Message | None, **fields: Any) -> Trajectory:
    prompt, completion = S.codec.encode("<|open|>assistant\n"), S.codec.encode(f"{said}<|shut|>")
    step = Step(prompt, completion, finish_reason="stop", reply=reply, **fields)
    return Trajectory("t", (step,))


def lost(one: Trajectory) -> list[Finding]:
    return [finding for finding in examine(one, S.codec).findings if finding.kind == "reply_text_lost"]


def message(content: str, **fields: Any) -> Message:
    return {"role": "assistant", "content": content, **fields}


def test_a_reply_whose_message_lacks_sampled_text_is_found_with_all_its_places() -> None:
    one = trajectory(f"Now I look here. {TAGGED} Now it sums up both.", message("", tool_calls=[CALL]))
    (finding,) = lost(one)
    (step,) = one.steps
    told = [S.codec.decode(step.stream[a:b]) for a, b in finding.places]
    assert [text.strip() for text in told] == ["Now I look here", "Now it sums up both"]
    assert (finding.severity, finding.step, (finding.start, finding.stop)) == (Severity.WARNING, 0, finding.places[0])
    assert "“Now I look here” and at 1 more place" in finding.evidence
    held = trajectory(
        f"Now I look here. {TAGGED} Now it sums up both.",
        message("Now I look here. Now it sums up both.", tool_calls=[CALL]),
    )
    assert lost(held) == [] and examine(held, S.codec).checks["reply"] == "passed"


def test_lost_reasoning_is_a_note_and_reasoning_without_an_end_a_warning() -> None:
    (finding,) = lost(trajectory("<think>I add one and two.</think>It is three.", message("It is three.")))
    assert finding.severity is Severity.INFO and "reasoning" in finding.evidence
    (finding,) = lost(trajectory("It is three. <think>I add one and two.", message("It is three.")))
    assert finding.severity is Severity.WARNING
    kept = message("It is three.", reasoning_content="I add one and two.")
    assert lost(trajectory("<think>I add one and two.</think>It is three.", kept)) == []


def test_the_message_of_the_next_request_counts_where_the_source_has_no_reply() -> None:
    first = trajectory("Now I look here. It is three.", None).steps[0]
    from rollout_inspector.streams.trajectory import Request

    asked: Message = {"role": "user", "content": "Go on."}
    sent = message("It is three.")
    first = replace(first, request=Request((asked,)))
    prompt = ids_array([*first.stream, *S.codec.encode("<|open|>assistant\n")])
    second = replace(
        first, prompt_ids=prompt, request=Request((asked, sent, asked)), reply=message("Now I look here. It is three.")
    )
    found = examine(Trajectory("t", (first, second)), S.codec)
    assert [(f.kind, f.step) for f in found.findings if f.kind == "reply_text_lost"] == [("reply_text_lost", 0)]
    assert found.checks["reply"] == "failed"
    assert examine(Trajectory("t", (second, replace(second, reply=None))), S.codec).checks["reply"] == [
        "message of the reply"
    ]


def test_a_hostile_completion_costs_little_time() -> None:
    for said in ("<tool_call>" * 90_000, "</think" * 140_000, '\\u0041"' * 120_000, "<" * 1_000_000, "a " * 400_000):
        began = time.process_time()
        unheld(said, "nothing of it")
        lost(trajectory(said[:200_000], message("nothing of it")))
        assert time.process_time() - began < 5


def test_a_server_that_leaves_control_tokens_out_joins_the_words_beside_them() -> None:
    sampled = "\0" * 11 + "final" + "\0" * 11 + "4" + "\0" * 10
    assert unheld(sampled, "final4") == [] and unheld(sampled, "5")
