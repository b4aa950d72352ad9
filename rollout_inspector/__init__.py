"""See what a rollout sampled and what the trainer put under the gradient. ``rollout_inspector.open(place)`` opens files
where they lie, or a server (docs/open.md)."""

from importlib import import_module
from typing import Any


def open(place: Any, token: str = "", **options: Any) -> Any:
    """The run at a path, at several, or at the address of a server; see ``rollout_inspector.opened.runs.open_run``."""
    return import_module("rollout_inspector.opened.runs").open_run(place, token, **options)
