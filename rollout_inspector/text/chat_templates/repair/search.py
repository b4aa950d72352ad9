"""Searches the smallest change of a chat template that makes its failed probes pass and changes nothing else.

Nothing else: a conversation whose history was preserved before renders byte for byte as before, with and without the
generation prompt. Its history is preserved if every shorter render that ends in an answer begins the longer render.
All conversations that the check renders are compared, and all their prefixes. Every returned repair is verified.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollout_inspector.streams.interfaces import Conversation, RenderFailed
from rollout_inspector.text.chat_templates.jinja_source.edits import edits
from rollout_inspector.text.chat_templates.jinja_source.scan import FAR, suspects
from rollout_inspector.text.chat_templates.package_renderer import NO_TEXT, is_renderer
from rollout_inspector.text.chat_templates.probes.checks import all_checks, check, make_render_cache
from rollout_inspector.text.chat_templates.probes.conversations import Probe
from rollout_inspector.text.chat_templates.probes.message_shape import candidates
from rollout_inspector.text.chat_templates.probes.render_cache import RenderCache
from rollout_inspector.text.chat_templates.probes.report import (
    Check, CheckReport, CheckStatus, Purpose, conversation_dict
)
from rollout_inspector.text.chat_templates.repair.regression_set import RegressionSet
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer, TemplateTokenizer
from rollout_inspector.text.line_diffs import LineDiffs

MAX_CANDIDATES = 400
"""Changed templates that one search tries. A count finds the same on a busy machine; a clock would not."""
SAFETY_SECONDS = 300.0  # A search that takes longer is given up without an answer.
NOT_FINISHED = (
    f"The search for a repair was not finished within {SAFETY_SECONDS:.0f} s, because the machine is busy. Ask again."
)
DEPTH = 3  # At most this many changed conditions.
BEAM = 4
MAX_GUIDING_MESSAGES = 30
"""Messages of the user's own conversation that guide the search; the check of the result takes all messages."""
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Repair:
    """A patched chat template that was verified."""

    template: str
    diff: str  # Unified diff against the original.
    fixes: tuple[str, ...]  # Names of the probes that failed before and pass now.
    still_broken: tuple[str, ...]  # Names of the decisive prefix probes that fail before and after.
    changed: tuple[tuple[Conversation, str, str], ...]
    """The conversations that render differently, each with the render before and after."""
    scope: str
    """What the mended probes are about: ``tools`` results, ``users`` messages, ``all`` = both, the ``generation``
    prompt alone, or ``every`` = the generation prompt and one of the others."""
    wider: Repair | None = None  # A larger change that mends more, where one was found.

    def to_dict(self) -> dict[str, Any]:
        """The repair as JSON."""
        return {
            "diff": self.diff,
            "template": self.template,
            "verified": True,
            "scope": self.scope,
            "fixes": list(self.fixes),
            "still_broken": list(self.still_broken),
            "changed_conversations": len(self.changed),
            "changed": [
                {**conversation_dict(conversation), "before": before, "after": after}
                for conversation, before, after in self.changed
            ],
            "wider": None if self.wider is None else self.wider.to_dict(),
        }


def unified_diff(before: str, after: str) -> str:
    """The change as a unified diff; templates without a last newline keep their own way."""
    names = "chat_template.jinja", "chat_template.jinja"
    lines = LineDiffs().unified(before.splitlines(keepends=True), after.splitlines(keepends=True), names, end="\n")
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


class _NotFinished(Exception):
    """The search took longer than ``SAFETY_SECONDS``."""


def _search(
    regressions: RegressionSet, start: str, goal: Sequence[Probe], may_try: Callable[[], bool],
    progress: Progress,
) -> tuple[str | None, bool]:
    """Change conditions, fewest first and the likeliest first, until every probe of the goal passes. Returns the first
    template on which all of them pass and True, else the one on which most of them pass and False. ``may_try``: whether
    one more candidate may be tried. Raises ``_NotFinished``, as it does."""
    failed = regressions.failing(regressions.cache.template, regressions.probes)
    others = [probe for probe in regressions.probes if probe not in failed]
    fewest, best = len(regressions.failing(start, goal)), None
    level: list[tuple[int, str]] = [(fewest, start)]
    visited = {start}
    for depth in range(DEPTH):
        following: list[tuple[int, str]] = []
        for _, template in level[:BEAM]:
            near = suspects(template, regressions.places(template, regressions.failing(template, goal)))
            # Further changes are made where the difference comes from; the first one may be anywhere.
            tried = [edit for edit in edits(template, near) if depth == 0 or edit[0][0] < FAR]
            for n, (_, first, stop, text) in enumerate(tried):
                candidate = template[:first] + text + template[stop:]
                if candidate in visited:
                    continue
                if not may_try():
                    return best, False
                visited.add(candidate)
                if n % 10 == 0:
                    conditions = "1 condition changed" if depth == 0 else f"{depth + 1} conditions changed"
                    progress(f"{conditions}: {n} of {len(tried)} candidates tried")
                # This order is fastest: most candidates change nothing that matters, and most others change too much.
                if (
                    not regressions.moves(candidate, template, goal)
                    or not regressions.keeps(candidate)
                    or regressions.failing(candidate, others)
                    or regressions.loses(candidate)
                ):
                    continue
                n_failing = len(regressions.failing(candidate, goal))
                if n_failing == 0:
                    return candidate, True
                if n_failing < fewest:
                    fewest, best = n_failing, candidate
                # A change that mends nothing alone may do so together with the next one.
                following.append((n_failing, candidate))
        level = sorted(following, key=lambda item: item[0])
        if not level:
            break
    return best, False


def find_repair(
    tokenizer: TemplateTokenizer | None, report: CheckReport, progress: Progress = lambda _: None,
    n_candidates: int = MAX_CANDIDATES,
) -> tuple[Repair | None, str]:
    """A verified repair of the failed prefix probes or None; and what it leaves broken, or why there is none. First
    tool results alone are repaired, then user messages too, then the generation prompt too. Each wider repair is the
    ``wider`` of the repair before it."""
    until = time.monotonic() + SAFETY_SECONDS
    n_allowed = n_tried = 0

    def may_try() -> bool:
        nonlocal n_tried
        if time.monotonic() > until:
            raise _NotFinished
        is_allowed = n_tried < n_allowed
        n_tried += is_allowed
        return is_allowed

    broken = [
        check
        for check in report.checks
        if check.status is CheckStatus.BROKEN and check.decisive and check.comparison is not None
    ]
    void = any(check.name == "tool_append" and check.void for check in report.checks)
    purposes = [purpose for purpose in SCOPES if not (void and purpose is Purpose.TOOLS)]
    goals = {purpose: [check for check in broken if check.purpose is purpose] for purpose in purposes}
    everything = [check for checks in goals.values() for check in checks]
    if not everything:
        return None, _nothing(report)
    if all(check.comparison is not None and check.comparison.text_passed for check in everything):
        return None, "The text is kept; only the tokens differ, which no change of the template can mend."
    renderer = TemplateRenderer(tokenizer, report.chat_template)
    cache, _ = make_render_cache(renderer, report.tools, report.kwargs)
    regressions = RegressionSet(
        cache, (report.conversation or ())[:MAX_GUIDING_MESSAGES], _checked_conversations(cache, report)
    )
    failing = {probe.name: probe for probe in regressions.failing(report.chat_template, regressions.probes)}
    hopeless = {name for name, probe in failing.items() if regressions.is_hopeless(probe)}
    repairs: list[Repair] = []
    goal: list[Probe] = []
    stages = [purpose for purpose, checks in goals.items() if any(check.name in failing for check in checks)]
    for n, purpose in enumerate(stages):
        added = [
            failing[check.name] for check in goals[purpose] if check.name in failing and check.name not in hopeless
        ]
        goal += added
        if not added:
            continue
        # What an earlier purpose leaves of its share is there for the next one.
        n_allowed = n_candidates * (n + 1) // len(stages)
        start = repairs[-1].template if repairs else report.chat_template
        try:
            template, is_whole = _search(regressions, start, goal, may_try, progress)
        except _NotFinished:
            return None, NOT_FINISHED
        if template is not None and template != start:
            must = {probe.name for probe in goal} if is_whole else set()
            repair = _verified(tokenizer, report, regressions, template, must)
            if repair is not None and len(repair.fixes) > max((len(check.fixes) for check in repairs), default=0):
                repairs.append(repair)
    if not repairs:
        return None, _none(everything, hopeless, n_tried >= n_candidates)
    chosen = repairs.pop()
    while repairs:
        chosen = replace(repairs.pop(), wider=chosen)
    return chosen, _left(report, chosen, hopeless)


def _checked_conversations(cache: RenderCache, report: CheckReport) -> list[Conversation]:
    """Every conversation that the check renders, and those that find out its form of messages."""
    cache.answer(all_checks(cache))
    tried = [conversation for _, conversation in candidates(cache.form.parts, report.tools, report.kwargs)]
    return [*cache.seen.values(), *tried]


SCOPES = {Purpose.TOOLS: "tools", Purpose.USERS: "users", Purpose.GENERATION: "generation"}
"""The purposes that a repair serves, in this order, and the scope of one that mends probes of this purpose alone."""
FIXED = "both renders belong to conversations whose history is kept today, so neither may change"


def _nothing(report: CheckReport) -> str:
    """Why there is nothing to repair. If the template is not safe all the same, it says what the user can do."""
    raising = [
        check
        for check in report.checks
        if check.status is CheckStatus.RAISES
        and check.decisive
        and check.purpose in SCOPES
        and check.failed is not None
    ]
    if raising:
        first = raising[0]
        assert first.failed is not None
        where = "the template" if first.line is None else f"line {first.line} of the template"
        others = f" and {len(raising) - 1} more" if len(raising) > 1 else ""
        return (
            f"There is nothing that a repair could compare: the template renders no conversation of the probe "
            f"“{first.title}”{others}. {first.failed.error.rstrip('.')}. A refusal may be meant, so no repair takes it "
            f"away. If your conversations hold such messages, change {where}, or choose another chat template."
        )
    void = next((check for check in report.checks if check.name == "tool_append" and check.void), None)
    if void is not None:
        return f"{void.detail} If your conversations hold tool results, choose a chat template that renders them."
    return "There is nothing to repair: appending messages keeps what was rendered before."


def _none(broken: Sequence[Check], hopeless: Collection[str], all_used: bool) -> str:
    """Why there is no repair."""
    stuck = [check.title.lower() for check in broken if check.name in hopeless]
    others = [check.title.lower() for check in broken if check.name not in hopeless]
    sentences = []
    if others:
        reason = f"among {MAX_CANDIDATES:,} changes" if all_used else "by changing conditions of the template"
        sentences.append(f"No repair was found {reason}. Still broken: {', '.join(others)}.")
    else:
        sentences.append("No repair was found.")
    if stuck:
        sentences.append(f"No change of the template can mend {', '.join(stuck)}: {FIXED}.")
    return " ".join(sentences)


def _left(report: CheckReport, repair: Repair, hopeless: Collection[str]) -> str:
    """What the repair leaves broken."""
    if not repair.still_broken:
        return "Every prefix probe passes on the repaired template."
    titles = [report.check(name).title.lower() for name in repair.still_broken]
    sentences = [f"Still broken after the repair: {', '.join(titles)}."]
    if repair.wider is not None:
        what = "these too" if not repair.wider.still_broken else "more of these"
        sentences.append(f"A wider repair that mends {what} is offered beside it.")
    stuck = [report.check(name).title.lower() for name in repair.still_broken if name in hopeless]
    if stuck:
        sentences.append(f"No change of the template can mend {', '.join(stuck)}: {FIXED}.")
    return " ".join(sentences)


def _verified(
    tokenizer: TemplateTokenizer | None, report: CheckReport, regressions: RegressionSet, candidate: str,
    goals: Collection[str],
) -> Repair | None:
    """Check the candidate from scratch, tokens included; None when anything that passed fails or a goal is missed."""
    try:
        now = check(tokenizer, candidate, report.tools, report.kwargs, report.conversation)
    except RenderFailed:
        return None
    before = {answer.name: answer for answer in report.checks}
    for answer in now.checks:
        was = before.get(answer.name)
        is_lost = was is not None and was.status is CheckStatus.OK and answer.status is not CheckStatus.OK
        if is_lost and answer.comparison is not None:
            return None
    # A probe can turn from broken to void: what it asks about was never rendered, only its place was.
    passed = {
        answer.name for answer in now.checks if answer.status is CheckStatus.OK or (answer.void and answer.passed)
    }
    if not passed.issuperset(goals) or not regressions.keeps(candidate) or regressions.loses(candidate):
        return None
    append = [it for it in report.checks if it.comparison is not None and it.status is CheckStatus.BROKEN]
    mended = {it.purpose for it in append if it.name in passed}
    return Repair(
        template=candidate, diff=unified_diff(report.chat_template, candidate),
        fixes=tuple(it.name for it in append if it.name in passed),
        still_broken=tuple(it.name for it in append if it.name not in passed and it.decisive and it.purpose in SCOPES),
        changed=regressions.changed(candidate), scope=_scope([purpose for purpose in SCOPES if purpose in mended]),
    )


def _scope(mended: Sequence[Purpose]) -> str:
    """The scope of a repair that mends probes of these purposes, as :class:`Repair` names it."""
    if len(mended) == 1:
        return SCOPES[mended[0]]
    return "every" if Purpose.GENERATION in mended else "all"


def with_repair(
    tokenizer: TemplateTokenizer | None, report: CheckReport, progress: Progress = lambda _: None,
) -> CheckReport:
    """The same report with a repair, or with the sentence that says why there is none."""
    is_code = is_renderer(report.chat_template)
    repair, detail = (None, NO_TEXT) if is_code else find_repair(tokenizer, report, progress)
    return replace(report, repair=repair, repair_detail=detail)
