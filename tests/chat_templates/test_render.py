"""Renders equal ``transformers``' own, text and ids; provenance names the right line."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.streams.interfaces import Renderer, RenderFailed
from rollout_inspector.text.chat_templates import Conversation, renderer
from rollout_inspector.text.chat_templates.probes.checks import all_probes, make_render_cache
from rollout_inspector.text.chat_templates.sandbox import client
from rollout_inspector.text.chat_templates.sandbox.client import Rendered
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer
from rollout_inspector.text.chat_templates.sandbox.worker import rendering
from rollout_inspector.text.tokenizers import load

DUMMY_CALL = [{"type": "function", "function": {"name": "dummy", "arguments": {}}}]
CALLED = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": "", "tool_calls": DUMMY_CALL}]


@pytest.fixture
def fixed_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``transformers`` read the sandbox's clock."""
    from transformers.utils import chat_template_utils

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> "Clock":
            return cls(2026, 1, 1, 12, 0)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def rows(corpus: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (corpus / "cases" / "prefix_cases.jsonl").read_text().splitlines()]


def test_every_case_of_the_corpus_renders_as_in_transformers(corpus: Path, fixed_clock: None) -> None:
    compared = 0
    by_template: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows(corpus):
        by_template.setdefault((row["tokenizer"], row["template"]), []).append(row)
    for (tokenizer_name, template_name), group in by_template.items():
        tokenizer = load(corpus / "tokenizers" / tokenizer_name)
        text = (corpus / "templates" / template_name).read_text(encoding="utf-8")
        mine = renderer(tokenizer, text)
        asked = []
        for row in group:
            before = row.get("add_generation_prompt_prefix", False)
            both = [*row["prefix"], *row["append"]]
            asked.append(Conversation(row["prefix"], row["tools"], row["kwargs"], before))
            asked.append(Conversation(both, row["tools"], row["kwargs"], row["add_generation_prompt_full"]))
        outcomes = mine.render_many(asked, lines=True)
        for conversation, outcome in zip(asked, outcomes, strict=True):
            options = dict(
                chat_template=text, tools=conversation.tools, tokenize=False,
                add_generation_prompt=conversation.add_generation_prompt, **(conversation.kwargs or {}),
            )
            try:
                expected = tokenizer.hf.apply_chat_template(list(conversation.messages), **options)
            except Exception as error:
                assert outcome.error and outcome.line, (template_name, error)
                assert str(error)[:60] in outcome.error
                continue
            assert outcome.text == expected, template_name
            assert sum(n for n, _ in outcome.lines) == len(expected)
            assert all(line > 0 for _, line in outcome.lines)
            compared += 1
    assert compared > 600


def test_golden_ids(corpus: Path) -> None:
    seen = 0
    for row in rows(corpus):
        if "full_ids" not in row or row["extra_special_tokens"]:
            continue
        mine: Renderer = renderer(
            load(corpus / "tokenizers" / row["tokenizer"]), (corpus / "templates" / row["template"]).read_text("utf-8")
        )
        before = row.get("add_generation_prompt_prefix", False)
        prefix = mine.render_ids(Conversation(row["prefix"], row["tools"], row["kwargs"], before))
        both = [*row["prefix"], *row["append"]]
        full = mine.render_ids(Conversation(both, row["tools"], row["kwargs"], row["add_generation_prompt_full"]))
        assert prefix.tolist() == row["prefix_ids"], row["id"]
        assert full.tolist() == row["full_ids"], row["id"]
        seen += 1
    assert seen > 150


def written_by(template: TemplateRenderer, messages: list[dict[str, Any]]) -> Rendered:
    return template.render_many([Conversation(messages)], lines=True)[0].or_raise()


def test_the_line_that_wrote_a_character(corpus: Path) -> None:
    template = (corpus / "templates" / "qwen3.jinja").read_text()
    written = written_by(renderer(None, template), CALLED)
    line = written.line_at(written.text.index("<think>"))
    assert line is not None and "<think>" in template.splitlines()[line - 1]
    line = written.line_at(written.text.index("<tool_call>"))
    assert line is not None and "<tool_call>" in template.splitlines()[line - 1]
    assert written.line_at(len(written.text)) == written.lines[-1][1]


def test_lines_inside_macros_and_blocks() -> None:
    template = (
        "{% macro shout(x) %}\n<b>\n{{ x }}\n</b>\n{% endmacro %}\n"
        "{{ shout('hi') }}\n{% set y %}\n*{{ 1 }}*\n{% endset %}{{ y }}end"
    )
    written = written_by(renderer(None, template), CALLED)
    assert written.text == "<b>\nhi\n</b>\n\n*1*\nend"
    assert written.line_at(written.text.index("hi")) == 3
    assert written.line_at(written.text.index("*1*")) == 8
    # A template that looks at what its macro wrote would see the marks: then the line of the call is what is left.
    template = "{% macro m() %}ab{% endmacro %}\n{{ m() | length }}"
    written = written_by(renderer(None, template), CALLED)
    assert (written.text, written.line_at(0)) == ("2", 2)


@pytest.mark.parametrize(("template", "n_plain"), [
    ("{% macro m(x) %}{{ x }}{% endmacro %}{% if m('a') %}{{ m('b') }}{% endif %}", 0),
    ("{% macro m(x) %}{% generation %}{{ x }}{% endgeneration %}{% endmacro %}{{ m('b') }}", 1),
])
def test_only_generation_tags_need_a_second_compilation(template: str, n_plain: int) -> None:
    compiled = rendering.compiled.cache_info().misses
    assert rendering.render_with_lines(template, {})["text"] == "b"
    assert rendering.compiled.cache_info().misses - compiled == n_plain


def test_generation_spans() -> None:
    template = (
        "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}\n"
        "{% generation %}{{ m.content }}!{% endgeneration %}{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    written = written_by(renderer(None, template), messages)
    assert written.text == "user:a;assistant:b!;"
    assert [written.text[a:b] for a, b in written.spans] == ["b!"]
    assert written.tracked_spans == written.spans
    # Inside a macro the arithmetic of transformers loses its place; the real place is known all the same.
    template = "{% macro m(x) %}<{% generation %}{{ x }}{% endgeneration %}>{% endmacro %}{{ m('b') }}"
    written = written_by(renderer(None, template), messages)
    assert [written.text[a:b] for a, b in written.spans] == ["b"]
    assert written.tracked_spans == ((0, 1),)


def test_the_clock_stands_still_until_told() -> None:
    template = "{{ strftime_now('%d %b %Y') }}"
    assert renderer(None, template).render_text(Conversation(CALLED)) == "01 Jan 2026"
    assert renderer(None, template, now="2027-02-03T04:05:06").render_text(Conversation(CALLED)) == "03 Feb 2027"


def test_a_short_render_is_remembered_and_a_long_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    render = client.render
    monkeypatch.setattr(client, "render", lambda template, jobs: asked.append(len(jobs)) or render(template, jobs))
    template = TemplateRenderer(None, "{{ messages[0].content }}{{ x }}")

    def n_asked(*conversations: Conversation) -> int:
        asked.clear()
        for conversation in conversations:
            assert template.render_text(conversation).startswith(str(conversation.messages[0]["content"]))
        return sum(asked)

    short, other = ([{"role": "user", "content": text}] for text in "ab")
    assert n_asked(*[Conversation(short)] * 3) == 1
    assert n_asked(Conversation(other), Conversation(short, None, {"x": 1}), Conversation(short, None, None, True)) == 3
    assert n_asked(*[Conversation(short * 5)] * 2) == 2
    assert n_asked(*[Conversation([{"role": "user", "content": "a" * 30_000}])] * 2) == 2
    assert n_asked(*(Conversation([{"role": "user", "content": str(n)}]) for n in range(300))) == 300
    assert len(template._recent) <= 128


def test_a_failure_names_its_line_and_ids_need_a_tokenizer() -> None:
    with pytest.raises(RenderFailed, match="on line 2: no tools here"):
        renderer(None, "a\n{{ raise_exception('no tools here') }}").render_text(Conversation(CALLED))
    with pytest.raises(RenderFailed, match="syntax error on line 1"):
        renderer(None, "{% if %}").render_text(Conversation(CALLED))
    with pytest.raises(RenderFailed, match="Without a tokenizer"):
        renderer(None, "a").render_ids(Conversation(CALLED))


def test_provenance_of_a_batch_is_in_order() -> None:
    outcomes = renderer(None, "{{ messages[0].content }}").render_many(
        [Conversation([{"role": "user", "content": str(n)}]) for n in range(20)], lines=True
    )
    assert [outcome.text for outcome in outcomes] == [str(n) for n in range(20)]


def test_every_probe_on_every_template_renders_as_in_transformers(corpus: Path, fixed_clock: None) -> None:
    """Kwargs, tools, the generation prompt and the form that each template accepts included."""
    families = {"deepseek": "deepseek-r1", "gpt": "gpt-oss", "llama": "llama3.1", "mistral": "mistral-nemo"}
    compared = switched = 0
    for path in sorted((corpus / "templates").glob("*.jinja")):
        name = next((folder for word, folder in families.items() if word in path.stem), "qwen3")
        tokenizer = load(corpus / "tokenizers" / name)
        text = path.read_text(encoding="utf-8")
        cache, _ = make_render_cache(renderer(tokenizer, text), None, None)
        asked = [conversation for probe in all_probes(cache) for conversation in probe.conversations()]
        for conversation, outcome in zip(asked, cache.renderer.render_many(asked), strict=True):
            options: dict[str, Any] = dict(
                chat_template=text, tools=conversation.tools,
                add_generation_prompt=conversation.add_generation_prompt, **(conversation.kwargs or {}),
            )
            try:
                expected = tokenizer.hf.apply_chat_template(list(conversation.messages), tokenize=False, **options)
            except Exception as error:
                assert str(error)[:60] in outcome.error, path.stem
                continue
            assert outcome.text == expected, path.stem
            compared += 1
            switched += bool(conversation.kwargs)
            if compared % 10 == 0:
                ids = tokenizer.hf.apply_chat_template(list(conversation.messages), return_dict=False, **options)
                assert tokenizer.encode(outcome.text).tolist() == ids, path.stem
    assert compared > 1200 and switched > 50
