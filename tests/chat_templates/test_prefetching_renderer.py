"""Renders made ahead are the renders that would have been made; what fails for the moment is asked for again."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates import PrefetchingRenderer, renderer
from rollout_inspector.text.chat_templates.sandbox import client
from rollout_inspector.text.chat_templates.sandbox.worker import resuming, serving
from rollout_inspector.text.tokenizers import load

TOOLS = [{"type": "function", "function": {"name": "calc", "description": "", "parameters": {"type": "object"}}}]
TALK: list[Message] = [
    {"role": "user", "content": "What's 2+2? 漢字"},
    {"role": "assistant", "content": "<think>hm</think>4"},
    {"role": "user", "content": "And 3+3?"},
    {"role": "assistant", "content": "6"},
]


@pytest.fixture
def trips(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many renders each request to the sandbox asked for."""
    seen: list[int] = []
    real = client.Pool.render

    def counted(self: client.Pool, template: str, jobs: Sequence[Any]) -> list[client.Rendered]:
        seen.append(len(jobs))
        return real(self, template, jobs)

    monkeypatch.setattr(client.Pool, "render", counted)
    return seen


def asks() -> list[Conversation]:
    kwargs = {"enable_thinking": False, "messages": "is not mine to say"}
    made = [Conversation(TALK[:n], None, {}, n % 2 == 1) for n in range(1, 5)]
    return [*made, Conversation(TALK[:3], TOOLS, {}, True), Conversation(TALK[:3], [], kwargs, True)]


@pytest.mark.parametrize("name", ["qwen2.5", "qwen3", "trl-training--qwen3", "llama3.1", "gpt-oss"])
def test_the_same_text_ids_and_spans_in_one_round_trip(corpus: Path, trips: list[int], name: str) -> None:
    tokenizer = load(corpus / "tokenizers" / ("qwen3" if "qwen3" in name else name))
    text = (corpus / "templates" / f"{name}.jinja").read_text()
    plain, made = renderer(tokenizer, text), PrefetchingRenderer(tokenizer, text, tokenizer.encode)
    wanted = asks()
    made.use(made.foresee(wanted))
    assert len(trips) == 1
    for ask in wanted:
        assert made.render_tracked(ask) == plain.render_tracked(ask)
        assert made.render_ids(ask).tolist() == plain.render_ids(ask).tolist()
    assert len(trips) == 1 + len(wanted)  # the plain one makes each render once


def test_another_conversation_of_equal_messages_is_rendered_by_itself(tiny_tokenizer: Path, trips: list[int]) -> None:
    tokenizer = load(tiny_tokenizer)
    made = PrefetchingRenderer(tokenizer, tokenizer.chat_template or "", tokenizer.encode)
    made.use(made.foresee([Conversation(TALK[:1], None, {}, True)]))
    text = made.render_text(Conversation(TALK[:1], None, {}, True))
    assert len(trips) == 1
    assert made.render_text(Conversation([dict(TALK[0])], None, {}, True)) == text and len(trips) == 2
    assert made.render_text(Conversation(TALK[:1], None, {}, False)) != text and len(trips) == 3


LOOPS = "{% for i in range(90000) %}{% for j in range(90000) %}{% endfor %}{% endfor %}"


def test_a_template_that_raises_is_remembered_and_one_that_ran_too_long_is_not(
    tiny_tokenizer: Path, trips: list[int]
) -> None:
    tokenizer = load(tiny_tokenizer)
    raising = "{% if messages|length == 2 %}{{ raise_exception('no pairs') }}{% endif %}{{ messages[-1].content }}"
    made = PrefetchingRenderer(tokenizer, raising, tokenizer.encode)
    made.use(made.foresee([Conversation(TALK[:n]) for n in (1, 2, 3)]))
    with pytest.raises(RenderFailed, match="no pairs"):
        made.render_text(Conversation(TALK[:2]))
    assert made.render_text(Conversation(TALK[:3])) == "And 3+3?" and len(trips) == 1
    slow = PrefetchingRenderer(tokenizer, "{% if messages|length == 2 %}" + LOOPS + "{% endif %}x", tokenizer.encode)
    slow.use(slow.foresee([Conversation(TALK[:n]) for n in (1, 2, 3)]))
    assert slow.render_text(Conversation(TALK[:3])) == "x" and len(trips) == 3


def test_what_is_no_json_fails_only_whom_it_concerns(tiny_tokenizer: Path) -> None:
    tokenizer = load(tiny_tokenizer)
    made = PrefetchingRenderer(tokenizer, "{{ messages[-1].content }}", tokenizer.encode)
    strange: Message = {"role": "user", "content": object()}
    made.use(made.foresee([Conversation(TALK[:1]), Conversation([strange])]))
    assert made.render_text(Conversation(TALK[:1])) == TALK[0]["content"]
    with pytest.raises(RenderFailed, match="plain JSON"):
        made.render_text(Conversation([strange]))


LONG: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Q 漢字"},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "calc", "arguments": {"e": "2"}}}]},
    {"role": "tool", "name": "calc", "content": "2"},
    {"role": "tool", "name": "calc", "content": "3"},
    {"role": "assistant", "content": "<think>\nso\n</think>\n\nIt is 2."},
    {"role": "user", "content": "And?\n"},
    {"role": "assistant", "content": "No."},
]


@pytest.fixture
def skipped(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """For each render that a series may resume, the messages that it did not write again. Nothing is made twice."""
    seen: list[int] = []
    real = resuming._resumed

    def counted(template: Any, variables: Any, here: Any, earlier: Any) -> Any:
        made = real(template, variables, here, earlier)
        seen.append(here.skipped)
        return made

    monkeypatch.setattr(resuming, "_resumed", counted)
    # This process is no sandbox: a limit on its computing time would end the tests.
    monkeypatch.setattr(serving.resource, "setrlimit", lambda *_: None)
    monkeypatch.setattr(resuming, "TRIES", 0)
    monkeypatch.setattr(resuming, "_tried", {})
    return seen


def grown(template: str) -> None:
    """Every beginning of a conversation, up and down, with and without generation prompt and tools: as from the start.

    Tools go with a length, so that neighbours have the same ones mostly.
    """
    lengths = [*range(1, len(LONG) + 1), *range(len(LONG), 0, -2)]
    renders = [(list(range(n)), 0 if n > 5 else None, 0, with_prompt) for n in lengths for with_prompt in (True, False)]
    renders.insert(9, ([1, 2, 3], None, 0, True))
    job = {"variables": {"bos_token": "<s>"}, "messages": LONG, "tools": [TOOLS], "kwargs": [{}], "renders": renders}
    before, spans = "", []
    made = serving.answer_series(template, job)["series"]
    for (indices, tools, _, with_prompt), outcome in zip(renders, made, strict=True):
        variables = {
            "bos_token": "<s>", "messages": [LONG[n] for n in indices], "tools": None if tools is None else TOOLS,
            "add_generation_prompt": with_prompt,
        }
        plain = serving.answer(template, {"variables": variables})
        if "error" in plain:
            assert outcome == plain
            continue
        kept, rest, n_kept, ends = outcome
        before, spans = before[:kept] + rest, [*spans[:n_kept], *zip(ends[::2], ends[1::2], strict=True)]
        assert {"text": before, "tracked_spans": spans} == plain


LOOP = "{% for message in messages %}"
EACH = LOOP + "[{{ message.role }}]{% generation %}{{ message.content }}{% endgeneration %}"
END = "{% endfor %}{% if add_generation_prompt %}>{% endif %}"


@pytest.mark.parametrize(
    "template",
    [
        EACH + END,
        "{{ bos_token }}{% if messages and messages[0].role == 'system' %}!{% endif %}{{ tools }}" + EACH + END,
        EACH + "{{ loop.index }}{% if loop.last %}last{% endif %}" + END,
        EACH + "{% if loop.nextitem and loop.nextitem.role == 'tool' %}then{% endif %}" + END,
        EACH + "{% if loop.index0 > 0 and messages[loop.index0 - 1].role == 'tool' %}after{% endif %}" + END,
        EACH + "{% if messages[loop.index0 + 1] is defined %}then{% endif %}" + END,
        EACH + END + "{{ messages | length }}{{ messages[-1].role }}",
        EACH + "{% if message.role == 'tool' %}{% break %}{% endif %}" + END,
        "{% macro m(x) %}<{{ x }}>{% endmacro %}" + LOOP + "{% set n = n ~ 'x' %}{{ m(message.role) }}{{ n }}" + END,
        LOOP + "{% if message.role == 'user' %}{% continue %}{% endif %}{{ message.role }}" + END,
    ],
)
def test_a_conversation_that_grows_is_not_written_from_the_start(skipped: list[int], template: str) -> None:
    grown(template)
    assert sum(skipped) > len(skipped)


@pytest.mark.parametrize(
    ("template", "again"),
    [
        (EACH + END, 0),
        (EACH + "{{ loop.index }}{% if loop.previtem %}{{ loop.previtem.role }}{% endif %}" + END, 0),
        (EACH + "{% if loop.last %}last{% endif %}" + END, 1),
        (EACH + "{% if loop.nextitem is defined %}{% endif %}" + END, 1),
        (EACH + "{% if messages[loop.index0 + 1] is defined %}then{% endif %}" + END, 1),
        (EACH + "{% continue %}" + END, 1),
    ],
)
def test_the_last_body_is_run_again_only_if_it_may_have_seen_what_comes_behind(
    skipped: list[int], template: str, again: int
) -> None:
    renders = [(list(range(n)), None, 0, True) for n in range(1, len(LONG) + 1)]
    job = {"variables": {}, "messages": LONG, "tools": [], "kwargs": [{}], "renders": renders}
    serving.answer_series(template, job)
    assert skipped == [max(0, n - again) for n in range(len(LONG))]


@pytest.mark.parametrize(
    "template",
    [
        EACH + "{{ loop.length }}" + END,
        EACH + "{{ loop.revindex }}" + END,
        EACH + "{{ loop }}" + END,
        EACH + "{{ messages[-1].role }}" + END,
        EACH + "{{ messages[loop.index0 - 1].role }}" + END,
        EACH + "{% if messages[loop.index0 + 2] is defined %}then{% endif %}" + END,
        "{% set n = messages | length %}" + EACH + "{{ n }}" + END,
        "{% set last = messages | last %}" + EACH + "{% if message == last %}last{% endif %}" + END,
        "{% set messages = messages[:-1] %}" + EACH + END,
        "{% set all = [] + messages %}" + EACH + "{{ all | length }}" + END,
        "{% set all = messages + [] %}" + EACH + "{{ all | length }}" + END,
        "{% set all %}{{ messages }}{% endset %}" + EACH + "{{ all | length }}" + END,
        "{% set all = messages | tojson %}" + EACH + "{{ all | length }}" + END,
        "{% set n = messages.count(messages[0]) ~ messages.index(messages[0]) %}" + EACH + "{{ n }}" + END,
        "{% set many = [1, 2] == messages %}" + EACH + END,
        "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}{{ ns.n }}" + END,
        "{% set c = cycler('a', 'b', 'c') %}" + EACH + "{{ c.next() }}" + END,
        "{% set j = joiner(',') %}" + EACH + "{{ j() }}" + END,
        "{% set names = ['a', 'b', 'c'] | map('upper') %}" + EACH + "{% for n in names %}{{ n }}{% endfor %}" + END,
        EACH + "{% if loop.changed(message.role) %}new{% endif %}" + END,
        EACH + "{% if add_generation_prompt %}>{% endif %}" + END,
        "{% for m in messages %}{{ m.role }}{% endfor %}" + EACH + END,
        "{% for message in messages if message.role != 'user' %}{{ message.content }}" + END,
        "{% for message in messages recursive %}{{ message.content }}" + END,
        "{% block a %}" + EACH + END + "{% endblock %}",
    ],
)
def test_what_tells_how_long_a_conversation_is_or_carries_values_is_written_from_the_start(
    skipped: list[int], template: str
) -> None:
    grown(template)
    assert sum(skipped) == 0


def test_every_real_template_writes_the_same_however_conversations_grow(corpus: Path, skipped: list[int]) -> None:
    for path in sorted((corpus / "templates").glob("*.jinja")):
        grown(path.read_text())
    assert sum(skipped) > 100


def test_a_template_that_was_resumed_wrongly_once_is_not_resumed_again(
    skipped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = "{% set ns = namespace(n=0) %}" + EACH + "{% set ns.n = ns.n + 1 %}{{ ns.n }}" + END
    monkeypatch.setattr(resuming, "TRIES", 8)
    monkeypatch.setattr(resuming, "_CARRIES", frozenset())
    resuming.resumable.cache_clear()
    grown(counts)
    resuming.resumable.cache_clear()
    assert resuming._tried == {counts: -1} and sum(map(bool, skipped)) == 1
