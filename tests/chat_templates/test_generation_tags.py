"""Generation tags are placed where a mask covers what was sampled, proved, and never given otherwise."""

from pathlib import Path

import pytest

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.text.chat_templates import check, find_marks, renderer
from rollout_inspector.text.chat_templates.jinja_source.parts import CannotTakeApart, cut, explicit, take_apart, walk
from rollout_inspector.text.chat_templates.probes.assistant_masks import merged
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer
from rollout_inspector.text.tokenizers import load
from tests.samples.chat_templates import PLAIN, PROMPT, TURN
from tests.samples.model_setups import HEADERS

TALK = [
    {"role": "user", "content": "a"},
    {"role": "assistant", "content": "b"},
    {"role": "user", "content": "c"},
    {"role": "assistant", "content": "d"},
]


def spans(template: str, messages: list[dict[str, str]]) -> list[str]:
    """What the template's tags mark, as transformers counts it."""
    found = TemplateRenderer(None, template).render_many([Conversation(messages)])[0].or_raise()
    return [found.text[start:stop] for start, stop in merged(found.tracked_spans)]


def test_one_loop_for_all_roles_is_marked_by_role_and_cut_at_the_line_break(tiny_tokenizer: Path) -> None:
    tokenizer = load(tiny_tokenizer)
    marks, detail = find_marks(tokenizer, check(tokenizer, PLAIN))
    assert marks is not None, detail
    assert spans(marks.template, TALK) == ["b<|im_end|>", "d<|im_end|>"]
    for prompt in (False, True):
        talk = Conversation(TALK, add_generation_prompt=prompt)
        before = renderer(tokenizer, PLAIN).render_text(talk)
        assert renderer(tokenizer, marks.template).render_text(talk) == before
    assert check(tokenizer, marks.template).verdicts["masks from generation tags"] == "exact"
    assert marks.diff.startswith("--- ") and marks.conversations > 10 and marks.partly == 0 and marks.by_tokens


def test_the_next_header_is_marked_where_the_model_stops_at_it() -> None:
    """GLM's templates write no stop token: the model stops at <|user|> or <|observation|>."""
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"q": 1}}}]}
    result = {"role": "tool", "content": "e"}
    marks, detail = find_marks(None, check(None, HEADERS))
    assert marks is not None, detail
    assert spans(marks.template, TALK) == ["b<|user|>", "d"]
    called = "<call>f\n<arg>q=1</arg>\n</call><|tool|>"
    assert spans(marks.template, [TALK[0], call, result, result, *TALK[1:]]) == [called, "b<|user|>", "d"]
    assert check(None, marks.template).verdicts["masks from generation tags"] == "exact"
    answers_alone = HEADERS.replace("{{ m.content }}{% for c", "{% generation %}{{ m.content }}{% for c").replace(
        "</call>{% endfor %}", "</call>{% endfor %}{% endgeneration %}"
    )
    verdict = check(None, answers_alone).verdicts["masks from generation tags"]
    assert verdict == "not exact: The mask ends too early: '<|user|>' is sampled and not trained."


def test_a_conversation_whose_answer_is_rewritten_later_counts_as_partly_proved() -> None:
    turn = TURN.replace("{{ m.content }}", "{% if m.role == 'assistant' and loop.last %}!{% endif %}{{ m.content }}")
    kept, _ = find_marks(None, check(None, PLAIN))
    rewritten, detail = find_marks(None, check(None, PLAIN.replace(TURN, turn)))
    assert kept is not None and rewritten is not None, detail
    assert kept.partly == 0 < rewritten.partly and not kept.by_tokens
    assert kept.conversations == rewritten.conversations + rewritten.partly


def test_tags_that_mark_too_much_are_placed_again(tiny_tokenizer: Path) -> None:
    tokenizer = load(tiny_tokenizer)
    whole = PLAIN.replace(TURN, "{% generation %}" + TURN + "{% endgeneration %}")
    report = check(tokenizer, whole)
    assert report.verdicts["masks from generation tags"].startswith("not exact")
    marks, detail = find_marks(tokenizer, report)
    assert marks is not None, detail
    assert spans(marks.template, TALK) == ["b<|im_end|>", "d<|im_end|>"]
    exact, detail = find_marks(tokenizer, check(tokenizer, marks.template))
    assert exact is None and "tags of its own" in detail


def test_a_forced_think_block_is_not_marked() -> None:
    template = (
        "{% for m in messages %}{% if m.role == 'assistant' %}"
        "{{ '<|im_start|>assistant\\n<think>\\n' + m.content + '<|im_end|>\\n' }}{% else %}" + TURN + "{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n<think>\\n' }}{% endif %}"
    )
    marks, detail = find_marks(None, check(None, template))
    assert marks is not None, detail
    assert spans(marks.template, TALK) == ["b<|im_end|>", "d<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (PLAIN.replace(PROMPT, "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"),
         "nothing tells what of the render was sampled"),
        ("{% raw %}x{% endraw %}" + PLAIN, "a raw block"),
        (("{% for m in messages %}{{ '%s: %s<|im_end|>\\n' % (m.role, m.content) }}{% endfor %}"
         "{% if add_generation_prompt %}assistant: {% endif %}"), "in one piece"),
    ],
)
def test_where_there_is_no_place_the_reason_is_given(template: str, reason: str) -> None:
    marks, detail = find_marks(None, check(None, template))
    assert marks is None and reason in detail and detail.startswith("No place for generation tags was found: ")


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5", "llama3.1", "deepseek-v3.1", "mistral-nemo"])
def test_families_of_the_corpus_are_marked(corpus: Path, name: str) -> None:
    family = name.replace("deepseek-v3.1", "deepseek-r1")
    tokenizer = load(corpus / "tokenizers" / family)
    marks, detail = find_marks(tokenizer, check(tokenizer, (corpus / "templates" / f"{name}.jinja").read_text()))
    assert marks is not None, detail


# --- taking apart ---
def test_a_template_spelled_out_renders_the_same() -> None:
    template = (
        "{#- a comment -#}\n{% set x = 1 %}\n  {% if x %}\n    a {{- ' b' ~ x + 'c\\n' }}\n  {% endif %}\n"
        "{% macro f(y) %}<{{ y }}>{% endmacro %}{{ f('z') }}\n{%- for i in [1, 2] +%}\n{{ i }}, {% endfor %}\n"
    )
    named = explicit(take_apart(template), lambda operand, loops: "")
    assert named != template
    plain, same = (TemplateRenderer(None, one).render_many([Conversation([])])[0] for one in (template, named))
    assert plain.or_raise().text == same.or_raise().text


def test_operands_and_cuts() -> None:
    (leaf,) = take_apart("{{- '<a>' + m['x + y'] ~ \"it\\'s\\n\" -}}")
    operands = next(walk([leaf])).operands
    assert [(one.source, one.text, one.joiner) for one in operands] == [
        ("'<a>'", "<a>", ""), ("m['x + y']", None, "+"), ('"it\\\'s\\n"', "it's\n", "~"),
    ]
    first, second = cut(operands[2], 4)
    assert (first.text, second.text, second.source) == ("it's", "\n", '"\\n"')
    for whole in ("a if b else 'c' + 'd'", "a + b | length > 2", "n - 1 + 2", "not a + b"):
        (leaf,) = walk(take_apart("{{ " + whole + " }}"))
        assert len(leaf.operands) == 1, whole
    for source, text in (("'a' 'b'", None), ("'\\x41\\101\\N{EM DASH}'", "AA—")):
        (leaf,) = walk(take_apart("{{ " + source + " }}"))
        assert leaf.operands[0].text == text


@pytest.mark.parametrize("template", ["{% if x %}", "{% endfor %}", "{% macro f() %}x", "{% if x %}{% endfor %}"])
def test_a_template_that_does_not_close_is_refused(template: str) -> None:
    with pytest.raises(CannotTakeApart):
        take_apart(template)
