"""Reads files of any format and diagnoses what is in them, without a database."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rollout_inspector import formats
from rollout_inspector.diagnose import examine
from rollout_inspector.diagnose.checks import CHECKS, CheckTotal, Diagnosis, failed_diagnosis
from rollout_inspector.diagnose.finding import Finding, Severity
from rollout_inspector.formats import FileRefused, Rejected, Source
from rollout_inspector.formats.folders import files_of
from rollout_inspector.formats.training_step import ANY, TrainingStepRule
from rollout_inspector.streams.figures import share
from rollout_inspector.streams.interfaces import Codec, Renderer
from rollout_inspector.streams.prefix import n_new_tokens
from rollout_inspector.streams.token_origins import mask_runs
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text import tokenizers
from rollout_inspector.text.tokenizers import LoadedTokenizer, TokenizerUnusable

MAX_PLACES = 100  # Findings of one kind that are kept with their place. All of them are counted.
MAX_UNREAD = 100  # Lines and files that were not read and are kept with their reason. All of them are counted.

SEVERITIES = tuple(Severity)  # The worst first.
MIN_ROWS = 3  # Trajectories of a file from which on it counts that none of them trains a stop token.

Progress = Callable[["CheckedFiles"], object]  # Called after each trajectory.


@dataclass(frozen=True)
class PlacedFinding:
    """A finding with its place: offsets count in the stream of its step, or in its row where there is no step."""

    finding: Finding
    file: str
    line: int | None  # 1-based. None = the trajectory stands on many lines, or the file has no lines.
    trajectory: str
    training_step: int | None


@dataclass
class KindCount:
    """How often one kind of finding was found."""

    severity: Severity  # The worst severity of its findings.
    n_findings: int = 0
    n_trajectories: int = 0


@dataclass
class CheckedFiles:
    """What was read, what was found in it, and what could not be checked."""

    files: list[str] = field(default_factory=list)
    formats: list[str] = field(default_factory=list)
    n_trajectories: int = 0
    n_steps: int = 0
    n_rows: int = 0
    n_tokens: int = 0  # Tokens that the steps add, or those of the rows where there are no steps.
    kinds: dict[str, KindCount] = field(default_factory=dict)
    """Kind of finding -> its counts; ``not_decidable`` is not among them."""
    found: list[PlacedFinding] = field(default_factory=list)  # In reading order, at most ``MAX_PLACES`` of each kind.
    unread: list[Rejected] = field(default_factory=list)
    """Lines that were not read; without a number the whole file was not."""
    n_unread: int = 0
    checks: Counter[str] = field(default_factory=Counter)
    """Check -> on how many trajectories it passed, was noted or failed."""
    undecided: dict[str, Counter[str]] = field(default_factory=dict)
    """Check -> field that lacks -> on how many trajectories."""
    failed: Counter[str] = field(default_factory=Counter)  # Check -> on how many trajectories it failed.
    open: Counter[str] = field(default_factory=Counter)  # Check -> on how many trajectories it was not decidable.
    unnamed: Counter[str] = field(default_factory=Counter)
    """Field that lacks -> number of breaks whose cause could not be named without it."""
    lacks: list[str] = field(default_factory=list)  # What the formats of these files cannot tell, one sentence each.

    def totals(self) -> list[CheckTotal]:
        """What each check came to, in the order of lists."""
        return [
            CheckTotal(
                name, claim, self.checks[name], self.failed[name], not_decidable=self.open[name],
                needs=sorted(self.undecided.get(name, ())),
            )
            for name, claim in CHECKS.items()
            if self.checks[name] or self.open[name]
        ]

    def rate(self, kind: str) -> float:
        """The share of trajectories that have a finding of a kind, 0 to 1."""
        count = self.kinds.get(kind)
        return 0.0 if count is None else share(count.n_trajectories, self.n_trajectories)

    def refuse(self, file: str, line: int | None, reason: str) -> None:
        """Count what was not read."""
        self.n_unread += 1
        if len(self.unread) < MAX_UNREAD:
            self.unread.append(Rejected(line, reason, file))

    def add(self, file: str, line: int | None, trajectory: Trajectory, diagnosis: Diagnosis) -> None:
        """Count a trajectory and what was found in it."""
        self.n_trajectories += 1
        self.n_steps += len(trajectory.steps)
        self.n_rows += len(trajectory.rows)
        self.n_tokens += n_new_tokens(trajectory)
        for check, outcome in diagnosis.checks.items():
            if isinstance(outcome, str):
                self.checks[check] += 1
                self.failed[check] += outcome == "failed"
            else:
                self.open[check] += 1
                self.undecided.setdefault(check, Counter()).update(outcome)
        kinds: set[str] = set()
        for finding in diagnosis.findings:
            if finding.kind == "not_decidable" and finding.severity is Severity.INFO:
                continue
            if finding.missing:
                self.unnamed[finding.missing] += 1
            count = self.kinds.setdefault(finding.kind, KindCount(finding.severity))
            count.severity = min(count.severity, finding.severity, key=SEVERITIES.index)
            count.n_findings += 1
            count.n_trajectories += finding.kind not in kinds
            kinds.add(finding.kind)
            if count.n_findings <= MAX_PLACES:
                self.found.append(PlacedFinding(finding, file, line, trajectory.external_id, trajectory.training_step))

    def warn_of_stops(self, file: str) -> None:
        """No row of a file trains a stop token: what may be a limit in one row is a fault of all."""
        self.kinds["stop_token_untrained"].severity = min(
            self.kinds["stop_token_untrained"].severity, Severity.WARNING, key=SEVERITIES.index
        )
        for n, placed in enumerate(self.found):
            finding = placed.finding
            if placed.file == file and finding.kind == "stop_token_untrained" and finding.severity is Severity.INFO:
                what = f"{finding.evidence} No row of the file trains one."
                self.found[n] = replace(placed, finding=replace(finding, severity=Severity.WARNING, evidence=what))

    def sorted_kinds(self) -> list[tuple[str, KindCount]]:
        """The kinds, errors first, then the kind of most trajectories."""
        return sorted(
            self.kinds.items(),
            key=lambda one: (SEVERITIES.index(one[1].severity), -one[1].n_trajectories, one[0]),
        )


def check_files(
    paths: Iterable[str | Path], codec: Codec | None = None, renderer: Renderer | None = None,
    format_name: str = "auto", training_step: TrainingStepRule = ANY, progress: Progress | None = None,
) -> CheckedFiles:
    """Read files and folders and diagnose every trajectory in them. ``codec``: the tokenizer that sampled; without it,
    what needs text is not decidable, and the result says so. ``renderer``: the chat template that wrote the prompts. A
    file that cannot be read becomes an entry of ``unread``."""
    checked = CheckedFiles()
    for path in paths:
        try:
            files = files_of(Path(path))
        except FileRefused as refusal:
            checked.refuse(str(path), None, str(refusal))
            continue
        for file in files:
            _check_file(file, checked, codec, renderer, format_name, training_step, progress)
    checked.lacks = formats.lacks_of(", ".join(checked.formats))
    return checked


def _check_file(
    file: Path, checked: CheckedFiles, codec: Codec | None, renderer: Renderer | None, format_name: str,
    training_step: TrainingStepRule, progress: Progress | None,
) -> None:
    name = str(file)
    checked.files.append(name)
    try:
        unstopped: list[bool] = []
        source = Source.of_path(file)
        chosen, items = formats.read(source, format_name, training_step)
        if chosen.name not in checked.formats:
            checked.formats.append(chosen.name)
        for item in items:
            if isinstance(item, Rejected):
                checked.refuse(name, item.line, item.reason)
                continue
            line = source.line if chosen.by_line and source.line else None
            diagnosis = diagnosis_of(item, codec, renderer)
            checked.add(name, line, item, diagnosis)
            if (has_stop := _trains_stop(item, diagnosis, codec)) is not None:
                unstopped.append(not has_stop)
            if progress is not None:
                progress(checked)
        if len(unstopped) >= MIN_ROWS and all(unstopped):
            checked.warn_of_stops(name)
    except FileRefused as refusal:
        checked.refuse(name, None, str(refusal))
    except OSError as error:
        checked.refuse(name, None, f"{name} cannot be read: {error.strerror or type(error).__name__}.")


def _trains_stop(trajectory: Trajectory, diagnosis: Diagnosis, codec: Codec | None) -> bool | None:
    """Whether rows train a token that may end a turn; None where they are cut, train nothing, or nothing tells it."""
    kinds = {finding.kind for finding in diagnosis.findings}
    if codec is None or not trajectory.rows or "truncated_trained" in kinds:
        return None
    stops = (codec.eos_id, *getattr(codec, "stop_ids", ()))
    ends = {int(row.ids[stop - 1]) for row in trajectory.rows if len(row.ids) == len(row.loss_mask)
            for _, stop in mask_runs(row.loss_mask) if stop == len(row.ids) or int(row.ids[stop]) not in stops}
    return None if not ends else "stop_token_untrained" not in kinds or not ends.isdisjoint(codec.special_ids)


def diagnosis_of(
    trajectory: Trajectory, codec: Codec | None, renderer: Renderer | None, encode_rows: bool = False
) -> Diagnosis:
    """The diagnosis of one trajectory. A fault of the diagnosis itself becomes a finding, never an exception."""
    try:
        # It counts where a step names no chat template or the same one.
        own = ("", "" if renderer is None else renderer.chat_template_sha256)
        return examine(trajectory, codec, lambda sha256: renderer if sha256 in own else None, encode_rows=encode_rows)
    except Exception as error:
        return failed_diagnosis(f"The diagnosis itself failed on this trajectory ({type(error).__name__}: {error}).")


def codec_of(tokenizer: Any) -> tuple[LoadedTokenizer | None, TemporaryDirectory[str] | None]:
    """The tokenizer that a caller names, loaded, and the folder that must live as long as it; None for None. A
    tokenizer of ``transformers`` is saved to such a folder. Raises :class:`TokenizerUnusable`."""
    if tokenizer is None or isinstance(tokenizer, LoadedTokenizer):
        return tokenizer, None
    if isinstance(tokenizer, str | Path):
        return tokenizers.load(tokenizer), None
    if not hasattr(tokenizer, "save_pretrained"):
        raise TokenizerUnusable(
            f"A {type(tokenizer).__name__} is no tokenizer. Name its folder, or pass a tokenizer of transformers."
        )
    folder = TemporaryDirectory(prefix="rollout-inspector-")
    try:
        tokenizer.save_pretrained(folder.name)
        return tokenizers.load(folder.name), folder
    except BaseException:
        folder.cleanup()
        raise
