"""A cache folder of its own for each test of files that are opened where they lie."""

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("ROLLOUT_INSPECTOR_CACHE", str(folder))
    return folder
