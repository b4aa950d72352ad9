"""The repair of a chat template as a page shows it: patches and the renders that they change, or why there is none."""

from collections.abc import Mapping
from typing import Any

from rollout_inspector.text.line_diffs import LineDiffs
from rollouts.jobs import template_checks
from rollouts.store.models import TemplateCheck

MAX_CHANGED = 100  # The most changed conversations that the page draws. The JSON twin has all of them.
TITLES = {
    "tools": "For tool results: the smallest change",
    "users": "For user messages: the smallest change",
    "all": "For tool results and user messages",
    "generation": "For the generation prompt: the smallest change",
    "every": "For the generation prompt too",
}
PREFIX = ("TITO with tool results", "multi-turn with users", "generation prompt")


def repairs(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The verified repairs of a report, the smallest first."""
    views, diffs = [], LineDiffs()
    titles = {check["name"]: check["title"] for check in report.get("checks", ())}
    for which, repair in template_checks.repairs_of(report).items():
        changed = repair["changed"]
        views.append({
            "which": which,
            "title": TITLES.get(repair["scope"], "Verified"),
            "template": repair["template"],
            "diff": diff_lines(repair["diff"]),
            "fixes": [{"name": name, "title": titles.get(name, name)} for name in repair["fixes"]],
            "still_broken": [{"name": name, "title": titles.get(name, name)} for name in repair["still_broken"]],
            "n_changed": len(changed),
            "changed": [_changed(conversation, diffs) for conversation in changed[:MAX_CHANGED]],
            "rest": max(0, len(changed) - MAX_CHANGED),
        })
    return views


def marks(report: Mapping[str, Any]) -> dict[str, Any] | None:
    """The verified generation tags of a report, or why there are none; None before the search."""
    marks_report = report.get("marks")
    if not marks_report:
        return {"detail": report["marks_detail"]} if report.get("marks_detail") else None
    return {**marks_report, "diff": diff_lines(marks_report["diff"])}


def search(check: TemplateCheck) -> dict[str, Any]:
    """The state of the search. When it ended without a repair, also the probes that stay broken."""
    report: Mapping[str, Any] = check.report or {}
    if check.progress:
        return {"state": "searching", "progress": check.progress}
    if not report:
        return {"state": "none"}
    broken = [
        {"name": check_row["name"], "title": check_row["title"], "detail": check_row["detail"]}
        for check_row in report["checks"]
        if check_row["status"] == "broken" and check_row["decisive"] and check_row["purpose"] in PREFIX
    ]
    if template_checks.wants_repair(check):
        failed = f"No repair was looked for: {check.job.error}" if check.job.error else ""
        return {"state": "unasked" if broken else "none", "detail": failed}
    if report.get("repair"):
        return {"state": "found", "detail": report["repair_detail"]}
    return {"state": "failed" if broken else "none", "detail": report["repair_detail"], "broken": broken}


def _changed(changed: Mapping[str, Any], diffs: LineDiffs) -> dict[str, Any]:
    """One conversation that renders differently with the repair."""
    return {
        "messages": [message_words(message) for message in changed["messages"]],
        "prompted": changed.get("add_generation_prompt", False),
        "diff": text_diff(changed["before"], changed["after"], diffs),
    }


def text_diff(before: str, after: str, diffs: LineDiffs) -> list[dict[str, str]]:
    """Two texts line by line as a unified diff without its heading. The diffs of a page share their work."""
    return diff_lines("\n".join(diffs.shown(before, after, context=2)))


_CLASSES = {"+": "add", "-": "del", "@": "hunk", "\\": "hunk"}


def diff_lines(diff: str) -> list[dict[str, str]]:
    """The lines of a unified diff, each with its CSS class."""
    lines_of_diff = []
    for line in diff.splitlines():
        heading = line.startswith(("+++", "---"))
        lines_of_diff.append({"tone": "hunk" if heading else _CLASSES.get(line[:1], ""), "text": line})
    return lines_of_diff


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
