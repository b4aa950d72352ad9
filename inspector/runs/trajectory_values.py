"""A trajectory as pages and the API show it."""

from dataclasses import dataclass, field
from typing import Any, Self

from django.urls import reverse

from inspector.runs.run_values import CountedValues
from inspector.web.twins import from_columns, some_fields
from rollout_inspector.streams.figures import rows_per_call
from rollouts.store.models import Run, StoredTrajectory


@dataclass(frozen=True)
class TrajectoryValues(CountedValues):
    """A trajectory as pages and the API show it: columns, and what one of them read beside them."""

    run: str
    """Code of its run."""
    run_name: str
    """Name of its run."""
    index: int
    """Its position in its run, from 0."""
    external_id: str
    """What the files or the environment call it."""
    group: str
    """The trajectories of one prompt have the same; empty = not known."""
    stop_reason: str
    """Why it ended, in the word of the source; empty = not known."""
    prompt_line: str | None
    """First line of the task: of the last user message of its first request; null = not known."""
    answer_line: str | None
    """First line of its last answer, without reasoning; null = not known."""
    reward: float | None
    """Of the whole trajectory; null when there is none."""
    reward_parts: dict[str, float]
    """Name of each part of the reward -> its value."""
    seed: int | None
    """Of a launch: what its sampling began with."""
    training_step: int | None
    """Of the trainer; null = not recorded."""
    trained: int
    """Tokens under the gradient."""
    lost: int | None
    """Sampled tokens that no row trains as they were sampled; null = not known."""
    damage: float | None
    """Relative error of the gradient of its rows against that of what was sampled; null = not measured."""
    findings: int
    """Findings of every severity."""
    worst_severity: str
    """The gravest severity of its findings; empty without findings."""
    checks: dict[str, Any] | None
    """Check -> ``passed``, ``noted``, ``failed``, or the fields that it lacks; null = not known."""
    not_checked: int | None
    """Checks of the diagnosis that could not decide; null = not known."""
    not_read: bool
    """It lies in a file that is open in place, and nobody has opened it: findings and trained tokens are not known."""
    tokenizer: str | None = None
    """Name of the tokenizer of its run."""
    group_url: str = ""
    """Address of its group; empty = it has none, or it is not shown here."""
    kinds: dict[str, str] = field(default_factory=dict)
    """Kind of its findings -> the worst severity of that kind; of a list of trajectories."""
    comments: int | None = None
    """Comments on it; null for the visitor of a share link."""
    open_comments: int | None = None
    """Comments that nobody has resolved."""
    seen: bool | None = None
    """Whether the reader has marked it as seen; null for the visitor of a share link."""
    zero_variance: bool = False
    """All rewards of its group are equal, and none is still to come."""
    advantage: float | None = None
    """Of a group: as the trainer stored it, the mean over its trained tokens, or computed: ``advantages`` tells."""
    shared: int | None = None
    """Of a group: leading sampled tokens that are those of the reference; null = it was not read."""
    compare_url: str = ""
    """Of a group: side by side with the reference; empty for the reference, and for one that cannot be compared."""

    @classmethod
    def of(cls, trajectory: StoredTrajectory, run: Run, query: str = "", **more: Any) -> Self:
        """A trajectory of that run. ``query``: the end of its address. No query."""
        checks = trajectory.checks
        not_read = checks is None and bool(run.settings.get("opened"))
        return from_columns(
            cls, trajectory, run=run.code, run_name=run.name, url=reverse("trajectory", args=[trajectory.code]) + query,
            rows_per_call=rows_per_call(trajectory.n_rows, trajectory.n_steps), not_read=not_read,
            not_checked=None if checks is None else sum(isinstance(state, list) for state in checks.values()), **more,
        )


QuestionSide: Any = some_fields(
    TrajectoryValues, "QuestionSide", "What one run made of a question.",
    "code url status reward rows findings worst_severity",
)
