"""An import by one worker and by two, in turn. Ratios in one run, printed, never timed tests.

Each worker is a process that takes waiting jobs, as a Celery worker does, without a broker. Two ratios are printed: of
the clock, which wants two cores that nobody else uses; and of processor seconds: those of one worker against those of
the busier one of two, with the processes of their tokenizers. The second one also holds on a busy machine, but knows
nothing of waiting for the database. Also printed is how many cores one worker keeps busy, with its tokenizer and with
its connection's process of PostgreSQL: where that is more than one, two cores cannot do twice as much.

The database is that of ``DATABASE_URL``; SQLite, with its one writer, without it. ``BENCH_FANOUT_STORE=segments`` puts
the arrays into segments.
"""

import json
import os
import signal
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile
from django.db import connection, connections

from benchmarks.gym_file import write_gym_file
from benchmarks.processes import family, processor_seconds
from rollout_inspector.formats import FORMATS, Source
from rollout_inspector.streams.trajectory import Trajectory
from rollout_inspector.text.tokenizers import load
from rollouts.jobs.diagnosis import codec_of
from rollouts.jobs.imports import import_shards, imports
from rollouts.store.chat_templates.tokenizers import find_tokenizer
from rollouts.store.jobs.job_queue import take_next_job
from rollouts.store.models import Job, Run
from rollouts.store.runs.runs import create_run, delete_run
from rollouts.worker import jobs

pytestmark = [pytest.mark.bench, pytest.mark.django_db(transaction=True)]

MB = 1_000_000
SIZE = int(os.environ.get("BENCH_FANOUT_MB", "100")) * MB
PAIRS = int(os.environ.get("BENCH_FANOUT_PAIRS", "3"))
STORE = os.environ.get("BENCH_FANOUT_STORE", "database")
PART = int(os.environ.get("BENCH_FANOUT_PART_MB", "8")) * MB


def worker(run: Run, ready: Path, ended: Path) -> None:
    """Do what waits until the file ``ended`` is there; then write the processor seconds that it took.

    It has its tokenizer before it is ``ready``, as a worker that lives for days.
    """
    codec = codec_of(run)
    assert codec is not None and codec.encode("ready") is not None
    ready.touch()
    before = sum(processor_seconds(pid) for pid in family())
    while not ended.exists():
        if (job := take_next_job(64)) is None:
            time.sleep(0.01)
        else:
            jobs.work_on(job, share=True)
    took, backend = sum(processor_seconds(pid) for pid in family()) - before, 0.0
    if connection.vendor == "postgresql":
        with connection.cursor() as cursor:
            cursor.execute("SELECT pg_backend_pid()")
            backend = processor_seconds(cursor.fetchone()[0])
    (ended.parent / f"{ended.name}.{os.getpid()}").write_text(f"{took} {backend}")


def import_by(n: int, data: bytes, tokenizer: Path, folder: Path) -> tuple[Run, float, list[tuple[float, float]]]:
    """The run, the seconds of the clock, and the processor seconds of each of ``n`` workers and of its backend."""
    run = create_run(
        Run.Kind.IMPORT, f"{n} workers", tokenizer=find_tokenizer(str(tokenizer)), token_store=STORE
    )
    ended = folder / run.code
    ready = [folder / f"{run.code}.ready.{number}" for number in range(n)]
    connections.close_all()
    pids = []
    for one in ready:
        if (pid := os.fork()) == 0:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            try:
                with mock.patch.object(jobs, "send_task", lambda *_: ""), mock.patch.object(jobs, "send_shards", list):
                    worker(run, one, ended)
            finally:
                os._exit(0)
        pids.append(pid)
    while not all(one.exists() for one in ready):
        time.sleep(0.01)
    with mock.patch("rollouts.jobs.imports.imports.send_job", lambda job: ""):
        imports.send_import(run, imports.ask_for_uploads(run, [SimpleUploadedFile("a.jsonl", data)], "auto", True))
    began = time.monotonic()
    while Job.objects.filter(run=run, status__in=("queued", "running")).exists():
        time.sleep(0.02)
    clock = time.monotonic() - began
    ended.touch()
    for pid in pids:
        os.waitpid(pid, 0)
    spent = [(folder / f"{run.code}.{pid}").read_text().split() for pid in pids]
    run.refresh_from_db()
    assert run.status == Run.Status.DONE and not run.n_rejected, run.error
    return run, clock, [(float(took), float(backend)) for took, backend in spent]


def test_import_by_two_workers(tiny_tokenizer: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(import_shards, "PART_BYTES", PART)
    if STORE == "segments":
        import_module("rollouts.store.token_arrays.segment_file")  # it loads pyarrow, once in the life of a worker
    path = tmp_path / "a.jsonl"
    write_gym_file(path, load(tiny_tokenizer), SIZE)
    data = path.read_bytes()
    print(
        f"\n{connection.vendor}, {STORE}, {len(data) / MB:.0f} MB, parts of {PART / MB:.0f} MB, {os.cpu_count()} cores"
    )
    for _ in range(PAIRS):
        clocks, spent, stored = {}, {}, []
        for n in (1, 2):
            run, clocks[n], spent[n] = import_by(n, data, tiny_tokenizer, tmp_path)
            stored.append((run.n_trajectories, run.n_tokens, dict(run.finding_counts)))
            delete_run(run)
        assert stored[0] == stored[1]
        (took, backend), busiest = spent[1][0], max(took for took, _ in spent[2])
        print(
            f"one worker {clocks[1]:6.1f} s, two {clocks[2]:6.1f} s: {clocks[1] / clocks[2]:.2f}x by the clock, "
            f"{took / busiest:.2f}x by processor seconds; one worker keeps {took / clocks[1]:.2f} cores busy, its "
            f"connection's process {backend / clocks[1]:.2f} more; {stored[0][1] / clocks[1]:,.0f} and "
            f"{stored[0][1] / clocks[2]:,.0f} tokens/s"
        )


@pytest.mark.parametrize("mixed", [1, 64, 100_000])
def test_finding_sessions(mixed: int, tmp_path: Path) -> None:
    """Processor seconds of cutting a file of calls, of reading it whole, and of reading all parts.

    ``mixed``: sessions that are written side by side; the last number is all of them.
    """
    rng, calls = np.random.default_rng(1), 8
    path, n_sessions = tmp_path / "calls.jsonl", max(SIZE // 2 // (calls * 24_000), 2)
    with path.open("wb") as file:
        for first in range(0, n_sessions, mixed):
            for call in range(calls):
                for session in range(first, min(first + mixed, n_sessions)):
                    file.write(call_of(session, call, rng))
    source = Source.of_path(path)
    chosen = FORMATS["recorded_calls"]
    assert chosen.cut is not None
    cut, parts = timed(lambda: chosen.cut(source, PART))  # type: ignore[misc]
    whole, read = timed(lambda: [one.external_id for one in chosen.read(source) if isinstance(one, Trajectory)])
    by_parts, found = timed(lambda: [
        one.external_id for part in parts for one in chosen.read(source.of_part(part)) if isinstance(one, Trajectory)
    ])
    assert found == read and len(read) == n_sessions
    print(
        f"\n{source.size / MB:.0f} MB, {mixed} sessions side by side, {len(parts)} parts: cutting {cut:.2f} s, "
        f"reading it whole {whole:.2f} s, all parts {by_parts:.2f} s"
    )


def call_of(session: int, call: int, rng: np.random.Generator) -> bytes:
    """A line of a file of calls: 500 new tokens each time."""
    ids = np.random.default_rng(session).integers(0, 150_000, 500 * (call + 1)).tolist()
    logprobs = {"token_logprobs": (-rng.exponential(0.3, 250)).tolist()}
    choice = {"token_ids": ids[-250:], "logprobs": logprobs, "message": {"role": "assistant", "content": "x" * 999}}
    line = {
        "session_id": f"s{session}", "request": {"messages": [{"role": "user", "content": "y" * 999}]},
        "response": {"prompt_token_ids": ids[:-250], "choices": [choice]},
    }
    return json.dumps(line).encode() + b"\n"


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    began = time.process_time()
    found = work()
    return time.process_time() - began, found
