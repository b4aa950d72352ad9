"""A guard inside a trainer: looks at a sample of its rows and engine calls in bounded time, and counts its findings."""

import logging
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from rollout_inspector.diagnose.kinds import title_of
from rollout_inspector.guard.checked_files import CheckedFiles, KindCount, PlacedFinding, codec_of, diagnosis_of
from rollout_inspector.guard.fail_rules import ExitStatus, FailRule, FilesVerdict, fail_rule, undecided_reasons
from rollout_inspector.guard.report_formats import REPORTS, finding_text
from rollout_inspector.guard.trainer_batches import GuardedItems, items_of_rows, items_of_steps
from rollout_inspector.outputs import line_of
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.interfaces import Renderer

ACTIONS = ("warn", "raise", "drop")
MAX_SECONDS = 0.5  # How long one call may keep the trainer waiting, if nothing else is said.
_log = logging.getLogger("rollout_inspector.guard")


class GuardFailed(Exception):
    """What was asked to raise found something. ``findings`` holds it with its place."""

    def __init__(self, findings: Sequence[PlacedFinding]) -> None:
        super().__init__("\n".join(f"{placed.finding.kind}: {finding_text(placed)}" for placed in findings[:3]))
        self.findings = tuple(findings)


@dataclass
class _Look:
    """One call's look at its sample."""

    items: GuardedItems
    chosen: list[int]
    until: float
    failing: list[PlacedFinding] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    unreadable: str = ""  # Why an item could not be read; the first reason.


class Guard:
    """Looks at a sample of what a trainer trains on. Several threads may use it at once. A call never waits longer than
    ``max_seconds``, and raises only if ``on`` is ``raise``. What was not looked at in time is counted."""

    def __init__(
        self, tokenizer: Any = None, *, chat_template: str | None = None, on: str = "warn", sample: float = 0.05,
        fail_on: str = "error", max_seconds: float = MAX_SECONDS, seed: int | None = None,
    ) -> None:
        """``tokenizer``: a folder, a loaded tokenizer, or one of ``transformers``; None = only ids and columns.

        ``chat_template``: the text of the template that wrote the prompts; None = the tokenizer's own, empty = none.
        Masks and what stands between completions are checked with it alone. ``on``: what a finding does: ``warn`` logs
        it, ``raise`` raises :class:`GuardFailed`, ``drop`` leaves its row out. ``sample``: the share that is looked at,
        0 to 1. ``fail_on``: severities and kinds that count, as the check takes them.
        Raises ``ValueError`` with a sentence for what cannot be used.
        """
        if on not in ACTIONS:
            raise Refusal(f"on={on!r}: there are {', '.join(ACTIONS)}.")
        if not 0 <= sample <= 1:
            raise Refusal(f"sample={sample!r}: a share from 0 to 1 is needed.")
        if not max_seconds > 0:
            raise Refusal(f"max_seconds={max_seconds!r}: a time above 0 is needed.")
        self.on, self.sample, self.max_seconds = on, sample, max_seconds
        self._rule: FailRule = fail_rule(fail_on)
        self._codec, self._folder = codec_of(tokenizer)
        self._renderer: Renderer | None = None
        text = self._codec.chat_template if chat_template is None and self._codec is not None else chat_template
        if text and self._codec is not None:
            from rollout_inspector.text import chat_templates

            renderer = chat_templates.renderer(self._codec, text)
            problem = chat_templates.cannot_render(renderer)
            if problem and chat_template:
                raise Refusal(f"The chat template cannot be used. {problem}")
            self._renderer = None if problem else renderer
        self._random = random.Random(seed)
        self._share = self._random.random()  # so that ranks do not look at the same calls
        self._counts: Counter[str] = Counter()
        self._seconds = self._slowest = 0.0
        self._checked = CheckedFiles()
        self._warned: Counter[str] = Counter()
        self._lock = threading.Lock()  # Guards all counts.
        self._turn = threading.Lock()  # One look at a time: others wait for it as long as they may.

    def rows(self, rows: Any) -> Any:
        """Look at training rows. Returns the rows that are kept, as the same object where none is dropped. ``rows``: a
        list of ``Row``, ``Trajectory`` or dicts, or a batch: a dict of arrays or tensors ``[B, ...]``."""
        return self._guarded(items_of_rows, rows, "rows")

    def steps(self, steps: Any) -> Any:
        """Look at engine calls. Returns the trajectories that are kept, as the same object where none is dropped.
        ``steps``: the steps of one trajectory, or a list of trajectories. A step is a ``Step`` or a dict."""
        return self._guarded(items_of_steps, steps, "steps")

    def counters(self) -> dict[str, Any]:
        """What was seen, looked at, found and dropped so far, and how long it took. Tokens and seconds are sums."""
        with self._lock:
            names = ("calls", "seen", "checked", "tokens_seen", "tokens_checked", "failing", "dropped", "unchecked",
                     "late", "unreadable", "errors")
            figures: dict[str, Any] = {name: self._counts[name] for name in names}
            figures["seconds"], figures["slowest_seconds"] = self._seconds, self._slowest
            figures["findings"] = {kind: count.n_findings for kind, count in self._checked.sorted_kinds()}
            return figures

    def figures(self, prefix: str = "guard/") -> dict[str, float]:
        """The counters as flat numbers, for the logger of a trainer."""
        figures = self.counters()
        kinds = figures.pop("findings")
        flat = {f"{prefix}{name}": float(value) for name, value in figures.items()}
        return flat | {f"{prefix}findings/{kind}": float(n) for kind, n in kinds.items()}

    def report(self, form: str = "text") -> str:
        """All that was found so far, as :data:`rollout_inspector.guard.REPORTS` write it. Raises ``KeyError``."""
        with self._lock:
            kinds = [kind for kind, count in self._checked.sorted_kinds() if self._rule.concerns(kind, count)]
            reasons = undecided_reasons(self._checked) if self._checked.n_trajectories else ["Nothing was looked at."]
            outcome = ExitStatus.of_all([ExitStatus.of(not kinds), ExitStatus.of(None if reasons else True)])
            return REPORTS[form](self._checked, FilesVerdict(outcome, tuple(kinds), () if kinds else tuple(reasons)))

    # -- one call

    def _guarded(self, items_of: Callable[[Any, str], GuardedItems], value: Any, name: str) -> Any:
        start = time.monotonic()
        look: _Look | None = None
        try:
            with self._lock:
                self._counts["calls"] += 1
                call = self._counts["calls"]
            value = list(value) if isinstance(value, Iterator) else value
            items = items_of(value, f"call-{call}-{name}")
            look = _Look(items, self._choose(items.n), start + self.max_seconds)
            self._look(look)
            if self.on == "raise" and look.unreadable:
                raise Refusal(look.unreadable)
            remaining = value
            if self.on == "drop" and (dropped := set(look.dropped)):
                remaining = items.kept([n for n in range(items.n) if n not in dropped])
                self._count("dropped", len(dropped))
        except Exception as error:
            self._count("errors")
            self._warn("guard_failed", f"The guard could not look at a call. {type(error).__name__}: {error}")
            if self.on == "raise":
                raise
            return value
        finally:
            seconds = time.monotonic() - start
            with self._lock:
                self._seconds += seconds
                self._slowest = max(self._slowest, seconds)
        if self.on == "raise" and look.failing:
            raise GuardFailed(list(look.failing))
        return remaining

    def _choose(self, n: int) -> list[int]:
        """Which of ``n`` items are looked at: at random, and over many calls exactly the share that was asked for."""
        with self._lock:
            self._counts["seen"] += n
            self._share += n * self.sample
            m = min(n, int(self._share + 1e-9))
            self._share -= m
            return self._random.sample(range(n), m)

    def _look(self, look: _Look) -> None:
        """Look at the sample in a thread, and wait for it as long as the call may take."""
        n_tokens = sum(look.items.n_tokens(n) for n in range(look.items.n))
        self._count("tokens_seen", n_tokens)
        if not look.chosen:
            return
        if not self._turn.acquire(timeout=max(0.0, look.until - time.monotonic())):
            self._count("unchecked", len(look.chosen))
            return
        try:
            thread = threading.Thread(target=self._work, args=(look,), name="rollouts-guard", daemon=True)
            thread.start()
        except BaseException:
            self._turn.release()
            raise
        thread.join(max(0.0, look.until - time.monotonic()))
        if thread.is_alive():
            self._count("late")

    def _work(self, look: _Look) -> None:
        try:
            for m, n in enumerate(look.chosen):
                if time.monotonic() > look.until:
                    self._count("unchecked", len(look.chosen) - m)
                    break
                self._look_at(look, n)
        finally:
            self._turn.release()

    def _look_at(self, look: _Look, n: int) -> None:
        try:
            trajectory = look.items.trajectory(n)
            diagnosis = diagnosis_of(trajectory, self._codec, self._renderer)
        except Exception as error:
            self._count("unreadable")
            self._warn("unreadable", str(error))
            look.unreadable = look.unreadable or str(error)
            return
        failing = [
            finding for finding in diagnosis.findings
            if finding.kind != "not_decidable" and self._rule.concerns(finding.kind, KindCount(finding.severity))
        ]
        name, step = trajectory.external_id, trajectory.training_step
        placed = [PlacedFinding(finding, "trainer", None, name, step) for finding in failing]
        with self._lock:
            self._checked.add("trainer", None, trajectory, diagnosis)
            self._counts["checked"] += 1
            self._counts["tokens_checked"] += look.items.n_tokens(n)
            self._counts["failing"] += bool(failing)
        if placed:
            look.failing += placed
            look.dropped.append(n)
        for finding in placed:
            self._warn(finding.finding.kind, f"{title_of(finding.finding.kind)}. {finding_text(finding)}")

    # -- telling

    def _warn(self, kind: str, sentence: str) -> None:
        """Log the first of a kind, the tenth, the hundredth, and so on."""
        with self._lock:
            self._warned[kind] += 1
            n = self._warned[kind]
        if self.on != "raise" and n == 10 ** (len(str(n)) - 1):
            _log.warning("%s (number %d): %s", kind, n, line_of(sentence))

    def _count(self, what: str, n: int = 1) -> None:
        with self._lock:
            self._counts[what] += n
