"""Which changed line of a chat template changed which renders: each change is tried alone. The older template is
rendered with one change at a time. So a line is named because it did it, not because it is near."""

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rollout_inspector.guard.fail_rules import ExitStatus
from rollout_inspector.streams.align import BoundedMatcher
from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.prefix import common_length
from rollout_inspector.streams.snippets import contrast, counted
from rollout_inspector.text.chat_templates.jinja_source.scan import line_text
from rollout_inspector.text.chat_templates.probes.report import CheckReport
from rollout_inspector.text.chat_templates.sandbox.client import Rendered
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer

MAX_CHANGES = 40  # Changes of one template that are tried alone.
MAX_TRIES_SECONDS = 60.0  # After so long no further change is tried: a template may use all the time that a render has.
MAX_TITLES = 3
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")  # A line with its break, as Jinja counts lines.
_NO_TEMPLATE = ("syntax", "forbidden")  # How a render fails when one change alone makes no template, as half a block.


@dataclass(frozen=True)
class ChangedLines:
    """Lines of a chat template that were changed together."""

    first: int  # 1-based, in the newer template. Where lines were only removed, the line that stands there now.
    last: int  # Lower than ``first`` where lines were only removed.
    was: str
    now: str
    titles: tuple[str, ...] = ()  # The probes whose renders this change alone changes.
    difference: str = ""  # The first difference that it makes, in words.
    is_tried: bool = True  # False = alone it is no template, or there are too many changes.

    def sentence(self) -> str:
        """What was changed on which line, and what that does."""
        many = f"s {self.first}-{self.last}" if self.last > self.first else f" {self.first}"
        was, now = contrast(self.was.strip(), self.now.strip(), 80)
        text = f"Line{many}: {was} {f'became {now}' if self.now.strip() else 'was removed'}."
        if not self.is_tried:
            return f"{text} What it does alone cannot be told."
        if not self.titles:
            return f"{text} It changes no render."
        titles = ", ".join(f"“{title}”" for title in self.titles[:MAX_TITLES])
        more = f" and {len(self.titles) - MAX_TITLES} more" if len(self.titles) > MAX_TITLES else ""
        return (
            f"{text} It changes the renders of {counted(len(self.titles), 'probe')}: {titles}{more}. {self.difference}"
        )


@dataclass(frozen=True)
class LockComparison:
    """What changed since a template was locked."""

    outcome: ExitStatus
    changes: tuple[str, ...] = ()  # One sentence for each change.
    lines: tuple[ChangedLines, ...] = ()  # The changed lines, those that change most renders first.
    notes: tuple[str, ...] = ()


def lines_of(template: str) -> list[str]:
    """The lines of a template, each with its break."""
    return _LINE.findall(template)


def changed_lines(
    older: TemplateRenderer, newer: TemplateRenderer, report: CheckReport, now: str = ""
) -> list[ChangedLines]:
    """The changes from an older template to a newer one; those that change most renders come first. ``report``: of the
    older template; its conversations are rendered. ``now``: the clock of both renderers."""
    before, after = lines_of(older.chat_template), lines_of(newer.chat_template)
    asked_conversations = _conversations(report)
    conversations = [conversation for _, conversation in asked_conversations]
    old_renders = older.render_many(conversations, lines=True)
    changes = []
    until = time.monotonic() + MAX_TRIES_SECONDS
    edits = [edit for edit in BoundedMatcher(before, after).get_opcodes() if edit[0] != "equal"]
    for n, (_, start, stop, new_start, new_stop) in enumerate(edits):
        old_text, new_text = ("".join(part).strip("\r\n") for part in (before[start:stop], after[new_start:new_stop]))
        first = min(new_start + 1, max(len(after), 1))
        alone = "".join([*before[:start], *after[new_start:new_stop], *before[stop:]])
        renders: Sequence[Rendered] = ()
        if n < MAX_CHANGES and time.monotonic() < until:
            renders = TemplateRenderer(older.tokenizer, alone, now).render_many(conversations, lines=True)
        if not renders or any(it.kind in _NO_TEMPLATE for it in renders):
            changes.append(ChangedLines(first, new_stop, old_text, new_text, is_tried=False))
            continue
        differing = [
            m for m, it in enumerate(renders) if (it.text, it.error) != (old_renders[m].text, old_renders[m].error)
        ]
        titles = tuple(dict.fromkeys(asked_conversations[m][0] for m in differing))
        difference = _difference(old_renders[differing[0]], renders[differing[0]]) if differing else ""
        changes.append(ChangedLines(first, new_stop, old_text, new_text, titles, difference))
    return sorted(changes, key=lambda one: (-len(one.titles), one.first))


def first_difference(older: TemplateRenderer, newer: TemplateRenderer, report: CheckReport) -> str:
    """The first difference between the renders of two templates, and the line that writes it; empty = there is none."""
    labelled = _conversations(report)
    conversations = [conversation for _, conversation in labelled]
    renders = zip(older.render_many(conversations, True), newer.render_many(conversations, True), strict=True)
    for (title, _), (was, now) in zip(labelled, renders, strict=True):
        if (was.text, was.error) != (now.text, now.error):
            line = None if now.error else now.line_at(common_length(was.text, now.text))
            source = line_text(newer.chat_template, line)
            where = f" Line {line} writes it: {source[:200]}" if line else ""
            return f"“{title}”: {_difference(was, now)}{where}"
    return ""


def _conversations(report: CheckReport) -> list[tuple[str, Conversation]]:
    """Title and conversation of each render that a probe asked for."""
    conversations = []
    for check in report.checks:
        sides = (check.comparison.before, check.comparison.after) if check.comparison else (check.failed,)
        conversations += [(check.title, side.conversation) for side in sides if side is not None]
    return conversations


def _difference(was: Rendered, now: Rendered) -> str:
    if now.error:
        return f"Now it is not rendered: {now.error}"
    if was.error:
        return f"It was not rendered: {was.error}"
    old_text, new_text = contrast(was.text, now.text)
    return f"First, {old_text} becomes {new_text}."
