"""The result of checking a chat template: values that become JSON, and the verdict of each purpose in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from rollout_inspector.streams.interfaces import Conversation
from rollout_inspector.streams.snippets import contrast, quoted
from rollout_inspector.text.chat_templates.jinja_source.scan import deciding_condition, line_text
from rollout_inspector.text.chat_templates.probes.compare import (
    WINDOW_AFTER, WINDOW_BEFORE, RenderComparison, RenderSide
)


class Purpose(StrEnum):
    """A purpose that a chat template is used for."""

    TOOLS = "TITO with tool results"  # Appending tool results extends the render: what tool_delta needs.
    USERS = "multi-turn with users"  # Appending a user message extends the render.
    GENERATION = "generation prompt"  # What the model is prompted with is how the history that follows it begins.
    FIXED_BASE = "fixed-base deltas"  # Deltas that were rendered on a dummy conversation equal those of the real one.
    PER_MESSAGE = "message by message"  # Rendering each message alone and joining equals rendering the conversation.
    MASKS = "masks from generation tags"  # ``{% generation %}`` marks exactly what the model sampled.
    REPRODUCIBLE = "no date in the render"  # No date in the render, one BOS.
    PARSED_MESSAGES = "parse(render(m)) = m"  # A renderer that parses: its reply is what its ids are parsed to.
    PARSED_IDS = "render(parse(ids)) = ids"  # And what the ids are parsed to is rendered to the same ids.
    CLIENTS = "what clients send"  # The forms of messages that clients and agents really send are rendered alike.
    FACTS = "good to know"  # Properties that neither pass nor fail for training.


class CheckStatus(StrEnum):
    """How a check came out."""

    OK = "ok"  # The property holds.
    BROKEN = "broken"  # It does not; the first difference says where.
    RAISES = "raises"  # The template raised; the detail says what, and on which line.
    UNSUPPORTED = "unsupported"
    """The template does not render what the probe asks about, so a pass would say nothing (a void pass)."""


_OF_COMPARISON = (
    "text_passed", "token_passed", "index", "char_index", "decided_by", "window", "delta", "conversations", "renders",
)


@dataclass(frozen=True, eq=False)
class Check:
    """What is asked of a chat template, and how it came out: made as the question, which its answer replaces."""

    name: str
    title: str
    purpose: Purpose
    status: CheckStatus = CheckStatus.UNSUPPORTED
    detail: str = ""  # One or two sentences.
    decisive: bool = True  # False = worth knowing, but it does not change the verdict of its purpose.
    void: bool = False  # True = the renders agree only because neither contains what was asked about.
    unrendered: str = ""  # What a void pass asked about and the template does not render, in words.
    hides: bool = False
    """True = a void pass, although the template renders such messages elsewhere: nothing tells what becomes of them."""
    comparison: RenderComparison | None = None
    failed: RenderSide | None = None  # The side that raised.
    line: int | None = None  # The template line; None = not known, or told by ``comparison``.

    def ok(self, detail: str, **more: Any) -> Check:
        """The property holds."""
        return replace(self, status=CheckStatus.OK, detail=detail, **more)

    def broken(self, detail: str, **more: Any) -> Check:
        """The property does not hold."""
        return replace(self, status=CheckStatus.BROKEN, detail=detail, **more)

    def unsupported(self, detail: str, **more: Any) -> Check:
        """The template has no place for what is asked about."""
        return replace(self, status=CheckStatus.UNSUPPORTED, detail=detail, **more)

    def raised(self, *sides: RenderSide) -> Check | None:
        """The check of the first render that the template raised on; None when it raised on none."""
        failed = next((side for side in sides if side.error), None)
        if failed is None:
            return None
        place = ""
        if failed.rendered.kind == "raises" and failed.conversation.messages:
            roles = ", ".join(str(message.get("role")) for message in failed.conversation.messages)
            place = f" (with the messages {roles})."
        detail = failed.error + place
        return replace(self, status=CheckStatus.RAISES, detail=detail, failed=failed, line=failed.rendered.line)

    @property
    def passed(self) -> bool:
        """Whether the two renders agree. True for a void pass too."""
        return self.comparison.passed if self.comparison is not None else self.status is CheckStatus.OK

    def to_dict(self, template: str) -> dict[str, Any]:
        """The check as JSON, with both renders and a window of tokens around the first difference."""
        comparison = self.comparison
        fields: dict[str, Any] = {
            **{name: getattr(self, name) for name in ("name", "title", "passed", "void", "decisive", "detail", "line")},
            "purpose": self.purpose.value, "status": self.status.value, "source": line_text(template, self.line),
            "expected_ids": [], "actual_ids": [], "expected_text": "", "actual_text": "",
            "lines": {"expected": None, "actual": None}, "sources": {"expected": "", "actual": ""},
            **dict.fromkeys(_OF_COMPARISON),
        }
        if self.failed is not None and comparison is None:
            fields["conversations"] = {"before": conversation_dict(self.failed.conversation), "after": None}
        if comparison is None:
            return fields
        fields |= {
            "text_passed": comparison.text_passed,
            "token_passed": comparison.passed,
            "conversations": {
                "before": conversation_dict(comparison.before.conversation),
                "after": conversation_dict(comparison.after.conversation),
            },
            "renders": {
                "expected": comparison.before.to_dict(with_ids=not comparison.passed),
                "actual": comparison.after.to_dict(with_ids=not comparison.passed),
            },
        }
        if comparison.passed:
            fields["delta"] = {"ids": comparison.delta_ids.tolist(), "text": comparison.delta_text}
            return fields
        return fields | _difference(comparison, template)


def _difference(comparison: RenderComparison, template: str) -> dict[str, Any]:
    index = comparison.index
    assert index is not None
    before, after = comparison.before, comparison.after
    line, other = comparison.lines
    condition = deciding_condition(template, line, other)
    start, stop = max(0, index - WINDOW_BEFORE), index + WINDOW_AFTER
    return {
        "index": index,
        "char_index": comparison.char_index,
        "expected_ids": before.ids[index:stop].tolist(),
        "actual_ids": after.ids[index:stop].tolist(),
        "expected_text": before.codec.decode(before.ids[index:stop]),
        "actual_text": after.codec.decode(after.ids[index:stop]),
        "line": line,
        "source": line_text(template, line),
        "lines": {"expected": line, "actual": other},
        "sources": {"expected": line_text(template, line), "actual": line_text(template, other)},
        "decided_by": None if condition is None else {"line": condition.line, "source": condition.source},
        "window": {
            "start": start, "index": index, "expected": before.tokens(start, stop), "actual": after.tokens(start, stop),
        },
    }


def conversation_dict(conversation: Conversation) -> dict[str, Any]:
    """What a render was asked for, as JSON."""
    return {
        "messages": list(conversation.messages),
        "tools": None if conversation.tools is None else list(conversation.tools),
        "kwargs": dict(conversation.kwargs or {}),
        "add_generation_prompt": conversation.add_generation_prompt,
    }


@dataclass(frozen=True, eq=False)
class CheckReport:
    """All that a check found out about a chat template."""

    chat_template: str
    chat_template_sha256: str
    tokenizer: Mapping[str, Any] | None  # Name, sha256 and encoder; None = checked without a tokenizer.
    form: str  # The form of messages that the template accepts, in words.
    prefix_preserving: bool | None
    """The answer of the twelve lines of Hugging Face's TITO post. None = no answer: the template raises on them in
    every form, or does not render the call or its result."""
    checks: Sequence[Check]
    notes: Sequence[str] = ()
    repair: Any = None
    """A :class:`rollout_inspector.text.chat_templates.repair.search.Repair`, once searched and found."""
    repair_detail: str = ""  # Why there is no repair, or what it leaves broken.
    marks: Any = None  # :class:`GenerationTags`, once looked for and found.
    marks_detail: str = ""  # Why there are none.
    verdicts: Mapping[str, str] = field(default_factory=dict)
    tools: Sequence[Mapping[str, Any]] | None = None  # Function schemas that the check was asked with.
    kwargs: Mapping[str, Any] | None = None  # Template kwargs that the check was asked with.
    conversation: Sequence[Mapping[str, Any]] | None = None  # The user's own messages, which were probed too.

    def check(self, name: str) -> Check:
        """The check of that name. Raises ``KeyError``."""
        for check in self.checks:
            if check.name == name:
                return check
        raise KeyError(name)

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON."""
        return {
            "prefix_preserving": self.prefix_preserving, "verdicts": dict(self.verdicts), "form": self.form,
            "notes": list(self.notes), "tokenizer": None if self.tokenizer is None else dict(self.tokenizer),
            "chat_template": self.chat_template, "chat_template_sha256": self.chat_template_sha256,
            "checks": [check.to_dict(self.chat_template) for check in self.checks],
            "repair": None if self.repair is None else self.repair.to_dict(), "repair_detail": self.repair_detail,
            "marks": None if self.marks is None else self.marks.to_dict(), "marks_detail": self.marks_detail,
        }


_MARKED = {"ARGX": "a tool call", "RESX": "a tool result", "ANSX": "an answer", "SYSX": "the system text"}


def what_changed(comparison: RenderComparison) -> str:
    """The difference between two renders in a few words."""
    if comparison.text_passed:
        return "the text is kept but splits into other tokens"
    lost, gained = comparison.lost_and_gained()
    for text, verb in ((lost, "disappears"), (gained, "appears")):
        other = gained if text is lost else lost
        if re.search(r"think>\s*</think", text) and not re.search(r"think>\s*</think", other):
            return f"an empty think block {verb}"
    if "THINKX" in lost and "THINKX" not in comparison.after.text:
        return "drops earlier reasoning"
    if "THINKX" in lost:
        return "moves earlier reasoning"
    for marker, words in _MARKED.items():
        if marker in lost and marker not in gained:
            return f"rewrites {words}"
    if not lost.strip() and not gained.strip():
        return "white space changes"
    if not lost:
        return f"text is put in between: {quoted(gained)}"
    was, now = contrast(lost, gained)
    return f"{was} becomes {now}"


def verdicts(checks: Sequence[Check]) -> dict[str, str]:
    """Per purpose: safe, not safe and why, cannot be told, or not available."""
    grouped: dict[Purpose, list[Check]] = {}
    for check in checks:
        if check.purpose is not Purpose.FACTS:
            grouped.setdefault(check.purpose, []).append(check)
    verdict_of = {}
    for purpose, group in grouped.items():
        decisive = [check for check in group if check.decisive]
        undecided = next((check.detail for check in group if check.status is CheckStatus.BROKEN), "")
        verdict_of[purpose.value] = (
            _verdict(purpose, decisive, _hiding(purpose, checks)) if decisive else f"cannot be told: {undecided}"
        )
    return verdict_of


def outcome_of(purpose: Purpose, checks: Sequence[Check]) -> bool | None:
    """The verdict of a purpose in short: True = safe, False = not safe, None = cannot be told, or not available."""
    group = [check for check in checks if check.purpose is purpose and check.decisive]
    if any(check.name == "tool_append" and check.void for check in group):
        return None
    statuses = {check.status for check in group}
    if CheckStatus.BROKEN in statuses:
        return False
    return True if CheckStatus.OK in statuses and not _hiding(purpose, checks) else None


def _hiding(purpose: Purpose, checks: Iterable[Check]) -> list[Check]:
    """The void passes over which a purpose is never safe. A delta on a dummy base supposes that results are kept."""
    purposes = {purpose, Purpose.TOOLS} if purpose is Purpose.FIXED_BASE else {purpose}
    return [check for check in checks if check.purpose in purposes and check.decisive and check.hides]


def _verdict(purpose: Purpose, group: Sequence[Check], hiding: Sequence[Check]) -> str:
    broken = [check for check in group if check.status is CheckStatus.BROKEN]
    good = [check for check in group if check.status is CheckStatus.OK]
    if purpose is Purpose.MASKS:
        if not good and not broken:
            return "not available"
        return "exact" if not broken else f"not exact: {broken[0].detail}"
    if purpose is Purpose.REPRODUCIBLE:
        return "yes" if not broken else f"no: {broken[0].detail}"
    void = next((check for check in group if check.name == "tool_append" and check.void), None)
    if void is not None:
        return f"not available: {void.detail}"
    if broken:
        reasons: dict[str, list[str]] = {}
        for check in broken:
            sentence = check.detail[:1].lower() + check.detail[1:].rstrip(".")
            words = sentence if check.comparison is None else what_changed(check.comparison)
            reasons.setdefault(words, []).append(check.title[:1].lower() + check.title[1:])
        parts = [f"{words} ({_listed(titles)})" for words, titles in reasons.items()]
        return "not safe, " + "; ".join(parts[:3])
    if not good:
        raising = [check for check in group if check.status is CheckStatus.RAISES]
        reason = (raising or list(group))[0].detail
        return f"not available: {reason}"
    if hiding:
        titles = _listed([check.title[:1].lower() + check.title[1:] for check in hiding])
        return f"cannot be told: {hiding[0].unrendered} is not rendered ({titles})"
    limits = [check for check in group if check.status is CheckStatus.RAISES]
    raises = ", except that the template raises on: " + ", ".join(check.title.lower() for check in limits[:4])
    unrendered = dict.fromkeys(words for check in group if check.void for words in check.unrendered.split(", "))
    untold = f"; void for {', '.join(unrendered)} (not rendered)"
    return "safe" + raises * bool(limits) + untold * bool(unrendered)


def _listed(titles: Sequence[str]) -> str:
    return titles[0] if len(titles) == 1 else f"{titles[0]} and {len(titles) - 1} more"
