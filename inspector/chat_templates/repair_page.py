"""The repair of a chat template as a page shows it: patches and the renders that they change, or why there is none."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from rollouts.jobs import template_checks
from rollouts.store.models import TemplateCheck

MAX_CHANGED = 100
"""The most changed conversations that the page draws. The JSON twin has all of them."""
TITLES = {
    "tools": "For tool results: the smallest change",
    "users": "For user messages: the smallest change",
    "all": "For tool results and user messages",
    "generation": "For the generation prompt: the smallest change",
    "every": "For the generation prompt too",
}
PREFIX = ("TITO with tool results", "multi-turn with users", "generation prompt")
WHICH = ("repair", "wider", "widest")
"""The names of the repairs of a report in addresses, the smallest repair first."""


def named(report: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Name in addresses -> repair of the report, the smallest first."""
    found: dict[str, Mapping[str, Any]] = {}
    repair: Mapping[str, Any] | None = report.get("repair")
    for which in WHICH:
        if repair:
            found[which] = repair
            repair = repair.get("wider")
    return found


def repairs(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The verified repairs of a report, the smallest first."""
    found = []
    titles = {check["name"]: check["title"] for check in report.get("checks", ())}
    for which, repair in named(report).items():
        changed = repair["changed"]
        found.append(
            {
                "which": which,
                "title": TITLES.get(repair["scope"], "Verified"),
                "template": repair["template"],
                "diff": diff_lines(repair["diff"]),
                "fixes": [{"name": name, "title": titles.get(name, name)} for name in repair["fixes"]],
                "still_broken": [{"name": name, "title": titles.get(name, name)} for name in repair["still_broken"]],
                "n_changed": len(changed),
                "changed": [_changed(one) for one in changed[:MAX_CHANGED]],
                "rest": max(0, len(changed) - MAX_CHANGED),
            }
        )
    return found


def marks(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """The verified generation tags of a report, or why there are none; None before the search."""
    found = report.get("marks")
    if not found:
        return {"detail": report["marks_detail"]} if report.get("marks_detail") else None
    return {**found, "diff": diff_lines(found["diff"])}


def search(check: TemplateCheck) -> dict[str, Any]:
    """The state of the search. When it ended without a repair, also the probes that stay broken."""
    report: Mapping[str, Any] = check.report or {}
    if check.progress:
        return {"state": "searching", "progress": check.progress}
    if not report:
        return {"state": "none"}
    broken = [
        {"name": one["name"], "title": one["title"], "detail": one["detail"]}
        for one in report["checks"]
        if one["status"] == "broken" and one["decisive"] and one["purpose"] in PREFIX
    ]
    if template_checks.wants_repair(check):
        failed = f"No repair was looked for: {check.job.error}" if check.job.error else ""
        return {"state": "unasked" if broken else "none", "detail": failed}
    if report.get("repair"):
        return {"state": "found", "detail": report["repair_detail"]}
    return {"state": "failed" if broken else "none", "detail": report["repair_detail"], "broken": broken}


def _changed(changed: Mapping[str, Any]) -> dict[str, Any]:
    """One conversation that renders differently with the repair."""
    return {
        "messages": [message_words(message) for message in changed["messages"]],
        "prompted": changed.get("add_generation_prompt", False),
        "diff": text_diff(changed["before"], changed["after"]),
    }


def text_diff(before: str, after: str, context: int = 2) -> list[dict[str, str]]:
    """Two texts line by line as a unified diff without its heading."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=context)
    return diff_lines("\n".join(list(lines)[2:]))


_CLASSES = {"+": "add", "-": "del", "@": "hunk", "\\": "hunk"}


def diff_lines(diff: str) -> list[dict[str, str]]:
    """The lines of a unified diff, each with its CSS class."""
    found = []
    for line in diff.splitlines():
        heading = line.startswith(("+++", "---"))
        found.append({"tone": "hunk" if heading else _CLASSES.get(line[:1], ""), "text": line})
    return found


def _content(content: Any) -> str:
    """Content as text; the parts of a list are joined."""
    parts = content if isinstance(content, list) else [content]
    return " ".join(str(part.get("text", part) if isinstance(part, Mapping) else part) for part in parts)


def message_words(message: Mapping[str, Any]) -> dict[str, str]:
    """A message as one line: its role, its text, its reasoning and its calls."""
    parts = [f"thinks: {message['reasoning_content']}"] if message.get("reasoning_content") else []
    parts += [_content(message["content"])] if message.get("content") else []
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else []:
        function = call.get("function", call) if isinstance(call, Mapping) else {}
        if isinstance(function, Mapping):
            parts.append(f"calls {function.get('name')}({function.get('arguments')})")
    return {"role": str(message.get("role", "")), "text": " · ".join(parts) or "(empty)"}
