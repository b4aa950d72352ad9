"""Reports of a check: text, JSON, JUnit XML, SARIF, annotations of GitHub, Markdown. Sources: the JUnit XML schema of
Jenkins; SARIF 2.1.0 of OASIS; GitHub's workflow commands."""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import PurePath
from typing import Any
from xml.etree import ElementTree

from rollout_inspector.diagnose import KINDS
from rollout_inspector.diagnose.checks import CHECKS, check_sentence
from rollout_inspector.diagnose.finding import Severity, cost_sentence
from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.formats import Rejected
from rollout_inspector.guard.checked_files import CheckedFiles, PlacedFinding
from rollout_inspector.guard.fail_rules import ExitStatus, FilesVerdict
from rollout_inspector.outputs import line_of, plain

VERSION = 1  # The version of the JSON report.
MAX_TEXT = 10  # Findings of one kind that reports for people print. The JSON report holds more.
OPENED = "To see the tokens: rollout-inspector serve, then import the file, or rollout-inspector push FILE."
MAX_CELL = 300  # Characters of a text in a table of Markdown.
_LEVEL = {Severity.ERROR: "error", Severity.WARNING: "warning", Severity.INFO: "note"}


def place_text(one: PlacedFinding) -> str:
    """Where a finding is: file, line, trajectory, step or row, tokens."""
    finding = one.finding
    file = one.file if one.line is None else f"{one.file}:{one.line}"
    inside = f"row {finding.row}" if finding.step is None else f"step {finding.step}"
    return f"{line_of(file)}: {line_of(one.trajectory)}, {inside}, tokens {finding.start}-{finding.stop}"


def finding_text(one: PlacedFinding) -> str:
    """Where a finding is, what happened, what it costs and what mends it, on one line."""
    return " ".join([f"{place_text(one)}.", *_sentences(one)])


def _sentences(one: PlacedFinding) -> Iterator[str]:
    """What happened, what it costs and what mends it."""
    yield line_of(one.finding.evidence)
    if cost := cost_sentence(one.finding.cost, one.finding.severity):
        yield f"Cost: {cost}."
    if one.finding.remedy:
        yield f"Remedy: {line_of(one.finding.remedy)}"


def _read(checked: CheckedFiles) -> str:
    """What was read, and what cannot be seen from rows where no call is in the files."""
    n, formats = len(checked.files), f" ({', '.join(checked.formats)})" if checked.formats else ""
    rows_alone = " No call is in them: rows alone do not tell what the prompts were and which tokens were sampled."
    return (
        f"Read {checked.n_trajectories:,} trajectories, {checked.n_steps:,} steps, {checked.n_rows:,} rows in {n:,} "
        f"file{'s' * (n != 1)}{formats}.{rows_alone * bool(checked.n_rows and not checked.n_steps)}"
    )


def _unchecked(checked: CheckedFiles) -> Iterator[str]:
    """One sentence for each check that was not decided everywhere."""
    for name in CHECKS:
        if missing := checked.undecided.get(name):
            lacking = ", ".join(f"{field} (on {n:,})" for field, n in sorted(missing.items()))
            yield f"{name} lacks: {lacking}."


def _outcome(checked: CheckedFiles, verdict: FilesVerdict) -> str:
    return {
        ExitStatus.PASSED: check_sentence(checked.totals()),
        ExitStatus.FAILED: f"Failed by {', '.join(verdict.failing)}.",
        ExitStatus.UNDECIDED: f"Not decided. {' '.join(verdict.reasons)}",
    }[verdict.outcome]


def _by_kind(checked: CheckedFiles, kind: str) -> list[PlacedFinding]:
    return [placed for placed in checked.found if placed.finding.kind == kind]


# -- text ------------------------------------------------------------------------------------------


def as_text(checked: CheckedFiles, verdict: FilesVerdict) -> str:
    """For a terminal."""
    undecided = [_outcome(checked, verdict), ""] if verdict.outcome is ExitStatus.UNDECIDED else []
    lines = [*undecided, _read(checked)]
    for kind, count in checked.sorted_kinds():
        lines.append("")
        lines.append(
            f"{count.severity.value:7}  {kind}: {title_of(kind)}. {count.n_findings:,} on {count.n_trajectories:,} of "
            f"{checked.n_trajectories:,} trajectories ({100 * checked.rate(kind):.4g} %)."
        )
        findings = _by_kind(checked, kind)[:MAX_TEXT]
        for finding in findings:
            lines.append(f"  {place_text(finding)}")
            lines += [f"    {sentence}" for sentence in _sentences(finding)]
        if count.n_findings > len(findings):
            lines.append(f"  ... and {count.n_findings - len(findings):,} more.")
    if checked.n_unread:
        lines += ["", "Not read:"]
        lines += [f"  {_unread_text(line)}" for line in checked.unread]
        if checked.n_unread > len(checked.unread):
            lines.append(f"  ... and {checked.n_unread - len(checked.unread):,} more.")
    if unchecked := list(_unchecked(checked)):
        lines += ["", "Not checked, and on how many trajectories:", *(f"  {sentence}" for sentence in unchecked)]
        lines += [f"  {sentence}" for sentence in checked.lacks]
    if verdict.accepted:
        lines += ["", "Allowed:", *(f"  {sentence}" for sentence in verdict.accepted)]
    opened = ["", OPENED] if checked.found and checked.formats else []
    return "\n".join([*lines, *opened, "", _outcome(checked, verdict), ""])


def _unread_text(line: Rejected) -> str:
    return f"{line_of(line.file if line.line is None else f'{line.file}:{line.line}')}: {line_of(line.reason)}"


# -- JSON ------------------------------------------------------------------------------------------


def as_json(checked: CheckedFiles, verdict: FilesVerdict) -> str:
    """One object; ``check --baseline`` reads it."""
    value = {
        "version": VERSION,
        "outcome": verdict.outcome.name.lower(),
        "sentence": _outcome(checked, verdict),
        "failing": list(verdict.failing),
        "reasons": list(verdict.reasons),
        "accepted": list(verdict.accepted),
        "files": checked.files,
        "formats": checked.formats,
        "trajectories": checked.n_trajectories,
        "steps": checked.n_steps,
        "rows": checked.n_rows,
        "kinds": {
            kind: {
                "severity": count.severity.value, "findings": count.n_findings, "trajectories": count.n_trajectories,
                "rate": checked.rate(kind),
            }
            for kind, count in checked.sorted_kinds()
        },
        "findings": [_finding_value(finding) for finding in checked.found],
        "checks": {
            name: {"decided": checked.checks[name], "undecided": dict(checked.undecided.get(name, {}))}
            for name in CHECKS
            if name in checked.checks or name in checked.undecided
        },
        "n_unread": checked.n_unread,
        "unread": [{"file": line.file, "line": line.line, "reason": line.reason} for line in checked.unread],
    }
    return json.dumps(value, indent=1) + "\n"


def _finding_value(one: PlacedFinding) -> dict[str, Any]:
    finding = one.finding
    return {
        "file": one.file, "line": one.line, "trajectory": one.trajectory, "training_step": one.training_step,
        "step": finding.step, "row": finding.row, "start": finding.start, "stop": finding.stop,
        "axis": finding.axis.value, "kind": finding.kind, "severity": finding.severity.value,
        "expected_ids": finding.expected_ids.tolist(), "actual_ids": finding.actual_ids.tolist(),
        "expected_text": finding.expected_text, "actual_text": finding.actual_text, "evidence": finding.evidence,
        "remedy": finding.remedy, "missing": finding.missing, "cost": vars(finding.cost),
    }


# -- JUnit -----------------------------------------------------------------------------------------


def as_junit(checked: CheckedFiles, verdict: FilesVerdict) -> str:
    """One test case for each kind of finding, one for what was not read, one for the verdict."""
    suite = ElementTree.Element("testsuite", name="rollout-inspector check")
    n_failures = n_errors = 0
    for kind in sorted(set(KINDS) - {"not_decidable"}):
        if kind not in checked.kinds and kind not in verdict.failing:
            continue
        case = ElementTree.SubElement(suite, "testcase", classname="rollouts", name=kind)
        body = "\n".join(
            "\n  ".join([place_text(finding), *_sentences(finding)]) for finding in _by_kind(checked, kind)[:MAX_TEXT]
        )
        if kind in verdict.failing:
            n_failures += 1
            failure = ElementTree.SubElement(case, "failure", message=title_of(kind), type=kind)
            failure.text = body
        else:
            ElementTree.SubElement(case, "system-out").text = body
    case = ElementTree.SubElement(suite, "testcase", classname="rollouts", name="verdict")
    if verdict.outcome is ExitStatus.UNDECIDED:
        n_errors = 1
        error = ElementTree.SubElement(case, "error", message=plain(_outcome(checked, verdict)), type="undecided")
        error.text = "\n".join(map(_unread_text, checked.unread))
    else:
        ElementTree.SubElement(case, "system-out").text = "\n".join([_read(checked), *_unchecked(checked)])
    suite.set("tests", str(len(suite)))
    suite.set("failures", str(n_failures))
    suite.set("errors", str(n_errors))
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ElementTree.tostring(suite, encoding="unicode") + "\n"


# -- SARIF -----------------------------------------------------------------------------------------


def as_sarif(checked: CheckedFiles, verdict: FilesVerdict) -> str:
    """SARIF 2.1.0, as GitHub's code scanning reads it. ``executionSuccessful`` is false where nothing was decided."""
    kinds = [kind for kind, _ in checked.sorted_kinds() if kind in KINDS]
    rules = [
        {
            "id": kind,
            "shortDescription": {"text": KINDS[kind].title},
            "fullDescription": {"text": KINDS[kind].meaning},
            "help": {"text": f"{KINDS[kind].consequence} {KINDS[kind].remedy}"},
            "defaultConfiguration": {"level": _LEVEL[KINDS[kind].severity]},
        }
        for kind in kinds
    ]
    results = [
        {
            "ruleId": placed.finding.kind, "ruleIndex": kinds.index(placed.finding.kind),
            "level": _LEVEL[placed.finding.severity], "message": {"text": finding_text(placed)},
            "locations": [{"physicalLocation": _location(placed)}],
        }
        for placed in checked.found
        if placed.finding.kind in kinds
    ]
    notes = [{"level": "error", "message": {"text": _unread_text(line)}} for line in checked.unread]
    value = {
        "$schema": "https://json.schemastore.org/sarif-2.1.0.json",
        "version": "2.1.0",
        "runs": [
            {
                "tool": {"driver": {"name": "rollout-inspector", "rules": rules}},
                "invocations": [
                    {
                        "executionSuccessful": verdict.outcome is not ExitStatus.UNDECIDED,
                        "exitCode": int(verdict.outcome),
                        "toolExecutionNotifications": notes,
                    }
                ],
                "results": results,
            }
        ],
    }
    return json.dumps(value, indent=1) + "\n"


def _location(one: PlacedFinding) -> dict[str, Any]:
    path = PurePath(one.file)
    uri = path.as_uri() if path.is_absolute() else path.as_posix()
    location: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if one.line is not None:
        location["region"] = {"startLine": one.line}
    return location


# -- GitHub ----------------------------------------------------------------------------------------


def as_github(checked: CheckedFiles, verdict: FilesVerdict) -> str:
    """Workflow commands: an annotation for each finding that is printed, then the verdict."""
    lines = []
    for kind, count in checked.sorted_kinds():
        level = {"error": "error", "warning": "warning", "info": "notice"}[count.severity.value]
        for placed in _by_kind(checked, kind)[:MAX_TEXT]:
            line = "" if placed.line is None else f",line={placed.line}"
            title = workflow_property(f"{title_of(kind)} ({kind})")
            message = workflow_data(finding_text(placed))
            lines.append(f"::{level} file={workflow_property(placed.file)}{line},title={title}::{message}")
        if count.n_findings > MAX_TEXT:
            lines.append(f"::notice::{kind}: {count.n_findings - MAX_TEXT:,} more.")
    for unread in checked.unread[:MAX_TEXT]:
        line = "" if unread.line is None else f",line={unread.line}"
        lines.append(
            f"::error file={workflow_property(unread.file)}{line},title=Not read::{workflow_data(unread.reason)}"
        )
    level = "notice" if verdict.outcome is ExitStatus.PASSED else "error"
    lines.append(
        f"::{level} title=rollout-inspector check::{workflow_data(f'{_read(checked)} {_outcome(checked, verdict)}')}"
    )
    return "\n".join(lines) + "\n"


def workflow_data(text: str) -> str:
    """The message of a workflow command."""
    return plain(text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A"))


def workflow_property(text: str) -> str:
    """A property of a workflow command, such as its file."""
    return workflow_data(text).replace(":", "%3A").replace(",", "%2C")


# -- Markdown --------------------------------------------------------------------------------------


def as_markdown(checked: CheckedFiles, verdict: FilesVerdict) -> str:
    """For the summary of a job or a comment on a pull request."""
    outcome = markdown_cell(_outcome(checked, verdict))
    lines = [f"## Rollouts: {verdict.outcome.name.lower()}", "", outcome, "", _read(checked)]
    if checked.kinds:
        lines += [
            "", "| severity | kind | findings | trajectories | share | first place |", "|---|---|---:|---:|---:|---|",
        ]
        for kind, count in checked.sorted_kinds():
            first = next(iter(_by_kind(checked, kind)), None)
            lines.append(
                f"| {count.severity.value} | `{kind}` | {count.n_findings:,} | {count.n_trajectories:,} | "
                f"{100 * checked.rate(kind):.4g} % | {'' if first is None else markdown_cell(place_text(first))} |"
            )
        lines += ["", "What to do:", ""]
        lines += [f"* `{kind}`: {KINDS[kind].remedy}" for kind, _ in checked.sorted_kinds() if kind in KINDS]
        lines += ["", OPENED]
    if checked.unread:
        lines += ["", "Not read:", ""]
        lines += [f"* {markdown_cell(_unread_text(line))}" for line in checked.unread[:MAX_TEXT]]
    if unchecked := list(_unchecked(checked)):
        lines += ["", "Not checked, and on how many trajectories:", "", *(f"* {sentence}" for sentence in unchecked)]
    return "\n".join(lines) + "\n"


def markdown_cell(text: str) -> str:
    """Text that Markdown shows as it stands."""
    text = line_of(text)
    text = text if len(text) <= MAX_CELL else f"{text[: MAX_CELL - 1]}…"
    text = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return re.sub(r"([\\`*_{}\[\]()#+!|~@])", r"\\\1", text)


Report = Callable[[CheckedFiles, FilesVerdict], str]
REPORTS: dict[str, Report] = {
    "text": as_text,
    "json": as_json,
    "junit": as_junit,
    "sarif": as_sarif,
    "github": as_github,
    "markdown": as_markdown,
}
