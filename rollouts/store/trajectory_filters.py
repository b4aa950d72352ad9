"""The filters of a run's trajectories, declared once for the run's page, the API, searches and exports."""

from __future__ import annotations

from typing import Annotated, Any, NamedTuple

from django.db.models import Exists, OuterRef, Q, QuerySet
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from rollout_inspector.diagnose.finding import Severity
from rollouts.store import models
from rollouts.store.parameters import CommentsName, Count, MutedName, SeverityName, StatusName, Text, YesNo
from rollouts.store.runs.muted import rules_of
from rollouts.store.trajectories.seen import seen_in_run


class FilterInput(NamedTuple):
    """How the form of a page asks for a filter, and the column that it compares."""

    label: str = ""
    """Empty: the form has no input for it, and keeps what the address says."""
    column: str = ""
    """The condition on a column that it is alone; empty = ``filter_trajectories`` says what it does."""
    none: str = ""
    """A choice, and the words of its option that filters nothing."""
    options: dict[str, str] = {}
    """Value of a choice -> its words; empty = those that the run has."""
    width: str = ""
    """``narrow`` or ``medium``."""
    mode: str = ""
    """``decimal``: the number that it takes has a fraction."""
    is_upper: bool = False
    """The upper bound of the filter before it: the two stand together."""
    is_personal: bool = False
    """About what members say and do, which a visitor does not see."""


class FilterParameters(BaseModel):
    """Which trajectories of a run are meant. An empty value filters nothing.

    The alias of a field is its parameter in an address and in the API: ``step`` means something else on the pages of
    a trajectory. A new filter is a field here, with a column or with its condition in ``filter_trajectories``.
    """

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    kind: Annotated[Text, Field(alias="finding"), FilterInput("Finding", none="any or none", width="medium")] = ""
    """Only trajectories that have a finding of this kind."""
    severity: SeverityName = ""
    """Only trajectories that have a finding of this severity."""
    status: Annotated[StatusName, FilterInput(column="status")] = ""
    """Only trajectories in this state."""
    stop_reason: Annotated[Text, Field(alias="stop"), FilterInput("Stop reason", "stop_reason", "any")] = ""
    """The stop reason."""
    reward_min: Annotated[
        FiniteFloat | None,
        Field(alias="min"),
        FilterInput("Reward from", "reward__gte", width="narrow", mode="decimal"),
    ] = None
    """The least reward. A trajectory without a reward passes no bound."""
    reward_max: Annotated[
        FiniteFloat | None,
        Field(alias="max"),
        FilterInput("to", "reward__lte", width="narrow", mode="decimal", is_upper=True),
    ] = None
    """The greatest reward."""
    step: Annotated[Count | None, Field(alias="at")] = None
    """Only trajectories that have such a finding at this step."""
    first: Annotated[Count | None, Field(alias="from"), FilterInput(column="index__gte")] = None
    """The first position in the run."""
    last: Annotated[Count | None, Field(alias="to"), FilterInput(column="index__lte")] = None
    """The last position in the run."""
    tokens_min: Annotated[Count | None, FilterInput("Tokens from", "n_tokens__gte", width="narrow")] = None
    """The fewest tokens of a trajectory."""
    tokens_max: Annotated[Count | None, FilterInput("to", "n_tokens__lte", width="narrow", is_upper=True)] = None
    """The most tokens of a trajectory."""
    training_min: Annotated[Count | None, FilterInput("Training step", "training_step__gte", width="medium")] = None
    """The first training step. A trajectory without one passes no bound."""
    training_max: Annotated[Count | None, FilterInput("to", "training_step__lte", width="narrow", is_upper=True)] = None
    """The last training step."""
    group: Annotated[Text, FilterInput("Group", "group", width="narrow")] = ""
    """A whole group: the trajectories of one prompt."""
    text: Annotated[Text, FilterInput("Id contains", "external_id__icontains")] = ""
    """A part of the external id, in upper or lower case."""
    policy_version: Annotated[Text, Field(alias="policy")] = ""
    """The policy version that sampled the first step."""
    flawed: bool = False
    """Only trajectories that have a finding."""
    muted: Annotated[MutedName, FilterInput("Muted findings", none="shown", options={"hide": "hidden"})] = ""
    """``hide``: muted findings count as none, in every other filter by findings too."""
    seen: Annotated[YesNo, FilterInput(
        "Seen by you", none="seen or not", options={"no": "not seen", "yes": "seen"}, is_personal=True,
    )] = ""
    """Only trajectories that the caller's user has marked as seen, or only others."""
    comments: Annotated[CommentsName, FilterInput(
        "Comments", none="any or none", options={"open": "open", "any": "any"}, is_personal=True,
    )] = ""
    """Only trajectories with a comment that is open, or with any."""


INPUTS = {
    name: next((one for one in field.metadata if isinstance(one, FilterInput)), FilterInput())
    for name, field in FilterParameters.model_fields.items()
}
"""Field -> how a form asks for it."""
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
