"""What was recorded is rendered with the arguments that the template takes, and with the date of the record."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import diagnose
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.recorded_renders import NOW, UNKNOWN_DATE, kwargs_of_record, time_of_call
from rollout_inspector.streams.strategies import STRATEGIES, Context
from rollout_inspector.streams.strategies.replay import StrategyResult, replay
from rollout_inspector.streams.trajectory import NO_IDS, Message, Request, Step, Trajectory
from rollout_inspector.text.chat_templates import renderer
from rollout_inspector.text.tokenizers import load

DAY = "2026-11-22T08:30:00"
ASKED: Message = {"role": "user", "content": "What's 2+2?"}
RENDERING = ("message_delta", "per_message", "reconcile")
"""The strategies that render the first prompt by definition, but for *retokenize*, which wants tags too."""


def context_of(corpus: Path, tokenizer: str, template: str) -> Context:
    loaded = load(corpus / "tokenizers" / tokenizer)
    text = template if "{" in template else (corpus / "templates" / f"{template}.jinja").read_text()
    return Context(loaded, renderer(loaded, text), loaded.stop_ids)


def conversation(arguments: Any) -> list[Message]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "calc", "arguments": arguments}}
    return [
        ASKED,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "calc", "tool_call_id": "abcdefghi", "content": "4"},
        {"role": "assistant", "content": "It is 4."},
        {"role": "user", "content": "And 3+3?"},
        {"role": "assistant", "content": "It is 6."},
    ]


def recorded(
    context: Context,
    rendered: list[Message],
    sent: list[Message] | None = None,
    now: str = "",
    kwargs: Mapping[str, Any] | None = None,
    unrecorded: Mapping[str, Any] | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Trajectory:
    """Calls to a server that renders ``rendered`` at a time, and is sent ``sent``; it samples what its template writes.

    ``unrecorded``: template kwargs that the server had and the record does not show.
    """
    server = renderer(context.codec, context.renderer.chat_template, now)  # type: ignore[arg-type, attr-defined]
    steps = []
    for n in range(1, len(rendered), 2):
        said = {**(kwargs or {}), **(unrecorded or {})}
        prompt = server.render_text(Conversation(rendered[:n], None, said, True))
        whole = server.render_text(Conversation(rendered[: n + 1], None, said, False))
        text = whole[len(prompt) :] if whole.startswith(prompt) else str(rendered[n]["content"])
        ids, stops = context.codec.encode(text), context.stop_ids
        stop = next((place for place, one in enumerate(ids.tolist()) if one in stops), len(ids) - 1)
        request = Request(tuple((sent or rendered)[:n]), None, kwargs or {})
        reply = (sent or rendered)[n]
        steps.append(
            Step(context.codec.encode(prompt), ids[: stop + 1], request=request, reply=reply, extra=extra or {})
        )
    return Trajectory("t", tuple(steps))


def replays(value: Trajectory, context: Context) -> Iterator[StrategyResult]:
    for slug, make in STRATEGIES.items():
        if slug != "bridge":  # it needs an optional package
            yield replay(value, make, context)


def texts(made: StrategyResult, context: Context) -> list[str]:
    return [context.codec.decode(row.ids) for row in made.rows]


# -- arguments ---------------------------------------------------------------------------------------------------------

FAMILIES = [
    ("llama3.1", "llama3.1"), ("deepseek-r1", "deepseek-v3.1"), ("deepseek-r1", "deepseek-r1"),
    ("qwen3", "qwen3-coder"), ("qwen3", "qwen3.5-think"), ("qwen2.5", "qwen2.5"), ("mistral-nemo", "mistral-nemo"),
    ("gpt-oss", "gpt-oss"), ("qwen3", "glm-4.5"),
]


@pytest.mark.parametrize(("tokenizer", "template"), FAMILIES)
def test_arguments_as_text_and_as_objects_make_the_same_rows(corpus: Path, tokenizer: str, template: str) -> None:
    context = context_of(corpus, tokenizer, template)
    values = {"expr": "2+2", "digits": 3}
    as_object, as_text = conversation(values), conversation(json.dumps(values))
    takes = as_text if template.startswith("deepseek") else as_object
    results = [
        list(replays(recorded(context, takes, sent, DAY), context_of(corpus, tokenizer, template)))
        for sent in (as_object, as_text)
    ]
    n_made = 0
    for one, other in zip(*results, strict=True):
        assert one.refused == other.refused and "mapping" not in one.refused, one.slug
        assert [row.ids.tolist() for row in one.rows] == [row.ids.tolist() for row in other.rows], one.slug
        assert [row.loss_mask.tolist() for row in one.rows] == [row.loss_mask.tolist() for row in other.rows]
        assert (one.lost_tokens, one.differs_at) == (other.lost_tokens, other.differs_at), one.slug
        n_made += not one.refused
    assert n_made >= 4


# -- dates -------------------------------------------------------------------------------------------------------------

DATED = [
    ("gpt-oss", "gpt-oss", "Current date: 2026-11-22", {}),
    ("gpt-oss", "trl-training--gptoss", "Current date: 2026-11-22", {}),
    ("llama3.1", "llama3.2", "Today Date: 22 Nov 2026", {}),
    ("llama3.1", "llama3.1", "Today Date: 22 Nov 2026", {"date_string": "22 Nov 2026"}),
]


@pytest.mark.parametrize(("tokenizer", "template", "date", "unrecorded"), DATED)
def test_every_row_holds_the_date_of_the_recorded_prompt(
    corpus: Path, tokenizer: str, template: str, date: str, unrecorded: dict[str, Any]
) -> None:
    context = context_of(corpus, tokenizer, template)
    value = recorded(context, conversation({"expr": "2+2"})[:4], now=DAY, unrecorded=unrecorded)
    assert date in context.codec.decode(value.steps[0].prompt_ids)
    n_made = 0
    for made in replays(value, context):
        n_made += not made.refused
        for text in texts(made, context):
            dates = text.count("Today Date:") + text.count("Current date:")
            assert dates and text.count(date) == dates, made.slug
        if made.slug == "tool_delta":
            assert made.rows[0].ids[: len(value.steps[0].prompt_ids)].tolist() == value.steps[0].prompt_ids.tolist()
            assert made.differs_at is None
    assert n_made >= 4


@pytest.mark.parametrize(("tokenizer", "template"), [("gpt-oss", "gpt-oss"), ("llama3.1", "llama3.2")])
def test_other_ids_in_a_dated_first_prompt_are_found(corpus: Path, tokenizer: str, template: str) -> None:
    context = context_of(corpus, tokenizer, template)
    value = recorded(context, conversation({"expr": "2+2"})[:2], now=DAY)

    def kinds(one: Trajectory) -> list[str]:
        return [found.kind for found in diagnose(one, context.codec, lambda _: context.renderer, "")]

    step = value.steps[0]
    last = next(n for n in range(8, len(step.prompt_ids)) if context.codec.decode(step.prompt_ids[n : n + 1]).isalpha())
    word = context.codec.decode(step.prompt_ids[last : last + 1])
    pieces = [step.prompt_ids[:last], *map(context.codec.encode, word), step.prompt_ids[last + 1 :]]
    assert kinds(value) == []
    assert kinds(replace(value, steps=(replace(step, prompt_ids=np.concatenate(pieces)),))) == ["tokenizer_mismatch"]


def dated(form: str, more: str = "") -> str:
    """A template that prints the date in a format, unless there is a system message."""
    return (
        "{%- if messages[0].role != 'system' %}<|im_start|>system\nIt is {{ strftime_now('" + form + "') }}." + more +
        "<|im_end|>\n{% endif -%}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


TALK: list[Message] = [ASKED, *conversation("")[3:]]


def first_kwargs(context: Context, value: Trajectory) -> list[Mapping[str, Any]]:
    step = value.steps[0]
    assert step.request is not None
    return kwargs_of_record(step, step.request, context.renderer, context.codec)


@pytest.mark.parametrize(
    "form", ["%Y-%m-%d", "%d %b %Y", "%B %d, %Y", "%A, %d %B %Y", "%-d/%-m/%y", "%a %d.%m.%Y %H:%M", "today: %x"]
)
def test_a_date_is_read_in_the_format_that_the_template_prints(corpus: Path, form: str) -> None:
    context = context_of(corpus, "qwen2.5", dated(form))
    (kwargs,) = first_kwargs(context, recorded(context, TALK[:2], now=DAY))
    wanted = datetime.fromisoformat(DAY)
    assert datetime.fromisoformat(kwargs[NOW]).strftime(form) == wanted.strftime(form)


def test_two_formats_are_known_only_together_or_from_the_time_of_the_call(corpus: Path) -> None:
    context = context_of(corpus, "qwen2.5", dated("%Y-%m-%d", " Clock: {{ strftime_now('%H:%M') }}."))
    value = recorded(context, TALK[:2], now=DAY)
    assert len(first_kwargs(context, value)) == 2
    assert replay(value, STRATEGIES["message_delta"], context).refused == UNKNOWN_DATE
    timed = recorded(context, TALK[:2], now=DAY, extra={"response": {"created": _seconds(DAY)}})
    assert len(first_kwargs(context, timed)) == 1
    (row,) = replay(timed, STRATEGIES["message_delta"], context).rows
    assert "Clock: 08:30." in context.codec.decode(row.ids)


def _seconds(when: str) -> int:
    return int(datetime.fromisoformat(when).replace(tzinfo=UTC).timestamp())


def test_a_date_that_nobody_recorded_is_never_invented(corpus: Path) -> None:
    """The server had another template, which prints no date. Strategies that keep its prompt need none."""
    context = context_of(corpus, "qwen2.5", dated("%Y-%m-%d"))
    value = recorded(context_of(corpus, "qwen2.5", "qwen2.5"), TALK)
    for made in replays(value, context):
        if made.slug in RENDERING:
            assert made.refused == UNKNOWN_DATE, made.slug
        for text in texts(made, context):
            assert "It is 2026" not in text and "It is 1999" not in text
    assert replay(value, STRATEGIES["tool_delta"], context).rows
    timed = replace(value, steps=tuple(replace(one, extra={"line": {"created_at": DAY}}) for one in value.steps))
    (row,) = replay(timed, STRATEGIES["message_delta"], context).rows
    assert "It is 2026-11-22." in context.codec.decode(row.ids)


def test_a_template_that_prints_no_date_here_needs_none(corpus: Path) -> None:
    context = context_of(corpus, "qwen2.5", dated("%Y-%m-%d"))
    system: Message = {"role": "system", "content": "Be short."}
    value = recorded(context, TALK, now=DAY)
    value = replace(
        value,
        steps=tuple(
            replace(one, request=replace(one.request, messages=(system, *one.request.messages)), prompt_ids=prompt)
            for one in value.steps
            if one.request
            for prompt in [context.renderer.render_ids(Conversation([system, *one.request.messages], None, {}, True))]
        ),
    )
    for slug in ("tool_delta", "message_delta", "reconcile", "fixed_base"):
        assert not replay(value, STRATEGIES[slug], context).refused, slug
    # Each message is rendered alone here, so the template writes its own system text, with the date.
    assert replay(value, STRATEGIES["per_message"], context).refused == UNKNOWN_DATE


def test_a_template_that_speaks_of_generation_has_no_tags(corpus: Path) -> None:
    """The text of gpt-oss' template holds the word; without a tag nothing would be trained."""
    context = context_of(corpus, "gpt-oss", "gpt-oss")
    value = recorded(context, conversation({"expr": "2+2"})[:4], now=DAY)
    assert "has none" in replay(value, STRATEGIES["retokenize"], context).refused


@pytest.mark.parametrize("form", ["%Y %Y", "%q", "no date", "%Y-%m-%d %s"])
def test_a_format_that_cannot_be_read_is_no_fault(corpus: Path, form: str) -> None:
    context = context_of(corpus, "qwen2.5", dated(form))
    assert len(first_kwargs(context, recorded(context, TALK[:2], now=DAY))) == 2
    leap = recorded(context, TALK[:2], now="2028-02-29T08:30:00", extra={"created_at": DAY})
    assert len(first_kwargs(context, leap)) == 1


def test_another_template_makes_the_first_prompt_too(corpus: Path) -> None:
    context = context_of(corpus, "gpt-oss", "gpt-oss")
    value = recorded(context, conversation({"expr": "2+2"})[:4], now=DAY)
    step = value.steps[0]
    other = replace(value, steps=(replace(step, prompt_ids=step.prompt_ids[:-1]), *value.steps[1:]))
    kept = replay(other, STRATEGIES["tool_delta"], context).rows[0]
    made = replay(other, STRATEGIES["tool_delta"], replace(context, keeps_prompts=False)).rows[0]
    assert kept.ids[: len(step.prompt_ids) - 1].tolist() == step.prompt_ids[:-1].tolist()
    assert made.ids[: len(step.prompt_ids)].tolist() == step.prompt_ids.tolist()


@pytest.mark.parametrize(
    ("extra", "known"),
    [
        ({"line": {"created_at": "2026-11-22T08:30:00+00:00"}}, True), ({"response": {"created": 1795336200}}, True),
        ({"created_at": "2026-11-22T09:30:00+01:00"}, True), ({"created_at": "2026-11-22T08:30:00"}, True),
        ({"line": {"created_at": "soon"}}, False),
        ({"response": {"created": 10**40}}, False), ({"response": {"created": True}}, False), ({}, False),
    ],
)
def test_the_time_of_a_call(extra: dict[str, Any], known: bool) -> None:
    found = time_of_call(Step(NO_IDS, NO_IDS, extra=extra))
    assert (found == datetime(2026, 11, 22, 8, 30, tzinfo=UTC)) is known and (found is None) is not known
