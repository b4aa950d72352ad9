"""Each property has a witness pair: the smallest template that has it and the smallest that does not."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.snippets import quoted
from rollout_inspector.text.chat_templates import CheckStatus, check, renderer
from rollout_inspector.text.chat_templates.jinja_source.scan import deciding_condition, scan
from rollout_inspector.text.chat_templates.probes.assistant_masks import overrun, transformers_mask
from rollout_inspector.text.chat_templates.probes.checks import make_render_cache
from rollout_inspector.text.chat_templates.probes.compare import token_start, whole_until
from rollout_inspector.text.chat_templates.probes.conversations import thinking_switch
from rollout_inspector.text.chat_templates.probes.message_shape import MessageShape, find_message_shape
from rollout_inspector.text.chat_templates.probes.render_cache import RenderCache
from rollout_inspector.text.chat_templates.probes.report import CheckReport, Purpose, outcome_of
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer
from rollout_inspector.text.tokenizers import load
from tests.samples.chat_templates import PLAIN, PROMPT, TURN


def status(report: CheckReport, name: str) -> str:
    return report.check(name).status.value


def test_a_plain_template_is_safe(tiny_tokenizer: Path) -> None:
    report = check(load(tiny_tokenizer), PLAIN)
    assert report.prefix_preserving is True
    assert report.verdicts["TITO with tool results"] == "safe; void for reasoning (not rendered)"
    assert report.verdicts["multi-turn with users"] == "safe; void for reasoning (not rendered)"
    assert report.verdicts["fixed-base deltas"] == "safe"
    assert report.verdicts["masks from generation tags"] == "not available"
    assert report.tokenizer is not None and report.tokenizer["encoder"] in ("fastokens", "tokenizers")
    assert status(report, "tool_append_after_reasoning") == "unsupported"
    assert report.check("tool_append_after_reasoning").void


WITNESSES = {
    # name of the check -> (a template on which it is ok, one on which it is broken)
    "tool_append": (
        PLAIN,
        "{% for m in messages %}{% if loop.last %}!{% endif %}" + TURN + "{% endfor %}" + PROMPT,
    ),
    "tool_append_with_system": (
        PLAIN,
        "{% for m in messages %}{% if messages[0].role == 'system' and loop.last %}!{% endif %}"
        + TURN
        + "{% endfor %}",
    ),
    "tool_append_third_cycle": (
        PLAIN,
        "{% if messages | length > 6 %}!{% endif %}" + PLAIN,
    ),
    "user_append": (
        PLAIN,
        "{% for m in messages %}{% if m.role == 'assistant' and loop.last %}!{% endif %}" + TURN + "{% endfor %}",
    ),
    "generation_answer": (
        PLAIN,
        PLAIN.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}"),
    ),
    "per_message": (PLAIN, "<s>" + PLAIN),
    "default_system": (PLAIN, "{% if messages[0].role != 'system' %}You are a very helpful model{% endif %}" + PLAIN),
    "system_supported": (PLAIN, None),
    "dates": (PLAIN, "{{ strftime_now('%d %b') }}" + PLAIN),
    "generation_prompt_written": (PLAIN, PLAIN.replace(PROMPT, "")),
    "fixed_base_user": (
        PLAIN,
        PLAIN.replace("<|im_start|>{{ m.role }}", "<|im_start|>{{ m.role }}{{ loop.length if m.role == 'tool' }}"),
    ),
    "content_as_list": (
        PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string else m.content[0].text }}"),
        PLAIN,
    ),
    "arguments_other_form": (
        PLAIN.replace(
            "c.function.arguments | tojson",
            "c.function.arguments if c.function.arguments is string else (c.function.arguments | tojson)",
        ),
        PLAIN,
    ),
    "control_text_in_content": (PLAIN.replace("{{ m.content }}", "{{ m.content | replace('<|', '<') }}"), PLAIN),
    "seam": (PLAIN.replace("<|im_end|>\n", "<|im_end|>"), PLAIN),
    "two_user_messages": (PLAIN, "{% if messages | length > 1 %}!{% endif %}" + PLAIN),
}


@pytest.mark.parametrize("name", WITNESSES)
def test_witness_pair(tiny_tokenizer: Path, name: str) -> None:
    good, bad = WITNESSES[name]
    tokenizer = load(tiny_tokenizer)
    assert status(check(tokenizer, good), name) == "ok"
    if bad is not None:
        assert status(check(tokenizer, bad), name) == "broken"


def test_a_failed_probe_shows_both_sides_and_the_lines(tiny_tokenizer: Path) -> None:
    template = (
        "{% for m in messages %}\n{%- if loop.last %}\nLAST\n{%- else %}\nEARLY\n{%- endif %}" + TURN + "{% endfor %}"
    )
    report = check(load(tiny_tokenizer), template)
    assert report.prefix_preserving is False
    found = json.loads(json.dumps(report.to_dict()))["checks"][0]
    assert (found["name"], found["status"], found["passed"]) == ("tool_append", "broken", False)
    # The last line of both words is what differs; the tag that closes each branch strips what follows it.
    assert found["lines"] == {"expected": 3, "actual": 5}
    assert found["sources"] == {"expected": "LAST", "actual": "EARLY"}
    assert found["decided_by"]["line"] == 2 and "loop.last" in found["decided_by"]["source"]
    assert found["expected_text"].startswith("L") and found["actual_text"].startswith("E")
    window = found["window"]
    at = window["index"] - window["start"]
    assert window["expected"][at]["line"] == 3 and window["actual"][at]["line"] == 5
    assert window["expected"][:at] == window["actual"][:at]
    assert found["expected_ids"][0] == window["expected"][at]["id"]
    whole = found["renders"]["expected"]
    assert "".join(whole["tokens"]) == whole["text"] and len(whole["ids"]) == len(whole["tokens"])
    assert found["conversations"]["before"]["messages"][1]["tool_calls"]


def test_void_passes_are_told_apart(tiny_tokenizer: Path) -> None:
    deaf = (
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    report = check(load(tiny_tokenizer), deaf)
    first = report.check("tool_append")
    assert report.prefix_preserving is None and first.passed
    assert first.void and first.status is CheckStatus.UNSUPPORTED
    assert report.verdicts["TITO with tool results"].startswith("not available")


OLD = "{{ '(old)' if m.role == 'tool' and later else m.content }}"
HIDDEN = {
    "earlier results": ("{{ m.content }}", "{{ m.content if m.role != 'tool' or loop.last else '(old)' }}"),
    "results of earlier cycles": (
        "{{ m.content }}",
        "{% set later = messages[loop.index0:] | selectattr('role', 'eq', 'assistant') | list %}" + OLD,
    ),
    "calls of earlier cycles": (
        "in m.tool_calls or []",
        "in (m.tool_calls if not messages[loop.index:] | selectattr('role', 'eq', 'assistant') | list) or []",
    ),
}


@pytest.mark.parametrize("what", HIDDEN)
def test_no_verdict_is_safe_over_messages_that_later_cycles_hide(tiny_tokenizer: Path, what: str) -> None:
    template = PLAIN.replace(*HIDDEN[what])
    assert template != PLAIN
    report = check(load(tiny_tokenizer), template)
    assert report.prefix_preserving is True
    for purpose in (Purpose.TOOLS, Purpose.FIXED_BASE):
        assert outcome_of(purpose, report.checks) is None
        assert report.verdicts[purpose].startswith("cannot be told: ")
    assert "not rendered (" in report.verdicts[Purpose.TOOLS]


def test_a_safe_verdict_says_what_is_never_rendered(tiny_tokenizer: Path) -> None:
    """A template that writes the first call alone never rewrites anything."""
    report = check(load(tiny_tokenizer), PLAIN.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]"))
    assert report.verdicts[Purpose.TOOLS] == "safe; void for reasoning, one of two calls (not rendered)"
    assert outcome_of(Purpose.TOOLS, report.checks) is True


def test_text_and_tokens_are_told_apart(tiny_tokenizer: Path) -> None:
    """A prompt that ends in a newline, and a history that goes on with another: the text holds, the ids merge."""
    merging = PLAIN.replace("{{ m.content }}", "{{ '\n' if m.role == 'assistant' }}{{ m.content }}")
    tokenizer = load(tiny_tokenizer)
    found = check(tokenizer, merging).check("generation_answer").to_dict(merging)
    merges = len(tokenizer.encode("\n\n")) == 1
    assert found["text_passed"] is True
    assert found["token_passed"] is not merges
    lacking = check(tokenizer, PLAIN.replace("<|im_start|>", "<|no_such_token|>")).check("generation_answer")
    assert lacking.comparison is not None and lacking.comparison.text_passed


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (PLAIN, MessageShape()),
        (PLAIN.replace("c.function.arguments | tojson", "'' + c.function.arguments"), MessageShape(arguments="string")),
        (
            PLAIN.replace("{{ c.function.name }}", "{{ raise_exception('id') if c.id | length != 9 }}"),
            MessageShape(ids=True),
        ),
        (PLAIN.replace("m.tool_calls or []", "((m.tool_calls or []) if tools else [])"), MessageShape(tools=True)),
        (
            PLAIN.replace("{{ m.content }}", "{{ m.reasoning_content }}{{ m.content }}"),
            MessageShape(reasoning="reasoning_content"),
        ),
        (PLAIN.replace("{{ m.content }}", "{{ m.thinking }}{{ m.content }}"), MessageShape(reasoning="thinking")),
        ("</think>" + PLAIN, MessageShape(reasoning="inline")),
        (PLAIN.replace("{{ m.content }}", "{{ m.content[0].text }}"), MessageShape(parts=True)),
    ],
)
def test_forms(template: str, form: MessageShape) -> None:
    assert find_message_shape(TemplateRenderer(None, template), None, None)[0] == form


@pytest.mark.parametrize(
    ("read", "reason"),
    [
        ("{{ '' + m.content[0]['text'] }}", "has no attribute 'text'"),
        ("{% for part in m.content if part.type == 'text' %}{{ part.text }}{% endfor %}", "is not rendered"),
    ],
)
def test_a_template_that_reads_lists_of_parts_alone_is_probed_with_them(
    tiny_tokenizer: Path, read: str, reason: str
) -> None:
    report = check(load(tiny_tokenizer), PLAIN.replace("{{ m.content }}", read))
    assert report.prefix_preserving is True and report.form.startswith("content as a list of parts")
    assert any("only as a list of parts" in note and reason in note for note in report.notes)
    assert report.verdicts["multi-turn with users"].startswith("safe")
    assert report.verdicts["TITO with tool results"].startswith("safe")
    appended = report.check("user_append").comparison
    assert appended is not None and "UQ2" in appended.after.text
    assert appended.after.conversation.messages[0]["content"] == [{"type": "text", "text": "UQ1 please compute"}]
    assert status(report, "per_message") == "ok" and status(report, "content_as_list") in ("raises", "broken")


def test_a_message_that_raises_alone_decides_message_by_message(tiny_tokenizer: Path) -> None:
    """The whole conversation is rendered, so the template is right, and this way to use it cannot work."""
    raising = "{{ raise_exception('no user has asked') }}"
    report = check(load(tiny_tokenizer), f"{{% if messages[0].role == 'assistant' %}}{raising}{{% endif %}}" + PLAIN)
    assert status(report, "per_message") == "broken"
    verdict = report.verdicts["message by message"]
    assert verdict.startswith("not safe") and "no user has asked (with the messages assistant)" in verdict
    # Where the conversation raises as well, nothing was compared.
    refusing = f"{{% for m in messages %}}{{% if m.role == 'system' %}}{raising}{{% endif %}}{{% endfor %}}"
    report = check(load(tiny_tokenizer), refusing + PLAIN)
    assert status(report, "per_message") == "raises"
    assert not report.verdicts["message by message"].startswith("not safe")


def test_a_template_that_refuses_tools_is_not_checked_for_them(tiny_tokenizer: Path) -> None:
    refusing = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}" + TURN
    refusing += "{% endfor %}"
    report = check(load(tiny_tokenizer), refusing)
    assert report.prefix_preserving is None
    assert "no tools" in report.check("tool_append").detail and "line" in report.check("tool_append").detail
    assert report.verdicts["multi-turn with users"].startswith("safe")


@pytest.mark.parametrize(
    "template", ["{% if %}", "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"]
)
def test_a_template_that_cannot_render_gets_one_sentence(template: str) -> None:
    with pytest.raises(RenderFailed, match="The template"):
        check(None, template)


def test_without_a_tokenizer_the_text_is_compared() -> None:
    report = check(None, PLAIN)
    assert report.prefix_preserving is True and report.tokenizer is None
    assert any("without a tokenizer" in note for note in report.notes)


def test_thinking_switches_and_own_conversations_are_probed(tiny_tokenizer: Path) -> None:
    switch = "{% if enable_thinking is false %}!{% endif %}"
    switched = PLAIN.replace("assistant\n{% endif %}", "assistant\n" + switch + "{% endif %}")
    own = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    report = check(load(tiny_tokenizer), switched, conversation=own)
    assert status(report, "thinking_on_generation_answer") == "ok"
    assert status(report, "thinking_off_generation_answer") == "broken"
    assert status(report, "conversation_2") == "ok"
    assert report.check("conversation_2").title == "Your conversation, message 2 (user) appended"
    with pytest.raises(KeyError):
        check(load(tiny_tokenizer), PLAIN).check("conversation_2")


@pytest.mark.parametrize(
    ("template", "switch"),
    [
        ("{% if enable_thinking is defined and enable_thinking is false %}x{% endif %}", "enable_thinking"),
        ("{%- if not thinking is defined %}{% set thinking = false %}{% endif %}", "thinking"),
        ("{{ raise_exception('Cannot pass both content and thinking in a message.') }}", None),
        ("{# Set it if thinking is wanted. #}Think if thinking is fun.", None),
        ("{% if message.thinking is defined and not message.thinking %}x{% endif %}", None),
    ],
)
def test_a_switch_is_read_in_conditions_alone(template: str, switch: str | None) -> None:
    assert thinking_switch(template) == switch


MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}<|im_start|>assistant\n"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}" + TURN
    + "{% endif %}{% endfor %}" + PROMPT
)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (MARKED, ""),
        (
            MARKED.replace("<|im_start|>assistant\n{% generation %}", "{% generation %}<|im_start|>assistant\n"),
            "too early",
        ),
        (MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>"), "ends too early"),
        (MARKED.replace("{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% endgeneration %}"), "ends too late"),
        (
            MARKED.replace("{{ m.content }}<|im_end|>", "<|im_end|>").replace("{% gen", "{{ m.content }}{% gen"),
            "too late",
        ),
    ],
)
def test_generation_masks(tiny_tokenizer: Path, template: str, said: str) -> None:
    found = check(load(tiny_tokenizer), template).check("generation_masks")
    assert found.status is (CheckStatus.BROKEN if said else CheckStatus.OK), found.detail
    assert said in found.detail


TWO_STOPS = PLAIN.replace("<|im_end|>", "<|box_end|><|im_end|>")
EOS_AT_THE_END = MARKED.replace(
    "{% endgeneration %}{{ '\n' }}", "{{ '\n' }}{% if loop.last %}<|im_end|>{% endif %}{% endgeneration %}"
)


def test_the_stop_token_is_the_tokenizers(corpus: Path) -> None:
    assert EOS_AT_THE_END != MARKED
    tokenizer = load(corpus / "tokenizers" / "qwen3")
    marked = MARKED.replace("{{ m.content }}<|im_end|>", "{{ m.content }}<|box_end|><|im_end|>")
    for one in (tokenizer, None):
        assert "The model stops at '<|im_end|>'" in check(one, TWO_STOPS).check("seam").detail
        assert check(one, marked).check("generation_masks").status is CheckStatus.OK
    first = RenderCache(TemplateRenderer(tokenizer, TWO_STOPS.replace("<|im_end|>", "")), MessageShape())
    assert first.answer([RenderCache.stop_text]) == ["<|box_end|>"]
    open_end = RenderCache(TemplateRenderer(tokenizer, TWO_STOPS.replace("<|box_end|>", " so ")), MessageShape())
    assert open_end.answer([RenderCache.stop_text]) == [None]


def test_the_model_stops_at_the_first_stop_token(corpus: Path) -> None:
    """As in TRL's training template of Phi-3, whose mask goes on to a second one at the end of the row."""
    report = check(load(corpus / "tokenizers" / "qwen3"), EOS_AT_THE_END)
    assert "The model stops at '<|im_end|>'" in report.check("seam").detail
    assert "ends too late" in report.check("generation_masks").detail


def test_masks_that_no_render_tells_are_not_called_exact(tiny_tokenizer: Path) -> None:
    untold = "{% for m in messages %}{{ messages | length }}{% endfor %}" + MARKED
    found = check(load(tiny_tokenizer), untold)
    assert found.check("generation_masks").status is CheckStatus.UNSUPPORTED
    assert found.verdicts["masks from generation tags"] == "not available"


@pytest.fixture(scope="module")
def trimming(tiny_tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose offsets leave white space at the end of a token out, as many do."""
    folder = tmp_path_factory.mktemp("tokenizers") / "trimming"
    shutil.copytree(tiny_tokenizer, folder)
    definition = json.loads((folder / "tokenizer.json").read_text())
    trims = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True}
    (folder / "tokenizer.json").write_text(json.dumps({**definition, "post_processor": trims}))
    return folder


def test_the_overrun_of_transformers_is_reported(trimming: Path, tiny_tokenizer: Path) -> None:
    turns = "<|im_start|>{{ m.role }}\n{{ m.content }}\n"
    marked = "<|im_start|>assistant\n{% generation %}{{ m.content }}{{ ' ' }}{% endgeneration %}"
    overlong = "{% for m in messages %}{% if m.role == 'assistant' %}" + marked + "{% else %}" + turns
    overlong += "{% endif %}{% endfor %}" + PROMPT
    assert "runs on to the end" in check(load(trimming), overlong).check("generation_masks").detail
    assert "runs on" not in check(load(tiny_tokenizer), overlong).check("generation_masks").detail


def test_masks_are_those_of_transformers(corpus: Path, trimming: Path) -> None:
    messages = [
        {"role": "user", "content": "hello"}, {"role": "assistant", "content": "well, 4"},
        {"role": "user", "content": "sure?"}, {"role": "assistant", "content": "yes 🙂 "},
    ]
    overran = 0
    for name in ("qwen3", "qwen2.5", "deepseek-r1", "gpt-oss", "trimming"):
        tokenizer = load(trimming if name == "trimming" else corpus / "tokenizers" / name)
        templates = [MARKED, MARKED.replace("<|im_end|>{% endgeneration %}{{ '\n' }}", " {% endgeneration %}")]
        stem = {"deepseek-r1": "deepseekv3", "gpt-oss": "gptoss", "qwen2.5": "qwen2-5"}.get(name, name)
        if name != "trimming":
            templates.append((corpus / "templates" / f"trl-training--{stem}.jinja").read_text())
        for template in templates:
            expected = tokenizer.hf.apply_chat_template(
                messages, chat_template=template, return_dict=True, return_assistant_tokens_mask=True
            )["assistant_masks"]
            written = renderer(tokenizer, template).render_many([Conversation(messages)], lines=True)[0].or_raise()
            if "strftime_now" in template:
                continue
            mask = transformers_mask(tokenizer, written.text, written.tracked_spans)
            assert mask.astype(np.int64).tolist() == expected, name
            overran += overrun(tokenizer, written.text, written.tracked_spans)
    assert overran > 0  # the known fault of the arithmetic shows on tokenizers that trim offsets


def test_tags() -> None:
    template = "{# {% if x %} #}\n{% if a == '%}' %}\nA\n{% elif b %}\nB\n{% else %}\nC\n{% endif %}{{ x }}"
    assert [tag.kind for tag in scan(template)] == ["if", "elif", "else", "endif", "output"]
    assert scan(template)[0].text(scan(template)[0].expression) == "a == '%}'"
    decided = deciding_condition(template, 3, 7)
    assert decided is not None and decided.line == 2
    decided = deciding_condition(template, 5, 9)
    assert decided is not None and decided.line == 4
    assert deciding_condition(template, 3, 3) is None
    for hostile in ("{% if", "{{", "{#", "{% %}", "{%- if a -%}", "%}{{ '"):
        scan(hostile)


def test_kwargs_and_tools_reach_the_template(tiny_tokenizer: Path) -> None:
    needy = "{% if flavour != 'x' or tools[0].function.name != 'mine' %}{{ raise_exception('needs both') }}{% endif %}"
    tools = [{"type": "function", "function": {"name": "mine", "description": "", "parameters": {}}}]
    cache, _ = make_render_cache(TemplateRenderer(load(tiny_tokenizer), needy + PLAIN), tools, {"flavour": "x"})
    assert cache.form.calls
    assert check(load(tiny_tokenizer), needy + PLAIN, tools, {"flavour": "x"}).prefix_preserving is True
    assert check(load(tiny_tokenizer), needy + PLAIN).prefix_preserving is None
    conversation = Conversation([{"role": "user", "content": "a"}], None, {"messages": [], "x": 1})
    assert TemplateRenderer(None, "").variables(conversation)["messages"]


def test_snippets_hold_control_tokens_whole() -> None:
    assert quoted("abc <|im_start|>user", 8) == "'abc ' …"
    assert quoted("<|im_start|>user", 8) == "'<|im_start|>' …"
    assert quoted("some words and more", 12) == "'some words' …"
    assert token_start("a<|im_end|>b", 5) == 1
    assert token_start("a<|im_end|>b", 11) == 11
    assert token_start("a < b", 4) == 4
    assert whole_until("<|end|><|start|>x", 10) == 16 and whole_until("some words", 2) == 4
