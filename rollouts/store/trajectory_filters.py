"""The filters of a run's trajectories, declared once for the run's page, the API, searches and exports."""

from typing import Annotated, Any, NamedTuple

from django.db.models import Exists, OuterRef, Q, QuerySet
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from rollout_inspector.diagnose.finding import Severity
from rollouts.store import models
from rollouts.store.parameters import CommentsName, Count, KindName, MutedName, SeverityName, StatusName, Text, YesNo
from rollouts.store.runs.muted import rules_of
from rollouts.store.trajectories.comments import seen_in_run

Bound = FiniteFloat | None  # Of a figure; None = it is not asked.


class FilterInput(NamedTuple):
    """How the search box of a list names a filter, and the column that it compares."""

    word: str  # What stands before the sign, as in ``reward>0.5``; the bounds of one column share it.
    example: str  # What one may type.
    column: str = ""  # The condition on a column that it is alone; empty = ``filter_trajectories`` says what it does.
    is_personal: bool = False  # About what members say and do, which a visitor does not see.

    @property
    def sign(self) -> str:
        """What stands between word and value: a comparison for a bound, a colon for all others."""
        return {"gte": ">=", "lte": "<=", "gt": ">", "lt": "<"}.get(self.column.rpartition("__")[2], ":")


class FilterParameters(BaseModel):
    """Which trajectories of a run are meant. An empty value filters nothing. The alias of a field is its parameter in
    an address and in the API: ``step`` means something else on the pages of a trajectory. A new filter is a field here,
    with a column or with its condition in ``filter_trajectories``."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    kind: Annotated[KindName, Field(alias="finding"), FilterInput("kind", "kind:branch")] = ""
    """Only trajectories that have a finding of this kind."""
    severity: Annotated[SeverityName, FilterInput("severity", "severity:error")] = ""
    """Only trajectories that have a finding of this severity."""
    status: Annotated[StatusName, FilterInput("status", "status:failed", "status")] = ""
    """Only trajectories in this state."""
    stop_reason: Annotated[Text, Field(alias="stop"), FilterInput("stop", "stop:length", "stop_reason")] = ""
    """The stop reason."""
    reward_min: Annotated[Bound, Field(alias="min"), FilterInput("reward", "reward>=0.5", "reward__gte")] = None
    """The least reward. A trajectory without a reward passes no bound."""
    reward_max: Annotated[Bound, Field(alias="max"), FilterInput("reward", "reward<=1", "reward__lte")] = None
    """The greatest reward."""
    reward_above: Annotated[Bound, Field(alias="above"), FilterInput("reward", "reward>0", "reward__gt")] = None
    """The reward is greater than this."""
    reward_below: Annotated[Bound, Field(alias="below"), FilterInput("reward", "reward<1", "reward__lt")] = None
    """The reward is less than this."""
    step: Annotated[Count | None, Field(alias="at"), FilterInput("step", "step:2")] = None
    """Only trajectories that have such a finding at this step."""
    first: Annotated[Count | None, Field(alias="from"), FilterInput("position", "position>=100", "index__gte")] = None
    """The first position in the run."""
    last: Annotated[Count | None, Field(alias="to"), FilterInput("position", "position<=200", "index__lte")] = None
    """The last position in the run."""
    tokens_min: Annotated[Count | None, FilterInput("tokens", "tokens>10k", "n_tokens__gte")] = None
    """The fewest tokens of a trajectory."""
    tokens_max: Annotated[Count | None, FilterInput("tokens", "tokens<500", "n_tokens__lte")] = None
    """The most tokens of a trajectory."""
    damage_min: Annotated[Bound, FilterInput("damage", "damage>=0.1", "damage__gte")] = None
    """The least damage to the gradient. A trajectory that was not measured passes no bound."""
    training_min: Annotated[Count | None, FilterInput("training", "training>=10", "training_step__gte")] = None
    """The first training step. A trajectory without one passes no bound."""
    training_max: Annotated[Count | None, FilterInput("training", "training<=20", "training_step__lte")] = None
    """The last training step."""
    group: Annotated[Text, FilterInput("group", "group:12", "group")] = ""
    """A whole group: the trajectories of one prompt."""
    text: Annotated[Text, FilterInput("id", "id:task-7", "external_id__icontains")] = ""
    """A part of the external id, in upper or lower case."""
    policy_version: Annotated[Text, Field(alias="policy"), FilterInput("policy", "policy:v3")] = ""
    """The policy version that sampled the first step."""
    kept_max: Annotated[Count | None, Field(alias="kept"), FilterInput("kept", "kept:5")] = None
    """Only trajectories with a token that was drawn from a kept set of at most so many tokens."""
    flawed: Annotated[bool, FilterInput("flawed", "flawed:yes")] = False
    """Only trajectories that have a finding."""
    muted: Annotated[MutedName, FilterInput("muted", "muted:hide")] = ""
    """``hide``: muted findings count as none, in every other filter by findings too."""
    seen: Annotated[YesNo, FilterInput("seen", "seen:no", is_personal=True)] = ""
    """Only trajectories that the caller's user has marked as seen, or only others."""
    comments: Annotated[CommentsName, FilterInput("comments", "comments:open", is_personal=True)] = ""
    """Only trajectories with a comment that is open, or with any."""


INPUTS = {
    name: next(entry for entry in field.metadata if isinstance(entry, FilterInput))
    for name, field in FilterParameters.model_fields.items()
}
"""Field -> how a search box names it."""
PARAMETERS = {name: field.alias or name for name, field in FilterParameters.model_fields.items()}
"""Field -> its parameter."""


class TrajectoryFilters(FilterParameters):
    """Which trajectories of a run are listed: the parameters, and what a door adds to them."""

    model_config = ConfigDict(populate_by_name=True)

    reader: int | None = None
    """The key of the user of ``seen``; None without it."""
    hide_queued: bool = False
    """Leave out queued trajectories."""

    def chosen(self) -> dict[str, Any]:
        """The fields that filter, by name: an export keeps them as its ``only``."""
        return self.model_dump(include=set(TrajectoryFilters.model_fields), exclude_defaults=True)

    @property
    def pass_all(self) -> bool:
        """Nothing is filtered out."""
        return not self.chosen()


def filter_trajectories(run: models.Run, filters: TrajectoryFilters) -> QuerySet[models.StoredTrajectory]:
    """The trajectories that pass the filter, in no order."""
    chosen = filters.chosen()
    columns = {INPUTS[name].column: value for name, value in chosen.items() if name in INPUTS and INPUTS[name].column}
    trajectories = models.StoredTrajectory.objects.filter(run=run, **columns)
    of_finding = {"kind": "kind", "severity": "severity", "step": "step_index"}
    conditions = {column: chosen[name] for name, column in of_finding.items() if name in chosen}
    findings = models.StoredFinding.objects.filter(run=run, trajectory=OuterRef("pk"), **conditions)
    if filters.muted == "hide":
        met = Exists(findings.exclude(kind__in=rules_of(run).order_by().values("kind")))
        trajectories = trajectories.filter(met if filters.flawed or conditions else Q(n_findings=0) | met)
    elif conditions == {"severity": Severity.ERROR}:  # there is no worse one, so that the trajectory itself tells
        trajectories = trajectories.filter(worst_severity=Severity.ERROR)
    elif conditions:
        trajectories = trajectories.filter(Exists(findings))
    # Trajectories that cannot have such a finding are left out before findings are looked for.
    if filters.flawed or conditions:
        trajectories = trajectories.filter(n_findings__gt=0)
    if filters.step is not None:
        trajectories = trajectories.filter(n_steps__gt=filters.step)
    if filters.policy_version:
        first = models.StoredStep.objects.filter(trajectory=OuterRef("pk"), index=0)
        trajectories = trajectories.filter(Exists(first.filter(policy_version=filters.policy_version)))
    if filters.kept_max is not None:
        steps = models.StoredStep.objects.filter(trajectory=OuterRef("pk"), least_kept__lte=filters.kept_max)
        trajectories = trajectories.filter(Exists(steps))
    if filters.comments:
        # People write few comments: those of the run are read first.
        comments = models.Comment.objects.filter(trajectory__run=run)
        comments = comments.filter(resolved_at=None) if filters.comments == "open" else comments
        trajectories = trajectories.filter(pk__in=comments.values("trajectory"))
    if filters.seen and filters.reader is not None:
        seen = Q(pk__in=seen_in_run(run, filters.reader).values("trajectory"))
        trajectories = trajectories.filter(seen if filters.seen == "yes" else ~seen)
    if filters.hide_queued:
        trajectories = trajectories.exclude(status=models.StoredTrajectory.Status.QUEUED)
    return trajectories
