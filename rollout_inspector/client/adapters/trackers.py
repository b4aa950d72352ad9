"""Experiment trackers that are loaded in a process: what their run is called, and the address of ours as a link in it.

Nothing is imported: a trainer that tracks has loaded its tracker. Each function is called in the trainer's own thread,
because MLflow and trackio know the run that is under way by thread or context. A tracker that fails is left out.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

KEY = "rollout_inspector"
"""The name of the link: a value of the config in W&B, a tag in MLflow, a logged text in trackio."""


def _wandb_run() -> Any:
    return getattr(sys.modules.get("wandb"), "run", None)


def _mlflow_run() -> Any:
    mlflow = sys.modules.get("mlflow")
    return mlflow.active_run() if mlflow is not None else None


def _trackio_run() -> Any:
    variables = sys.modules.get("trackio.context_vars")
    return variables.current_run.get() if variables is not None else None


def tracked_name() -> str:
    """What the first tracker calls the run that is under way; empty without one."""
    for find, name_of in (
        (_wandb_run, lambda run: run.name), (_mlflow_run, lambda run: run.info.run_name),
        (_trackio_run, lambda run: run.name),
    ):
        with contextlib.suppress(Exception):
            run = find()
            if run is not None and isinstance(name := name_of(run), str) and name.strip():
                return name.strip()[:200]
    return ""


def link_run(url: str) -> None:
    """Write the address of our run into the run of each tracker."""
    with contextlib.suppress(Exception):
        if (run := _wandb_run()) is not None:
            run.config.update({KEY: url}, allow_val_change=True)
    with contextlib.suppress(Exception):
        if _mlflow_run() is not None:
            sys.modules["mlflow"].set_tag(KEY, url)
    with contextlib.suppress(Exception):
        if (run := _trackio_run()) is not None:
            run.log({KEY: url}, step=0)  # a step of its own would shift those of the trainer
