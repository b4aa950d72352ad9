"""The source of the product."""

from functools import cache
from pathlib import Path

from tests.conftest import ROOT

HOUSES = ("rollout_inspector", "rollouts", "inspector")


def source_files() -> list[Path]:
    """The files of the product and of the tools."""
    return [path for folder in (*HOUSES, "tools") for path in ROOT.glob(f"{folder}/**/*.py")]


@cache
def modules() -> dict[str, str]:
    """Every module of the product by its dotted name, with its source."""
    found = {}
    for path in [path for house in HOUSES for path in ROOT.glob(f"{house}/**/*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "migrations" in parts:  # Django wrote them
            continue
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found


def package_of(module: str) -> str:
    """The first two parts of a dotted name."""
    return ".".join(module.split(".")[:2])
