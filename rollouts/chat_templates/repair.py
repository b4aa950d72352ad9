"""Search the smallest change of a chat template that makes its failed probes pass and leaves everything else alone.

Everything else: each conversation whose own history was preserved before (every shorter render a prefix of the longer)
renders byte for byte as before, with and without the generation prompt. A repair that is not verified is never given.
"""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rollouts.chat_templates.bench import Bench
from rollouts.chat_templates.checks import all_probes, check, make_bench, tito_post_probe
from rollouts.chat_templates.edits import Edit, edits
from rollouts.chat_templates.forms import Form
from rollouts.chat_templates.probes import Probe
from rollouts.chat_templates.render import Conversation, TemplateRenderer, TemplateTokenizer
from rollouts.chat_templates.report import Check, CheckReport, Purpose, Status
from rollouts.chat_templates.tags import deciding_condition
from rollouts.tito.codec import RenderFailed

SECONDS = 18.0
DEPTH = 3
"""At most this many changed conditions."""
BEAM = 4
Progress = Callable[[str], None]


@dataclass(frozen=True)
class Changed:
    """A conversation whose render a repair changes."""

    conversation: Conversation
    before: str
    after: str

    def to_dict(self) -> dict[str, Any]:
        conversation = self.conversation
        return {
            "messages": list(conversation.messages),
            "tools": None if conversation.tools is None else list(conversation.tools),
            "kwargs": dict(conversation.kwargs or {}),
            "before": self.before,
            "after": self.after,
        }


@dataclass(frozen=True)
class Repair:
    """A patched chat template that was verified."""

    template: str
    diff: str
    """Unified diff against the original."""
    fixes: tuple[str, ...]
    """Names of the probes that failed before and pass now."""
    still_broken: tuple[str, ...]
    """Names of the decisive append probes that fail before and after."""
    changed: tuple[Changed, ...]
    scope: str
    """``tools`` = the probes of tool results, ``users`` = those of user messages, ``all`` = both."""
    wider: Repair | None = None
    """A larger change that mends user messages too, where one was found."""

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
            "changed": [changed.to_dict() for changed in self.changed],
            "wider": None if self.wider is None else self.wider.to_dict(),
        }


def unified_diff(before: str, after: str) -> str:
    """The change as a unified diff; templates without a last newline keep their own way."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), "chat_template.jinja", "chat_template.jinja"
    )
    return "".join(line if line.endswith("\n") else line + "\n\\ No newline at end of file\n" for line in lines)


class _World:
    """All conversations that a candidate is judged on, and how the original renders them."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.probes = [tito_post_probe(Form(), bench), tito_post_probe(bench.form, bench), *all_probes(bench)]
        self.conversations: dict[str, Conversation] = {}
        for probe in self.probes:
            for conversation in probe.conversations():
                for k in range(1, len(conversation.messages) + 1):
                    for prompt in (False, True):
                        self._add(
                            replace(conversation, messages=conversation.messages[:k], add_generation_prompt=prompt)
                        )
        self.original = self.render(bench.template)
        self.kept = [key for key, conversation in self.conversations.items() if self._preserved(conversation)]
        """Keys of the conversations that must not change."""

    def _add(self, conversation: Conversation) -> None:
        self.conversations.setdefault(_key(conversation), conversation)

    def render(self, template: str) -> dict[str, str | None]:
        """The text of every conversation, None where the template raises."""
        renderer = TemplateRenderer(self.bench.renderer.tokenizer, template)
        outcomes = renderer.render_many(list(self.conversations.values()))
        return {
            key: outcome.text if outcome.ok else None for key, outcome in zip(self.conversations, outcomes, strict=True)
        }

    def _preserved(self, conversation: Conversation) -> bool:
        """Was the conversation's own history preserved: does each shorter render begin the longer?"""
        messages = conversation.messages
        whole = self.original[_key(replace(conversation, add_generation_prompt=False))]
        if whole is None or self.original[_key(conversation)] is None:
            return False
        for k in range(1, len(messages)):
            if messages[k - 1]["role"] != "assistant":
                continue
            shorter = self.original[_key(replace(conversation, messages=messages[:k], add_generation_prompt=False))]
            if shorter is None or not whole.startswith(shorter):
                return False
        return True

    def failing(self, texts: Mapping[str, str | None], probes: Sequence[Probe]) -> list[Probe]:
        """Probes whose shorter render does not begin the longer."""
        failed = []
        for probe in probes:
            before, after = (texts[_key(conversation)] for conversation in probe.conversations())
            if before is None or after is None or not after.startswith(before):
                failed.append(probe)
        return failed

    def keeps(self, texts: Mapping[str, str | None]) -> bool:
        """Does everything that was preserved render as before?"""
        return all(texts[key] == self.original[key] for key in self.kept)

    def changed(self, texts: Mapping[str, str | None]) -> tuple[Changed, ...]:
        """The conversations that render differently, each once."""
        found = []
        for key, conversation in self.conversations.items():
            before, after = self.original[key], texts[key]
            if not conversation.add_generation_prompt and before != after:
                found.append(Changed(conversation, before or "", after or ""))
        return tuple(found)


def _key(conversation: Conversation) -> str:
    return json.dumps(
        [list(conversation.messages), conversation.tools, conversation.kwargs, conversation.add_generation_prompt],
        default=list,
    )


def _hints(bench: Bench, checks: Sequence[Check]) -> frozenset[int]:
    """Lines that failed checks point at: where the difference was written, and the condition that decides it."""
    lines: set[int] = set()
    for one in checks:
        if one.comparison is None or one.status is not Status.BROKEN:
            continue
        pair = one.comparison.lines
        lines.update(line for line in pair if line)
        condition = deciding_condition(bench.template, *pair)
        if condition is not None:
            lines.add(condition.line)
    return frozenset(lines)


def _search(
    world: _World, start: str, goal: Sequence[Probe], hints: frozenset[int], until: float, progress: Progress
) -> str | None:
    """The first template, by number of changed conditions and then by likelihood, on which every goal probe passes."""
    others = [probe for probe in world.probes if probe not in world.failing(world.original, world.probes)]
    level: list[tuple[int, str]] = [(len(goal), start)]
    seen = {start}
    for depth in range(DEPTH):
        following: list[tuple[int, str]] = []
        for n_before, template in level[:BEAM]:
            tried: Sequence[Edit] = edits(template, hints)
            for n, edit in enumerate(tried):
                if time.monotonic() > until:
                    return None
                candidate = edit.apply(template)
                if candidate in seen:
                    continue
                seen.add(candidate)
                if n % 10 == 0:
                    progress(f"{depth + 1} changed conditions: {n} of {len(tried)} candidates tried")
                texts = world.render(candidate)
                if not world.keeps(texts) or world.failing(texts, others):
                    continue
                left = len(world.failing(texts, goal))
                if left == 0:
                    return candidate
                # A change that moves nothing by itself can still open the way for the next one.
                if left < n_before or texts != world.original:
                    following.append((left, candidate))
        level = sorted(following, key=lambda item: item[0])
        if not level:
            return None
    return None


def find_repair(
    tokenizer: TemplateTokenizer | None,
    report: CheckReport,
    progress: Progress = lambda _: None,
    seconds: float = SECONDS,
) -> tuple[Repair | None, str]:
    """A verified repair of the append probes that failed, or None; and what it leaves broken, or why there is none."""
    began = time.monotonic()
    broken = [
        one for one in report.checks if one.status is Status.BROKEN and one.decisive and one.comparison is not None
    ]
    void = any(one.name == "tool_append" and one.void for one in report.checks)
    tools = [] if void else [one for one in broken if one.purpose is Purpose.TOOLS]
    users = [one for one in broken if one.purpose is Purpose.USERS]
    if not tools and not users:
        return None, "There is nothing to repair: appending messages keeps what was rendered before."
    if all(one.comparison is not None and one.comparison.text_passed for one in (*tools, *users)):
        return None, "The text is kept; only the tokens differ, which no change of the template can mend."
    renderer = TemplateRenderer(tokenizer, report.chat_template)
    bench, _ = make_bench(renderer, report.tools, report.kwargs)
    world = _World(bench)
    template = report.chat_template
    found: dict[str, Repair] = {}
    for scope, goals in (("tools", tools), ("users", users) if not tools else ("all", [*tools, *users])):
        if not goals or (scope == "all" and not users):
            continue
        goal = [probe for probe in world.probes if probe.name in {one.name for one in goals}]
        goal = [probe for probe in goal if probe in world.failing(world.original, world.probes)]
        previous = found.get("tools")
        until = began + seconds * (0.6 if scope == "tools" and users else 1.0)
        start = previous.template if previous is not None else template
        candidate = _search(world, start, goal, _hints(bench, goals), until, progress)
        if candidate is not None:
            repair = _verified(tokenizer, report, world, candidate, goals, scope)
            if repair is not None:
                found[scope] = repair
    if not found:
        names = ", ".join(one.title.lower() for one in (*tools, *users))
        reason = (
            "in the time given" if time.monotonic() - began >= seconds else "by changing conditions of the template"
        )
        return None, f"No repair was found {reason}. Still broken: {names}."
    chosen = found.get("tools") or found.get("users") or found["all"]
    wider = found.get("all") if chosen.scope == "tools" else None
    if wider is not None:
        chosen = replace(chosen, wider=wider)
    return chosen, _left(report, chosen)


def _left(report: CheckReport, repair: Repair) -> str:
    if not repair.still_broken:
        return "Every append probe passes on the repaired template."
    titles = [report.check(name).title.lower() for name in repair.still_broken]
    more = " A wider repair that mends these too is offered beside it." if repair.wider is not None else ""
    return f"Still broken after the repair: {', '.join(titles)}.{more}"


def _verified(
    tokenizer: TemplateTokenizer | None,
    report: CheckReport,
    world: _World,
    candidate: str,
    goals: Sequence[Check],
    scope: str,
) -> Repair | None:
    """Check the candidate from scratch, tokens included; None when anything that passed fails or a goal is missed."""
    try:
        now = check(tokenizer, candidate, report.tools, report.kwargs)
    except RenderFailed:
        return None
    before = {one.name: one for one in report.checks}
    for one in now.checks:
        was = before.get(one.name)
        if was is not None and was.status is Status.OK and one.status is not Status.OK and one.comparison is not None:
            return None
    # A probe can turn from broken to void: what it asks about was never rendered, only its place was.
    passed = {one.name for one in now.checks if one.status is Status.OK or (one.void and one.passed)}
    if not {goal.name for goal in goals} <= passed:
        return None
    texts = world.render(candidate)
    if not world.keeps(texts):
        return None
    append = [one for one in report.checks if one.comparison is not None and one.status is Status.BROKEN]
    return Repair(
        template=candidate,
        diff=unified_diff(report.chat_template, candidate),
        fixes=tuple(one.name for one in append if one.name in passed),
        still_broken=tuple(
            one.name
            for one in append
            if one.name not in passed and one.decisive and one.purpose in (Purpose.TOOLS, Purpose.USERS)
        ),
        changed=world.changed(texts),
        scope=scope,
    )


def with_repair(
    tokenizer: TemplateTokenizer | None,
    report: CheckReport,
    progress: Progress = lambda _: None,
    seconds: float = SECONDS,
) -> CheckReport:
    """The same report with a repair, or with the sentence that says why there is none."""
    found, detail = find_repair(tokenizer, report, progress, seconds)
    return replace(report, repair=found, repair_detail=detail)
