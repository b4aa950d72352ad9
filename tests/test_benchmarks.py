"""The benchmarks run by hand. So what they import is tried here, and the one of lists runs with a small run."""

import importlib
from typing import Any

import pytest

from benchmarks import bench_lists
from tests.conftest import ROOT

FOLDER = ROOT / "benchmarks"
MODULES = sorted(".".join(path.relative_to(ROOT).with_suffix("").parts) for path in FOLDER.rglob("[!_]*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_a_benchmark_can_be_imported(name: str) -> None:
    assert (importlib.import_module(name).__doc__ or "").strip()


@pytest.mark.django_db
def test_the_benchmark_of_lists_runs(monkeypatch: pytest.MonkeyPatch, django_user_model: Any) -> None:
    monkeypatch.setattr(bench_lists, "N", 40)
    monkeypatch.setattr(bench_lists, "ROUNDS", 1)
    bench_lists.test_lists(bench_lists.stored_run(), django_user_model)
