"""The verdicts as text, JSON and JUnit XML."""

import json
from collections.abc import Sequence
from xml.etree import ElementTree

from rollout_inspector.gauntlet.properties import PropertyOutcome, Verdict
from rollout_inspector.outputs import line_of, plain


def n_broken(verdicts: Sequence[Verdict]) -> int:
    """Properties that are broken."""
    return sum(verdict.outcome is PropertyOutcome.BROKEN for verdict in verdicts)


def as_text(verdicts: Sequence[Verdict]) -> str:
    """A line for each property, and one in the end."""
    lines = [f"{verdict.outcome.value:12} {verdict.name:20} {line_of(verdict.evidence)}" for verdict in verdicts]
    n = n_broken(verdicts)
    end = f"{n} of {len(verdicts)} properties are broken." if n else "No property is broken."
    if names := ", ".join(verdict.name for verdict in verdicts if verdict.is_undecided):
        end += f" Not decided, although every gateway should offer it: {names}."
    return "\n".join([*lines, "", end, ""])


def as_json(verdicts: Sequence[Verdict]) -> str:
    """One object."""
    properties = [
        {"name": verdict.name, "verdict": verdict.outcome.value, "evidence": verdict.evidence} for verdict in verdicts
    ]
    return json.dumps({"properties": properties, "broken": n_broken(verdicts)}, indent=1) + "\n"


def as_junit(verdicts: Sequence[Verdict]) -> str:
    """A test case for each property."""
    suite = ElementTree.Element("testsuite", name="rollout-inspector gauntlet", tests=str(len(verdicts)))
    tags = [_junit_tag(verdict) for verdict in verdicts]
    for tag, name in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
        suite.set(name, str(tags.count(tag)))
    for verdict, tag in zip(verdicts, tags, strict=True):
        case = ElementTree.SubElement(suite, "testcase", classname="gauntlet", name=verdict.name)
        ElementTree.SubElement(case, tag, message=line_of(verdict.evidence))
    ElementTree.indent(suite)
    return plain(ElementTree.tostring(suite, encoding="unicode")) + "\n"


def _junit_tag(verdict: Verdict) -> str:
    if verdict.is_undecided:
        return "error"
    return {PropertyOutcome.BROKEN: "failure", PropertyOutcome.NOT_OFFERED: "skipped"}.get(
        verdict.outcome, "system-out"
    )
