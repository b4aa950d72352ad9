"""Checks chat templates for the purposes that a user names, without a database."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rollout_inspector.guard.fail_rules import ExitStatus
from rollout_inspector.guard.template_changes import LockComparison
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.interfaces import RenderFailed
from rollout_inspector.text import chat_templates
from rollout_inspector.text.chat_templates.probes.report import Check, CheckReport, CheckStatus, Purpose, outcome_of
from rollout_inspector.text.tokenizers import LoadedTokenizer, TokenizerUnusable

PURPOSES = {
    "tools": Purpose.TOOLS,
    "users": Purpose.USERS,
    "generation": Purpose.GENERATION,
    "fixed-base": Purpose.FIXED_BASE,
    "per-message": Purpose.PER_MESSAGE,
    "masks": Purpose.MASKS,
    "dates": Purpose.REPRODUCIBLE,
    "clients": Purpose.CLIENTS,
    "parsed-messages": Purpose.PARSED_MESSAGES,
    "parsed-ids": Purpose.PARSED_IDS,
}
"""The word of an option -> the purpose that it names."""


@dataclass(frozen=True, eq=False)
class CheckedTemplate:
    """What a check found out about a chat template, and whether it is safe for what it is used for."""

    name: str  # As the user named it.
    text: str
    tokenizer: LoadedTokenizer | None
    purposes: tuple[Purpose, ...]
    report: CheckReport | None = None
    error: str = ""  # Why there is no report, as a sentence.
    compared: LockComparison | None = None  # What changed since it was locked. None = no lock was named.

    def outcomes(self) -> dict[Purpose, bool | None]:
        """Each purpose that was asked for: safe, not safe, or None = cannot be told."""
        if self.report is None:
            return dict.fromkeys(self.purposes)
        return {purpose: outcome_of(purpose, self.report.checks) for purpose in self.purposes}

    @property
    def outcome(self) -> ExitStatus:
        """Failed where a purpose is not safe, undecided where one cannot be told: a void pass is no pass. With a lock,
        a change fails, and what was locked as not safe is accepted."""
        outcomes = list(self.outcomes().values())
        if self.compared is None:
            return ExitStatus.of_all(map(ExitStatus.of, outcomes))
        return ExitStatus.of_all([self.compared.outcome, *([ExitStatus.UNDECIDED] if None in outcomes else [])])

    def reasons(self) -> list[str]:
        """One sentence for each purpose that is not safe or cannot be told."""
        if self.report is None:
            return [self.error]
        return [
            f"{purpose.value}: {self.report.verdicts.get(purpose.value, 'not available').rstrip('.')}."
            for purpose, safe in self.outcomes().items()
            if not safe
        ]

    def last_sentence(self) -> str:
        """The outcome in words."""
        if self.compared is not None and self.outcome is ExitStatus.FAILED:
            return "Failed: it is not what was locked. If that is meant, write the lock again."
        reasons = " ".join(self.reasons())
        if self.outcome is ExitStatus.PASSED:
            reasons_known = f" Known since it was locked: {reasons}" if reasons else ""
            return f"Passed: {'it is what was locked' if self.compared is not None else 'safe'}.{reasons_known}"
        if self.outcome is ExitStatus.FAILED:
            return f"Failed: {reasons}"
        unsaid = "" if self.compared is None else " ".join([*self.compared.changes, *self.compared.notes])
        return f"Not decided: {' '.join(filter(None, [reasons, unsaid]))}"

    def failing(self) -> list[Check]:
        """The checks that make a purpose unsafe."""
        checks = () if self.report is None else self.report.checks
        purposes = {purpose for purpose, safe in self.outcomes().items() if safe is False}
        return [
            check
            for check in checks
            if check.purpose in purposes and check.decisive and check.status is CheckStatus.BROKEN
        ]


def purposes_of(words: str | Iterable[str]) -> tuple[Purpose, ...]:
    """The purposes of words joined by commas, or of a list of words. Raises :class:`Refusal`."""
    parts = words.split(",") if isinstance(words, str) else list(words)
    names = [part.strip() for part in parts if part.strip()]
    for name in names:
        if name not in PURPOSES:
            raise Refusal(f"There is no purpose {name!r}. There are: {', '.join(PURPOSES)}.")
    if not names:
        raise Refusal(f"Name at least one purpose of: {', '.join(PURPOSES)}.")
    return tuple(dict.fromkeys(PURPOSES[name] for name in names))


def check_template(
    name: str, text: str, tokenizer: LoadedTokenizer | None = None, purposes: Sequence[Purpose] = (Purpose.TOOLS,),
    now: str = "",
) -> CheckedTemplate:
    """Check a template that a user named; what cannot be rendered at all becomes an ``error``. ``now``: an ISO date
    and time that templates with a clock are told; empty = the real one."""
    try:
        report, problem = chat_templates.check(tokenizer, text, now=now), ""
    except (RenderFailed, TokenizerUnusable) as error:
        report, problem = None, str(error)
    return CheckedTemplate(name, text, tokenizer, tuple(purposes), report, problem)
