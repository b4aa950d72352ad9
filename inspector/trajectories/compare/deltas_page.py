"""Template deltas: the ids between two completions beside what the chat template writes for the same messages.

A step that breaks the stream stands beside the stream that it should have continued. The template's text is the
difference of two renders of a small conversation that ends in the step's own messages. The template sandbox renders;
the cache keeps the renders, because they follow from stored texts alone.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from django.http import HttpRequest
from django.urls import reverse

from inspector.server.page_cache import keep, recall
from inspector.trajectories.compare.side_by_side import TokenComparison, align_texts, compare
from inspector.trajectories.frame import TrajectoryHead, base_url, head_of
from inspector.trajectories.place import PagePlace, View
from inspector.trajectories.tokens import page_queries as data
from inspector.trajectories.tokens.turns import stored_json
from inspector.web.twins import whole_number
from rollout_inspector.streams.interfaces import Codec, Conversation, Renderer, RenderFailed
from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.strategies.appending import FORMS, dummy_conversation
from rollout_inspector.streams.trajectory import Ids, Origin, Origins, Tokens, plain_tokens
from rollout_inspector.text.chat_templates import is_renderer, renderer
from rollout_inspector.text.html.tokens import TokenPainter, painter_of
from rollout_inspector.text.tokenizers import TokenizerUnusable
from rollouts.store import models
from rollouts.store.chat_templates.chat_templates import chat_template_texts
from rollouts.store.chat_templates.tokenizers import load_tokenizer
from rollouts.store.text import without_paths
from rollouts.store.trajectories import trajectory_parts as parts

PAGE = 20  # Steps of one page. Each step needs two renders.

MAX_DELTA_TOKENS = 4096  # The most ids of one delta that are compared with others.

HEAD, TAIL = 160, 80
"""Tokens that are drawn of the start and the end of a delta. The middle is the text of one message."""

MAX_RENDER_CHARACTERS = 200_000

CACHE_SECONDS = 7 * 24 * 3600


@dataclass(frozen=True)
class Renders:
    """The small conversation rendered without and with the new messages, or why the render failed."""

    prefix: str = ""
    full: str = ""
    shared: int = 0  # The number of leading characters that both renders share.
    problem: str = ""
    added_ids: tuple[int, ...] = ()
    """The ids that the longer render has behind the shared text; empty when its tokens do not spell the render."""


@dataclass(frozen=True)
class TemplateDelta:
    """What one step adds between the previous completion and its own completion."""

    step: int
    after_step: int
    start: int
    stop: int  # Tokens ``[start, stop)`` of the step's prompt.
    ids: tuple[int, ...]
    text: str
    messages: str  # Roles of the messages that the ids stand for.
    extends: bool  # False: the step breaks the stream, so the ids are more than a delta.
    origins: str
    agrees: bool | None  # Whether the ids decode to the text that the template adds; None when that is not known.
    verdict: str
    template_ids: tuple[int, ...]  # The ids of the text that the template adds; empty when they are not known.
    same_ids: bool | None  # Whether the ids are those; None when that is not known.
    prefix_render: str
    full_render: str
    render_problem: str


@dataclass(frozen=True)
class DeltasPage(TrajectoryHead):
    """The ids between the completions of a trajectory, and the renders that they come from."""

    deltas: list[TemplateDelta]
    """At most 20, in the order of the steps."""
    next_step: int | None
    """The step with which the next page begins; None on the last page."""
    notices: list[str]
    """A sentence for each part of the address that could not be followed."""


def deltas_page(request: HttpRequest, trajectory: models.StoredTrajectory) -> tuple[DeltasPage, dict[str, Any]]:
    """The page: a few steps, from the step that the address names."""
    params = request.GET
    step_text = params.get("step", "")
    step = whole_number(step_text)
    first = step or 0
    notices = [f"“{step_text[:20]}” is no step."] if step_text and step is None else []
    stored = parts.continuing_steps(trajectory, first, PAGE + 1)
    table, missing = data.table_of(trajectory.run.tokenizer)
    painter = painter_of(table)
    next_step = stored[PAGE].index if len(stored) > PAGE else None
    stored = stored[:PAGE]
    templates = _templates(trajectory, stored)
    broken = {step.parent.index for step in stored if step.parent and step.shared_length < step.parent_length}
    parents = parts.steps_with_tokens(trajectory, broken) if broken else {}
    deltas = [_delta(trajectory, step, painter, templates.get(step.pk), parents) for step in stored]
    if first and not deltas:
        notices.append(f"No step from {first} on continues an earlier one.")
    page = DeltasPage(
        **head_of(trajectory), deltas=[delta for delta, _ in deltas], next_step=next_step, notices=notices
    )
    rest_url = f"?step={next_step}" if next_step is not None else ""
    return page, {"deltas": deltas, "rest_url": rest_url, "tokenizer_missing": missing}


def _templates(trajectory: models.StoredTrajectory, steps: Sequence[models.StoredStep]) -> dict[int, str]:
    """The chat template of each step by its key: its own, the run's, or the tokenizer's. At most one more query."""
    run = trajectory.run
    default = run.chat_template_id or (run.tokenizer.chat_template_id if run.tokenizer else None)
    template_of_step = {step.pk: step.chat_template_sha256 or default for step in steps}
    texts = chat_template_texts(run.project_id, {sha for sha in template_of_step.values() if sha})
    return {key: texts[sha] for key, sha in template_of_step.items() if sha in texts}


def _body(content: models.Content | None) -> Any:
    return None if content is None else stored_json(content.body)


def new_messages(body: Any) -> list[dict[str, Any]]:
    """The messages after the last reply of the assistant. The delta of a step stands for these messages."""
    if not isinstance(body, list):
        return []
    messages = [message for message in body if isinstance(message, dict)]
    last_reply = max((i for i, m in enumerate(messages) if m.get("role") == "assistant"), default=-1)
    return messages[last_reply + 1 :]


def _delta(
    trajectory: models.StoredTrajectory, step: models.StoredStep, painter: TokenPainter, template: str | None,
    parents: Mapping[int, models.StoredStep],
) -> tuple[TemplateDelta, dict[str, Any]]:
    stored: Any = step.tokens
    ids: Ids = stored.delta_ids
    messages = new_messages(_body(step.messages_new))
    origin: Origins | None = stored.delta_origin
    has_origin = origin is not None and len(origin) == len(ids)
    if origin is None or not has_origin:
        origin = np.full(len(ids), Origin.OBSERVATION, dtype=np.uint8)
    tokens = Tokens(step.shared_length, ids, np.asarray(origin), np.zeros(len(ids), np.bool_))
    broken = step.shared_length < step.parent_length
    text = painter.table.text(ids) if painter.table is not None else ""
    renders = _renders(trajectory, step, messages, template)
    agrees, verdict = _verdict(text, renders, broken, painter.table is not None)
    counts = [f"{int((origin == o).sum()):,} {o.slug}" for o in Origin if (origin == o).any()]
    place = PagePlace(row=step.row_index, view=View.TOKENS)
    expected_ids = () if broken or renders.shared < len(renders.prefix) else renders.added_ids
    same_ids = expected_ids == tuple(ids.tolist()) if expected_ids else None
    if agrees and same_ids is not None:
        verdict += " They are the ids of that text too." if same_ids else " But that text encodes to other ids."
    comparison = words = None
    if broken and step.parent is not None and (missing := _expected(step, parents.get(step.parent.index))) is not None:
        comparison = _beside(missing, tokens, painter, tail_is_new=True)
        words = f"expected: the stream of step {step.parent.index}", f"read: the prompt of step {step.index}"
    elif same_ids is False:
        written = plain_tokens(np.array(expected_ids, dtype=np.int32), step.shared_length)
        comparison = _beside(written, tokens, painter)
        words = "what the chat template writes", "what the engine read"
    value = TemplateDelta(
        step=step.index, after_step=step.parent.index if step.parent else 0, start=step.shared_length,
        stop=step.shared_length + len(ids), ids=tuple(ids.tolist()), text=text,
        messages=", ".join(str(message.get("role", "message")) for message in messages) or "not recorded",
        extends=not broken,
        origins=(", ".join(counts) or "nothing") if has_origin else "not known which of it is template", agrees=agrees,
        verdict=verdict, template_ids=expected_ids, same_ids=same_ids, prefix_render=renders.prefix,
        full_render=renders.full, render_problem=renders.problem,
    )
    start, stop, n_hidden = tokens.start, tokens.start + len(ids), len(ids) - HEAD - TAIL
    panes = [tokens] if n_hidden <= 0 else [tokens.slice(start, start + HEAD), tokens.slice(stop - TAIL, stop)]
    return value, {
        "panes": [] if comparison else [painter.window(pane) for pane in panes],
        "n_hidden": max(n_hidden, 0),
        "url": base_url(trajectory) + place.marked(value.start, value.stop),
        "n_tokens": len(ids),
        "comparison": comparison,
        "words": words,
        "compare_url": f"{reverse('trajectory-compare', args=[trajectory.code])}?step={step.index}&side=prompt",
    }


def _expected(step: models.StoredStep, parent: models.StoredStep | None) -> Tokens | None:
    """What the stream of the parent holds where the step leaves it; None where that lies before the parent's delta."""
    if parent is None or step.shared_length < parent.shared_length:
        return None
    tokens: Any = parent.tokens
    ids: Ids = np.concatenate([tokens.delta_ids, tokens.completion_ids])[step.shared_length - parent.shared_length :]
    sampled = np.arange(step.shared_length, step.shared_length + len(ids)) >= parent.prompt_length
    return Tokens(
        step.shared_length, ids, np.where(sampled, Origin.SAMPLED, Origin.PROMPT).astype(np.uint8),
        np.zeros(len(ids), np.bool_),
    )


def _beside(expected: Tokens, tokens: Tokens, painter: TokenPainter, tail_is_new: bool = False) -> TokenComparison:
    """The ids that should stand there beside those that do. Of long ones the start is compared."""
    expected, tokens = (
        side.slice(side.start, side.start + min(len(side), MAX_DELTA_TOKENS)) for side in (expected, tokens)
    )
    groups = align_texts(expected.ids, tokens.ids)
    sampled = expected.origin == Origin.SAMPLED
    return compare(expected, tokens, groups, painter, tail_is_new, most=HEAD, sampled=sampled)


def _verdict(text: str, renders: Renders, broken: bool, has_text: bool) -> tuple[bool | None, str]:
    if broken:
        return None, "This step breaks the stream, so these ids are more than a delta."
    if renders.problem or not has_text:
        return None, ""
    if renders.shared < len(renders.prefix):
        return False, (
            "The chat template is not prefix-preserving here: with the new messages it renders the conversation "
            "before them differently."
        )
    added = renders.full[renders.shared :]
    if added == text:
        return True, "The ids decode to exactly what the template adds for these messages."
    if added.strip() == text.strip():
        return False, "The ids decode to what the template adds for these messages, except for white space at an end."
    same = common_length(text, added)
    return False, (
        "The ids do not decode to what the template adds for these messages. After "
        f"{_quoted(text[max(same - 24, 0) : same], 'the start')} the ids go on with {_quoted(text[same : same + 24])}, "
        f"the template with {_quoted(added[same : same + 24])}."
    )


def _quoted(text: str, nothing: str = "nothing") -> str:
    """A stretch of text in quotation marks, for a sentence."""
    printable = "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
    return f"“{printable}”" if text else nothing


def _renders(
    trajectory: models.StoredTrajectory, step: models.StoredStep, messages: list[dict[str, Any]], template: str | None
) -> Renders:
    run = trajectory.run
    if not messages:
        return Renders(problem="The request's messages were not recorded at this step, so its renders cannot be made.")
    if template is None:
        return Renders(
            problem="No chat template is known: import with one (--chat-template FILE), or register the tokenizer "
            "with its template."
        )
    if is_renderer(template):
        return Renders(problem="A renderer is installed code, which only a worker runs. Its renders are not shown.")
    if run.tokenizer is None:
        return Renders(problem="No tokenizer is known, and the template names its tokens.")
    tools, kwargs = _body(step.tools), _body(step.template_kwargs)
    question = json.dumps([template, run.tokenizer.sha256, messages, tools, kwargs], sort_keys=True, default=str)
    key = "delta-renders-2:" + hashlib.sha256(question.encode("utf-8", "surrogatepass")).hexdigest()
    if (cached := recall(key, Renders)) is not None:
        return cached
    renders = _render(run.tokenizer, template, messages, tools, kwargs)
    if not renders.problem:
        keep(key, renders, CACHE_SECONDS)
    return renders


def _render(
    tokenizer: models.Tokenizer, template: str, messages: list[dict[str, Any]], tools: Any, kwargs: Any
) -> Renders:
    try:
        loaded = load_tokenizer(tokenizer.files_sha256)
        prefix, full = _both(renderer(loaded, template), messages, tools, kwargs)
        prefix = _cut_at_stop(prefix, loaded)
    except RenderFailed as error:
        return Renders(problem=f"The chat template failed on these messages: {error}")
    except (TokenizerUnusable, OSError) as error:
        return Renders(problem=f"The tokenizer cannot be loaded: {without_paths(str(error))}")
    if len(full) > MAX_RENDER_CHARACTERS:
        return Renders(problem=f"The render is longer than {MAX_RENDER_CHARACTERS:,} characters and is not shown.")
    shared = common_length(prefix, full)
    return Renders(prefix, full, shared, added_ids=_ids_behind(loaded, full, shared))


def _ids_behind(codec: Codec, text: str, start: int) -> tuple[int, ...]:
    """The ids of a text from a character on, with the one that reaches over it. Empty when they do not spell it."""
    ids = codec.encode(text)
    data, ends = codec.joined_bytes(ids)
    if data != text.encode("utf-8", "replace"):
        return ()
    n_before = int(np.searchsorted(ends, len(text[:start].encode("utf-8", "replace")), side="right"))
    return tuple(ids[n_before:].tolist())


def _both(bound: Renderer, messages: list[dict[str, Any]], tools: Any, kwargs: Any) -> tuple[str, str]:
    """The small conversation without and with the new messages, as the ``tool_delta`` strategy renders it."""
    failure: RenderFailed | None = None
    for arguments in FORMS:
        before = dummy_conversation(messages, arguments)
        try:
            return (
                bound.render_text(Conversation(before, tools, kwargs, False)),
                bound.render_text(Conversation([*before, *messages], tools, kwargs, True)),
            )
        except RenderFailed as error:
            failure = failure or error
    assert failure is not None
    raise failure


def _cut_at_stop(prefix: str, loaded: Any) -> str:
    """The prefix without the separator after its last stop token. The delta brings it; no engine samples it."""
    stops = [loaded.decode(np.asarray([stop], dtype=np.int32)) for stop in loaded.stop_ids]
    cut = max((prefix.rfind(stop) + len(stop) for stop in stops if stop and stop in prefix), default=0)
    return prefix[:cut] if cut and not prefix[cut:].strip() else prefix
