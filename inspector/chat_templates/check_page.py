"""What the page of a check draws: the verdict in words, the probes by purpose, the lines that decided."""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from django.utils.html import format_html
from django.utils.safestring import SafeString, mark_safe

from inspector.chat_templates.repair_page import marks, message_words, repairs, search
from inspector.chat_templates.template_matrix import word_of
from inspector.html.token_diff import marked
from rollout_inspector.streams.align import AlignedGroup, align_ids
from rollout_inspector.streams.trajectory import ids_array
from rollout_inspector.text.chat_templates.probes.report import Purpose
from rollout_inspector.text.html.text import text_html
from rollouts.store.chat_templates.tokenizers import byte_table
from rollouts.store.models import TemplateCheck

GLYPHS = {"ok": "●", "broken": "▲", "differs": "≠", "raises": "◆", "not rendered": "○", "void": "◇"}
PASSING = ("ok", "not rendered")  # Words of probes that say nothing against the template. They are folded.
IsSpecial = Callable[[int], bool]  # Whether an id is a control token.
PROBE_KEYS = (
    "name", "title", "status", "detail", "void", "decisive", "index", "line", "lines", "text_passed", "token_passed",
    "decided_by",
)
MARKED = "k f"  # Classes of the first token that differs: filled and ruled, never by colour alone.


def drawn(check: TemplateCheck) -> dict[str, Any]:
    """What only the template needs: headline, probes by purpose, and the lines of the chat template."""
    report: Mapping[str, Any] | None = check.report
    if not report:
        return {"target": check}
    checks: list[Mapping[str, Any]] = report["checks"]
    is_special = _special_of(check)
    groups = _groups(checks, is_special)
    return {
        "target": check,
        "headline": headline(report),
        "verdicts": [
            {"purpose": purpose, "text": text, "glyph": _verdict_glyph(text)}
            for purpose, text in report["verdicts"].items()
        ],
        "decisive": _probe(checks[0], is_special) if checks else None,
        "failing": [group for group in groups if group["failing"]],
        "passing": [group for group in groups if group["passing"]],
        "counts": dict(Counter(_word(check) for check in checks).most_common()),
        "source": _source(report["chat_template"], checks),
        "has_conversation": bool(check.question.get("conversation")),
        **drawn_repair(check),
    }


def drawn_repair(check: TemplateCheck) -> dict[str, Any]:
    """What the card of the repair needs: the patches, or the state of the search."""
    report: Mapping[str, Any] = check.report or {}
    return {
        "target": check,
        "code": check.code,
        "repairs": repairs(report),
        "search": search(check),
        "marks": marks(report),
    }


def drawn_conversation(check: TemplateCheck) -> dict[str, Any]:
    """What only the template of the conversation's page needs."""
    report = check.report or {}
    return {
        "target": check,
        "has_conversation": True,
        "conversation": _strategies(check.question.get("conversation"), report.get("strategies"), _special_of(check)),
    }


def headline(report: Mapping[str, Any]) -> dict[str, str]:
    """The first sentence of the page, with its glyph, its tone and its meaning in plain words."""
    first = report["checks"][0] if report["checks"] else {}
    preserving = report["prefix_preserving"]
    if first.get("void"):
        text = "It looks prefix-preserving, but only because the tool call or its result is not rendered at all."
        return {"tone": "warning", "glyph": "◆", "text": text}
    if preserving is None:
        return {"tone": "warning", "glyph": "◆", "text": "This template cannot be checked with tool messages."}
    if preserving and not str(report["verdicts"].get(Purpose.TOOLS, "")).startswith("safe"):
        means = (
            "Appending a tool result to a plain call leaves every token before it as it was. In other conversations "
            f"it does not, or no probe tells: see “{Purpose.TOOLS}”."
        )
        text = "Prefix-preserving for some tool messages, not for all."
        return {"tone": "warning", "glyph": "◆", "text": text, "means": means}
    if preserving:
        means = "Appending a tool result leaves every token before it as it was."
        return {"tone": "done", "glyph": "●", "text": "Prefix-preserving for tool messages.", "means": means}
    means = (
        "Appending a tool result changes what was rendered before it: a loop that renders the conversation again "
        "trains on tokens that nobody sampled."
    )
    return {"tone": "error", "glyph": "▲", "text": "Not prefix-preserving for tool messages.", "means": means}


def _verdict_glyph(text: str) -> str:
    if text.startswith(("safe", "yes", "exact")):
        return GLYPHS["ok"]
    return GLYPHS["not rendered"] if text.startswith(("not available", "cannot be told")) else GLYPHS["broken"]


def _special_of(check: TemplateCheck) -> IsSpecial:
    """Which ids are control tokens. Without a tokenizer, or when its files are gone, none is."""
    if check.tokenizer is not None:
        with suppress(OSError, ValueError):
            special = byte_table(check.tokenizer.files_sha256).special
            return lambda token_id: 0 <= token_id < len(special) and bool(special[token_id])
    return lambda _: False


def _groups(checks: Iterable[Mapping[str, Any]], is_special: IsSpecial) -> list[dict[str, Any]]:
    """The probes by purpose; those of a purpose that pass stand apart."""
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for check in checks:
        groups[check["purpose"]].append(_probe(check, is_special))
    return [
        {
            "purpose": purpose,
            "failing": [probe for probe in probes if probe["word"] not in PASSING],
            "passing": [probe for probe in probes if probe["word"] in PASSING],
            "passed": [
                (GLYPHS[word], word, n)
                for word in PASSING
                if (n := sum(probe_row["word"] == word for probe_row in probes))
            ],
        }
        for purpose, probes in groups.items()
    ]


def _probe(check: Mapping[str, Any], is_special: IsSpecial) -> dict[str, Any]:
    window, word = check["window"], _word(check)
    return {
        **{key: check[key] for key in PROBE_KEYS},
        "glyph": GLYPHS[word],
        "word": word,
        "tone": "raises" if word == "differs" else check["status"],
        "renders": _both_renders(window, is_special) if window else None,
        "conversation": _conversation(check["conversations"]),
    }


def _word(check: Mapping[str, Any]) -> str:
    word = word_of(check)
    return "not rendered" if word == "unsupported" else word


def _both_renders(window: Mapping[str, Any], is_special: IsSpecial) -> list[dict[str, Any]]:
    """Both renders in stretches: the shared tokens before the first difference, what differs, and what is equal again.
    ``start`` and ``stop`` count the tokens of the left render."""
    left, right = window["expected"], window["actual"]
    stretches: list[dict[str, Any]] = []
    groups = _aligned(left, right)
    for group in groups:
        start, stop = (window["start"] + at for at in (group.left_start, group.left_stop))
        sides = left[group.left_start : group.left_stop], right[group.right_start : group.right_stop]
        html = [_tokens(side, is_special) for side in sides]
        if not group.equal and (group is not groups[-1] or sides[0]):  # what is appended at the end is no difference
            html = [mark_safe(marked(side_html, tag)) for side_html, tag in zip(html, ("del", "ins"), strict=True)]
        stretches.append({"start": start, "stop": stop, "equal": group.equal, "left": html[0], "right": html[1]})
    return stretches


def _aligned(left: Sequence[Mapping[str, Any]], right: Sequence[Mapping[str, Any]]) -> list[AlignedGroup]:
    """Two windows that start alike and end anywhere, in groups. What only the end of a window makes differ is left out:
    that render goes on, unseen."""
    # An end of its own for each side, so that the ends are not taken for each other.
    ids = [ids_array([*(token["id"] for token in side), end]) for side, end in ((left, -1), (right, -2))]
    *groups, last = align_ids(*ids)
    last = replace(last, left_stop=len(left), right_stop=len(right))
    only_left, only_right = last.right_start == len(right), last.left_start == len(left)
    unseen = (only_left and len(left) <= len(right)) or (only_right and len(right) <= len(left))
    return groups if unseen else [*groups, last]


def _tokens(tokens: Iterable[Mapping[str, Any]], is_special: IsSpecial, marks_first: bool = False) -> SafeString:
    drawn_tokens: list[SafeString] = []
    for token in tokens:
        line = f", template line {token['line']}" if token.get("line") else ""
        names = [MARKED] if marks_first and not drawn_tokens else []
        drawn_tokens.append(format_html(
            '<i class="{}" title="id {}{}">{}</i>',
            " ".join([*names, "x"] if is_special(token["id"]) else names),
            token["id"],
            line,
            mark_safe(text_html(token["text"], spaces=True)),  # text_html escapes everything
        ))
    return mark_safe("".join(drawn_tokens))  # each piece was escaped by format_html


def _conversation(conversations: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The messages of the shorter render, and the appended messages."""
    if not conversations or not conversations["before"]:
        return None
    before = conversations["before"]["messages"]
    after = conversations["after"]["messages"] if conversations["after"] else []
    appended = after[len(before) :] if after[: len(before)] == before else after
    return {"before": [message_words(m) for m in before], "appended": [message_words(m) for m in appended]}


def _source(template: str, checks: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The template line by line, with the probes that fail at each line."""
    probes_by_line: dict[int, list[dict[str, str]]] = defaultdict(list)
    decides: set[int] = set()
    for check in checks:
        if check["status"] not in ("broken", "raises"):
            continue
        places = {check["lines"]["expected"], check["lines"]["actual"], check["line"]}
        if check["decided_by"]:
            decides.add(check["decided_by"]["line"])
            places.add(check["decided_by"]["line"])
        for line in sorted(place for place in places if place):
            probes_by_line[line].append({"name": check["name"], "title": check["title"]})
    return [
        {"number": number, "text": text, "probes": probes_by_line.get(number, [])[:8], "decides": number in decides}
        for number, text in enumerate(template.splitlines(), start=1)
    ]


def _strategies(
    conversation: Sequence[Mapping[str, Any]] | None, found: Mapping[str, Any] | None, is_special: IsSpecial
) -> dict[str, Any] | None:
    """The user's own conversation, and for each turn the ids that each strategy appends to the completion."""
    if not conversation:
        return None
    messages = [message_words(message) for message in conversation]
    if found is None:
        detail = "Choose a tokenizer to see what each strategy makes of it: strategies append tokens."
        return {"messages": messages, "turns": [], "refused": {}, "rows": {}, "detail": detail}
    turns = [
        {
            **turn,
            "reply": _tokens(turn["reply"], is_special),
            "deltas": [_delta(delta, is_special) for delta in turn["deltas"]],
        }
        for turn in found["turns"]
    ]
    return {**found, "messages": messages, "turns": turns}


def _delta(delta: Mapping[str, Any], is_special: IsSpecial) -> dict[str, Any]:
    back, delta_tokens = delta["stream"] - delta["shared"], delta["tokens"]
    tokens = _tokens(delta_tokens, is_special, marks_first=bool(back))
    return {**delta, "back": back, "rest": delta["n"] - len(delta_tokens), "tokens": tokens}
