"""A repair mends what failed, changes nothing that was preserved, and is never given unverified."""

import itertools
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.text.chat_templates import check, find_repair, renderer, with_repair
from rollout_inspector.text.chat_templates.jinja_source.edits import edits, operands
from rollout_inspector.text.chat_templates.jinja_source.scan import suspects
from rollout_inspector.text.chat_templates.jinja_source.tokens import pieces
from rollout_inspector.text.chat_templates.probes.checks import make_render_cache
from rollout_inspector.text.chat_templates.probes.report import CheckReport, Purpose
from rollout_inspector.text.chat_templates.repair import search
from rollout_inspector.text.chat_templates.repair.regression_set import RegressionSet
from rollout_inspector.text.chat_templates.repair.search import Repair, unified_diff
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer
from rollout_inspector.text.tokenizers import load
from tests.samples.chat_templates import PLAIN, PROMPT, TURN


def test_the_one_line_fix_of_qwen3(corpus: Path) -> None:
    tokenizer = load(corpus / "tokenizers" / "qwen3")
    template = (corpus / "templates" / "qwen3.jinja").read_text()
    report = with_repair(tokenizer, check(tokenizer, template))
    repair = report.repair
    assert repair is not None
    assert repair.template == (corpus / "templates" / "qwen3--seed-one-line-fix.jinja").read_text()
    changed = [line for line in repair.diff.splitlines() if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    assert changed == [
        "-            {%- if loop.last or (not loop.last and reasoning_content) %}",
        "+            {%- if true %}",
    ]
    assert check(tokenizer, repair.template).prefix_preserving
    assert "tool_append" in repair.fixes and "user_append" in repair.still_broken
    assert repair.changed and all(before != after for _, before, after in repair.changed)
    assert repair.wider is not None and not repair.wider.still_broken
    found = report.to_dict()["repair"]
    assert found["verified"] is True and found["changed_conversations"] == len(found["changed"])


@pytest.mark.parametrize(
    "broken",
    [
        "{% for m in messages %}{% if m.role == 'assistant' and not loop.last %}~{% endif %}"
        + TURN
        + "{% endfor %}"
        + PROMPT,
        "{% for m in messages %}{{ '' if loop.last or m.role != 'assistant' else '~' }}"
        + TURN
        + "{% endfor %}"
        + PROMPT,
        "{% set n = messages | length %}{% for m in messages %}"
        "{% if m.role == 'assistant' and loop.index0 < n - 1 %}~{% endif %}" + TURN + "{% endfor %}" + PROMPT,
    ],
)
def test_position_tests_are_repaired(tiny_tokenizer: Path, broken: str) -> None:
    tokenizer = load(tiny_tokenizer)
    report = check(tokenizer, broken)
    assert report.prefix_preserving is False
    repair, detail = find_repair(tokenizer, report)
    assert repair is not None, detail
    assert check(tokenizer, repair.template).prefix_preserving is True
    # What ends in an assistant message was preserved, so it must render as before.
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    for prompt in (False, True):
        question = Conversation(messages[:1], add_generation_prompt=prompt)
        before = renderer(tokenizer, broken).render_text(question)
        assert renderer(tokenizer, repair.template).render_text(question) == before
    before = renderer(tokenizer, broken).render_text(Conversation(messages))
    assert renderer(tokenizer, repair.template).render_text(Conversation(messages)) == before


def test_nothing_is_offered_where_nothing_can_be(tiny_tokenizer: Path) -> None:
    tokenizer = load(tiny_tokenizer)
    assert find_repair(tokenizer, check(tokenizer, PLAIN)) == (
        None, "There is nothing to repair: appending messages keeps what was rendered before.",
    )
    refusing = "\n{% if messages[-1].role == 'tool' %}{{ raise_exception('No tools, please.') }}{% endif %}" + PLAIN
    report = check(tokenizer, refusing)
    assert "(with the messages user, assistant, tool). Probed in" in report.check("tool_append").detail
    repair, detail = find_repair(tokenizer, report)
    assert repair is None and "raises on line 2: No tools, please. A refusal may be meant" in detail
    assert "more. " in detail and "change line 2 of the template, or choose another" in detail
    silent = PLAIN.replace("{% for m in messages %}", "{% for m in messages if m.role != 'tool' %}", 1)
    assert silent != PLAIN
    repair, detail = find_repair(tokenizer, check(tokenizer, silent))
    assert repair is None and "is not rendered at all" in detail and "choose a chat template that renders" in detail
    hopeless = "{{ messages | length }}" + PLAIN
    repair, detail = find_repair(tokenizer, check(tokenizer, hopeless))
    assert repair is None and detail.startswith("No repair was found") and "tool result" in detail


def test_a_repair_that_would_change_what_was_preserved_is_not_given(tiny_tokenizer: Path) -> None:
    # Dropping the mark everywhere passes the probe, but a conversation that ends in an answer would lose it.
    marked = (
        "{% for m in messages %}"
        + TURN
        + "{% if loop.last and m.role == 'assistant' %}~{% endif %}{% endfor %}"
        + PROMPT
    )
    tokenizer = load(tiny_tokenizer)
    repair, _ = find_repair(tokenizer, check(tokenizer, marked))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    if repair is not None:
        assert renderer(tokenizer, repair.template).render_text(Conversation(messages)).endswith("~")


def test_edits_are_ordered_by_likelihood_and_apply_cleanly() -> None:
    template = "{% if a and (b or loop.last) %}x{% endif %}{{ 'y' if m.reasoning else 'z' }}"
    template += "{% if m.role == 'user' and a %}{% endif %}"
    found = edits(template, {1: 0})
    results = [template[:start] + text + template[stop:] for _, start, stop, text in found]
    assert results[0].startswith("{% if true %}x")
    assert any("{% if a and (b) %}" in result for result in results)
    assert any("{% if a and (b or false) %}" in result for result in results)
    assert any("{{ 'y' if true else 'z' }}" in result for result in results)
    assert found[-1][0] > found[0][0]


def test_a_changed_set_can_be_the_repair(tiny_tokenizer: Path) -> None:
    broken = (
        "{% for m in messages %}{% set here = not loop.last %}\n"
        "{% if m.role == 'assistant' and here %}~{% endif %}" + TURN + "{% endfor %}" + PROMPT
    )
    found = [broken[:start] + text + broken[stop:] for _, start, stop, text in edits(broken, {1: 0})]
    assert found[0].startswith("{% for m in messages %}{% set here = true %}")
    tokenizer = load(tiny_tokenizer)
    repair, detail = find_repair(tokenizer, check(tokenizer, broken))
    assert repair is not None and not repair.still_broken, detail


def assert_scope(report: CheckReport, repair: Repair) -> None:
    """The scope names the purposes of the probes that are mended, and no other."""
    mended = {report.check(name).purpose for name in repair.fixes} & {Purpose.TOOLS, Purpose.USERS, Purpose.GENERATION}
    named = {
        "tools": {Purpose.TOOLS}, "users": {Purpose.USERS}, "generation": {Purpose.GENERATION},
        "all": {Purpose.TOOLS, Purpose.USERS},
    }
    if repair.scope == "every":
        assert Purpose.GENERATION in mended and len(mended) > 1
    else:
        assert mended == named[repair.scope]


def test_a_scope_names_what_is_mended() -> None:
    assert [search._scope([one]) for one in search.SCOPES] == ["tools", "users", "generation"]
    assert search._scope([Purpose.TOOLS, Purpose.USERS]) == "all"
    assert search._scope([Purpose.USERS, Purpose.GENERATION]) == "every"


def test_a_busy_machine_finds_the_same(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    template = (corpus / "templates" / "qwen3.jinja").read_text()
    report = check(None, template)
    wanted = find_repair(None, report)
    assert wanted[0] is not None
    for step, finished in ((5.0, True), (200.0, False)):
        ticks = itertools.count(0.0, step)
        monkeypatch.setattr(search, "time", SimpleNamespace(monotonic=ticks.__next__))
        found, detail = find_repair(None, report)
        if finished:
            assert found is not None and (found.template, detail) == (wanted[0].template, wanted[1])
        else:
            assert (found, detail) == (None, search.NOT_FINISHED)
    assert find_repair(None, report, n_candidates=0)[0] is None


def test_every_break_of_the_corpus_that_appending_makes_is_repaired(corpus: Path) -> None:
    """The templates whose tool or user probes fail, each with the probes that its repairs leave."""
    left = {}
    for name in ("glm-4.5", "gpt-oss", "qwen3.5-think", "qwq-32b", "skyrl--qwen3_without_thinking"):
        tokenizer = load(corpus / "tokenizers" / ("gpt-oss" if name == "gpt-oss" else "qwen3"))
        report = check(tokenizer, (corpus / "templates" / f"{name}.jinja").read_text())
        repair, detail = find_repair(tokenizer, report)
        assert repair is not None, (name, detail)
        widest = repair
        assert_scope(report, widest)
        while widest.wider is not None:
            widest = widest.wider
            assert_scope(report, widest)
        left[name] = [probe for probe in widest.still_broken if not probe.startswith("generation_")]
    assert not any(left.values()), left


def test_the_turn_after_an_answer_of_gpt_oss_is_mended_without_another_prompt(corpus: Path) -> None:
    """What ends in an answer renders as before, with the generation prompt too, though appending rewrote it."""
    template = (corpus / "templates" / "gpt-oss.jinja").read_text()
    repair, detail = find_repair(None, check(None, template))
    assert repair is not None and {"user_append", "user_append_after_reasoning"} <= set(repair.fixes), detail
    talk = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "thinking": "c"}]
    for messages in (talk[:1], talk):
        for prompt in (False, True):
            conversation = Conversation(messages, add_generation_prompt=prompt)
            before = renderer(None, template).render_text(conversation)
            assert renderer(None, repair.template).render_text(conversation) == before


def test_every_conversation_of_the_check_that_changes_is_listed(tiny_tokenizer: Path) -> None:
    """Results that are objects too, which no prefix probe has, and one whose prompt alone changes."""
    mark = "{% if m.role == 'assistant' and not loop.last %}~{% endif %}"
    broken = "{% for m in messages %}" + mark + TURN + "{% endfor %}" + PROMPT
    tokenizer = load(tiny_tokenizer)
    report = check(tokenizer, broken)
    repair, detail = find_repair(tokenizer, report)
    assert repair is not None, detail
    listed = {json.dumps([one.messages, one.tools], default=list) for one, _, _ in repair.changed}
    assert any("RESX1" in str(message["content"]) for one, _, _ in repair.changed for message in one.messages
               if isinstance(message["content"], dict))
    for one in report.checks:
        for side in (one.comparison.before, one.comparison.after) if one.comparison else ():
            asked = side.conversation
            now = renderer(tokenizer, repair.template).render_many([asked])[0].text
            name = json.dumps([asked.messages, asked.tools], default=list)
            assert now == side.text or name in listed, asked.messages


def test_a_conversation_whose_prompted_render_alone_changes_is_listed() -> None:
    one = "{% for m in messages %}" + TURN + "{% endfor %}" + PROMPT
    cache, _ = make_render_cache(TemplateRenderer(None, one), None, None)
    changed = RegressionSet(cache).changed(one.replace("assistant\n{% endif", "assistant:\n{% endif"))
    assert changed and all(conversation.add_generation_prompt for conversation, _, _ in changed)
    assert len({repr(conversation.messages) for conversation, _, _ in changed}) > 10


def test_a_repair_that_hides_a_message_is_not_given(tiny_tokenizer: Path) -> None:
    """Without the result there is nothing that could change; a prefix that is kept by silence is not kept."""
    broken = (
        "{% for m in messages %}{% if m.role == 'tool' and loop.last %}{{ messages | length }}" + TURN + "{% elif "
        "m.role != 'tool' %}{{ messages | length if m.tool_calls }}" + TURN + "{% endif %}{% endfor %}" + PROMPT
    )
    tokenizer = load(tiny_tokenizer)
    repair, _ = find_repair(tokenizer, check(tokenizer, broken), n_candidates=500)
    cache, _ = make_render_cache(TemplateRenderer(tokenizer, broken), None, None)
    regression_set = RegressionSet(cache)
    assert regression_set.loses(broken.replace("m.role == 'tool' and loop.last", "false"))
    assert not regression_set.loses(broken)
    assert repair is None or not regression_set.loses(repair.template)


def test_what_no_change_can_mend_is_said(tiny_tokenizer: Path) -> None:
    # The prompt opens a think block that the history lacks; both are renders that must stay.
    opened = PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    tokenizer = load(tiny_tokenizer)
    repair, detail = find_repair(tokenizer, check(tokenizer, opened))
    assert repair is None
    assert detail.startswith("No repair was found. No change of the template can mend before an answer")


def test_suspects_follow_names_to_where_they_are_set() -> None:
    template = (
        "{% set ns = namespace(x=false) %}\n{% for m in messages %}\n{% if loop.last %}\n{% set ns.x = true %}\n"
        "{% endif %}\n{% endfor %}\n{% if ns.x %}\na\n{% elif y %}\nb\n{% elif z %}\nc\n{% endif %}\nd"
    )
    near = suspects(template, [(8, 12)])
    assert {line: near[line] for line in (8, 12, 7, 11)} == {8: 0, 12: 0, 7: 0, 11: 0}
    assert near[4] == near[3] == 1 and 14 not in near


def test_operands() -> None:
    text = "{{ a and b or 'x and y' }}"
    found = list(operands(pieces(text)[0].tokens))
    assert [text[slice(*operand)] for operand, _, _ in found] == ["a", "b", "'x and y'"]
    assert [word for _, _, word in found] == ["and", "and", "or"]
    dropped = [text[3:start] + text[stop:-3] for _, (start, stop), _ in found]
    assert dropped == ["b or 'x and y'", "a or 'x and y'", "a and b"]
    for nested in ("{{ not (a or b) }}", "{{ (not(a or b)) }}"):
        assert [nested[slice(*operand)] for operand, _, _ in operands(pieces(nested)[0].tokens)] == ["a", "b"]
    assert list(operands(pieces("{{ (a or b)[c] }}")[0].tokens)) == []


def test_diff_of_a_template_without_a_last_newline() -> None:
    assert unified_diff("a\nb", "a\nc").endswith("-b\n\\ No newline at end of file\n+c\n\\ No newline at end of file\n")
