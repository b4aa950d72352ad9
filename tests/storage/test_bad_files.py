"""Changed files of every format through a whole import: whole trajectories or a sentence, never anything else.

``INSPECTOR_TEST_MUTATIONS=10000`` imports so many files of every format instead of a few; ``test_mutations.py`` in
``tests/formats`` then reads so many.
"""

import gzip
import io
import json
import logging
import os
import random
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from rollout_inspector.formats import Source
from rollout_inspector.formats.containers.compression import zstd
from rollouts.jobs.imports import imports
from rollouts.store.chat_templates.tokenizers import find_tokenizer
from rollouts.store.models import (
    RowTokens, Run, StepTokens, StoredFinding, StoredRow, StoredStep, StoredTrajectory, Tokenizer
)
from rollouts.store.runs.runs import create_run, delete_run
from rollouts.store.trajectories.trajectories import load_trajectory
from tests.samples.format_mutations import EXAMPLES, changed_values, mutate_bytes
from tests.samples.formats import jsonl

pytestmark = pytest.mark.django_db

FILES = int(os.environ.get("INSPECTOR_TEST_MUTATIONS", "24"))
AT_ONCE = 50


@pytest.fixture
def tokenizer(tiny_tokenizer: Any) -> Tokenizer:
    return find_tokenizer(str(tiny_tokenizer))


def changed_file(rng: random.Random, name: str, n: int) -> Source:
    values = changed_values(rng, name)
    data = jsonl(*values)
    if rng.random() < 0.3:
        data = json.dumps(values, indent=rng.choice([None, 2])).encode()
    if rng.random() < 0.1:
        data = as_parquet(values) or data
    if rng.random() < 0.4:
        data = mutate_bytes(rng, data)
    pack = rng.random()
    if pack < 0.2:
        data = gzip.compress(data) if pack < 0.1 else zstd.compress(data)
        if rng.random() < 0.5:
            data = mutate_bytes(rng, data)
    return Source.of_bytes(data, f"{n}.jsonl")


def as_parquet(values: list[Any]) -> bytes:
    """Empty where the columns have no common types."""
    file = io.BytesIO()
    try:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(values), file)
    except (pyarrow.ArrowException, OverflowError, TypeError, UnicodeEncodeError, AttributeError):
        return b""
    return file.getvalue()


@pytest.mark.parametrize("name", list(EXAMPLES))
def test_changed_files_leave_whole_trajectories_or_a_sentence(
    name: str, tokenizer: Tokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    rng = random.Random(f"files {name}")
    caplog.set_level(logging.ERROR)
    for done in range(0, FILES, AT_ONCE):
        files = [changed_file(rng, name, done + n) for n in range(min(AT_ONCE, FILES - done))]
        run = create_run(Run.Kind.IMPORT, name, tokenizer=tokenizer if rng.random() < 0.8 else None)
        imports.import_files(run, files, rng.choice(["auto", "auto", name]))
        check(run, [file.name for file in files])
        assert not caplog.records
        delete_run(run)
    for model in (StoredTrajectory, StoredStep, StepTokens, StoredRow, RowTokens, StoredFinding):
        assert not model.objects.exists()


def check(run: Run, names: list[str]) -> None:
    assert run.status in (Run.Status.DONE, Run.Status.FAILED), run.status
    assert run.status == Run.Status.DONE or run.error.startswith("Nothing was imported. "), run.error
    rejections = list(run.rejections.all())
    assert len(rejections) == run.n_rejected
    for one in rejections:
        assert one.file in names and one.reason.strip()[-1] in ".`" and "Traceback" not in one.reason, one.reason
    assert not StoredFinding.objects.filter(run=run, evidence__startswith="The diagnosis itself failed").exists()
    stored = list(run.trajectories.order_by("index"))
    assert [one.index for one in stored] == list(range(len(stored)))
    assert len(stored) == run.n_trajectories
    for one in stored:
        value = load_trajectory(one)
        assert len(value.steps) == one.n_steps == StepTokens.objects.filter(step__trajectory=one).count()
        assert one.status == (StoredTrajectory.Status.FAILED if one.error else StoredTrajectory.Status.DONE)
        assert one.n_rows == one.rows.count()
