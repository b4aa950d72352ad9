"""Experiment trackers that a process has loaded: what their run is called, and the address of ours as a link in it.
Nothing is imported. The thread of the trainer asks, because MLflow and trackio know a run by thread or context."""

import contextlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

KEY = "rollout_inspector"
"""The name of the link: a value of the config in W&B, a tag in MLflow, a logged text in trackio."""


class Tracker(NamedTuple):
    """How a tracker is asked. ``module``: of its name in ``sys.modules``."""

    module: str
    run: Callable[[Any], Any]
    name: Callable[[Any], Any]
    link: Callable[[Any, Any, str], Any]  # Of module, run and address.


TRACKERS = (
    Tracker("wandb", lambda module: module.run, lambda run: run.name,
            lambda _, run, url: run.config.update({KEY: url}, allow_val_change=True)),
    Tracker("mlflow", lambda module: module.active_run(), lambda run: run.info.run_name,
            lambda module, _, url: module.set_tag(KEY, url)),
    Tracker("trackio.context_vars", lambda module: module.current_run.get(), lambda run: run.name,
            lambda _, run, url: run.log({KEY: url}, step=0)),  # a step of its own would shift those of the trainer
)


def link_run(url: str) -> str:
    """Write the address of our run into that of each tracker; empty = only look. What the first one calls its run."""
    names = []
    for tracker in TRACKERS:
        with contextlib.suppress(Exception):  # a tracker that fails is left out
            module = sys.modules[tracker.module]
            if (run := tracker.run(module)) is not None:
                names.append(str(tracker.name(run) or "").strip()[:200])
                _ = url and tracker.link(module, run, url)
    return next(filter(None, names), "")
