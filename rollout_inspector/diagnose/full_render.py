"""Compares the final stream of a launched trajectory with a full render of its conversation. And what is told where a
strategy refused the chat template before anything was sampled."""

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from rollout_inspector.diagnose import text, thinking
from rollout_inspector.diagnose.breaks import Break
from rollout_inspector.diagnose.context import DiagnosisContext
from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.diagnose.finding_makers import bound_note, bounded
from rollout_inspector.diagnose.kinds import KINDS
from rollout_inspector.diagnose.template import template_not_append_only
from rollout_inspector.streams.interfaces import Codec, Renderer
from rollout_inspector.streams.prefix import stream_length
from rollout_inspector.streams.recorded_renders import kwargs_of_record
from rollout_inspector.streams.snippets import quoted_or_nothing
from rollout_inspector.streams.strategies.protocol import TemplateRewrites
from rollout_inspector.streams.trajectory import NO_IDS, Ids, Link, Request, Step, Trajectory

COMPARE = {"strict": "every token", "ignore_whitespace": "the text, white space aside", "off": "not at all"}
"""How a finished stream is compared with a full render."""

_CAUSES = (
    thinking.empty_think_toggled,
    thinking.thinking_stripped,
    text.special_tokens_dropped,
    text.invalid_utf8,
    text.tool_call_reserialized,
    text.whitespace_changed,
    text.boundary_merge,
    text.noncanonical_sampling,
)
_DIFFERS = "At its end the stream is not what the chat template renders for the whole conversation"
_KEEP = (
    "Nothing, if the trainer takes these tokens: they are the ones that the model read and sampled. A trainer that "
    "renders the conversation again would train others."
)


def compare_with_render(
    trajectory: Trajectory, codec: Codec, renderer: Renderer, mode: str, known: Collection[Finding] = ()
) -> Finding | None:
    """The first difference between the last step's stream and a full render of the final conversation, or None.

    ``mode`` is a key of ``COMPARE``. A difference that is among the ``known`` findings is not reported again. Two
    things are not differences: what the template writes after the last stop token, and the close of a completion that a
    limit or a stop text ended. The finding is an ``info`` if a render changes sampled tokens, and a ``warning`` if it
    changes others.
    """
    if mode == "off" or not trajectory.steps:
        return None
    last = len(trajectory.steps) - 1
    step = trajectory.steps[last]
    if step.request is None or step.reply is None:
        return None
    kwargs = kwargs_of_record(step, step.request, renderer, codec)[0]
    conversation = replace(step.request, messages=(*step.request.messages, step.reply), chat_template_kwargs=kwargs)
    asked_step = replace(
        step, prompt_ids=NO_IDS, completion_ids=NO_IDS, logprobs=None, request=conversation, reply=None
    )
    case = DiagnosisContext(Trajectory("", (asked_step,)), codec, lambda _: renderer)
    full = case.render(asked_step, conversation.messages, False)
    if full is None:
        return Finding(
            Axis.DELTA, "not_decidable", Severity.INFO, step=last,
            evidence="The stream could not be compared with a full render: the chat template refuses it.",
            remedy="Look at the last messages: a call that is not JSON, or roles that the template does not accept.",
            missing="a render of the final conversation",
        )
    places = _first_difference(codec, step, full, mode == "strict")
    if places is None:
        return _other_tokens(trajectory, codec, renderer, conversation, full, known) if mode == "strict" else None
    start, other = places
    return _finding(_broken(trajectory, codec, renderer, conversation, start, full[other:]))


def _first_difference(codec: Codec, step: Step, full: Ids, with_space: bool) -> tuple[int, int] | None:
    """Where the texts of two streams differ: the token in each stream; None when the texts are equal."""
    (a, a_ends), (b, b_ends) = (_kept(codec, ids, with_space) for ids in (step.stream, full))
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    first = int(differs[0]) if differs.size else n
    if not differs.size and len(b) >= len(a):
        # A completion that a limit or a stop text ended has no stop token.
        is_open = step.finish_reason == "length" or (step.stop_reason != "" and not step.stop_reason.isdigit())
        if is_open or not bytes(b[len(a) :]).strip():
            return None
    # Both streams have a cut there, after which their tokens can be compared.
    a_cuts, b_cuts = np.concatenate([[0], a_ends]), np.concatenate([[0], b_ends])
    shared = np.intersect1d(a_cuts, b_cuts)
    cut = shared[shared <= first][-1]
    return int(np.flatnonzero(a_cuts == cut)[-1]), int(np.flatnonzero(b_cuts == cut)[-1])


def _kept(codec: Codec, ids: Ids, with_space: bool) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The bytes that count, and how many of them there are up to each token's end ``[n]``."""
    data, ends = codec.joined_bytes(ids)
    values = np.frombuffer(data, dtype=np.uint8)
    keep = np.full(len(values), True) if with_space else ~np.isin(values, np.frombuffer(b" \t\r\n\v\f", dtype=np.uint8))
    counts = np.concatenate([[0], np.cumsum(keep)])
    return values[keep], counts[np.asarray(ends, dtype=np.int64)]


def _broken(
    trajectory: Trajectory, codec: Codec, renderer: Renderer, conversation: Request, start: int, rest: Ids
) -> Break:
    """The render as a further step of the trajectory, which differs from its stream from ``start`` on."""
    last = len(trajectory.steps) - 1
    rendered = Step(
        prompt_ids=np.concatenate([trajectory.steps[last].stream[:start], rest]),
        completion_ids=NO_IDS,
        request=conversation,
    )
    case = DiagnosisContext(
        replace(trajectory, steps=(*trajectory.steps, rendered), rows=()), codec, lambda _: renderer
    )
    return Break(case, last + 1, Link(last, start, stream_length(trajectory.steps[last])))


def _other_tokens(
    trajectory: Trajectory, codec: Codec, renderer: Renderer, conversation: Request, full: Ids,
    known: Collection[Finding],
) -> Finding | None:
    """The first place in a completion where other tokens have the same text, unless a known finding says so."""
    stream = trajectory.steps[-1].stream
    noncanonical = {finding.step for finding in known if finding.kind == "noncanonical_sampling"}
    n = min(len(stream), len(full))
    differs = np.flatnonzero(stream[:n] != full[:n])
    if not differs.size:
        return None
    b = _broken(trajectory, codec, renderer, conversation, int(differs[0]), full[int(differs[0]) :])
    for group in b.groups:
        place = b.start + group.left_start
        if group.equal or place >= len(stream):
            continue
        step = next((i for i in b.case.chain(b.parent_index) if len(b.case.steps[i].prompt_ids) <= place), None)
        if step in noncanonical and place < stream_length(b.case.steps[step or 0]):
            continue
        remaining = full[b.start + group.right_start :]
        return _finding(_broken(trajectory, codec, renderer, conversation, place, remaining))
    return None


def _finding(b: Break) -> Finding:
    if b.start >= len(b.expected):  # the render goes on after the stream's end
        remaining = bounded(b.actual[b.start :])
        text = b.case.text(remaining)
        return Finding(
            Axis.DELTA, "delta_differs", Severity.WARNING, step=b.parent_index, start=b.start, stop=b.start,
            expected_ids=remaining, expected_text=text, remedy=KINDS["delta_differs"].remedy,
            evidence=f"{_DIFFERS}: the stream ends, a render goes on with {quoted_or_nothing(text)}.",
        )
    sampled = b.sampled_at(b.start, b.start + 1)
    kind = next((verdict.kind for rule in _CAUSES if (verdict := rule(b)) is not None), None) or _other_kind(b, sampled)
    where = "the model sampled" if sampled else "the strategy put"
    # One cause, one place: what follows the first difference may have another cause.
    group = b.first_group
    start, stop = (b.start + group.left_start, b.start + group.left_stop) if group else (b.start, b.expected_stop)
    first, last = (b.start + group.right_start, b.start + group.right_stop) if group else (b.start, b.actual_stop)
    expected, actual = b.actual[first:last], b.expected[start:stop]
    return Finding(
        axis=Axis.STREAM if sampled else Axis.DELTA,
        kind=kind,
        severity=Severity.INFO if sampled else Severity.WARNING,
        step=b.parent_index,
        start=start,
        stop=stop,
        expected_ids=bounded(expected),
        actual_ids=bounded(actual),
        expected_text=b.case.widened(b.actual, first, last),
        actual_text=b.case.widened(b.expected, start, stop),
        evidence=f"{_DIFFERS}: {where} {quoted_or_nothing(b.a)}, a render writes {quoted_or_nothing(b.b)}."
        + bound_note(expected, actual),
        remedy=_KEEP if sampled else KINDS[kind].remedy,
    )


def _other_kind(b: Break, sampled: bool) -> str:
    """The kind when no cause fits. A difference in a turn that called a tool is a call that was written again."""
    if not sampled:
        return "delta_differs" if template_not_append_only(b) is None else "template_not_append_only"
    step = next(i for i in b.case.chain(b.parent_index) if len(b.case.steps[i].prompt_ids) <= b.start)
    return "tool_call_reserialized" if (b.case.steps[step].reply or {}).get("tool_calls") else "unclassified"


KINDS_OF_REFUSAL = ("empty_think_toggled", "template_not_append_only")
REMEDY = (
    "Launch again with a repaired template: the template check looks for a repair and offers it. Or choose a "
    "strategy that does not need a prefix-preserving template."
)


def finding_of_refusal(codec: Codec, refused: TemplateRewrites) -> Finding:
    """The finding shows both renders of the smallest conversation, from their first difference. It has neither step nor
    row, because nothing was sampled. Offsets count in the shorter render of the probe."""
    shorter, longer = refused.shorter[refused.shared :], refused.longer[refused.shared :]
    before, after = codec.decode(refused.shorter), codec.decode(refused.longer)
    toggled = [body for pair in ((before, after), (after, before)) if (body := thinking.lone_block(*pair)) is not None]
    kind = "empty_think_toggled" if toggled and not toggled[0].strip() else "template_not_append_only"
    return Finding(
        Axis.STREAM, kind, Severity.ERROR, start=refused.shared, stop=len(refused.shorter),
        expected_ids=bounded(shorter), actual_ids=bounded(longer), expected_text=codec.decode(bounded(shorter)),
        actual_text=codec.decode(bounded(longer)), evidence=str(refused), remedy=REMEDY,
    )
