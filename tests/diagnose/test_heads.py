"""What a request does not show: another input of the template, the date, a cut, and turns that the template edits."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from rollout_inspector.diagnose import Finding, diagnose
from rollout_inspector.diagnose.thinking import lone_block
from rollout_inspector.streams.interfaces import Conversation, Renderer
from rollout_inspector.streams.trajectory import Ids, Message, Request, Step, Trajectory
from rollout_inspector.text.chat_templates import TemplateRenderer, renderer
from tests.samples.model_setups import STABLE, model_setup

CODEC = model_setup("stable", tools=False).codec
TOOLS: tuple[dict[str, Any], ...] = tuple(
    {"type": "function", "function": {"name": name, "parameters": {}}} for name in ("search", "ls")
)
ASKED: Message = {"role": "user", "content": "Where does Ada live?"}
SAID: Message = {"role": "assistant", "content": "She lives in Cusco."}
MORE: Message = {"role": "user", "content": "Go on."}
CALL: Message = {
    "role": "assistant", "content": "Let me look.",
    "tool_calls": [{"id": "a", "type": "function", "function": {"name": "search", "arguments": {"place": "Lima"}}}],
}
RESULT: Message = {"role": "tool", "content": "Rain.", "tool_call_id": "a"}
DATED = "Today: {{ date_string or 'none' }}\n" + STABLE


def step(ids: Ids, messages: list[Message], said: str, reply: Message, tools: tuple[Any, ...] = ()) -> Step:
    return Step(ids, CODEC.encode(said), request=Request(tuple(messages), tools), reply=reply, finish_reason="stop")


def broken(template: Renderer, *steps: Step) -> Finding:
    """The finding of the second step."""
    findings = diagnose(Trajectory("t", steps), CODEC, lambda sha: template)
    return next(finding for finding in findings if finding.step == 1)


def two_calls(first: dict[str, Any], second: dict[str, Any], tools: tuple[Any, ...], source: str) -> Finding:
    """Two calls of one request, whose prompts are rendered with these parts of a conversation replaced."""
    template = renderer(CODEC, source)
    after = [ASKED, SAID, MORE]
    prompts = [
        template.render_ids(Conversation(messages, tools, {}, True)._replace(**parts))
        for messages, parts in (([ASKED], first), (after, second))
    ]
    said = "She lives in Cusco.<|shut|>"
    return broken(template, step(prompts[0], [ASKED], said, SAID, tools), step(prompts[1], after, said, SAID, tools))


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"tools": None}, "what it writes without its tools"),
        ({"tools": TOOLS[1:]}, "what it writes without the tool search"),
        ({"kwargs": {"reasoning_effort": "low"}}, 'what it writes with reasoning_effort="low"'),
    ],
)
def test_another_input_of_the_template_is_named(odd: int, parts: dict[str, Any], words: str) -> None:
    both: list[dict[str, Any]] = [{}, {}]
    both[odd] = parts
    source = "{% if reasoning_effort %}Effort: {{ reasoning_effort }}\n{% endif %}" + STABLE
    finding = two_calls(both[0], both[1], TOOLS, source)
    assert finding.kind == "chat_template_changed"
    assert f"The prompt of step {odd} is not" in finding.evidence and words in finding.evidence


@pytest.mark.parametrize(
    ("source", "kwargs", "words"),
    [
        ("{% if terse %}Be terse.\n{% endif %}", {"terse": True}, "terse=true"),
        ("{% if terse is not defined or terse %}Be terse.\n{% endif %}", {"terse": False}, "terse=false"),
        ("{% if detail == 'rich' %}Say more.\n{% endif %}", {"detail": "rich"}, 'detail="rich"'),
        ("You are {{ persona or 'Tom' }}.\n", {"persona": "Ada, a pilot"}, 'persona="Ada, a pilot"'),
        ("{% for p in plugins or [] %}{{ 'Maps on.' if p == 'maps' }}\n{% endfor %}", {"plugins": ["maps"]},
         'plugins=["maps"]'),
    ],
)
def test_a_switch_that_no_public_template_has_is_named(source: str, kwargs: dict[str, Any], words: str) -> None:
    finding = two_calls({}, {"kwargs": kwargs}, (), source + STABLE)
    assert finding.kind == "chat_template_changed"
    assert f"what it writes with {words}" in finding.evidence


@pytest.mark.parametrize("use", ["{%% if switch%d %%}1{%% endif %%}", "{{ switch%d }}"])
def test_many_switches_cost_few_renders(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template of a stranger may read hundreds of names."""
    n_renders, render = 0, TemplateRenderer.render_ids

    def counted(template: TemplateRenderer, conversation: Conversation) -> Ids:
        nonlocal n_renders
        n_renders += any(name.startswith("switch") for name in conversation.kwargs or ())
        return render(template, conversation)

    monkeypatch.setattr(TemplateRenderer, "render_ids", counted)
    source = "".join(use % n for n in range(300)) + "{% if odd %}Odd.\n{% endif %}"
    assert two_calls({}, {"kwargs": {"odd": True}}, (), source + STABLE).kind == "chat_template_changed"
    assert 0 < n_renders < 40


PILOT: Message = {"role": "system", "content": "You help pilots plan a long route."}
SAILOR: Message = {"role": "system", "content": "You help sailors plan a long route."}


def first_prompt(
    change: Callable[[Ids], Ids], tools: tuple[Any, ...] = (), said: str = "Yes.<|shut|>"
) -> list[Finding]:
    """The findings, notes left out, of one call whose prompt was changed."""
    messages = [SAILOR, ASKED]
    template = renderer(CODEC, STABLE)
    prompt = change(template.render_ids(Conversation(messages, list(tools) or None, {}, True)))
    call = step(prompt, messages, said, {"role": "assistant", "content": "Yes."}, tools)
    findings = diagnose(Trajectory("t", (call,)), CODEC, lambda sha: template)
    return [finding for finding in findings if finding.severity != "info"]


def rendered(*messages: Message, prompted: bool = True) -> Ids:
    return renderer(CODEC, STABLE).render_ids(Conversation(list(messages), None, {}, prompted))


@pytest.mark.parametrize(
    ("change", "tools", "kind", "words"),
    [
        (lambda ids: rendered(SAILOR, ASKED), TOOLS, "chat_template_changed", "without its tools"),
        (lambda ids: rendered(ASKED), (), "", "without its system text"),
        (lambda ids: rendered(SAILOR, ASKED, prompted=False), (), "generation_prompt_missing", "without the assistant"),
        (lambda ids: np.concatenate([ids[:6], ids[9:]]), (), "context_truncated", "lacks 3 ids"),
    ],
)
def test_a_first_prompt_that_nothing_follows_is_compared_with_its_request(
    change: Callable[[Ids], Ids], tools: tuple[Any, ...], kind: str, words: str
) -> None:
    assert first_prompt(lambda ids: ids, tools) == []
    (finding,) = first_prompt(change, tools)
    assert words in finding.evidence and finding.kind == (kind or finding.kind)


def test_a_model_may_write_its_own_header() -> None:
    header = CODEC.decode(rendered(ASKED)[len(rendered(ASKED, prompted=False)) :])
    assert first_prompt(lambda ids: rendered(SAILOR, ASKED, prompted=False), said=header + "Yes.<|shut|>") == []


@pytest.mark.parametrize("odd", [0, 1])
def test_a_prompt_with_another_text_than_its_request_is_named(odd: int) -> None:
    before, after = [SAILOR, ASKED], [SAILOR, ASKED, SAID, MORE]
    sent = [[PILOT if n == odd else SAILOR, *messages[1:]] for n, messages in enumerate((before, after))]
    prompts = [rendered(*messages) for messages in sent]
    said = "She lives in Cusco.<|shut|>"
    finding = broken(
        renderer(CODEC, STABLE), step(prompts[0], before, said, SAID), step(prompts[1], after, said, SAID)
    )
    assert finding.kind == "engine_ids_inconsistent"
    assert f"The prompt of step {odd} is not" in finding.evidence and "pilots" in finding.evidence


def test_a_template_is_not_blamed_for_words_that_it_writes() -> None:
    """Something behind the template took words out of an earlier answer."""
    cut: Message = {"role": "assistant", "content": "She lives."}
    after = step(rendered(ASKED, cut, MORE), [ASKED, SAID, MORE], "She lives in Cusco.<|shut|>", SAID)
    turn = CODEC.decode(rendered(ASKED, SAID)[len(rendered(ASKED)) :]).partition("<|shut|>")
    first = step(rendered(ASKED), [ASKED], "".join(turn[:2]), SAID)
    assert broken(renderer(CODEC, STABLE), first, after).kind == "engine_ids_inconsistent"


def test_plain_text_in_the_head_is_no_cut() -> None:
    """The template writes a default system text, the server left it out, and every message is still there."""
    template = renderer(CODEC, STABLE)
    first = template.render_ids(Conversation([ASKED], None, {}, True))
    second = template.render_ids(Conversation([ASKED, SAID, MORE], None, {}, True))
    gone = CODEC.encode("<|open|>system\nYou are a helpful thing.<|shut|>\n")
    assert np.array_equal(second[: len(gone)], gone)
    said = "She lives in Cusco.<|shut|>"
    after = step(np.concatenate([second[:1], second[len(gone) + 1 :]]), [ASKED, SAID, MORE], said, SAID)
    assert broken(template, step(first, [ASKED], said, SAID), after).kind == "chat_template_changed"


def test_the_date_of_the_template_is_named() -> None:
    dates = [{"kwargs": {"date_string": day}} for day in ("25 Nov 2026", "26 Nov 2026")]
    finding = two_calls(dates[0], dates[1], (), DATED)
    assert finding.kind == "chat_template_changed"
    assert "25 Nov 2026" in finding.evidence and "26 Nov 2026" in finding.evidence
    assert "date_string" in finding.remedy


@pytest.mark.parametrize("keep", [0, 6])
def test_a_cut_is_one_where_the_text_that_was_cut_comes_again(keep: int) -> None:
    template = renderer(CODEC, "{% for m in messages %}<|open|>{{ m.role }}\n{{ m.content }}<|shut|>\n{% endfor %}"
                        "{% if add_generation_prompt %}<|open|>assistant\n{% endif %}")
    before = [ASKED, SAID, ASKED]
    first = template.render_ids(Conversation(before, None, {}, True))
    whole = template.render_ids(Conversation([*before, SAID, ASKED], None, {}, True))
    turn = template.render_ids(Conversation([ASKED], None, {}, False))
    said = "She lives in Cusco.<|shut|>"
    after = step(whole[len(turn) :] if not keep else whole[keep:], [*before, SAID, ASKED], said, SAID)
    assert broken(template, step(first, before, said, SAID), after).kind == "context_truncated"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("{{ think(m, true) }}{{ m.content }}", "{{ m.content if not m.tool_calls else '' }}", "leaves"),
        ("{{ think(m, true) }}{{ m.content }}", "{{ 'Note: ' ~ m.content }}", "adds 'Note: '"),
    ],
)
def test_what_a_template_does_to_a_turn_is_quoted(old: str, new: str, words: str) -> None:
    assert old in STABLE
    template = renderer(CODEC, STABLE.replace(old, new))
    said = 'Let me look.<call>\n{"name": "search", "arguments": {"place": "Lima"}}\n</call><|shut|>'
    prompts = [
        template.render_ids(Conversation(messages, TOOLS, {}, True)) for messages in ([ASKED], [ASKED, CALL, RESULT])
    ]
    finding = broken(
        template, step(prompts[0], [ASKED], said, CALL, TOOLS),
        step(prompts[1], [ASKED, CALL, RESULT], "She lives in Cusco.<|shut|>", SAID, TOOLS),
    )
    assert finding.kind == "template_not_append_only"
    assert words in finding.evidence and finding.message_index == 1


TEXTS = st.text(alphabet="ab \n", max_size=6)
BLOCKS = st.sampled_from([
    ("<think>", "</think>"), ("[THINK]", "[/THINK]"), ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
])


@given(BLOCKS, TEXTS, st.text(alphabet="ab", min_size=1, max_size=6), TEXTS, TEXTS)
def test_a_block_that_both_texts_hold_was_not_removed(
    block: tuple[str, str], before: str, body: str, one: str, other: str
) -> None:
    head = before + block[0] + body + block[1]
    assert lone_block(head + "A" + one, head + "B" + other) is None
    assert lone_block(head + "A" + one, head) is None


@given(BLOCKS, TEXTS, st.text(alphabet="ab", min_size=1, max_size=6))
def test_nothing_behind_a_block_shows_that_a_text_goes_on(block: tuple[str, str], before: str, body: str) -> None:
    assert lone_block(f"{before}{block[0]}{body}{block[1]}The answer.", before) is None


ENDS = ("{% for m in messages %}<|open|>{{ m.role }}\n{{ m.content }}"
        "{{ '<|end|>' if loop.last and m.role == 'assistant' else '<|shut|>' }}\n{% endfor %}"
        "{% if add_generation_prompt %}<|open|>assistant\n{% endif %}")


@pytest.mark.parametrize(
    ("sent", "kind"),
    [("She lives in Cusco.", "template_not_append_only"), ("She lives in Cusco. Or so.", "assistant_rewritten"),
     ("She lives", "assistant_rewritten"), ("", "assistant_rewritten")],
)
def test_a_message_that_says_what_was_sampled_is_not_the_cause(sent: str, kind: str) -> None:
    """The server parsed "finalShe lives in Cusco.", the harness mended it, and the template has two ends of a turn."""
    template = renderer(CODEC, ENDS)
    after: list[Message] = [ASKED, {"role": "assistant", "content": sent}, MORE]
    first, second = (template.render_ids(Conversation(asked, None, {}, True)) for asked in ([ASKED], after))
    reply = {**SAID, "content": "finalShe lives in Cusco."}
    finding = broken(template, step(first, [ASKED], "She lives in Cusco.<|end|>", reply),
                     step(second, after, "She lives in Cusco.<|end|>", SAID))
    assert finding.kind == kind
