"""Runs of a small GRPO that belong to the gallery: a clean one, and the same with one fault each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).with_name("training")
STEPS = 30
SHARED: dict[str, Any] = {"groups": 2, "group_size": 4, "repeated": 1, "rate": 2.5e-4, "temperature": 1.2, "seed": 1}
"""Settings of every run, as ``tools.demo_policy.grpo.GrpoSettings`` takes them."""


@dataclass(frozen=True, eq=False)
class TrainingRun:
    """A bundled run of training."""

    name: str  # Of its file.
    title: str  # Of the run that it becomes.
    fault: dict[str, Any]  # The settings that differ from those of the clean run.
    cause: str  # What the gap is to be named; empty = nothing.

    @property
    def path(self) -> Path:
        return FOLDER / f"{self.name}.jsonl.gz"


TRAINING_RUNS = (
    TrainingRun("clean", "GRPO, clean", {}, ""),
    TrainingRun("retokenized", "GRPO, rows encoded again", {"strategy": "retokenize"}, "row_retokenized"),
    TrainingRun("undelivered", "GRPO, weights not delivered", {"deliver_every": 0}, "weights_not_delivered"),
    TrainingRun("stale_cache", "GRPO, cache never reset", {"reset_cache": False}, "stale_cache"),
    TrainingRun("temperature", "GRPO, trainer at another temperature", {"trainer_temperature": 1.0}, "temperature"),
)
"""In the order in which they are told."""
