"""Fixtures of several files."""

from __future__ import annotations

import pytest

from rollouts.jobs.imports import import_shards, imports
from rollouts.store.models import Run
from rollouts.store.runs.runs import create_run


@pytest.fixture
def run() -> Run:
    """A run of an import, without a trajectory."""
    return create_run(Run.Kind.IMPORT, "test")


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch, sent: list[int]) -> None:
    """Files of a few kilobytes are read in parts, and a batch is stored every few trajectories."""
    monkeypatch.setattr(import_shards, "PART_BYTES", 3000)
    monkeypatch.setattr(imports, "BATCH_TRAJECTORIES", 3)
    monkeypatch.setattr(imports, "BEAT_SECONDS", -1.0)
