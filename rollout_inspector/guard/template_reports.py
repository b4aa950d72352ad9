"""What a check of chat templates prints: text, JSON, annotations of GitHub."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rollout_inspector.guard.checked_templates import CheckedTemplate
from rollout_inspector.guard.fail_rules import ExitStatus
from rollout_inspector.guard.report_formats import markdown_cell, workflow_data, workflow_property
from rollout_inspector.outputs import line_of
from rollout_inspector.text.chat_templates.probes.report import Check

VERSION = 1  # Of the JSON report.
MAX_CHECKS = 3  # Failing checks of one template that are printed.


def as_text(found: Sequence[CheckedTemplate]) -> str:
    """For a terminal."""
    lines = []
    for template in found:
        report = template.report
        lines.append(line_of(template.name) + (f" (sha256 {report.chat_template_sha256[:12]})" if report else ""))
        if report is not None:
            lines += [f"  {note}" for note in report.notes]
            lines += [f"  {purpose}: {verdict}" for purpose, verdict in report.verdicts.items()]
            failing = template.failing()
            lines += [
                f"  broken: {check.title}. {check.detail}{_decided(template, check)}"
                for check in failing[:MAX_CHECKS]
            ]
            lines += [f"  ... and {len(failing) - MAX_CHECKS} more."] * (len(failing) > MAX_CHECKS)
        if template.compared is not None and template.compared.outcome is not ExitStatus.UNDECIDED:
            lines += [f"  changed: {change}" for change in template.compared.changes]
            lines += [f"  {changed.sentence()}" for changed in template.compared.lines]
            lines += [f"  {note}" for note in template.compared.notes]
        lines += [f"  {template.last_sentence()}", ""]
    return "\n".join(line_of(line) for line in lines)


def _decided(checked: CheckedTemplate, check: Check) -> str:
    """Which condition decides on a difference, as a sentence after a blank; empty = not known."""
    decision = check.to_dict(checked.text)["decided_by"]
    return "" if decision is None else f" Decided on line {decision['line']}: {decision['source']}"


def as_json(found: Sequence[CheckedTemplate]) -> str:
    """One object."""
    value = {
        "version": VERSION,
        "outcome": ExitStatus.of_all(template.outcome for template in found).name.lower(),
        "templates": [_value(template) for template in found],
    }
    return json.dumps(value, indent=1) + "\n"


def _value(one: CheckedTemplate) -> dict[str, Any]:
    report, compared = one.report, one.compared
    tokenizer = one.tokenizer
    return {
        "name": one.name,
        "outcome": one.outcome.name.lower(),
        "reasons": one.reasons(),
        "sha256": None if report is None else report.chat_template_sha256,
        "tokenizer_sha256": None if tokenizer is None else tokenizer.sha256,
        "prefix_preserving": None if report is None else report.prefix_preserving,
        "verdicts": {} if report is None else dict(report.verdicts),
        "checks": [] if report is None else [_check_value(one, check) for check in report.checks],
        "lock": None if compared is None else {
            "outcome": compared.outcome.name.lower(), "changes": list(compared.changes), "notes": list(compared.notes),
            "lines": [
                {
                    "first": line.first, "last": line.last, "was": line.was, "now": line.now,
                    "probes": list(line.titles), "is_tried": line.is_tried, "sentence": line.sentence(),
                }
                for line in compared.lines
            ],
        },
    }


def _check_value(checked: CheckedTemplate, check: Check) -> dict[str, Any]:
    value = check.to_dict(checked.text)
    names = ("name", "title", "purpose", "status", "void", "decisive", "detail", "line", "source", "decided_by")
    return {name: value[name] for name in names}


def as_github(found: Sequence[CheckedTemplate]) -> str:
    """Workflow commands: an annotation for each changed line and for each template."""
    lines = []
    for template in found:
        inside = Path(template.name, "chat_template.jinja")  # of a tokenizer; without such a file, its folder
        file = workflow_property(str(inside if inside.is_file() else Path(template.name)))
        for changed in template.compared.lines if template.compared is not None else ():
            place = f"file={file},line={changed.first}"
            level = "error" if changed.titles or not changed.is_tried else "notice"
            lines.append(f"::{level} {place},title=Chat template::{workflow_data(changed.sentence())}")
        sentences = [*(template.compared.changes if template.compared is not None else ()), template.last_sentence()]
        level = "notice" if template.outcome is ExitStatus.PASSED else "error"
        lines.append(f"::{level} file={file},title=rollout-inspector template::{workflow_data(' '.join(sentences))}")
    return "\n".join(lines) + "\n"


def as_markdown(found: Sequence[CheckedTemplate]) -> str:
    """For the summary of a job."""
    lines = [f"## Chat templates: {ExitStatus.of_all(template.outcome for template in found).name.lower()}", ""]
    lines += ["| template | outcome | why |", "|---|---|---|"]
    lines += [
        f"| {markdown_cell(template.name)} | {template.outcome.name.lower()} "
        f"| {markdown_cell(template.last_sentence())} |"
        for template in found
    ]
    for template in found:
        compared = template.compared
        if compared and (changes := [*compared.changes, *(line.sentence() for line in compared.lines)]):
            lines += ["", f"{markdown_cell(template.name)}:", "", *(f"* {markdown_cell(text)}" for text in changes)]
    return "\n".join(lines) + "\n"


TemplateReport = Callable[[Sequence[CheckedTemplate]], str]
TEMPLATE_REPORTS: dict[str, TemplateReport] = {
    "text": as_text, "json": as_json, "github": as_github, "markdown": as_markdown,
}
