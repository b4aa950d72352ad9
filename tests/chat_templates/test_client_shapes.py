"""What clients send: each shape has the smallest template that takes it and the smallest that does not."""

from pathlib import Path

import pytest

from rollout_inspector.text.chat_templates import check
from rollout_inspector.text.chat_templates.probes.checks import make_render_cache
from rollout_inspector.text.chat_templates.probes.client_shapes import CLIENT_SHAPES
from rollout_inspector.text.chat_templates.probes.report import Check, Purpose, outcome_of
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer
from tests.samples.chat_templates import PLAIN

NULL = PLAIN.replace("{{ m.content }}", "{{ m.content or '' }}")
STRINGS = PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string else '' }}")
PARTS = PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string else m.content[0].text }}")
ARGUMENTS = "c.function.arguments | tojson"
SHAPES = {
    "content_as_list": (PARTS, STRINGS),
    "result_as_list": (PARTS, STRINGS),
    "result_as_object": (
        PLAIN.replace("{{ m.content }}", "{{ m.content if m.content is string else m.content | tojson }}"), PLAIN,
    ),
    "content_null": (NULL, PLAIN),
    "arguments_other_form": (
        PLAIN.replace(ARGUMENTS, f"c.function.arguments if c.function.arguments is string else ({ARGUMENTS})"), PLAIN,
    ),
    "empty_reasoning": (
        PLAIN, PLAIN.replace("{{ m.content }}", "{% if m.reasoning_content is defined %}<think></think>{% endif %}"
                                                "{{ m.content }}"),
    ),
    "python_in_call": (PLAIN, PLAIN.replace(ARGUMENTS, "c.function.arguments")),
    "parallel_calls": (PLAIN, PLAIN.replace("in m.tool_calls or []", "in (m.tool_calls or [])[:1]")),
    "tools_not_sent_again": (
        "{% set tools = tools or [] %}" + PLAIN,
        PLAIN.replace("in m.tool_calls or []", "in (m.tool_calls if tools is not none and tools) or []"),
    ),
    "turn_marks": (PLAIN, PLAIN.replace("<|im_end|>", "{% if not loop.last %}<|im_end|>{% endif %}")),
    "long_id": (
        PLAIN, "{% for m in messages %}{% if m.tool_calls and m.tool_calls[0].id | length > 40 %}"
               "{{ raise_exception('The id is too long.') }}{% endif %}{% endfor %}" + PLAIN,
    ),
    "forged_role": (PLAIN.replace("{{ m.content }}", "{{ m.content | string | replace('<|', '< |') }}"), PLAIN),
}
"""Name of a shape -> the smallest template that takes it, and one that does not."""


def shapes_of(template: str) -> dict[str, Check]:
    cache, _ = make_render_cache(TemplateRenderer(None, template), None, None)
    return {shape.name: shape for shape in cache.answer(CLIENT_SHAPES)}


def test_every_shape_is_here() -> None:
    assert list(shapes_of(PLAIN)) == list(dict.fromkeys([*shapes_of(NULL), *SHAPES])) and len(SHAPES) == 12


@pytest.mark.parametrize("shape", SHAPES)
def test_a_template_takes_a_shape_and_another_one_does_not(shape: str) -> None:
    takes, does_not = (shapes_of(template)[shape] for template in SHAPES[shape])
    assert takes.status == "ok", takes.detail
    assert does_not.status in ("broken", "raises") and does_not.detail.endswith((".", ")."))
    if does_not.comparison is not None:
        assert does_not.comparison.lines[0] in (1, 2)


def test_a_template_without_calls_has_a_verdict_for_what_it_renders() -> None:
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    report = check(None, template)
    assert report.check("parallel_calls").status == "unsupported" and report.check("turn_marks").status == "ok"
    assert outcome_of(Purpose.CLIENTS, report.checks) is False
    assert "content as a list of parts" in report.verdicts[Purpose.CLIENTS]
    assert report.check("content_as_list").status == "broken"  # a list of Python


def test_the_shapes_of_the_corpus_are_decided(corpus: Path) -> None:
    names = {"gpt-oss": {"parallel_calls"}, "qwen3-coder": {"python_in_call"}, "glm-4.5": {"content_null"},
             "vllm--chatml": {"turn_marks"}, "qwen3-vl": set()}
    told = {"parallel_calls", "python_in_call", "content_null", "turn_marks"}
    for name, broken in names.items():
        text = (corpus / "templates" / f"{name}.jinja").read_text(encoding="utf-8")
        shapes = shapes_of(text)
        assert {shape for shape in told if shapes[shape].status == "broken"} == broken, name
        assert outcome_of(Purpose.CLIENTS, list(shapes.values())) is (not broken), name
