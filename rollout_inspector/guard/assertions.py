"""Assertions for tests: rows that may be trained on, and chat templates that are safe."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec

from rollout_inspector import formats
from rollout_inspector.formats import FileRefused, Rejected, Source
from rollout_inspector.guard.checked_files import CheckedFiles, check_files, codec_of, diagnosis_of
from rollout_inspector.guard.checked_templates import check_template, purposes_of
from rollout_inspector.guard.fail_rules import ExitStatus, fail_rule, verdict_on
from rollout_inspector.guard.report_formats import as_text
from rollout_inspector.guard.template_lock import (
    LOCK_TIME, compare_with_lock, name_in_lock, read_lock, tokenizer_in_lock
)
from rollout_inspector.guard.template_reports import as_text as template_text
from rollout_inspector.guard.text_files import read_text
from rollout_inspector.guard.trainer_batches import array_of, items_of_rows
from rollout_inspector.outputs import plain
from rollout_inspector.refusal import Refusal
from rollout_inspector.streams.interfaces import Codec, Renderer
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.chat_templates import cannot_render, renderer

_ROWS = "rows"  # What stands in a report where a file has its name.


def assert_tito(
    rows_or_file: Any, tokenizer: Any = None, *, chat_template: str | None = None, fail_on: str = "error",
    max_rate: Iterable[str] = (),
) -> None:
    """Assert that rollouts can be trained on. Raises ``AssertionError`` with the report of the check.

    ``rows_or_file``: a file, a folder, a list of these; or rows as :meth:`rows` takes them, or
    dicts as a line of any known format holds them. ``tokenizer``: a folder, a loaded tokenizer, or one of
    ``transformers``. ``chat_template``: its text, for what templates write. ``fail_on`` and ``max_rate``: as the
    options of the check. What could not be decided is no pass. Raises ``ValueError`` for what cannot be used.
    """
    __tracebackhide__ = True
    rule = fail_rule(fail_on, max_rate)
    codec, folder = codec_of(tokenizer)
    try:
        text = chat_template if chat_template is not None else (codec.chat_template if codec is not None else None)
        writer = None if text is None or codec is None else renderer(codec, text)
        if writer is not None and (problem := cannot_render(writer)):
            raise Refusal(f"The chat template cannot be used. {problem}")
        paths = _paths(rows_or_file)
        checked = check_files(paths, codec, writer) if paths else _check_rows(rows_or_file, codec, writer)
    finally:
        if folder is not None:
            folder.cleanup()
    verdict = verdict_on(checked, rule)
    if verdict.outcome is not ExitStatus.PASSED:
        raise AssertionError("\n" + plain(as_text(checked, verdict)))


def _paths(value: Any) -> list[str | Path]:
    if isinstance(value, str | Path):
        return [value]
    is_paths = isinstance(value, list | tuple) and value and all(isinstance(item, str | Path) for item in value)
    return list(value) if is_paths else []


def _check_rows(rows: Any, codec: Codec | None, writer: Renderer | None) -> CheckedFiles:
    checked = CheckedFiles(files=[_ROWS])
    rows = rows if isinstance(rows, Mapping) or hasattr(rows, "keys") else list(rows)
    trajectories = _of_a_format(rows) if isinstance(rows, list) else None
    if trajectories is not None:
        for item in trajectories:
            if isinstance(item, Rejected):
                checked.refuse(_ROWS, item.line, item.reason)
            else:
                checked.add(_ROWS, None, item, diagnosis_of(item, codec, writer))
        return checked
    items = items_of_rows(rows, "row")
    for n in range(items.n):
        try:
            trajectory = items.trajectory(n)
        except Refusal as error:
            checked.refuse(_ROWS, n + 1, str(error))
            continue
        checked.add(_ROWS, None, trajectory, diagnosis_of(trajectory, codec, writer))
    return checked


def _of_a_format(rows: list[Any]) -> list[Trajectory | Rejected] | None:
    """The trajectories of dicts as the lines of a file hold them; None where no format fits."""
    if not rows or not all(isinstance(row, Mapping) for row in rows):
        return None
    try:
        encoder = msgspec.json.Encoder(enc_hook=lambda value: array_of(value).tolist())
        data = b"\n".join(encoder.encode(dict(row)) for row in rows)
        source = Source(_ROWS, lambda: BytesIO(data), len(data))
        return list(formats.read(source)[1])
    except (FileRefused, TypeError, ValueError, RecursionError):
        return None


def assert_template_safe(
    tokenizer: Any = None, chat_template: str | Path | None = None, *, purposes: str | Iterable[str] = "tools",
    lock: str | Path | None = None, name: str = "",
) -> None:
    """Assert that a chat template is safe for its purposes. Raises ``AssertionError`` with the report of the check.

    ``tokenizer``: a folder, a loaded tokenizer, or one of ``transformers``; None = compare characters.
    ``chat_template``: its text, or the path of its file (a text without `{` is one); None = the tokenizer's own.
    ``purposes``: words of :data:`PURPOSES`. ``lock``: a lock file; then it must be what was locked under ``name``: by
    default the path that was passed, or the only template there. Its tokenizer is taken where none is passed.
    Raises ``ValueError`` for what cannot be used.
    """
    __tracebackhide__ = True
    wanted_purposes = purposes_of(purposes)
    template_lock = None if lock is None else read_lock(lock)
    if isinstance(chat_template, str) and chat_template and "{" not in chat_template:
        chat_template = Path(chat_template)
    path = chat_template if isinstance(chat_template, Path) else tokenizer
    if lock is not None and template_lock is not None:
        if not name and isinstance(path, str | Path) and (chat_template is None or path is chat_template):
            name = name_in_lock(path, lock)
        elif not name and len(template_lock.templates) == 1:
            name = next(iter(template_lock.templates))
        tokenizer = tokenizer if chat_template is None else tokenizer_in_lock(name, template_lock, lock, tokenizer)
    codec, folder = codec_of(tokenizer)
    try:
        own = None if codec is None else codec.chat_template
        if isinstance(chat_template, Path):
            chat_template = read_text(chat_template, "The chat template")
        text = chat_template or own
        if text is None:
            raise Refusal("There is no chat template: the tokenizer has none, and none was named.")
        label = name or (codec.name if codec is not None and folder is None else "the chat template")
        checked = check_template(
            label, text, codec, purposes=wanted_purposes, now="" if template_lock is None else LOCK_TIME
        )
        if template_lock is not None:
            checked = replace(checked, compared=compare_with_lock(checked, template_lock, name))
    finally:
        if folder is not None:
            folder.cleanup()
    if checked.outcome is not ExitStatus.PASSED:
        raise AssertionError("\n" + plain(template_text([checked])))
