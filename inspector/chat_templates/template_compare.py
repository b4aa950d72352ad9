"""Two chat templates side by side: the change of the text, and what changes in the render of each probe."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from inspector.chat_templates.repair_page import diff_lines, text_diff
from inspector.chat_templates.template_matrix import LETTERS, is_missing, word_of
from inspector.web.twins import Page
from rollout_inspector.text.line_diffs import LineDiffs
from rollouts.jobs import template_checks
from rollouts.store.chat_templates.chat_templates import chat_template_labels, newest_chat_templates
from rollouts.store.chat_templates.template_checks import find_checks
from rollouts.store.jobs.jobs import is_active
from rollouts.store.models import ChatTemplate, Project, TemplateCheck, Tokenizer

MAX_TEMPLATES = 300


@dataclass(frozen=True)
class ComparedPage(Page):
    """Two templates side by side, as soon as both are chosen."""

    project: str
    """Code of the project that has registered them."""
    templates: list[dict[str, str]]
    """Hash and label of the templates that can be chosen, newest first."""
    a: dict[str, Any] | None = None
    """The first: hash, label, and the state of its check; null = it is not chosen."""
    b: dict[str, Any] | None = None
    """The second."""
    same: bool = False
    """Their texts are equal."""
    diff: str = ""
    """Their texts as a unified diff."""
    tokenizer: str | None = None
    """The tokenizer of both checks; None compares characters."""
    missing: list[str] = field(default_factory=list)
    """Hashes of those that have not been checked yet."""
    under_way: bool = False
    """A worker has not answered yet."""
    ready: bool = False
    """Both reports are there."""
    probes: list[dict[str, Any]] = field(default_factory=list)
    """Each probe, how it came out with either template, and the change of its render; empty until ready."""


def choices(project: Project, chosen: Sequence[str]) -> list[dict[str, str]]:
    """Hash and label of the newest chat templates of a project, newest first, then those chosen that are older. Two
    queries at most."""
    templates = newest_chat_templates(project, MAX_TEMPLATES)
    listed = {template.chat_template_id: template.label for template in templates}
    if older := [sha256 for sha256 in chosen if sha256 not in listed]:
        listed |= chat_template_labels(project, older)
    return [{"sha256": sha256, "label": label or "unnamed template"} for sha256, label in listed.items()]


def compare(
    project: Project, templates: list[dict[str, str]], a: ChatTemplate, b: ChatTemplate, tokenizer: Tokenizer | None,
) -> ComparedPage:
    """Two templates of a project side by side. ``templates``: those that can be chosen, both among them. One query."""
    names = {template["sha256"]: template["label"] for template in templates}
    codes = {template.sha256: template_checks.code_of(project, tokenizer, template.sha256, {}) for template in (a, b)}
    checks = find_checks(codes.values(), report=True)
    checks_of_sides = [checks.get(codes[template.sha256]) for template in (a, b)]
    diffs = LineDiffs()
    lines = diffs.shown(a.text, b.text, (names[a.sha256], names[b.sha256]))
    first, second = (
        template.report if template and template.status == TemplateCheck.Status.DONE else None
        for template in checks_of_sides
    )
    return ComparedPage(
        project=project.code, templates=templates, a=_compared(a, names[a.sha256], checks_of_sides[0]),
        b=_compared(b, names[b.sha256], checks_of_sides[1]), same=a.text == b.text, diff="\n".join(lines),
        tokenizer=tokenizer.name if tokenizer else None,
        missing=[template.sha256 for template, check in zip((a, b), checks_of_sides, strict=True) if is_missing(check)],
        under_way=any(check is not None and is_active(check) for check in checks_of_sides),
        ready=bool(first and second), probes=_probes(first, second, diffs) if first and second else [],
    )


def _compared(template: ChatTemplate, label: str, check: TemplateCheck | None) -> dict[str, Any]:
    return {
        "sha256": template.sha256,
        "label": label,
        "code": check.code if check else None,
        "status": check.status if check else "missing",
        "error": check.error if check else "",
        "prefix_preserving": ((check.cells or {}) if check else {}).get("prefix_preserving"),
    }


def _probes(a: Mapping[str, Any], b: Mapping[str, Any], diffs: LineDiffs) -> list[dict[str, Any]]:
    """Each probe with both outcomes, and the change of its longer render."""
    before = {check["name"]: check for check in a["checks"]}
    after = {check["name"]: check for check in b["checks"]}
    differences = []
    for name in dict.fromkeys([*before, *after]):
        first, other = before.get(name), after.get(name)
        either = first or other
        assert either is not None
        words = [word_of(side) if side else "" for side in (first, other)]
        texts = [_render(side) for side in (first, other)]
        differs = None not in texts and texts[0] != texts[1]
        differences.append({
            "name": name,
            "title": either["title"],
            "purpose": either["purpose"],
            "a": words[0],
            "b": words[1],
            "turned": words[0] != words[1],
            "render_differs": differs,
            "render_diff": text_diff(texts[0] or "", texts[1] or "", diffs) if differs else [],
            "same_conversation": (first or {}).get("conversations") == (other or {}).get("conversations"),
        })
    return differences


def _render(check: Mapping[str, Any] | None) -> str | None:
    renders = check.get("renders") if check else None
    return renders["actual"]["text"] if renders else None


def drawn(compared: ComparedPage) -> dict[str, Any]:
    """What only the template reads: the lines of the diff, and the probes that changed, another outcome first."""
    changed = [
        {**probe, "letters": [LETTERS.get(probe[side], "") for side in "ab"]}
        for probe in compared.probes
        if probe["turned"] or probe["render_differs"]
    ]
    changed.sort(key=lambda probe: not probe["turned"])
    return {"lines": diff_lines(compared.diff), "changed": changed, "n_same": len(compared.probes) - len(changed)}
