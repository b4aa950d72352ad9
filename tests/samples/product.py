"""The source of the product."""

from functools import cache

from tests.conftest import ROOT


@cache
def modules() -> dict[str, str]:
    """Every module of the product by its dotted name, with its source."""
    found = {}
    for path in [*ROOT.glob("rollouts/**/*.py"), *ROOT.glob("inspector/**/*.py")]:
        parts = path.relative_to(ROOT).with_suffix("").parts
        if "migrations" in parts:  # Django wrote them
            continue
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return found
