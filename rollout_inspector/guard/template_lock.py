"""The lock file of chat templates: what they are and do today, so that a later check fails when it changes. It holds
the templates' own lines too. So a later check can render the older template again and say which line did it."""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from rollout_inspector.guard.checked_templates import CheckedTemplate, check_template
from rollout_inspector.guard.fail_rules import ExitStatus
from rollout_inspector.guard.template_changes import (
    ChangedLines, LockComparison, changed_lines, first_difference, lines_of
)
from rollout_inspector.guard.text_files import read_json
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.snippets import counted
from rollout_inspector.text import chat_templates
from rollout_inspector.text.chat_templates.probes.compare import RenderSide
from rollout_inspector.text.chat_templates.probes.report import CheckReport, CheckStatus, Purpose, outcome_of
from rollout_inspector.text.chat_templates.sandbox.client import TEMPLATE_CHARS
from rollout_inspector.text.chat_templates.sandbox.render import TemplateRenderer

FILE_VERSION = 1
LOCK_TIME = "2025-01-15T12:00:00"
"""What a template with a clock is told, so that its renders are the same on every day."""
MAX_LINES_TOLD = 10  # Changed lines of one template that are told.
MAX_TOLD = 4  # Checks that one sentence names.


class LockedVerdict(TypedDict, total=False):
    """Whether a template is safe for a purpose."""

    safe: bool | None  # None = cannot be told.
    sentence: str


@dataclass(frozen=True, kw_only=True)
class LockedTemplate:
    """What a lock file holds of one chat template, under the same names."""

    sha256: str  # Of the template's text.
    tokenizer_sha256: str | None = None  # None = it was checked without a tokenizer.
    tokenizer: str = ""
    """The tokenizer of a template file, as a path from the folder of the lock; empty = none, or the template's own."""
    verdicts: dict[str, LockedVerdict]  # By purpose.
    checks: dict[str, str]  # Name of each check -> its status.
    renders: dict[str, str]  # Name of each probe -> the digest of its two renders, text and ids.
    template: list[str]  # Its lines, each with its break.

    @property
    def text(self) -> str:
        """The template's text."""
        return "".join(self.template)


@dataclass(frozen=True)
class TemplateLock:
    """A lock file."""

    templates: Mapping[str, LockedTemplate]
    checks_version: int  # The version of the checks that wrote it.
    jinja: str  # The version of Jinja that rendered.


def name_in_lock(path: str | Path, lock: str | Path) -> str:
    """The name of a template in a lock file: its path from the folder of that file, as given. Raises :class:`Refusal`.
    Links are followed only where the path as it is written does not lie below that folder."""
    for resolved in (os.path.abspath, os.path.realpath):
        place, folder = Path(resolved(path)), Path(resolved(lock)).parent
        if place.is_relative_to(folder):
            return place.relative_to(folder).as_posix()
    raise Refusal(
        f"{path} lies outside {folder}, the folder of the lock file, so a check would not find it. "
        f"Put the lock file into a folder above both, such as {os.path.commonpath([place, folder])}."
    )


def path_of_name(name: str, lock: str | Path) -> str:
    """Where a template or the tokenizer of a lock file lies."""
    return str(Path(lock).parent / name)


def tokenizer_in_lock(name: str, templates: TemplateLock, lock: str | Path, tokenizer: Any = None) -> Any:
    """What a template file is checked with: nothing if it was locked so, ``tokenizer``, or the folder in the lock."""
    template = templates.templates.get(name)
    if template is None or (tokenizer is not None and template.tokenizer_sha256 is not None):
        return tokenizer
    return path_of_name(template.tokenizer, lock) if template.tokenizer else None


def _digest(*sides: RenderSide) -> str:
    digest = hashlib.sha256()
    for side in sides:
        text = side.text.encode("utf-8", "surrogatepass")
        digest.update(b"%d %d " % (len(text), len(side.ids)))
        digest.update(text)
        digest.update(side.ids.astype("<i4").tobytes())
    return digest.hexdigest()


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def locked(checked: CheckedTemplate, tokenizer: str = "") -> LockedTemplate:
    """What is kept of a check. It must have a report, made at ``LOCK_TIME``. ``tokenizer``: as a lock file holds it."""
    report = checked.report
    assert report is not None
    return LockedTemplate(
        sha256=_sha256(report.chat_template),
        tokenizer_sha256=None if checked.tokenizer is None else checked.tokenizer.sha256,
        tokenizer=tokenizer,
        verdicts={
            purpose.value: {
                "safe": outcome_of(purpose, report.checks), "sentence": report.verdicts.get(purpose.value, ""),
            }
            for purpose in Purpose if purpose is not Purpose.FACTS
        },
        checks={check.name: check.status.value for check in report.checks},
        renders={check.name: _digest(both.before, both.after)
                 for check in report.checks if (both := check.comparison) is not None},
        template=lines_of(report.chat_template),
    )


def lock_text(checked: Mapping[str, CheckedTemplate], tokenizers: Mapping[str, str]) -> str:
    """A lock file of templates by name, as JSON with one line for each line of a template. ``tokenizers``: name of a
    template file -> the tokenizer that it was checked with, from the folder of the lock."""
    entries = {name: vars(locked(template, tokenizers.get(name, ""))) for name, template in sorted(checked.items())}
    value = {
        "version": FILE_VERSION, "checks_version": chat_templates.VERSION, "jinja": version("jinja2"),
        "templates": {
            name: {key: item for key, item in entry.items() if key != "tokenizer" or item}
            for name, entry in entries.items()
        },
    }
    return json.dumps(value, indent=1) + "\n"


def read_lock(path: str | Path) -> TemplateLock:
    """A lock file. Raises :class:`Refusal` with a sentence for the user."""
    make = "Write it with rollout-inspector lock."
    value = read_json(path, "The lock file", make)
    templates = value.get("templates") if isinstance(value, dict) else None
    if not isinstance(templates, dict) or value.get("version") != FILE_VERSION:
        raise Refusal(f"{path} is no lock file of version {FILE_VERSION}: it has no such 'templates'. {make}")
    locked_templates = {}
    for name, entry in templates.items():
        try:
            template = locked_templates[name] = msgspec.convert(entry, LockedTemplate)
            is_sound = len(template.text) <= TEMPLATE_CHARS and _sha256(template.text) == template.sha256
        except msgspec.ValidationError:
            is_sound = False
        if not is_sound:
            raise Refusal(f"The lock file {path} is broken at {name[:200]!r}. {make}")
    checks_version, jinja = value.get("checks_version"), value.get("jinja")
    if not isinstance(checks_version, int) or not isinstance(jinja, str):
        raise Refusal(f"The lock file {path} does not say which version wrote it. {make}")
    return TemplateLock(locked_templates, checks_version, jinja[:40])


def compare_with_lock(checked: CheckedTemplate, lock: TemplateLock, name: str) -> LockComparison:
    """What changed in a template since it was locked under ``name``. ``checked`` was checked at ``LOCK_TIME``.
    Undecided where the lock has no such template, where nothing could be rendered, or where only the checks changed."""
    before = lock.templates.get(name)
    if before is None:
        names = ", ".join(sorted(lock.templates)) or "none"
        lack = f"The lock file has no template {name}." if name else "Say which template of the lock file this is."
        return LockComparison(ExitStatus.UNDECIDED, (f"{lack} It has: {names}.{' Lock it too.' if name else ''}",))
    tokenizer = checked.tokenizer
    if checked.report is None:
        if checked.text == before.text:
            return LockComparison(ExitStatus.UNDECIDED)
        return LockComparison(ExitStatus.FAILED, (f"The template changed and cannot be rendered. {checked.error}",))
    after = locked(checked)
    changes, notes = [], []
    if after.sha256 != before.sha256:
        changes.append(f"The template changed: sha256 {before.sha256[:12]} became {after.sha256[:12]}.")
    if after.tokenizer_sha256 != before.tokenizer_sha256:
        hashes = (before.tokenizer_sha256, after.tokenizer_sha256)
        was, now = ("no tokenizer" if sha256 is None else f"the tokenizer {sha256[:12]}" for sha256 in hashes)
        notes.append(f"The template was locked with {was} and is checked with {now}.")
        if None in hashes and not changes:
            notes.append(
                "Ids and characters cannot be compared. Check with the same tokenizer, or write the lock again."
            )
            return LockComparison(ExitStatus.UNDECIDED, (), (), tuple(notes))
    changes += _verdict_changes(before, after)
    changes += _check_changes(before, after, checked.report)
    if (before.renders, before.sha256) != (after.renders, after.sha256):
        changes += _render_changes(before, after, checked.report)
    lines: list[ChangedLines] = []
    if after.sha256 != before.sha256:
        older = check_template(name, before.text, tokenizer, now=LOCK_TIME).report
        if older is not None:
            texts = (older.chat_template, checked.text)
            was_renderer, now_renderer = (TemplateRenderer(tokenizer, text, LOCK_TIME) for text in texts)
            lines = changed_lines(was_renderer, now_renderer, older, LOCK_TIME)
            alone = any(line.titles for line in lines)
            together = "" if alone else first_difference(was_renderer, now_renderer, older)
            changes += [f"No changed line does it alone. {together}"] if together else []
    elif changes and lock.checks_version != chat_templates.VERSION:
        notes += changes
        notes.append(
            f"The lock was written by version {lock.checks_version} of the checks, this is version "
            f"{chat_templates.VERSION}; the template itself is the same. Write the lock again."
        )
        return LockComparison(ExitStatus.UNDECIDED, (), (), tuple(notes))
    elif changes and lock.jinja != version("jinja2"):
        notes.append(f"The template is the same; Jinja {lock.jinja} became {version('jinja2')}.")
    return LockComparison(ExitStatus.of(not changes), tuple(changes), tuple(lines[:MAX_LINES_TOLD]), tuple(notes))


def _verdict_changes(before: LockedTemplate, after: LockedTemplate) -> Iterable[str]:
    words = {True: "safe", False: "not safe", None: "cannot be told"}
    for purpose, verdict in after.verdicts.items():
        was, now = before.verdicts.get(purpose, verdict).get("safe"), verdict["safe"]
        if was is not now:
            yield f"{purpose}: {words[was]} became {words[now]}."


def _check_changes(before: LockedTemplate, after: LockedTemplate, report: CheckReport) -> Iterable[str]:
    """One sentence for all checks that came out alike, and the first detail of those that became worse."""
    turned: dict[tuple[str, str], list[str]] = {}
    for name, was in before.checks.items():
        if name in after.checks and after.checks[name] != was:
            turned.setdefault((was, after.checks[name]), []).append(name)
    for (was, now), names in turned.items():
        detail = report.check(names[0]).detail if now in (CheckStatus.BROKEN, CheckStatus.RAISES) else ""
        yield f"{counted(len(names), 'check')} {was} before, now {now}: {_titles(names, report)}. {detail}".rstrip()


def _titles(names: Sequence[str], report: CheckReport) -> str:
    titles = ", ".join(f"“{report.check(name).title}”" for name in names[:MAX_TOLD])
    return titles + (f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else "")


def _render_changes(before: LockedTemplate, after: LockedTemplate, report: CheckReport) -> list[str]:
    """One sentence about the probes whose renders differ from the locked ones."""
    names = [name for name, digest in before.renders.items() if after.renders.get(name, digest) != digest]
    gone = [name for name in before.renders if name not in after.renders]
    if not names and not gone:
        return []
    changes = [f"The renders of {counted(len(names), 'probe')} changed: {_titles(names, report)}."] if names else []
    return changes + ([f"{counted(len(gone), 'probe')} cannot be rendered any more."] if gone else [])
