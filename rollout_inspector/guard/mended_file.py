"""Writes a file again with its faulty trajectories mended, and a manifest of every change. Our own formats are written
from values. A trainer's records are changed where they stand, and untouched lines are copied. Both files appear when
they are whole and the output passes the check; until then they are called ``*.part``."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from io import TextIOWrapper
from pathlib import Path
from typing import IO, Any

import numpy as np

from rollout_inspector import formats
from rollout_inspector.diagnose.finding import Finding
from rollout_inspector.formats import FORMATS, FileRefused, Format, Rejected, Source
from rollout_inspector.formats.folders import MANIFEST
from rollout_inspector.formats.shapes import decode
from rollout_inspector.formats.training_step import ANY
from rollout_inspector.formats.writers.exports import rows_of
from rollout_inspector.formats.writers.mask_patches import PATCHED, why_not, without
from rollout_inspector.guard.checked_files import CheckedFiles, KindCount, check_files, diagnosis_of
from rollout_inspector.guard.fail_rules import ExitStatus, FailRule, verdict_on
from rollout_inspector.guard.mended_trajectory import MendedTrajectory, MendWay, Remake, left_out, mend_trajectory
from rollout_inspector.outputs import whole_file
from rollout_inspector.refusal import Refusal, Remedy
from rollout_inspector.streams.interfaces import Codec, Renderer
from rollout_inspector.streams.trajectory import Trajectory

VERSION = 1  # Of the manifest.
OWN = tuple(name for name, export in FORMATS.items() if export.write is not None)
"""Formats that hold every mended trajectory."""


_BY_ERRORS = FailRule()


class MendRefused(Refusal):
    """Nothing is written; the message is a sentence that says why, and the way out."""


@dataclass
class Figures:
    """What a file holds."""

    trajectories: int = 0
    rows: int = 0
    sampled_tokens: int = 0  # In the calls; 0 for a file of rows alone.
    trained_tokens: int = 0
    kinds: dict[str, int] = field(default_factory=dict)  # Kind of finding -> trajectories that have it.

    def add(self, trajectory: Trajectory) -> None:
        """Count a trajectory. Its findings are counted by the check."""
        rows = rows_of(trajectory)
        self.trajectories += 1
        self.rows += len(rows)
        self.sampled_tokens += sum(len(step.completion_ids) for step in trajectory.steps)
        self.trained_tokens += sum(row.n_trained for row in rows)

    def take_kinds(self, checked: CheckedFiles) -> None:
        self.kinds = {kind: count.n_trajectories for kind, count in checked.sorted_kinds()}


def mend_file(
    path: Path, output: Path, way: MendWay = MendWay.SPLIT, rule: FailRule = _BY_ERRORS, codec: Codec | None = None,
    renderer: Renderer | None = None, remake: Remake | None = None, input_format: str = "auto", output_format: str = "",
) -> Mending:
    """Mend one file. Raises :class:`MendRefused`; then neither the output nor the manifest was touched. ``rule``: what
    fails. ``remake``: for the way ``STRATEGY``. ``output_format``: a name of ``OWN``; empty = that of the input."""
    manifest = output.with_name(f"{output.name}{MANIFEST}")
    if not path.is_file():
        raise MendRefused(f"There is no file {path}. Name one file; a folder is mended file by file.")
    if output.exists() and output.samefile(path):
        raise MendRefused(f"The output {output} is the input. Name another file.")
    for file_path in (output, manifest):
        if (file_path.exists() and not file_path.is_file()) or not file_path.absolute().parent.is_dir():
            raise MendRefused(f"The output {file_path} cannot be written: name a file in a folder that is there.")
    try:
        with whole_file(manifest) as record, whole_file(output) as file:
            log = TextIOWrapper(record, "utf-8")
            mending = Mending(path, way, rule, codec, renderer, remake, log)
            mending.write(file, input_format, output_format)
            file.flush()
            mending.check_output(Path(file.name))
            log.write(mending.end_of_manifest(output))
            log.detach()
    except FileRefused as refusal:
        raise MendRefused(str(refusal)) from refusal
    except OSError as error:
        place = error.filename or f"{path}, or {output},"
        raise MendRefused(f"{place} cannot be read or written: {error.strerror}.") from error
    return mending


class Mending:
    """One pass over a file, and what it changed."""

    def __init__(
        self, path: Path, way: MendWay, rule: FailRule, codec: Codec | None, renderer: Renderer | None,
        remake: Remake | None, log: IO[str],
    ) -> None:
        self._path, self._way, self._rule, self._log = path, way, rule, log
        self._codec, self._renderer, self._remake = codec, renderer, remake
        self._source = Source.of_path(path)
        self._checked = CheckedFiles()
        self._n_changes = 0
        self.before, self.after = Figures(), Figures()
        self.actions: Counter[str] = Counter()  # Action -> trajectories; ``not_read`` counts lines.
        self.first_not_read = ""  # Why the first line that was not read was not.
        self.format = ""

    def write(self, file: IO[bytes], input_format: str, output_format: str) -> None:
        """Write the output and the changes. Raises :class:`MendRefused` for a format that cannot be written."""
        format_name, items = formats.read(self._source, input_format, ANY)
        target = output_format or format_name.name
        self.format = target
        self._log.write('{"changes": [')
        if target in OWN:
            write = FORMATS[target].write
            assert write is not None
            write(self._values(format_name, items), file)
        elif target in PATCHED:
            self._patch(format_name, items, file)
        else:
            raise MendRefused(f"{format_name.title} can be read, but not written.", Remedy.OWN_FORMAT)
        self.before.take_kinds(self._checked)

    def check_output(self, draft: Path) -> None:
        """Read what was written again. Raises :class:`MendRefused` where it does not pass."""
        if not self.before.trajectories:
            raise MendRefused(f"No trajectory could be read: {self.first_not_read or 'the file holds none'}")
        if not self.after.trajectories:
            raise MendRefused(
                f"Nothing would be left: every trajectory fails ({self.before.trajectories:,}), and {self._way} "
                "mends none of them. See what fails with: rollout-inspector check."
            )
        checked = check_files([draft], self._codec, self._renderer, self.format)
        verdict = verdict_on(checked, self._rule)
        if verdict.outcome is not ExitStatus.PASSED or checked.n_trajectories != self.after.trajectories:
            unread = [line.reason for line in checked.unread[:1]]
            why = " ".join([*(f"{kind} is still there." for kind in verdict.failing), *verdict.reasons, *unread])
            raise MendRefused(f"What would be written does not pass the check, so nothing is written. {why}")
        self.after.take_kinds(checked)

    def end_of_manifest(self, output: Path) -> str:
        """What stands behind the changes."""
        more = {
            "version": VERSION,
            "input": str(self._path),
            "output": str(output),
            "format": self.format,
            "way": self._way.value,
            "tokenizer": getattr(self._codec, "name", None),
            "chat_template_sha256": getattr(self._renderer, "chat_template_sha256", None),
            "before": vars(self.before),
            "after": vars(self.after),
            "actions": dict(sorted(self.actions.items())),
        }
        return "\n],\n" + json.dumps(more, indent=1)[2:] + "\n"

    def _values(self, found: Format, items: Iterator[Trajectory | Rejected]) -> Iterator[Trajectory]:
        for item in items:
            if isinstance(item, Rejected):
                self._not_read(item)
                continue
            done = self._mend(item)
            self._tell(self._source.line if found.by_line else None, item, done)
            yield from (part.trajectory for part in done.written)

    def _patch(self, found: Format, items: Iterator[Trajectory | Rejected], file: IO[bytes]) -> None:
        """Copy each line, changed where a trajectory of it was."""
        lines = Source.of_path(self._path)
        lines.is_document = self._source.is_document
        raw = lines.lines()
        of_line: list[Trajectory] = []
        number = 0
        for item in items:
            if self._source.line != number and of_line:
                self._write_line(found, _line_of(raw, number), number, of_line, file)
                of_line = []
            number = self._source.line
            if isinstance(item, Rejected):
                self._not_read(item)
            else:
                of_line.append(item)
        if of_line:
            self._write_line(found, _line_of(raw, number), number, of_line, file)

    def _write_line(
        self, found: Format, line: bytes, number: int, trajectories: list[Trajectory], file: IO[bytes]
    ) -> None:
        mask_places, list_key = PATCHED[found.name]
        done = [self._mend(trajectory) for trajectory in trajectories]
        if not any(result.actions for result in done):
            for trajectory, result in zip(trajectories, done, strict=True):
                self._tell(number, trajectory, result)
            line = line.strip()  # an object over several lines becomes one line
            file.write((json.dumps(decode(line)).encode() if b"\n" in line else line) + b"\n")
            return
        record = decode(line)
        if why := why_not(record):
            raise MendRefused(
                f"Line {number} of {self._path} cannot be changed where it stands. {why}", Remedy.OWN_FORMAT
            )
        dropped = []
        for n, (trajectory, result) in enumerate(zip(trajectories, done, strict=True)):
            if result.actions == ("masked",) and len(result.masked) == 1:
                places = sorted((*result.masked[0], *result.unmasked[0]))
                mask_places(record, n, places, result.written[0].trajectory.rows[0])
            elif result.actions:
                if result.written:
                    reason = f"It would need {', '.join(result.actions)}; in {found.title} a record is only masked or "
                    result = left_out(trajectory, result.kinds, f"{reason}left out.")
                dropped.append(n)
            self._tell(number, trajectory, result)
        remaining = without(record, dropped, list_key)
        if remaining is not None:
            file.write(json.dumps(remaining).encode() + b"\n")

    def _mend(self, trajectory: Trajectory) -> MendedTrajectory:
        first: list[Finding] | None = None

        def find_faults(one: Trajectory) -> list[Finding]:
            nonlocal first
            diagnosis = diagnosis_of(one, self._codec, self._renderer)
            if first is None:
                first = []
                self._checked.add(str(self._path), None, one, diagnosis)
            return [finding for finding in diagnosis.findings if _fails(finding, self._rule)]

        self.before.add(trajectory)
        try:
            return mend_trajectory(trajectory, self._way, find_faults, self._remake)
        except Exception as error:  # as in diagnosis_of: one odd trajectory must not stop the others
            reason = f"The repair itself failed on this trajectory ({type(error).__name__}: {error})."
            return left_out(trajectory, (), reason)

    def _not_read(self, one: Rejected) -> None:
        self.actions["not_read"] += 1
        self.first_not_read = self.first_not_read or f"line {one.line}: {one.reason}"
        self._change({"line": one.line, "actions": ["not_read"], "reason": one.reason})

    def _tell(self, line: int | None, trajectory: Trajectory, done: MendedTrajectory) -> None:
        for part in done.written:
            self.after.add(part.trajectory)
        if not done.actions:
            self.actions["unchanged"] += 1
            return
        self.actions.update(done.actions)
        before, after = Figures(), Figures()
        before.add(trajectory)
        for part in done.written:
            after.add(part.trajectory)
        self._change({
            "line": line,
            "trajectory": trajectory.external_id,
            "actions": list(done.actions),
            "kinds": list(done.kinds),
            "written": [
                {"trajectory": part.trajectory.external_id, "steps": list(part.steps)} for part in done.written
            ],
            "left_out": [{"steps": list(part.steps), "kinds": list(part.kinds), "reason": part.reason}
                         for part in done.parts if part.reason],
            "masked": [_stretches(offsets) for offsets in done.masked],
            "unmasked": [_stretches(offsets) for offsets in done.unmasked],
            "n_unmasked": sum(map(len, done.unmasked)),
            "columns_left_out": list(dict.fromkeys(name for part in done.written for name in part.columns)),
            "trained_tokens": [before.trained_tokens, after.trained_tokens],
        })

    def _change(self, value: dict[str, Any]) -> None:
        self._log.write(("," if self._n_changes else "") + "\n" + json.dumps(value))
        self._n_changes += 1


def _fails(finding: Finding, rule: FailRule) -> bool:
    """Whether the check fails by a finding, or cannot decide because of it."""
    if finding.kind == "not_decidable":
        return finding.severity != "info"
    return rule.concerns(finding.kind, KindCount(finding.severity))


def _line_of(lines: Iterator[Any], number: int) -> bytes:
    return next(line for line in lines if line.number == number).checked()  # type: ignore[no-any-return]


def _stretches(offsets: tuple[int, ...]) -> list[list[int]]:
    """``[start, stop]`` of each run of offsets."""
    if not offsets:
        return []
    ids = np.array(offsets)
    cuts = np.flatnonzero(np.diff(ids) > 1) + 1
    return [[int(run[0]), int(run[-1]) + 1] for run in np.split(ids, cuts)]
