"""A run by the step of its trainer: the values of its pages *Over training*, *Alarms*, *Gap* and *Columns*."""

from typing import Annotated, Any

from django.http import HttpRequest, HttpResponse
from ninja import Router

from inspector.api.answers import AnswerItems, answer, extra, found, the_run
from inspector.chat_templates.tokenizers_page import TokenizerValues
from inspector.runs.loss_weights import LossWeights, weights_of
from inspector.runs.training.alarms_page import AlarmsPage, alarms_of_run
from inspector.runs.training.columns_page import ColumnLine, lines_of
from inspector.runs.training.training_page import TrainingPage, training_of
from inspector.team.shares import FIND, MAX_LISTED, ShareLine
from inspector.web.access import access, visible
from inspector.web.twins import some_fields
from rollout_inspector.diagnose.loss_weights.rules import MEANS, RULES
from rollouts.store.chat_templates.tokenizers import list_tokenizers
from rollouts.store.parameters import Count, Text, among, listed
from rollouts.store.people.shares import newest_shares

router = Router(tags=["training"])
AXES = ("step", "version")
AxisName = Annotated[str, among(AXES), listed(AXES)]
RuleName = Annotated[str, among(tuple(RULES)), listed(tuple(RULES))]
MeanName = Annotated[str, among(tuple(MEANS)), listed(tuple(MEANS))]
TargetName = Annotated[str, among(tuple(FIND)), listed(tuple(FIND))]
RegisteredTokenizer: Any = some_fields(
    TokenizerValues, "RegisteredTokenizer", "A registered tokenizer.",
    "name project=project_code sha256 source revision vocab_size encoder chat_template created_at",
)
RunAlarms: Any = some_fields(AlarmsPage, "RunAlarms", "The alarms of a run.", "alarms limits steps")


@router.get("/runs/{code}/training", response=TrainingPage, openapi_extra=extra(422))
def get_training(
    request: HttpRequest, code: str, by: AxisName = "step", training_min: Count | None = None,
    training_max: Count | None = None,
) -> HttpResponse:
    """A run by training step or policy version: figures, what changed, since when it has each finding, gap causes."""
    return answer(training_of(the_run(request, code), by == "version", training_min, training_max))


@router.get("/runs/{code}/weights", response=LossWeights, openapi_extra=extra(422))
def get_weights(request: HttpRequest, code: str, rule: RuleName = "", mean: MeanName = "") -> HttpResponse:
    """What a loss makes of the tokens of a run: the sums that a worker made, or why there are none."""
    return answer(weights_of(the_run(request, code), {"rule": rule, "mean": mean}))


@router.get("/runs/{code}/columns", response=AnswerItems[ColumnLine], openapi_extra=extra())
def list_columns(request: HttpRequest, code: str) -> HttpResponse:
    """The columns of log-probabilities of a run: recorded ones, then those that engines scored, with their gap."""
    return answer(AnswerItems(lines_of(the_run(request, code))))


@router.get("/runs/{code}/alarms", response=RunAlarms, openapi_extra=extra())
def get_alarms(request: HttpRequest, code: str) -> HttpResponse:
    """Where a run is above a limit, since which step, and the limits that hold in it."""
    return answer(RunAlarms.of(alarms_of_run(request, the_run(request, code))))


@router.get("/tokenizers", response=AnswerItems[RegisteredTokenizer], openapi_extra=extra(422), tags=["checks"])
def get_tokenizers(request: HttpRequest, project: Text = "") -> HttpResponse:
    """The registered tokenizers of the caller's projects, by name."""
    tokenizers = list_tokenizers(access(request), project)
    return answer(AnswerItems([RegisteredTokenizer.of(TokenizerValues.of(record, None)) for record in tokenizers]))


@router.get("/shares", response=AnswerItems[ShareLine], openapi_extra=extra(422), tags=["together"])
def list_shares(request: HttpRequest, target: TargetName = "", code: Text = "") -> HttpResponse:
    """The share links of the caller's projects, newest first, without their tokens; or those to one object."""
    shared = found(visible(request, FIND[target](code)), target, code) if target else None
    links = newest_shares(access(request), MAX_LISTED, shared)
    return answer(AnswerItems([ShareLine.of(link, request) for link in links]))
