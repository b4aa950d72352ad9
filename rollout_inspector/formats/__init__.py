"""Formats of files, one module each: read and, in some, write. A line in ``FORMATS`` adds one, as do other packages. A
format is recognised by content. Readers stream, and yield :class:`Rejected` for a line that cannot be read."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

from rollout_inspector.formats.containers.refusals import FileRefused, TooLarge
from rollout_inspector.formats.containers.source import Source
from rollout_inspector.formats.engine_fields import summarised
from rollout_inspector.formats.policy_versions import with_policy_version
from rollout_inspector.formats.readers import (
    agent_lightning, agent_lightning_events, atif, datasets, harbor, inspector_jsonl, inspector_parquet, miles_columns,
    nemo_gym, nemo_rl, prime_rl_export, recorded_calls, rllm, rllm_steps, samples, sglang, skyrl, text_only,
    token_capture, tokendb, trainer_rows, verifiers_legacy, verifiers_traces
)
from rollout_inspector.formats.registry import Format, Rejected, installed_formats, is_named_by_line
from rollout_inspector.formats.shapes import BadLine, decode
from rollout_inspector.formats.training_step import ANY, TrainingStepRule, with_step
from rollout_inspector.streams.trajectory import Trajectory

FORMATS: dict[str, Format] = {
    format.name: format
    for format in (
        *installed_formats(),
        inspector_jsonl.FORMAT,
        inspector_parquet.FORMAT,
        *recorded_calls.FORMATS,
        nemo_gym.FORMAT,
        nemo_rl.FORMAT,
        token_capture.FORMAT,
        *verifiers_traces.FORMATS,
        verifiers_legacy.FORMAT,
        prime_rl_export.FORMAT,
        miles_columns.FORMAT,
        skyrl.FORMAT,
        rllm.FORMAT,
        rllm_steps.FORMAT,
        harbor.FORMAT,
        atif.FORMAT,
        sglang.FORMAT,
        tokendb.FORMAT,
        agent_lightning.FORMAT,
        *agent_lightning_events.FORMATS,
        *samples.FORMATS,
        *datasets.FORMATS,
        *trainer_rows.FORMATS,
        *text_only.FORMATS,
    )
}
"""In the order in which they are tried. Of two with one name, the later one is read: a name of ours stays ours."""

_LOOK_AT = 20  # Lines that are tried to recognise a format. Broken lines before the first good line do not matter.
_LOOK_INTO = 100  # Keys of an unknown object whose lists are tried.


def detect(source: Source) -> Format:
    """The format of a file, by its first lines. Raises :class:`FileRefused` when no format fits. A file whose first
    line is no JSON may hold JSON objects over many lines. Then it is read so."""
    recognised, problem = _look(source)
    if recognised is None and not source.is_document and _begins_broken(source):
        source.is_document = True
        recognised, _ = _look(source)
        source.is_document = recognised is not None
    if recognised is not None:
        return recognised
    raise FileRefused(f"{source.name} could not be recognised. {problem or 'It has no lines.'}")


def _begins_broken(source: Source) -> bool:
    """Whether the first line is no JSON by itself. Raises :class:`TooLarge` when it is beyond a limit."""
    line = next(source.lines(), None)
    if line is None:
        return False
    if line.data is None:
        raise TooLarge(f"{source.name} could not be recognised. Line {line.number}: {line.problem}")
    try:
        decode(line.data)
    except BadLine:
        return True
    return False


def _look(source: Source) -> tuple[Format | None, str]:
    problem = ""
    for line in islice(source.lines(), _LOOK_AT):
        try:
            value = decode(line.checked())
        except BadLine as error:
            problem = problem or f"Line {line.number}: {error}"
            continue
        for format in FORMATS.values():
            if format.detect([value]):
                return format, ""
        titles = ", ".join(format.title for format in FORMATS.values())
        problem = f"Line {line.number} {_unknown(value)} Known are: {titles}."
    return None, problem


def _unknown(value: Any) -> str:
    """What kind of value was not recognised, and where in it the trajectories may be."""
    if not isinstance(value, dict):
        what = "a list" if isinstance(value, list) else "JSON, but no object"
        return f"is {what}, of no format that is known here."
    for key, items in islice(value.items(), _LOOK_INTO):
        if not isinstance(items, list) or not items:
            continue
        inside = next((format for format in FORMATS.values() if format.detect(items)), None)
        if inside is not None:
            return f"holds a list under {key[:40]!r}: {inside.title}. Write that list alone to a file and import that."
    keys = ", ".join(key[:40] for key in islice(value, 12)) + ", ..." * (len(value) > 12)
    return f"is JSON, but of no format that is known here; its keys are: {keys or 'none'}."


def read(
    source: Source, name: str = "auto", training_step: TrainingStepRule = ANY
) -> tuple[Format, Iterator[Trajectory | Rejected]]:
    """The format of a file and its trajectories. Raises :class:`FileRefused`, also while it is read. ``training_step``:
    what the user says about the training steps."""
    if name in ("", "auto"):
        chosen = detect(source)
    elif name in FORMATS:
        chosen = FORMATS[name]
    else:
        raise FileRefused(f"There is no format {name!r}. There are: auto, {', '.join(FORMATS)}.")
    of_path = training_step.in_path(source.path)

    def completed(trajectory: Trajectory) -> Trajectory:
        if not chosen.is_lossless:
            trajectory = _with_end(with_policy_version(summarised(trajectory)))
        return with_step(trajectory, of_path, training_step)

    items = chosen.read(source)
    return chosen, (item if isinstance(item, Rejected) else completed(item) for item in items)


def _with_end(trajectory: Trajectory) -> Trajectory:
    """The trajectory; one that does not tell why it ended has the reason of its last call."""
    if trajectory.stop_reason or trajectory.error or not trajectory.steps:
        return trajectory
    return replace(trajectory, stop_reason=trajectory.steps[-1].finish_reason)


def lacks_of(names: str) -> list[str]:
    """What files of these formats lack, a sentence for each lack. ``names``: slugs joined by ", ". A sentence that is
    not true of all of them begins with those of which it is."""
    formats_of: dict[str, list[str]] = {}
    for name in names.split(", "):
        if name in FORMATS:
            formats_of.setdefault(FORMATS[name].lacks, []).append(name)
    return [
        sentence if len(formats_of) == 1 else f"{', '.join(some)}: {sentence[0].lower()}{sentence[1:]}"
        for sentence, some in formats_of.items() if sentence
    ]
