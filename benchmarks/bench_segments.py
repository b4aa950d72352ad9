"""Token arrays in segments against token arrays in the database. Ratios in one run, and bytes a token, printed.

Seconds of imports are processor seconds of all threads, here and in the processes of tokenizers. Windows are timed by
the clock, in turn, and the median is printed: a read of a segment waits for nothing but this processor.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from django.db.models import Sum
from django.test import Client

from benchmarks.bench_import import seconds
from benchmarks.gym_file import write_gym_file
from rollout_inspector.text.tokenizers import load
from rollouts.jobs.imports import imports
from rollouts.jobs.launch import LaunchSettings, launch
from rollouts.jobs.storage.token_moves import move_run
from rollouts.store import files
from rollouts.store.chat_templates.tokenizers import find_tokenizer
from rollouts.store.models import RowColumn, RowTokens, Run, StepTokens
from rollouts.store.runs.runs import create_run, delete_run
from rollouts.store.token_arrays import STORES, items, segment_file
from rollouts.store.trajectories.rows import row_window
from rollouts.worker import run_rollouts

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True)]

MB = int(os.environ.get("BENCH_SEGMENTS_MB", "30"))
PAIRS = int(os.environ.get("BENCH_PAIRS", "5"))
WINDOW = 4096


@pytest.fixture(autouse=True)
def no_segments_stay() -> Iterator[None]:
    yield
    files.delete_all("segments/")
    run_rollouts.close_engines()


def imported(store: str, paths: Sequence[Path], tokenizer: Path) -> Run:
    run = create_run(
        Run.Kind.IMPORT, store, tokenizer=find_tokenizer(str(tokenizer)), token_store=store
    )
    imports.import_files(run, paths)
    assert run.status == Run.Status.DONE, run.error
    return run


def test_import_and_windows(corpus: Path, tmp_path: Path, client: Client, django_user_model: type) -> None:
    tokenizer = corpus / "tokenizers" / "qwen2.5"
    path = tmp_path / "gym.jsonl"
    write_gym_file(path, load(tokenizer), MB * 1_000_000)
    imported("database", [path], tokenizer)  # fills every cache
    took: dict[str, list[float]] = {store: [] for store in STORES}
    runs: dict[str, Run] = {}
    for _ in range(PAIRS):
        for store in STORES:
            if store in runs:
                delete_run(runs[store])
            spent, runs[store] = seconds(lambda: imported(store, [path], tokenizer))  # noqa: B023
            took[store].append(spent)
    ratios = [ours / theirs for theirs, ours in zip(took["database"], took["segments"], strict=True)]
    run = runs["segments"]
    assert not StepTokens.objects.filter(step__trajectory__run=run, step__segment__isnull=False).exists()
    print(
        f"\nimport of {path.stat().st_size / 1e6:.0f} MB, {run.n_tokens:,} tokens: database "
        f"{median(took['database']):.2f} s, segments {median(took['segments']):.2f} s; segments / database "
        f"{median(ratios):.3f} (median of {PAIRS} pairs, {min(ratios):.3f} to {max(ratios):.3f}; target 1.10)"
    )
    said = {store: list(one.trajectories.order_by("index")[:20]) for store, one in runs.items()}
    client.force_login(django_user_model.objects.create_user("bench", is_superuser=True))  # type: ignore[attr-defined]

    def page(code: str) -> None:
        assert client.get(f"/trajectories/{code}", follow=True).status_code == 200

    def compare(what: str, read: Callable[[object], object]) -> None:
        times: dict[str, list[float]] = {store: [] for store in STORES}
        for n in range(5):
            for pair in zip(*said.values(), strict=True):
                for store, one in zip(said, pair, strict=True):
                    began = time.perf_counter()
                    read(one)
                    if n:  # the first round warms
                        times[store].append(time.perf_counter() - began)
        middle = {store: median(values) * 1e3 for store, values in times.items()}
        print(
            f"{what}, warm: database {middle['database']:.2f} ms, segments {middle['segments']:.2f} ms; segments / "
            f"database {middle['segments'] / middle['database']:.3f} (target 1.10)"
        )

    compare("window of 4,096 tokens", lambda one: row_window(one, 0, 0, WINDOW))  # type: ignore[arg-type]
    compare("page of it", lambda one: page(one.code))  # type: ignore[attr-defined]
    print_bytes("the imported file", run)


def print_bytes(what: str, run: Run) -> None:
    """Bytes a token of a run in the database, then in a segment, columns of BLOBs and whole files."""
    for _ in move_run(run, "database"):
        pass
    steps = StepTokens.objects.filter(step__trajectory__run=run)
    rows = RowTokens.objects.filter(row__trajectory__run=run)
    blobs, ids, scored = 0, 0, 0
    for found, fields in ((steps, items.STEP_ARRAYS), (rows, items.ROW_ARRAYS)):
        for one in found.iterator():
            for name, field in fields.items():
                values = getattr(one, name)
                if values is not None:
                    blobs += len(field.to_bytes(values))
                    ids += len(values) * name.endswith("ids")
                    scored += len(values) * (name == "logprobs")
    blobs += sum(one.values.nbytes for one in RowColumn.objects.filter(row__trajectory__run=run).iterator())
    for _ in move_run(run, "segments"):
        pass
    size = run.token_segments.filter(replaced_at=None).aggregate(n=Sum("n_bytes"), ids=Sum("n_tokens"))
    assert size["ids"] == ids
    print(
        f"{what}: {ids:,} ids, {scored / ids:.0%} of them with a log-probability: database {blobs / ids:.2f}, "
        f"segments {size['n'] / ids:.2f} bytes a token (target 5)"
    )


def test_bytes_a_token_of_the_labelled_corpus(corpus: Path) -> None:
    print()
    for path in sorted((corpus / "labelled").glob("*.jsonl")):
        run = imported(
            "segments",
            [path],
            corpus / "tokenizers" / path.name.split(".calls")[0].split(".train")[0].removesuffix("-fixed"),
        )
        print_bytes(path.name, run)


def test_bytes_a_token_of_a_launch(tiny_tokenizer: Path) -> None:
    run = launch(LaunchSettings(engine="transformers", prompts=64, group=4, seed=1), enqueue=False)
    run_rollouts.work_on(run.pk)
    print()
    print_bytes("a launch of the demo policy", run)


def test_bytes_a_token_of_every_encoding(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A million ids as frequent as words, without any order, and a random log-probability for each."""
    rng = np.random.default_rng(1)
    ranks = np.minimum(rng.zipf(1.1, 1 << 20), 150_000)
    ids = rng.permutation(np.arange(150_001, dtype=np.int32))[ranks]
    logprobs = -rng.exponential(0.3, len(ids)).astype(np.float32)
    cut = range(0, len(ids), 400)
    none = np.zeros(0, np.int32)
    found = [
        items.TokenItem("t", n, None, {
            "delta_ids": none, "delta_origin": None, "completion_ids": ids[at : at + 400],
            "logprobs": logprobs[at : at + 400],
        })
        for n, at in enumerate(cut)
    ]
    leaves = [f"{name}.list.element" for name in ("delta_ids", "completion_ids", "ids")]
    own = segment_file._WRITING
    for name, writing in {
        "plain, as written": own,
        "byte stream split": {
            **own,
            "column_encoding": {**own["column_encoding"], **dict.fromkeys(leaves, "BYTE_STREAM_SPLIT")},
        },
        "delta binary packed": {
            **own,
            "column_encoding": {**own["column_encoding"], **dict.fromkeys(leaves, "DELTA_BINARY_PACKED")},
        },
        "dictionary": {**own, "use_dictionary": [*own["use_dictionary"], *leaves]},
        "plain, zstd 9": {**own, "compression_level": 9},
    }.items():
        monkeypatch.setattr(segment_file, "_WRITING", writing)
        path = tmp_path / "x.parquet"
        began = time.process_time()
        with path.open("wb") as file:
            segment_file.write_items(found, file)
        spent = time.process_time() - began
        print(f"ids {name}: {path.stat().st_size / len(ids):.2f} bytes a token, {spent:.2f} s a million")
