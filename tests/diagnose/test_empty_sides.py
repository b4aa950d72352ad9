"""Nothing agrees with nothing: ids without bytes, missing replies, deltas and texts without a character."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from rollout_inspector.diagnose import BREAK_RULES, Severity, diagnose
from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.context import DiagnosisContext
from rollout_inspector.streams.dropped_text import holds_all, unheld
from rollout_inspector.streams.messages import letters_of
from rollout_inspector.streams.trajectory import Message, Row, Trajectory, ids_array
from rollout_inspector.text.chat_templates import renderer
from tests.samples.model_setups import model_setup
from tests.samples.planted.plant import PLANTERS

S = model_setup("stable")
WORDS = [int(token) for token in S.codec.encode("In Cusco, the answer is 67.\n")]
HOLES = [S.codec.vocab_size + n for n in range(3)]
"""Ids that stand for nothing, as a padded vocabulary has them."""
OF_EQUAL_TEXT = {"boundary_merge", "noncanonical_sampling", "whitespace_changed", "tool_call_reserialized",
                 "special_tokens_dropped", "empty_think_toggled", "thinking_stripped"}
"""Kinds that say that both streams hold the same text, but for what they name."""


HEAD = S.codec.encode("<|open|>user\nHello.<|shut|>\n<|open|>assistant\n")
holes = st.lists(st.sampled_from(HOLES), min_size=1, max_size=3)
tails = st.lists(st.sampled_from([*WORDS, *HOLES, *sorted(S.codec.special_ids)]), max_size=5)


def kinds_of(prompt: list[int], sampled: list[int], later: list[int]) -> set[str]:
    """What any rule names, whatever stands before it in the order."""
    asked: Message = {"role": "user", "content": "Hello."}
    steps = [S.step([asked], np.concatenate([HEAD, prompt]), ids_array(sampled), None)]
    after = [asked, {"role": "assistant", "content": ""}, asked]
    steps.append(S.step(after, np.concatenate([HEAD, later]), S.codec.encode("Yes.<|shut|>"), None))
    context = DiagnosisContext(Trajectory("t", tuple(steps)), S.codec, lambda sha: S.renderer)
    link = context.links[1]
    if link.parent is None or link.extends:
        return set()
    return {fault.kind for rule in BREAK_RULES if (fault := rule(Break(context, 1, link))) is not None}


@settings(max_examples=150, deadline=None)
@given(holes, tails, st.booleans())
def test_ids_without_bytes_agree_with_nothing(gone: list[int], behind: list[int], in_prompt: bool) -> None:
    """One side holds ids without bytes where the other holds none, on either side and at either place."""
    for one, other in ((gone + behind, behind), (behind, gone + behind), (gone, []), ([*WORDS, *gone], WORDS)):
        prompt, sampled = (one, [WORDS[0]]) if in_prompt else ([], one or [WORDS[0]])
        assert not kinds_of(prompt, sampled, other) & OF_EQUAL_TEXT


blanks = st.text(alphabet=" \n\t\u00a0", max_size=4)


@settings(max_examples=150, deadline=None)
@given(blanks, st.sampled_from(["Cusco.", "<think>I see.</think>Cusco.", '<call>\n{"a": 1}\n</call>', "札幌"]),
       st.booleans(), st.booleans())
def test_nothing_and_white_space_agree_with_no_words(blank: str, words: str, swapped: bool, in_prompt: bool) -> None:
    sides = [S.codec.encode(f"{text}<|shut|>").tolist() for text in (blank, words)]
    one, other = sides[::-1] if swapped else sides
    prompt, sampled = (one, [WORDS[0]]) if in_prompt else ([], one)
    for later in (other, other[:-1], other[-1:] if swapped else other):
        assert not kinds_of(prompt, sampled, later) & (OF_EQUAL_TEXT - {"thinking_stripped"})


@given(blanks, st.sampled_from(["I live in Cusco.", "札幌", "<think>It is so.</think>"]))
def test_nothing_and_white_space_hold_no_words(blank: str, words: str) -> None:
    """A text, a reply and a field of a reply that are empty do not fit what was sampled."""
    ids = S.codec.encode(f"{words}<|shut|>")
    assert unheld(words, blank) and not holds_all(words, [blank])
    assert not letters_of(blank)
    for fields in ({"text": blank}, {"reply": {"role": "assistant", "content": blank}},
                   {"reply": {"role": "assistant", "content": None, "reasoning_content": blank, "tool_calls": []}}):
        step = S.step([{"role": "user", "content": "Hello."}], HEAD, ids, **{"reply": None, **fields})
        findings = diagnose(Trajectory("t", (step,)), S.codec, lambda sha: S.renderer)
        assert {one.kind for one in findings} & {"engine_ids_inconsistent", "reply_text_lost"}, fields


@pytest.mark.parametrize("reply", [None, {"role": "assistant", "content": "I am Ada."}])
def test_a_reply_that_nobody_recorded_is_not_an_unchanged_one(reply: Message | None) -> None:
    asked: Message = {"role": "user", "content": "Hello."}
    sampled = S.codec.encode("I am Ada.<|shut|>")
    for content, equal in (("I am Ada.", True), ("", False), ("Quilts!", False)):
        after = [asked, {"role": "assistant", "content": content}, asked]
        steps = S.step([asked], HEAD, sampled, reply), S.step(after, HEAD[:-1], sampled, None)
        context = DiagnosisContext(Trajectory("t", steps), S.codec, None)
        assert Break(context, 1, replace(context.links[1], parent=0)).messages_equal is equal


def test_a_delta_without_tokens_is_no_render() -> None:
    """A template may end with a control token, as every sampled stream does."""
    source = S.renderer.chat_template.replace("<|open|>assistant\n", "<|bot|>")
    s = replace(model_setup("stable", tools=False, system=False), renderer=renderer(S.codec, source))
    turn = s.turn({"role": "assistant", "content": "One moment."}, [{"role": "user", "content": ""}])
    for delta, kinds in ((turn.d, []), (turn.d[:0], ["delta_differs"])):
        loud = [one for one in diagnose(turn.tito(d=delta), s.codec, lambda sha: s.renderer)
                if one.severity is not Severity.INFO]
        assert [one.kind for one in loud] == kinds


def test_a_step_without_ids_is_in_no_row() -> None:
    value = PLANTERS["clean"](S).trajectory
    empty = replace(value.steps[1], prompt_ids=ids_array([]), completion_ids=ids_array([]), logprobs=None)
    row = Row(value.steps[0].stream, np.zeros(len(value.steps[0].stream), bool))
    findings = diagnose(replace(value, steps=(value.steps[0], empty), rows=(row,)), S.codec, None)
    assert {one.row for one in findings if one.kind == "token_ids_missing"} == {None}


@pytest.mark.parametrize(
    ("text", "said", "stop_reason", "kinds"),
    [("", "I am Ada.", "", ["engine_ids_inconsistent"]), ("", "I am Ada.", "I", []), ("", "", "", []),
     ("�", "Ada", "", ["engine_ids_inconsistent"]), ("Ad�", "Ada", "", [])],
)
def test_an_empty_text_fits_no_words(text: str, said: str, stop_reason: str, kinds: list[str]) -> None:
    step = S.step([{"role": "user", "content": "Hello."}], HEAD, S.codec.encode(f"{said}<|shut|>"), None, text=text)
    findings = diagnose(Trajectory("t", (replace(step, stop_reason=stop_reason),)), S.codec, None)
    assert [one.kind for one in findings if one.kind == "engine_ids_inconsistent"] == kinds
