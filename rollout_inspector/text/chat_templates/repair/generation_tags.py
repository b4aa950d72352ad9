"""Place ``{% generation %}`` tags in a chat template, so that ``return_assistant_tokens_mask`` marks what was sampled.

The template is taken apart and every output gets a name. The probes are rendered once, which shows the outputs that
write inside a sampled span: behind the generation prompt, up to the stop token. An output that writes only there is
wrapped. An output that also writes the messages of other roles is wrapped behind a test of the role. Constant text is
cut where a span begins or ends in it. Then the marked template is checked from scratch, and tags that fail are dropped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.text.chat_templates.jinja_source.parts import CannotTakeApart
from rollout_inspector.text.chat_templates.package_renderer import NO_TEXT, is_renderer
from rollout_inspector.text.chat_templates.probes.assistant_masks import (
    exact_mask, merged, overlap_mask, transformers_mask
)
from rollout_inspector.text.chat_templates.probes.checks import check, make_render_cache
from rollout_inspector.text.chat_templates.probes.generation_checks import NAME, has_generation_tags
from rollout_inspector.text.chat_templates.probes.render_cache import RenderCache
from rollout_inspector.text.chat_templates.probes.report import CheckReport, CheckStatus
from rollout_inspector.text.chat_templates.repair.regression_set import RegressionSet
from rollout_inspector.text.chat_templates.repair.sampled_spans import CannotMark, SampledSpans, sampled_spans
from rollout_inspector.text.chat_templates.repair.search import unified_diff
from rollout_inspector.text.chat_templates.repair.tag_places import learn_places
from rollout_inspector.text.chat_templates.repair.tag_writer import TagWriter
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer, TemplateTokenizer


@dataclass(frozen=True)
class GenerationTags:
    """A template with generation tags that were verified; it renders as before, byte for byte."""

    template: str
    diff: str  # Unified diff against the original.
    blocks: int  # Generation blocks in the template; one message may be marked by several.
    conversations: int  # Conversations in which the mask was proved for every answer: each goes on as it was prompted.
    partly: int
    """Further conversations, with an answer that was rewritten. The answer was looked for behind what is left of its
    header; what follows a place that is not known was not compared."""
    renders: int  # Renders that stay byte for byte the same.
    by_tokens: bool  # False = compared by characters alone, without a tokenizer.

    def to_dict(self) -> dict[str, Any]:
        """The tags as JSON."""
        return {**vars(self), "verified": True}


def find_marks(tokenizer: TemplateTokenizer | None, report: CheckReport) -> tuple[GenerationTags | None, str]:
    """Verified generation tags for the template of a report, or None and the reason."""
    original = report.chat_template
    if has_generation_tags(original) and report.check(NAME).status is CheckStatus.OK:
        return None, "The template has generation tags of its own, and they mark exactly what is sampled."
    cache, _ = make_render_cache(TemplateRenderer(tokenizer, original), report.tools, report.kwargs)
    try:
        stop = cache.answer([RenderCache.stop_text])[0]
        regressions = RegressionSet(cache)
        spans = sampled_spans(regressions, stop)
        nodes, state = learn_places(regressions, original, spans)
        for sets_inside in (True, False):
            template = TagWriter(state, sets_inside).write(nodes)
            marks = _verified(tokenizer, report, regressions, spans, template)
            if marks is not None:
                return marks, ""
        raise CannotMark("tags at the places that were found change the render, or mark something else")
    except (CannotMark, CannotTakeApart, RenderFailed) as error:
        return None, f"No place for generation tags was found: {error}."


def with_marks(tokenizer: TemplateTokenizer | None, report: CheckReport) -> CheckReport:
    """The same report with verified generation tags, or with the sentence that says why there are none."""
    tagged, detail = (None, NO_TEXT) if is_renderer(report.chat_template) else find_marks(tokenizer, report)
    return replace(report, marks=tagged, marks_detail=detail)


def _verified(
    tokenizer: TemplateTokenizer | None, report: CheckReport, regressions: RegressionSet,
    spans: Mapping[str, SampledSpans], template: str,
) -> GenerationTags | None:
    """The marks, if every render is what it was and every mask is what was sampled."""
    if not has_generation_tags(template):
        return None
    keys = list(regressions.conversations)
    outcomes = TemplateRenderer(tokenizer, template).render_many([regressions.conversations[key] for key in keys])
    compared: list[SampledSpans] = []
    for key, outcome in zip(keys, outcomes, strict=True):
        if regressions.original[key] is None:
            continue
        if outcome.text != regressions.original[key] or not outcome.ok:
            return None
        sampled = spans.get(key, SampledSpans(limit=len(outcome.text)))
        marked = [span for span in merged(outcome.tracked_spans) if span[1] <= sampled.limit]
        if marked != sampled.sampled or not _tokens_agree(tokenizer, outcome.text, outcome.tracked_spans, sampled):
            return None
        if sampled.sampled and sampled.is_told:
            compared.append(sampled)
    now = check(tokenizer, template, report.tools, report.kwargs)
    if now.check(NAME).status is not CheckStatus.OK:
        return None
    blocks = template.count("endgeneration")
    proved = sum(spans.is_proved for spans in compared)
    renders = sum(text is not None for text in regressions.original.values())
    diff = unified_diff(report.chat_template, template)
    by_tokens = hasattr(tokenizer, "encode_offsets")
    return GenerationTags(template, diff, blocks, proved, len(compared) - proved, renders, by_tokens)


def _tokens_agree(
    tokenizer: TemplateTokenizer | None, text: str, tracked: Sequence[tuple[int, int]], known: SampledSpans
) -> bool:
    """Does ``transformers`` mark every token that lies in what was sampled, and none that lies outside of it?"""
    codec: Any = tokenizer
    if not hasattr(codec, "encode_offsets") or known.limit < len(text):
        return True
    mask = transformers_mask(codec, text, tracked)
    wholly, partly = exact_mask(codec, text, known.sampled), overlap_mask(codec, text, known.sampled)
    return bool((wholly <= mask).all() and (mask <= partly).all())
