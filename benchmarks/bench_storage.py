"""Storing a 16k-token trajectory: against a table with JSON-text columns. Ratios in one run, printed."""

import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from django.db import connection, models, transaction

from rollout_inspector.streams.trajectory import Step, Trajectory
from rollouts.store.fields import FloatsField, IdsField, MaskField
from rollouts.store.models import Run, StepTokens
from rollouts.store.runs.runs import create_run
from rollouts.store.trajectories.save_trajectories import save_trajectories
from rollouts.store.trajectories.trajectories import load_trajectory

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True)]

TURNS, DELTA, COMPLETION = 20, 400, 400
USED = (
    "SELECT page_size * (page_count - freelist_count) FROM pragma_page_size, pragma_page_count, pragma_freelist_count"
)
BATCH = 10
"""Trajectories of one save on either side: an import saves up to a hundred at once."""


def long_trajectory(external_id: str, with_logprobs: bool = True) -> Trajectory:
    """16,000 tokens in 20 turns."""
    rng = np.random.default_rng(1)
    prompt = rng.integers(0, 150_000, DELTA, dtype=np.int32)
    steps = []
    for _ in range(TURNS):
        completion = rng.integers(0, 150_000, COMPLETION, dtype=np.int32)
        logprobs = -rng.random(COMPLETION, dtype=np.float32) if with_logprobs else None
        steps.append(Step(prompt, completion, logprobs))
        prompt = np.concatenate([prompt, completion, rng.integers(0, 150_000, DELTA, dtype=np.int32)])
    return Trajectory(external_id, tuple(steps))


class JsonStep(models.Model):
    """What one would write first: every step with its arrays as JSON text."""

    trajectory = models.CharField(max_length=100)
    index = models.IntegerField()
    prompt_ids = models.JSONField()
    completion_ids = models.JSONField()
    logprobs = models.JSONField()

    class Meta:
        app_label = "rollouts"
        managed = False
        db_table = "bench_json_step"


class JsonColumns(models.Model):
    """The arrays of one row as JSON text."""

    ids = models.JSONField()
    loss_mask = models.JSONField()
    logprobs = models.JSONField()

    class Meta:
        app_label = "rollouts"
        managed = False
        db_table = "bench_json_columns"


class BlobColumns(models.Model):
    """The same arrays in the columns that the store has."""

    ids = IdsField()
    loss_mask = MaskField()
    logprobs = FloatsField()

    class Meta:
        app_label = "rollouts"
        managed = False
        db_table = "bench_blob_columns"


TABLES = (JsonStep, JsonColumns, BlobColumns)


@pytest.fixture
def bench_tables(transactional_db: None):  # type: ignore[no-untyped-def]
    with connection.schema_editor() as editor:
        for table in TABLES:
            editor.create_model(table)
    yield
    with connection.schema_editor() as editor:
        for table in TABLES:
            editor.delete_model(table)


def seconds(call: Callable[[int], object], n: int = 5) -> float:
    """The best of several."""
    best = float("inf")
    for k in range(n):
        start = time.perf_counter()
        call(k)
        best = min(best, time.perf_counter() - start)
    return best


def test_a_column_of_bytes_against_a_column_of_json_text(bench_tables: None) -> None:
    """The same 16,000 ids, mask values and logprobs, the same single row, the same ORM."""
    value = long_trajectory("x")
    ids = value.steps[-1].stream
    mask = np.arange(len(ids)) % 2 == 1
    logprobs = -np.random.default_rng(2).random(len(ids), dtype=np.float32)
    blob = seconds(lambda k: BlobColumns.objects.create(ids=ids, loss_mask=mask, logprobs=logprobs), 20)
    text = seconds(
        lambda k: JsonColumns.objects.create(
            ids=ids.tolist(), loss_mask=mask.tolist(), logprobs=logprobs.astype(float).tolist()
        ),
        20,
    )
    read_blob = seconds(lambda k: BlobColumns.objects.get(pk=1), 20)
    read_text = seconds(
        lambda k: [np.array(getattr(JsonColumns.objects.get(pk=1), name)) for name in ("ids", "loss_mask", "logprobs")],
        20,
    )
    print(f"\nwrite {len(ids):,} tokens: {blob * 1e3:.2f} ms, as JSON text {text * 1e3:.2f} ms: {text / blob:.0f}x")
    print(f"read them: {read_blob * 1e3:.2f} ms, JSON text {read_text * 1e3:.2f} ms: {read_text / read_blob:.0f}x")


def test_store_and_load_against_json_text(bench_tables: None) -> None:
    run = create_run(Run.Kind.IMPORT, "bench")
    value = long_trajectory("x")

    def store_json(k: int) -> None:
        with transaction.atomic():
            JsonStep.objects.bulk_create(
                JsonStep(
                    trajectory=f"j{k}-{m}", index=n, prompt_ids=step.prompt_ids.tolist(),
                    completion_ids=step.completion_ids.tolist(), logprobs=step.logprobs.tolist(),
                )
                for m in range(BATCH)
                for n, step in enumerate(value.steps)
            )

    def load_json(k: int) -> list[tuple[np.ndarray, ...]]:
        return [
            (np.array(s.prompt_ids), np.array(s.completion_ids), np.array(s.logprobs))
            for s in JsonStep.objects.filter(trajectory="j0-0").order_by("index")
        ]

    def store(k: int) -> None:
        stored.extend(save_trajectories(run, [replace(value, external_id=f"o{k}-{m}") for m in range(BATCH)]))

    stored: list[models.Model] = []
    ours = seconds(store) / BATCH
    theirs = seconds(store_json) / BATCH
    load_ours = seconds(lambda k: load_trajectory(stored[0]))
    load_theirs = seconds(load_json)
    n = stored[0].n_tokens
    print(f"\nstore {n:,} tokens, whole: {ours * 1e3:.2f} ms, as JSON text {theirs * 1e3:.2f} ms: {theirs / ours:.0f}x")
    print(f"load them: {load_ours * 1e3:.2f} ms, JSON text {load_theirs * 1e3:.2f} ms: {load_theirs / load_ours:.0f}x")


def test_bytes_a_token_without_logprobs() -> None:
    run = create_run(Run.Kind.IMPORT, "bench")
    (stored,) = save_trajectories(run, [long_trajectory("x", with_logprobs=False)])
    arrays = sum(
        t.delta_ids.nbytes + t.completion_ids.nbytes + (0 if t.delta_origin is None else t.delta_origin.nbytes)
        for t in StepTokens.objects.filter(step__trajectory=stored)
    )
    print(f"\narrays: {arrays / stored.n_tokens:.2f} bytes a token")
    assert arrays / stored.n_tokens <= 7
    if connection.vendor == "sqlite":
        with connection.cursor() as cursor:
            cursor.execute(USED)
            before = cursor.fetchone()[0]
            save_trajectories(
                run, [replace(long_trajectory("x", with_logprobs=False), external_id=f"n{n}") for n in range(50)]
            )
            cursor.execute(USED)
            grown = (cursor.fetchone()[0] - before) / (50 * stored.n_tokens)
        print(f"the whole database file grows by {grown:.2f} bytes a token, columns and indexes included")
        assert grown <= 7
