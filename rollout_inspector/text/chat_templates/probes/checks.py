"""``check``: every probe and every property check of a chat template, and the verdict per purpose."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.streams.snippets import quoted
from rollout_inspector.streams.trajectory import Message
from rollout_inspector.text.chat_templates.package_renderer import renderer as renderer_of
from rollout_inspector.text.chat_templates.probes.client_shapes import CLIENT_SHAPES
from rollout_inspector.text.chat_templates.probes.compare import RenderComparison
from rollout_inspector.text.chat_templates.probes.content_checks import CONTENT_CHECKS
from rollout_inspector.text.chat_templates.probes.conversations import (
    TITO_POST_PREFIX, TITO_POST_RESULT, Probe, append_probes, conversation_probes, markers_of, thinking_probes,
    thinking_switch
)
from rollout_inspector.text.chat_templates.probes.delta_checks import DELTA_CHECKS
from rollout_inspector.text.chat_templates.probes.generation_checks import generation_masks
from rollout_inspector.text.chat_templates.probes.message_shape import MessageShape, Tool, find_message_shape
from rollout_inspector.text.chat_templates.probes.parse_checks import parse_checks
from rollout_inspector.text.chat_templates.probes.render_cache import CONTROL_SHAPE, CheckFunction, RenderCache
from rollout_inspector.text.chat_templates.probes.report import (
    Check, CheckReport, CheckStatus, Purpose, verdicts, what_changed
)
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer, TemplateTokenizer

TITO_POST = "tool_append"


def tito_post_probe(form: MessageShape, cache: RenderCache) -> Probe:
    """The twelve lines of Hugging Face's TITO post, in the given form."""
    before, appended = list(TITO_POST_PREFIX), [TITO_POST_RESULT]
    if form != MessageShape():
        before = form.written([TITO_POST_PREFIX[0], form.call(("dummy", {}))])
        appended = form.written([form.result("dummy", "dummy")])
    title = "A tool result after a call, in the words of Hugging Face's TITO post"
    return Probe(TITO_POST, title, Purpose.TOOLS, tuple(before), tuple(appended), cache.tools, cache.kwargs)


def check_append(probe: Probe, cache: RenderCache) -> Check:
    """Does appending keep what was rendered before, token for token?"""
    question = Check(probe.name, probe.title, probe.purpose, decisive=probe.decisive)
    before, after = cache.renders(*probe.conversations())
    if failed := question.raised(before, after):
        return failed
    comparison = RenderComparison(before, after)
    if not comparison.passed:
        lacking = _lacking_control_token(comparison) if comparison.text_passed else None
        if lacking is None:
            return question.broken(_broken_detail(probe, comparison), comparison=comparison)
        detail = (
            f"The text holds; the tokens differ from {comparison.index} on only because this vocabulary has no "
            f"token {lacking!r}. Check with the template's own tokenizer."
        )
        return question.broken(detail, decisive=False, comparison=comparison)
    # A word that only the shorter render has was not ignored: it was removed.
    absent = [marker for marker in probe.markers if marker not in after.text and marker not in before.text]
    if absent:
        hides = _hides(probe, absent, cache.form)
        what = ", ".join(dict.fromkeys(_WORDS[marker.rstrip("0123456789")] for marker in absent))
        if what == _WORDS["ARGX"] and cache.form.calls and not hides:
            what = "one of two calls"
        detail = f"The renders agree only because {what} is not rendered at all: the pass is void."
        return question.unsupported(detail, void=True, comparison=comparison, unrendered=what, hides=hides)
    added = quoted(comparison.delta_text or "", 100)
    return question.ok(f"Adds {added} and changes nothing before it.", comparison=comparison)


_WORDS = {
    "ARGX": "the call", "RESX": "the tool result", "ANSX": "the answer", "UQ": "a user message",
    "SYSX": "the system message", "CONX": "the content beside the call", "THINKX": "reasoning",
}


def _hides(probe: Probe, absent: Sequence[str], form: MessageShape) -> bool:
    """Whether a template leaves out a message whose like it renders elsewhere: an earlier result, a call, an answer. It
    is no such message where reasoning, or one of several calls, is never rendered."""
    stems = {marker.rstrip("0123456789") for marker in absent}
    calls = [markers_of(call) for message in (*probe.before, *probe.appended) if (call := message.get("tool_calls"))]
    arguments = [[marker for marker in markers if marker.startswith("ARGX")] for markers in calls]
    left_out = any(markers and set(markers) <= set(absent) for markers in arguments)
    return bool(stems & {"UQ", "ANSX"}) or (form.calls and ("RESX" in stems or left_out))


def _lacking_control_token(comparison: RenderComparison) -> str | None:
    """The control token at the seam that the vocabulary spells in several tokens, if that is why the ids differ."""
    seam = len(comparison.before.text)
    text, codec = comparison.after.text, comparison.before.codec
    for match in CONTROL_SHAPE.finditer(text, max(0, seam - 48), seam + 48):
        touches = match.start() <= seam <= match.end()
        if touches and len(codec.encode(match.group())) > 1:
            return match.group()
    return None


def _broken_detail(probe: Probe, comparison: RenderComparison) -> str:
    line, other = comparison.lines
    where = ""
    if line:
        where = f" (written by template line {line}" + (f" before, by line {other} after)" if other != line else ")")
    if comparison.text_passed:
        return (
            f"The text holds, but from token {comparison.index} on the ids differ{where}: the vocabulary merges text "
            "across the seam, or lacks the control token that should stand there."
        )
    act = "Appending does not keep what was rendered before"
    if probe.prompted:
        act = "What the model was prompted with is not how the history begins"
    return f"{act}: {what_changed(comparison)}, from token {comparison.index} on{where}."


def check_tito_post(cache: RenderCache) -> Check:
    """The check of Hugging Face's TITO post in its own words; if these raise, in the form that the template accepts."""
    probe = tito_post_probe(MessageShape(), cache)
    check = check_append(probe, cache)
    own_words = check.status is not CheckStatus.RAISES and not _is_lost_on(cache.form)
    if not own_words and cache.form != MessageShape():
        probe = tito_post_probe(cache.form, cache)
        check = check_append(probe, cache)
    marked = next(
        check_append(probe, cache)
        for probe in append_probes(cache.form, cache.tools, cache.kwargs)
        if probe.name == "tool_append_marked"
    )
    void = check.status is CheckStatus.OK and (marked.void or marked.status is CheckStatus.RAISES)
    note = "" if own_words else f" Probed in the form the template accepts: {cache.form.describe()}."
    detail = marked.detail if void else check.detail
    status = CheckStatus.UNSUPPORTED if void else check.status
    return replace(check, status=status, detail=detail + note, void=void)


def _is_lost_on(form: MessageShape) -> bool:
    """Whether the template renders calls and results in this form and not in the plain one of the post. Then the words
    of the post vanish in the render, and their pass would be void."""
    return form.calls and replace(form, reasoning="") != MessageShape()


def all_probes(cache: RenderCache, conversation: Sequence[Message] | None = None) -> list[Probe]:
    """Every append probe for this template, thinking on and off included."""
    probes = list(append_probes(cache.form, cache.tools, cache.kwargs))
    switch = thinking_switch(cache.template)
    if switch is not None:
        probes += thinking_probes(cache.form, cache.tools, cache.kwargs, switch)
    if conversation:
        probes += conversation_probes(conversation, cache.tools, cache.kwargs)
    return probes


def all_checks(cache: RenderCache, conversation: Sequence[Message] | None = None) -> list[CheckFunction]:
    """Every check of a template, in the order of the report."""
    probes = (partial(check_append, probe) for probe in all_probes(cache, conversation))
    parses = parse_checks(cache, append_probes(cache.form, cache.tools, cache.kwargs))
    return [check_tito_post, *probes, *parses, *DELTA_CHECKS, *CONTENT_CHECKS, *CLIENT_SHAPES, generation_masks]


def make_render_cache(
    renderer: TemplateRenderer, tools: Sequence[Tool] | None, kwargs: Mapping[str, Any] | None
) -> tuple[RenderCache, list[str]]:
    """An empty cache in the form that the template accepts, and notes about that form for the page."""
    tools = list(tools) if tools else None
    form, refused = find_message_shape(renderer, tools, kwargs)
    notes = []
    plain = refused.get(MessageShape())
    if form.parts:
        notes.append(
            f"Content is accepted only as a list of parts ({plain}), so every probe has it as "
            '[{"type": "text", "text": …}].'
        )
    elif plain and form.calls:
        notes.append(
            f"Messages in the plain form are refused ({plain}), so every probe is in the form: {form.describe()}."
        )
    if not form.calls:
        reason = form.describe() if form.parts or not plain else plain
        notes.append(f"Tool calls and results cannot be probed: {reason}.")
    return RenderCache(renderer, form, tools, kwargs), notes


def check(
    tokenizer: TemplateTokenizer | None, chat_template: str, tools: Sequence[Tool] | None = None,
    kwargs: Mapping[str, Any] | None = None, conversation: Sequence[Message] | None = None, now: str = "",
) -> CheckReport:
    """Check a chat template; without a tokenizer at the level of text, characters in place of tokens. ``now``: an ISO
    date and time that templates with a clock are told; empty = the real one. Raises :class:`RenderFailed` when nothing
    can be rendered at all: a syntax error, no end, no memory."""
    renderer = renderer_of(tokenizer, chat_template, now)
    if problem := cannot_render(renderer, tools, kwargs):
        raise RenderFailed(problem)
    cache, notes = make_render_cache(renderer, tools, kwargs)
    notes += renderer.notes
    if tokenizer is None:
        notes.append("Checked without a tokenizer: at the level of text only, with characters in place of tokens.")
    checks = cache.answer(all_checks(cache, conversation))
    first = checks[0]
    described = {"name": tokenizer.name, "vocab_size": tokenizer.vocab_size} if tokenizer is not None else None
    for key in ("sha256", "encoder"):
        if described is not None and hasattr(tokenizer, key):
            described[key] = getattr(tokenizer, key)
    return CheckReport(
        chat_template=chat_template, chat_template_sha256=renderer.chat_template_sha256, tokenizer=described,
        form=cache.form.describe(),
        prefix_preserving=first.passed if first.status in (CheckStatus.OK, CheckStatus.BROKEN) else None, checks=checks,
        notes=notes, verdicts=verdicts(checks), tools=tools, kwargs=kwargs, conversation=conversation,
    )


def cannot_render(
    renderer: TemplateRenderer, tools: Sequence[Tool] | None = None, kwargs: Mapping[str, Any] | None = None
) -> str:
    """Why no check of a template can be made, as one sentence; empty = checks can be made. A template that raises can
    be checked: it may want other messages than these."""
    simplest = Conversation([{"role": "user", "content": "UQ1"}], tools, kwargs)
    outcome = renderer.render_many([simplest], lines=True)[0]
    return outcome.error if outcome.kind in _BROKEN else ""


_BROKEN = ("syntax", "time", "memory", "size", "depth", "crash", "forbidden")
