"""The measurement of ``benchmarks/measures`` runs, and a seed plants the same faults each time."""

import random
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture
def faults(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The measurement with a few faults alone, so that it takes seconds."""
    monkeypatch.setenv("INSPECTOR_CORPUS", str(corpus))
    from benchmarks.measures import faults

    monkeypatch.setattr(faults, "FAULTS", faults.FAULTS[::8])
    monkeypatch.setattr(faults, "ROW_FAULTS", faults.ROW_FAULTS[::8])
    return faults


def test_a_small_measurement(faults: ModuleType) -> None:
    found = faults.measure(seed=1, per_kind=1, n_clean=6, pairs=["qwen2.5"])
    assert found.clean >= 4
    planted = sum(one.planted for one in found.tallies.values())
    assert planted > 10
    assert sum(one.right for one in found.tallies.values()) > planted / 2
    tally = found.tallies["noncanonical_sampling"]
    assert tally.planted == tally.right == tally.exact > 0
    assert f"| `noncanonical_sampling` | {tally.planted} | {tally.right} |" in found.table()


def test_the_same_seed_plants_the_same(faults: ModuleType) -> None:
    one = faults.model(0)
    for make in (faults.call_samples, faults.row_samples, faults.clean_samples):
        first, second = ([sample.data for sample in make([one], random.Random("7"), 1)] for _ in range(2))
        assert first and first == second
