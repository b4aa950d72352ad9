"""Fixtures of several files."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from rollouts.jobs.imports import import_shards, imports
from rollouts.store.files import cache
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run


@pytest.fixture
def run() -> Run:
    """A run of an import, without a trajectory."""
    return create_run(Run.Kind.IMPORT, "test")


@pytest.fixture
def who_locks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[], int]:
    """How many threads and processes have come to the lock of an entry of the cache."""
    real, log = cache._lock, tmp_path / "who locks"
    log.touch()

    def lock(entry: Path, how: int) -> int:
        with log.open("a") as file:
            file.write(f"{os.getpid()}-{threading.get_ident()}\n")
        return real(entry, how)

    monkeypatch.setattr(cache, "_lock", lock)
    return lambda: len(set(log.read_text().split()))


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch, sent: list[int]) -> None:
    """Files of a few kilobytes are read in parts, and a batch is stored every few trajectories."""
    monkeypatch.setattr(import_shards, "PART_BYTES", 3000)
    monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 3)
    monkeypatch.setattr(imports, "BEAT_SECONDS", -1.0)
