"""The benchmarks run by hand. So what they import is tried here, and the one of lists runs with a small run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.bench import bench_lists
from tests.conftest import ROOT

FILES = sorted((ROOT / "tests" / "bench").glob("*.py"))


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_benchmark_can_be_imported(file: Path) -> None:
    module = importlib.import_module(f"tests.bench.{file.stem}")
    assert (module.__doc__ or "").strip()


@pytest.mark.django_db
def test_the_benchmark_of_lists_runs(monkeypatch: pytest.MonkeyPatch, django_user_model: Any) -> None:
    monkeypatch.setattr(bench_lists, "N", 40)
    monkeypatch.setattr(bench_lists, "ROUNDS", 1)
    bench_lists.test_lists(bench_lists.stored_run(), django_user_model)
