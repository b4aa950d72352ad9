"""The named causes of a run's gap between trainer and sampler, as the pages of runs show them."""

from collections.abc import Sequence
from dataclasses import dataclass

from django.urls import reverse

from inspector.web.twins import Page
from rollout_inspector.diagnose.gap.cause_kinds import CAUSES
from rollouts.store.models import Run
from rollouts.store.runs.logprob_columns import NamedCause


@dataclass(frozen=True)
class GapCauseValues(Page):
    """A cause of the gap in a run."""

    cause: str
    """One of ``rollout_inspector.diagnose.gap.cause_kinds.CAUSES``."""
    title: str
    """The cause in words."""
    from_step: int | None
    """The first training step that shows it; null without training steps."""
    url: str
    """Address of the trajectories since that step; of the page *Gap* without one."""


def gap_causes(run: Run, named: Sequence[NamedCause]) -> list[GapCauseValues]:
    """What pages show of the causes that :func:`rollouts.store.runs.logprob_columns.named_causes` has of a run."""
    here, gap_page = reverse("run", args=[run.code]), reverse("run-gap", args=[run.code])
    return [
        GapCauseValues(
            cause.cause,
            CAUSES[cause.cause].title if cause.cause in CAUSES else cause.cause,
            cause.from_step,
            f"{here}?training_min={cause.from_step}" if cause.from_step is not None else gap_page,
        )
        for cause in named
    ]
