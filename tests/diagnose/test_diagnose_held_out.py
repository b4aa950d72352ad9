"""Tokenizers and harnesses that the corpus does not hold: what is right stays silent, what is wrong is named."""

from dataclasses import replace

import numpy as np
import pytest

from rollout_inspector.diagnose import Finding, Severity, diagnose
from rollout_inspector.diagnose.text import call_regions
from rollout_inspector.diagnose.thinking import lone_block
from rollout_inspector.streams.trajectory import Ids, Message, Row, Step, Trajectory, ids_array
from rollout_inspector.text.chat_templates import renderer
from tests.samples.diagnosis import problem
from tests.samples.model_setups import STABLE, model_setup
from tests.samples.planted.plant import PLANTERS, ModelSetup, planted
from tests.samples.planted.plant_delta import DECOMPOSED, OBSERVATIONS
from tests.samples.planted.plant_setup import split_token
from tests.tokenizers.oracles import encode_plain

PLAIN_TURNS = """\
{% for m in messages %}{% if m.role == 'system' %}<|system|>{{ m.content }}
{%- elif m.role == 'user' %}<|user|>{{ m.content }}
{%- else %}<|bot|>{{ m.content }}<|shut|>{% endif %}{% endfor -%}
{%- if add_generation_prompt %}<|bot|><think>{% endif %}"""
"""Headers of one token; a think tag that the generation prompt opens and the history does not write."""

ASKED = {"role": "user", "content": "Where does Ada live?"}
SAID = {"role": "assistant", "content": "She lives in Cusco."}


def loud(s: ModelSetup, *steps: Step, rows: tuple[Row, ...] = ()) -> list[tuple[str, int | None]]:
    found: list[Finding] = diagnose(Trajectory("t", steps, rows=rows), s.codec, lambda sha: s.renderer)
    return [(f.kind, f.step) for f in found if f.severity is not Severity.INFO]


def dropped(s: ModelSetup, *steps: Step) -> Finding:
    found = diagnose(Trajectory("t", steps), s.codec, lambda sha: s.renderer)
    return next(f for f in found if f.kind == "special_tokens_dropped")


def exchange(s: ModelSetup, *new: Message, delta: Ids) -> tuple[Step, Step]:
    """An answer, and a step whose prompt puts a delta behind it."""
    completion = s.codec.encode("She lives in Cusco.<|shut|>")
    first = s.step([ASKED], s.render([ASKED]), completion, SAID, text="She lives in Cusco.")
    return first, s.final([ASKED, SAID, *new], np.concatenate([first.stream, delta]), "Yes.")


@pytest.fixture(autouse=True)
def numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """`ModelSetup.final` needs them only where it writes a sentence of its own."""
    monkeypatch.setattr(ModelSetup, "a", 2, raising=False)
    monkeypatch.setattr(ModelSetup, "b", 3, raising=False)


def test_a_tokenizer_that_lowers_case_is_no_fault() -> None:
    s = model_setup("words", tools=False)
    delta = s.codec.encode("\n<|open|>user\nGo On, Please.<|shut|>\n<|open|>assistant\n")
    first, last = exchange(s, {"role": "user", "content": "Go On, Please."}, delta=delta)
    assert s.decode(first.completion_ids) != "She lives in Cusco.<|shut|>"
    assert loud(s, first, last) == []
    other = s.step([ASKED], first.prompt_ids, first.completion_ids, SAID, text="He lived in Lisbon.")
    assert loud(s, other) == [("engine_ids_inconsistent", 0)]


@pytest.mark.parametrize("name", ["stable", "prefixed", "words"])
def test_control_text_that_was_encoded_apart_is_no_fault(name: str) -> None:
    """Each piece may bring a space of its own, and a WordPiece takes the control token's name apart."""
    s = model_setup(name, tools=False)
    asked = {"role": "user", "content": "note <|end|> here"}
    head, tail = "\n<|open|>user\nnote ", " here<|shut|>\n<|open|>assistant\n"
    behind = s.codec.encode("<|shut|>" + head)[1:]
    parts = [behind, encode_plain(s.codec, "<|end|>"), s.codec.encode(tail)]
    assert loud(s, *exchange(s, asked, delta=np.concatenate(parts).astype(np.int32))) == []
    parts[1] = s.codec.encode("<|end|>")
    assert [kind for kind, _ in loud(s, *exchange(s, asked, delta=np.concatenate(parts)))] == [
        "special_tokens_injected"
    ]


def test_structure_that_was_encoded_as_text_is_a_fault_beside_control_text() -> None:
    s = model_setup("stable", tools=False)
    asked = {"role": "user", "content": "note <|shut|> here"}
    delta = encode_plain(s.codec, "\n<|open|>user\nnote <|shut|> here<|shut|>\n<|open|>assistant\n")
    assert [kind for kind, _ in loud(s, *exchange(s, asked, delta=delta))] == ["delta_differs"]


def test_control_tokens_of_a_call_that_were_dropped() -> None:
    """One of them is the stop token, so that the turns of both sides do not end at the same count."""
    s = model_setup("stable", tools=False)
    sampled = s.codec.encode("<|shut|>We call<|tool|> for Cusco.<|shut|>")
    said, asked = {"role": "assistant", "content": "We call for Cusco."}, {"role": "user", "content": "Go on."}
    prompt = s.render([ASKED])
    back = s.codec.encode("We call for Cusco.<|shut|>\n<|open|>user\nGo on.<|shut|>\n<|open|>assistant\n")
    first = s.step([ASKED], prompt, sampled, said)
    last = s.final([ASKED, said, asked], np.concatenate([prompt, back]), "Yes.")
    assert loud(s, first, last) == [("special_tokens_dropped", 1)]
    found = dropped(s, first, last)
    begins = len(prompt), len(prompt) + len(s.codec.encode("We call"))
    assert found.places == tuple((place, place) for place in begins)
    assert (found.start, found.stop) == begins
    assert s.decode(found.expected_ids) == "<|shut|>We call<|tool|>" and s.decode(found.actual_ids) == "We call"


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_compaction_that_keeps_the_first_step_whole_is_no_branch(role: str) -> None:
    s = model_setup("stable")
    turn = s.turn()
    second = s.final(turn.after, np.concatenate([turn.p, turn.g, turn.d]), "So it is.")
    asked = s.codec.encode("\n<|open|>user\nWhy?<|shut|>\n<|open|>assistant\n")
    longer = [*turn.after, {"role": "assistant", "content": "So it is."}, {"role": "user", "content": "Why?"}]
    third = s.final(longer, np.concatenate([second.stream, asked]), "Because.")
    cut = [*turn.after, {"role": role, "content": "Summary: it was computed."}, {"role": "user", "content": "Go on."}]
    last = s.final(cut, s.render(cut), "Gladly.")
    kinds = {step: kind for kind, step in loud(s, turn.first(), second, third, last)}
    assert kinds == {3: "history_rewritten"}


def test_what_a_template_moves_was_not_cut() -> None:
    def kind(*actual: int) -> str:
        before = Step(ids_array([20, 21, 22, 23, 9, 7, 6, 5]), ids_array([3]))
        trajectory = Trajectory("t", (before, Step(ids_array(actual), ids_array([5]))))
        return next(f.kind for f in diagnose(trajectory, None) if f.step)

    assert kind(9, 7, 6, 5, 3, 4, 30) == "context_truncated"
    assert kind(9, 7, 6, 5, 3, 4, 20, 21, 22, 23, 30) == "unclassified"


def test_a_stop_token_behind_another_control_token_is_still_the_stop_token() -> None:
    s = model_setup("stable", tools=False)
    prompt, said, stop = s.render([ASKED]), s.codec.encode("I call.<|tool|>"), s.codec.encode("<|shut|>")
    ids = np.concatenate([prompt, said, stop, s.codec.encode("<|shut|>\n")[1:]]).astype(np.int32)
    mask = np.zeros(len(ids), dtype=np.bool_)
    mask[len(prompt) : len(prompt) + len(said) + 1] = True
    assert loud(s, rows=(Row(ids, mask),)) == []
    mask[len(prompt) + len(said)] = False
    assert loud(s, rows=(Row(ids, mask),)) == [("stop_token_untrained", None)]


def rewritten(before: list[Message], after: list[Message]) -> list[tuple[str, int | None]]:
    """What a second step is called whose prompt is the render of other messages."""
    s = model_setup("stable", tools=False)
    first = s.step(
        before, s.render(before), s.codec.encode("It is so.<|shut|>"), {"role": "assistant", "content": "It is so."}
    )
    return loud(s, first, s.final(after, s.render(after), "Yes."))


def test_messages_that_are_gone_or_new_are_no_rewritten_answer() -> None:
    """The first that differs is the assistant's on both sides, but what stands behind it moved as well."""
    turns: list[Message] = [
        ASKED, SAID, {"role": "user", "content": "And Bo?"}, {"role": "assistant", "content": "In Lima."},
        {"role": "user", "content": "And Cy?"},
    ]
    behind: list[Message] = [{"role": "assistant", "content": "It is so."}, {"role": "user", "content": "Thanks."}]
    assert rewritten(turns, [ASKED, *turns[3:], *behind]) == [("history_rewritten", 1)]
    noted: list[Message] = [{"role": "assistant", "content": "Noted."}, {"role": "user", "content": "Mind this."}]
    assert rewritten(turns, [ASKED, *noted, *turns[1:], *behind]) == [("history_rewritten", 1)]
    other: Message = {"role": "assistant", "content": "She lives in Lisbon."}
    assert rewritten(turns, [ASKED, other, *turns[2:], *behind]) == [("assistant_rewritten", 1)]


def test_a_stop_token_that_only_the_harness_lost_was_dropped() -> None:
    s = model_setup("stable", tools=False)
    asked: Message = {"role": "user", "content": "Go on."}
    first, _ = exchange(s, asked, delta=s.codec.encode(""))
    behind = s.codec.encode("<|shut|>\n<|open|>user\nGo on.<|shut|>\n<|open|>assistant\n")[1:]
    lost = s.final([ASKED, SAID, asked], np.concatenate([first.stream[:-1], behind]), "Yes.")
    assert loud(s, first, lost) == [("special_tokens_dropped", 1)]
    found = dropped(s, first, lost)
    assert (found.start, found.stop, found.places) == (len(first.stream) - 1, len(first.stream) - 1, ())
    assert (found.expected_ids.tolist(), found.actual_ids.tolist()) == (first.stream[-1:].tolist(), [])
    more = s.final([ASKED, SAID, asked], np.concatenate([first.stream[:-1], behind[1:]]), "Yes.")
    assert loud(s, first, more) != [("special_tokens_dropped", 1)]


def test_a_prompt_made_of_text_without_control_tokens() -> None:
    s = model_setup("stable", tools=False)
    asked: Message = {"role": "user", "content": "Go on."}
    first, _ = exchange(s, asked, delta=s.codec.encode(""))
    text = s.decode(first.stream) + "\n<|open|>user\nGo on.<|shut|>\n<|open|>assistant\n"
    bare = text.replace("<|open|>", "").replace("<|shut|>", "")
    for prompt, kind in ((bare, "special_tokens_dropped"), (bare.replace("lives", "lived"), "engine_ids_inconsistent")):
        last = s.final([ASKED, SAID, asked], s.codec.encode(prompt), "Yes.")
        assert loud(s, first, last) == [(kind, 1)]
    found = dropped(s, first, s.final([ASKED, SAID, asked], s.codec.encode(bare), "Yes."))
    ends = [s.decode(s.codec.encode(bare)[:place])[-6:] for place, _ in found.places]
    assert ends == ["", "thing.", " live?", "Cusco."]
    assert s.decode(found.actual_ids) == bare[: bare.index("Cusco.") + 6]


def test_white_space_behind_a_call_without_json() -> None:
    s = model_setup("headers")
    turn = s.turn()
    line = s.codec.encode("</call>\n")[len(s.codec.encode("</call>")) :]
    back = np.concatenate([turn.p, turn.g, turn.d])
    for place, kind in ((len(turn.g) - 1, "whitespace_changed"), (1, "tool_call_reserialized")):
        sampled = np.concatenate([turn.g[:place], line, turn.g[place:]]).astype(np.int32)
        first = s.step(turn.messages, turn.p, sampled, turn.reply)
        assert loud(s, first, s.final(turn.after, back)) == [(kind, 1)]


def test_a_system_block_whose_header_is_one_token_or_none() -> None:
    for template, header in ((PLAIN_TURNS, "<|system|>"), (PLAIN_TURNS.replace("<|system|>", ""), "")):
        s = model_setup("stable", tools=False)
        s.renderer = renderer(s.codec, template)
        system: Message = {"role": "system", "content": "You answer briefly."}
        asked: Message = {"role": "user", "content": "Go on."}
        prompt = s.render([system, ASKED])
        first = s.step([system, ASKED], prompt, s.codec.encode("Thus.</think>She does.<|shut|>"), None)
        for added, kinds in ((f"{header}You answer briefly.", ["system_prompt_injected"]), ("", [])):
            delta = s.codec.encode(f"{added}<|user|>Go on.<|bot|><think>")
            said = {"role": "assistant", "content": "She does.", "reasoning_content": "Thus."}
            last = s.step(
                [system, ASKED, said, asked], np.concatenate([first.stream, delta]), first.completion_ids, None
            )
            assert [kind for kind, _ in loud(s, first, last)] == kinds


def test_reasoning_that_came_back_as_content_without_its_opening_tag() -> None:
    s = model_setup("stable", tools=False)
    s.renderer = renderer(s.codec, PLAIN_TURNS)
    asked: Message = {"role": "user", "content": "Go on."}
    for content, kind in (("Thus.</think>She does.", "reasoning_misparsed"), ("She does.", "thinking_stripped")):
        said = {"role": "assistant", "content": content}
        first = s.step([ASKED], s.render([ASKED]), s.codec.encode("Thus.</think>She does.<|shut|>"), said)
        last = s.step([ASKED, said, asked], s.render([ASKED, said, asked]), first.completion_ids, None)
        assert loud(s, first, last)[0] == (kind, 1)


def test_a_block_of_which_only_the_markers_are_left() -> None:
    assert (
        lone_block("<bot><think>Thus so.</think>She does.", "<bot><think></think>She does.<user>Go on.") == "Thus so."
    )
    assert lone_block("<bot><think>Thus so.</think>She does.", "<bot><think></think>He does not.<user>Go on.") is None
    assert lone_block("<bot><think>Thus so.</think>She does.", "<bot><think>Thus.</think>She does.<user>Go.") is None


def test_sentences_show_both_sides() -> None:
    s = model_setup("stable", tools=False)
    asked: Message = {"role": "user", "content": "Go on."}
    delta = s.codec.encode("\n<|open|>user\nGo on.<|shut|>\n<|open|>tools\n<|open|>assistant\n")
    (other,) = diagnose(Trajectory("t", exchange(s, asked, delta=delta)), s.codec, lambda sha: s.renderer)
    assert other.kind == "delta_differs"
    assert other.evidence.endswith(r"where the template writes nothing, 'tools\n<|open|>' stands.")
    before: list[Message] = [{"role": "system", "content": "It is Monday."}, ASKED]
    after: list[Message] = [{"role": "system", "content": "It is Friday."}, ASKED, SAID, asked]
    first = s.step(before, s.render(before), s.codec.encode("She lives in Cusco.<|shut|>"), SAID)
    found = diagnose(Trajectory("t", (first, s.final(after, s.render(after), "Yes."))), s.codec, lambda sha: s.renderer)
    assert [(f.kind, "Monday" in f.evidence and "Friday" in f.evidence) for f in found] == [("request_changed", True)]


def test_a_call_that_merges_with_the_header_is_still_a_call() -> None:
    """The end of the generation prompt and the start of the call are one token when they are encoded as one text."""
    line = "{% if not loop.first or m.content %}\n{% endif %}"
    assert line in STABLE
    s = model_setup("stable")
    template = STABLE.replace("{{ think(m, true) }}", "").replace(line, "n short: ")
    s.renderer = renderer(s.codec, template.replace("<|open|>assistant\n", "<|open|>assistant\nI"))
    messages = s.opening()
    reply, result = s.calling(), s.result()
    prompt, after = s.text(messages), [*messages, reply, result]
    completion = s.text([*messages, reply], gen=False)[len(prompt) : -1]
    back = s.render(after)
    for sampled, kind in (
        (completion.replace('": ', '":'), "tool_call_reserialized"),
        (completion.replace("false", "False"), "tool_call_reserialized"),
        (completion, "boundary_merge"),
    ):
        first = s.step(messages, s.codec.encode(prompt), s.codec.encode(sampled), reply)
        assert not np.array_equal(back[: len(first.prompt_ids)], first.prompt_ids)
        assert loud(s, first, s.final(after, back)) == [(kind, 1)]


def test_choices_of_one_answer_are_branches() -> None:
    s = model_setup("stable", tools=False)
    said = [s.codec.encode(f"{place}.<|shut|>") for place in ("Cusco", "Lima")]
    prompt, prompt_b = s.render([ASKED]), s.render([{"role": "user", "content": "And Bo?"}])

    def step(n: int, prompt: Ids, name: str) -> Step:
        extra = {"response": {"id": name}, "choice": {"index": n} if n else {}}
        return s.step([ASKED], prompt, said[n], None, extra=extra)

    for prompts in ((prompt, prompt), (prompt, prompt_b)):
        for names, kind in ((("c1", "c1"), "branch"), (("c1", "c2"), "duplicate_call")):
            if kind == "branch" or prompts[0] is prompts[1]:
                steps = tuple(step(n, prompts[n], names[n]) for n in (0, 1))
                found = diagnose(Trajectory("t", steps), s.codec, lambda sha: s.renderer)
                assert [f.kind for f in found if f.kind in ("branch", "duplicate_call", "unclassified")] == [kind]


def test_what_a_retry_and_a_side_call_cost() -> None:
    """Nothing is lost where the conversation goes on from what was sampled; of a retry, the answer that was dropped."""
    s = model_setup("stable")
    for name in ("duplicate_call", "branch", "tools_dropped_once", "request_changed"):
        for _ in range(4):
            case = PLANTERS[name](s)
            found = diagnose(case.trajectory, s.codec, lambda sha: s.renderer)
            (broken,) = [f for f in found if f.kind == case.kind and f.step == case.step]
            steps = case.trajectory.steps
            on = [np.array_equal(steps[-1].prompt_ids[: len(step.stream)], step.stream) for step in steps[:-1]]
            dropped = [len(step.completion_ids) for step, kept in zip(steps[:-1], on, strict=True) if not kept]
            lost = {"duplicate_call": dropped[0], "branch": 0, "tools_dropped_once": 0}.get(name)
            if lost is None:
                lost = len(steps[0].stream) - max(broken.start, len(steps[0].prompt_ids))
            assert broken.cost.lost_in_one_row == lost, name
            assert broken.cost.trained_tokens_lost == 0, name  # each has a row, so that it is trained


def told(s: ModelSetup, *steps: Step) -> list[tuple[str, int, str]]:
    found = diagnose(Trajectory("t", steps), s.codec, lambda sha: s.renderer)
    return [(f.kind, f.start, f.evidence) for f in found if f.severity is not Severity.INFO]


@pytest.mark.parametrize("content", OBSERVATIONS)
def test_a_result_that_is_cut_short_is_cut_and_one_that_is_gone_has_no_trace(content: str) -> None:
    s = model_setup("composed")
    result, messages = {"role": "tool", "content": content}, [*s.opening(), s.calling()]
    prompt, completion = s.answer(messages[:-1], messages[-1])
    first = s.step(messages[:-1], s.codec.encode(prompt), s.codec.encode(completion), messages[-1])
    delta = s.delta([*messages, result], "<|shut|>", content)
    for n in range(len(content)):
        kept = delta.replace(content, content[:n])
        last = s.final([*messages, result], np.concatenate([first.stream, s.codec.encode(kept)]))
        ((kind, start, evidence),) = told(s, first, last)
        if n:
            assert (kind, f"cut in its prompt, after {n} of its {len(content)} " in evidence) == ("delta_differs", True)
        else:
            assert (kind, "has no trace" in evidence) == ("message_dropped", True)
        wrong = s.codec.encode(kept) != s.codec.encode(delta)[: len(s.codec.encode(kept))]
        assert start == len(first.stream) + int(wrong.argmax())


def test_a_changed_word_is_no_cut() -> None:
    s = model_setup("stable", tools=False)
    asked: Message = {"role": "user", "content": "Go on to Lima, please."}
    for text, cut in (("Go on to Lima", True), ("Go on to Cusco, please.", False), ("Go on to Lima, thanks.", False)):
        delta = s.codec.encode(f"\n<|open|>user\n{text}<|shut|>\n<|open|>assistant\n")
        ((kind, _, evidence),) = told(s, *exchange(s, asked, delta=delta))
        assert (kind, "is cut in its prompt" in evidence) == ("delta_differs", cut)


def test_a_call_is_found_by_its_values() -> None:
    text = 'I ask.\n<call>find\n{"name": "Łódź"}\n</call>\n<call>sum\n{"expr": "2"}\n</call>'
    calls = [{"name": "find", "arguments": {"name": "Łódź"}}, {"name": "sum", "arguments": {"expr": "2"}}]
    assert [text[a : b - 1].strip() for a, b in call_regions(text, calls)] == [
        'find\n{"name": "Łódź"}',
        'sum\n{"expr": "2"}',
    ]
    assert call_regions(text, []) == []
    whole = '<call>\n{"name": "find", "arguments": {"name": "Łódź"}}\n</call>'
    assert len(call_regions(whole, [])) == len(call_regions(whole, calls[:1])) == 1


def test_ids_outside_the_vocabulary_are_told_once() -> None:
    s = model_setup("stable")
    steps = PLANTERS["ids_outside_the_vocabulary"](s).trajectory.steps
    assert [kind for kind, _, _ in told(s, *steps)] == ["token_ids_missing"]
    assert [kind for kind, _, _ in told(s, *steps[:1], replace(steps[1], completion_ids=ids_array([0, 0])))] == [
        "token_ids_missing"
    ]
    other = replace(steps[1], prompt_ids=ids_array([]))
    assert [kind for kind, _, _ in told(s, steps[0], other)] == ["token_ids_missing", "token_ids_missing"]


def test_a_stop_token_alone_is_an_answer_unless_the_reply_claims_more() -> None:
    s = model_setup("stable", tools=False)
    stop = s.codec.encode("<|shut|>")
    for reply, kinds in (
        (None, []),
        ({"role": "assistant", "content": ""}, []),
        ({"role": "assistant", "content": "Yes."}, ["token_ids_missing"]),
        (s.calling(s.call(expr="2")), ["token_ids_missing"]),
    ):
        assert [kind for kind, _, _ in told(s, s.step([ASKED], s.render([ASKED]), stop, reply))] == kinds
    assert [kind for kind, _, _ in told(s, s.step([ASKED], s.render([ASKED]), ids_array([0]), None))]


@pytest.mark.parametrize("name", ["stable", "composed"])
def test_decomposed_accents_are_found_as_the_tokenizer_spells_them(name: str) -> None:
    s = model_setup(name)
    for content, kinds in ((f"{DECOMPOSED[0]} <|end|> so", ["special_tokens_injected"]), (DECOMPOSED[0], [])):
        turn = s.turn(new=[s.turn().setup.result(content)])
        assert [kind for kind, _, _ in told(s, *turn.tito().steps)] == kinds


@pytest.mark.parametrize("options", [{}, {"system": False}, {"tools": False, "history": True}])
def test_a_template_that_prints_the_date_hides_no_fault(options: dict[str, bool]) -> None:
    """The recorded prompts show another day than the clock of the renders."""
    s = model_setup("stable", **options)
    template = "<|open|>system\nToday is {{ strftime_now('%d %B %Y') }}.<|shut|>\n" + STABLE
    s.renderer = renderer(s.codec, template, now="2026-11-22T10:00:00")
    other, problems, n = renderer(s.codec, template), [], 0
    for case in planted(s, 1):
        n += 1
        problems.append(problem(case, s, diagnose(case.trajectory, s.codec, lambda sha: other)))
    assert n > 30 and [text for text in problems if text] == []


def test_a_first_prompt_of_another_template_is_not_decided_unless_its_text_explains_its_ids() -> None:
    s = model_setup("stable")
    turn = s.turn()
    rules, (other, _) = s.codec.encode("New rules. "), split_token(s, turn.p)
    for prompt, missing in (
        (turn.p, []),
        (np.concatenate([rules, turn.p]), []),
        (np.concatenate([rules, other]), ["chat template of the first prompt"]),
    ):
        step = s.step(turn.messages, prompt, turn.g, turn.reply)
        found = diagnose(Trajectory("t", (step,)), s.codec, lambda sha: s.renderer)
        assert [(f.kind, f.missing) for f in found] == [("not_decidable", name) for name in missing]


def test_control_tokens_of_the_template_that_are_spelled_in_pieces_are_of_another_tokenizer() -> None:
    s = model_setup("stable", tools=False)
    asked = {"role": "user", "content": "note <|end|> here"}
    text = s.text([asked])
    name, whole = encode_plain(s.codec, "<|end|>"), encode_plain(s.codec, text)
    head, tail = (s.codec.encode(part) for part in text.split("<|end|>"))
    for prompt, kinds in ((np.concatenate([head, name, tail]), []), (whole, ["tokenizer_mismatch"])):
        assert [kind for kind, _, _ in told(s, s.step([asked], prompt.astype(np.int32), tail[-1:], None))] == kinds


def test_a_system_block_where_the_template_writes_the_system_text_behind_the_tools() -> None:
    s = model_setup("stable")
    behind = "<|open|>system\n{% if tools %}Tools:\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}\n{% endif %}"
    macro, middle = STABLE.index("{%- if tools %}"), STABLE.index("{%- for m in messages -%}")
    system = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}<|shut|>\n"
    s.renderer = renderer(s.codec, STABLE[:macro] + behind + system + STABLE[middle:])
    turn = s.turn()
    block = s.codec.encode("\n<|open|>system\nYou are a helpful thing.<|shut|>")
    for delta, kinds in ((turn.d, []), (np.concatenate([block, turn.d]), ["system_prompt_injected"])):
        assert [kind for kind, _, _ in told(s, *turn.tito(d=delta).steps)] == kinds


def test_a_stop_token_that_the_template_writes_otherwise_a_turn_later() -> None:
    s = model_setup("stable", tools=False)
    first = s.step([ASKED], s.render([ASKED]), s.codec.encode("She lives in Cusco.<|end|>"), SAID)
    asked: Message = {"role": "user", "content": "Go on."}
    delta = s.codec.encode("\n<|open|>user\nGo on.<|shut|>\n<|open|>assistant\n")
    second = s.final([ASKED, SAID, asked], np.concatenate([first.stream, delta]), "Yes.")
    after = [ASKED, SAID, asked, {"role": "assistant", "content": "Yes."}, asked]
    kept = np.concatenate([second.stream, delta])
    again = np.where(kept == first.stream[-1], s.codec.encode("<|shut|>"), kept)
    assert told(s, first, second, s.final(after, kept, "No.")) == []
    ((kind, start, evidence),) = told(s, first, second, s.final(after, again, "No."))
    assert (kind, start) == ("template_not_append_only", len(first.stream) - 1)
    assert "'<|end|>' was sampled, and the template writes '<|shut|>' in its place" in evidence


def test_a_block_that_was_closed_at_once_holds_no_reasoning() -> None:
    s = model_setup("stable", tools=False)
    s.renderer = renderer(s.codec, PLAIN_TURNS)
    said, asked = {"role": "assistant", "content": "She does."}, {"role": "user", "content": "Go on."}
    prompt, behind = s.render([ASKED]), s.codec.encode("<|user|>Go on.<|bot|><think>")
    for sampled, kind in (
        ("</think>She does.", "special_tokens_dropped"),
        ("So.</think>She does.", "reasoning_misparsed"),
    ):
        first = s.step([ASKED], prompt, s.codec.encode(f"{sampled}<|shut|>"), said)
        back = np.concatenate([first.stream[:-1], behind])
        last = s.step([ASKED, said, asked], back, first.completion_ids, None)
        assert [kind for kind, _, _ in told(s, first, last)] == [kind]


def test_of_a_retry_the_answer_that_goes_on_is_the_parent() -> None:
    s = model_setup("stable", tools=False)
    prompt, asked = s.render([ASKED]), {"role": "user", "content": "Go on."}
    steps = []
    for text in ("She lives in Cusco.", "In Cusco."):
        reply = {"role": "assistant", "content": text}
        steps.append(s.step([ASKED], prompt, s.codec.encode(f"{text}<|shut|>"), reply))
    delta = s.codec.encode("\n<|open|>user\nGo on.<|shut|>\n<|open|>assistant\n")
    for text, kind in (("In Cusco, Peru.", "assistant_rewritten"), ("She lives in Cusco.", None)):
        back = np.concatenate([prompt, s.codec.encode(f"{text}<|shut|>"), delta])
        last = s.final([ASKED, {"role": "assistant", "content": text}, asked], back, "Yes.")
        found = diagnose(Trajectory("t", (*steps, last)), s.codec, lambda sha: s.renderer)
        assert [f.kind for f in found if f.step == 2] == [kind] * (kind is not None)
        assert not any("lives" in f.evidence for f in found if f.step == 2)
