"""Whether what was found lets a pull request pass."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import IntEnum
from pathlib import Path
from typing import Any

from rollout_inspector.diagnose import KINDS
from rollout_inspector.diagnose.checks import MUST_DECIDE, check_of
from rollout_inspector.diagnose.finding import Axis, Finding
from rollout_inspector.guard.checked_files import SEVERITIES, CheckedFiles, KindCount
from rollout_inspector.guard.text_files import read_json
from rollout_inspector.refusal import Refusal

_RATE_ERROR = 1e-9  # Rates are written as decimals, so equal rates may differ by this much.


class ExitStatus(IntEnum):
    """The exit status of a check."""

    PASSED = 0
    FAILED = 1
    UNDECIDED = 2

    @classmethod
    def of(cls, passed: bool | None) -> ExitStatus:
        """The status of one answer; None = it could not be decided."""
        return cls.UNDECIDED if passed is None else cls.PASSED if passed else cls.FAILED

    @classmethod
    def of_all(cls, statuses: Iterable[ExitStatus]) -> ExitStatus:
        """One status for many: a failure counts before what was not decided."""
        distinct = set(statuses)
        return next((status for status in (cls.FAILED, cls.UNDECIDED) if status in distinct), cls.PASSED)


@dataclass(frozen=True)
class FailRule:
    """What fails a check."""

    severity: str = "error"  # Kinds of this severity or a worse one fail; empty = only the kinds that are named.
    kinds: frozenset[str] = frozenset()  # Kinds that fail whatever their severity.
    max_rates: Mapping[str, float] = field(default_factory=dict)
    """Kind -> the share of trajectories (0 to 1) that may have it."""
    baseline: Mapping[str, float] | None = None
    """Kind -> the share of trajectories that is known and accepted; None = there is no baseline."""

    def named(self) -> set[str]:
        """The kinds that the user named."""
        return {*self.kinds, *self.max_rates}

    def concerns(self, kind: str, count: KindCount) -> bool:
        """Whether findings of a kind can fail the check."""
        if kind in self.named():
            return True
        return bool(self.severity) and SEVERITIES.index(count.severity) <= SEVERITIES.index(self.severity)

    def allowed(self, kind: str) -> float:
        """The share of trajectories that may have findings of a kind."""
        return max(self.max_rates.get(kind, 0.0), (self.baseline or {}).get(kind, 0.0))


@dataclass(frozen=True)
class FilesVerdict:
    """Passed, failed or undecided, and why."""

    outcome: ExitStatus
    failing: tuple[str, ...] = ()  # The kinds that fail.
    reasons: tuple[str, ...] = ()  # One sentence for each reason to fail or not to decide.
    accepted: tuple[str, ...] = ()  # One sentence for each kind that was found and is allowed.


def fail_rule(fail_on: str = "error", max_rates: Iterable[str] = (), baseline: str | Path | None = None) -> FailRule:
    """The rule of a command line. ``fail_on``: ``error``, ``warning``, ``info`` or ``none``, and names of kinds, joined
    by commas. ``max_rates``: ``KIND=0.01`` each. ``baseline``: the JSON report of an earlier check. Raises
    :class:`Refusal`."""
    severity, kinds = "", set()
    words = [part.strip() for part in fail_on.split(",") if part.strip()]
    if not words:
        raise Refusal(
            "It names nothing. Say what fails: error, warning, info, kinds of findings, or none.", field="fail_on"
        )
    for word in words:
        if word in SEVERITIES:
            severity = max(severity, word, key=(*SEVERITIES, "").index) if severity else word
        elif word != "none":
            kinds.add(_known(word, "fail_on"))
    rates = {}
    for text in max_rates:
        kind, equals, number = text.partition("=")
        try:
            rate = float(number)
        except ValueError:
            rate = math.nan
        if not equals or not 0 <= rate <= 1:
            raise Refusal(
                f"{text} is no limit. Write KIND=RATE with a rate from 0 to 1, such as {kind}=0.01.", field="max_rate"
            )
        rates[_known(kind.strip(), "max_rate")] = rate
    return FailRule(severity, frozenset(kinds), rates, None if baseline is None else read_baseline(baseline))


def _known(kind: str, field: str) -> str:
    if kind not in KINDS or kind == "not_decidable":
        raise Refusal(
            f"There is no kind of finding {kind!r}. There are the severities error, warning and info, and "
            f"the kinds {', '.join(sorted(set(KINDS) - {'not_decidable'}))}.",
            field=field,
        )
    return kind


def read_baseline(path: str | Path) -> dict[str, float]:
    """The rates of an earlier check, from its JSON report. Raises :class:`Refusal`."""
    make = "It is the JSON report of a check: make one with rollout-inspector check."
    value = read_json(path, "The baseline", make)
    kinds = value.get("kinds") if isinstance(value, dict) else None
    if not isinstance(kinds, dict):
        raise Refusal(f"The baseline {path} is no report of a check: it has no object 'kinds'. {make}")
    rates = {str(kind): _rate(rate) for kind, rate in kinds.items()}
    if bad := sorted(kind for kind, rate in rates.items() if rate is None):
        raise Refusal(f"The baseline {path} has no rate from 0 to 1 for {', '.join(bad[:5])}. {make}")
    return {kind: rate for kind, rate in rates.items() if rate is not None}


def _rate(value: Any) -> float | None:
    rate = value.get("rate") if isinstance(value, dict) else None
    is_number = isinstance(rate, int | float) and not isinstance(rate, bool)
    return float(rate) if is_number and rate is not None and 0 <= rate <= 1 else None


def verdict_on(checked: CheckedFiles, rule: FailRule) -> FilesVerdict:
    """Failed where a kind is beyond what the rule allows; undecided where something was not checked that had to be."""
    failing, reasons, accepted = [], [], []
    for kind, count in checked.sorted_kinds():
        if kind == "not_decidable" or not rule.concerns(kind, count):
            continue
        rate, allowed = checked.rate(kind), rule.allowed(kind)
        label = f"{kind}: {_share(rate)} of the trajectories"
        if rate > allowed + _RATE_ERROR:
            failing.append(kind)
            reasons.append(f"{label}; allowed are {_share(allowed)}." if allowed else f"{label}.")
        else:
            accepted.append(f"{label}; allowed are {_share(allowed)}.")
    if failing:
        return FilesVerdict(ExitStatus.FAILED, tuple(failing), tuple(reasons), tuple(accepted))
    reasons = _not_checked(checked, rule)
    return FilesVerdict(ExitStatus.UNDECIDED if reasons else ExitStatus.PASSED, (), tuple(reasons), tuple(accepted))


def _share(rate: float) -> str:
    return f"{100 * rate:.4g} %"


def _not_checked(checked: CheckedFiles, rule: FailRule) -> list[str]:
    """Why nothing can be said, one sentence each; empty = enough was checked to say *passed*."""
    if not checked.n_trajectories:
        return ["No trajectory could be read."]
    reasons = []
    if checked.n_unread:
        reasons.append(
            f"{checked.n_unread:,} {'line or file was' if checked.n_unread == 1 else 'lines or files were'} not read."
        )
    if "not_decidable" in checked.kinds:
        reasons.append(f"The diagnosis failed on {checked.kinds['not_decidable'].n_trajectories:,} trajectories.")
    if not checked.checks:
        reasons.append(f"Nothing could be checked without {', '.join(_lacking(checked, checked.undecided))}.")
        return reasons
    reasons += undecided_reasons(checked)
    for kind in sorted(rule.named()):
        about = KINDS[kind]
        check = check_of(Finding(about.axis, kind, about.severity, step=1))
        if check in checked.undecided and not checked.checks[check]:
            lacking = ", ".join(_lacking(checked, [check]))
            reasons.append(f"{kind} could not be checked: the check {check} lacks {lacking}.")
        elif about.axis is Axis.STREAM and checked.unnamed and kind not in checked.kinds:
            lacking = ", ".join(sorted(checked.unnamed))
            reasons.append(f"{kind} could not be told from other breaks: naming the cause needs {lacking}.")
    return reasons


def undecided_reasons(checked: CheckedFiles) -> list[str]:
    """One sentence for each check that the files and the options should have decided, and that was not decided."""
    return [
        f"{check} could not be decided on {counts[field]:,} of {checked.n_trajectories:,} trajectories: {why}."
        for check, counts in checked.undecided.items()
        for field, why in MUST_DECIDE.items()
        if counts[field]
    ]


def _lacking(checked: CheckedFiles, checks: Iterable[str]) -> list[str]:
    return sorted({field for check in checks for field in checked.undecided.get(check, ())})
