"""The parts of one trajectory for its pages: rows, steps, findings, a trainer's columns, stored texts. A function reads
token arrays only when its docstring says so, and makes the number of queries that it states."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from django.db.models import Case, Count, Exists, F, Max, Min, OuterRef, Q, QuerySet, Sum, When, Window
from django.db.models.functions import Length, RowNumber, Substr

from rollout_inspector.diagnose.finding import Axis, Finding, Severity
from rollout_inspector.streams.trajectory import Floats, Ids
from rollouts.store.models import Content, StoredFinding, StoredRow, StoredStep, StoredTrajectory
from rollouts.store.token_arrays import reading

READING_ORDER = ("step_index", "row_index", "start", "id")
"""The order in which the findings of a trajectory are numbered, from 1."""

MAX_STEP_WISE_STEPS = 50_000  # A group with more steps is too large to be counted for a page.


@dataclass(frozen=True)
class RowSummary:
    """A row without its arrays."""

    index: int
    n_tokens: int
    n_trained: int
    steps: frozenset[int]  # Indices of the steps that the row trains.
    last_step: int | None  # The key of the step whose stream the row is; None for a row that has its own arrays.
    key: int | None  # None for a row that the steps make so far, which is not stored.

    @property
    def follows_steps(self) -> bool:
        """The row is the stream of its last step, so the offsets of a step are offsets of the row."""
        return self.last_step is not None

    @property
    def handle(self) -> StoredRow:
        """The row as an argument of what reads rows, which then does not ask for it again."""
        return StoredRow(
            pk=self.key, index=self.index, last_step_id=self.last_step, n_tokens=self.n_tokens,
            n_trained=self.n_trained, step_indices=sorted(self.steps),
        )


@dataclass(frozen=True)
class StepSummary:
    """A step without its arrays."""

    pk: int
    index: int
    """Its position in its trajectory."""
    row: int
    """The row that trains it."""
    parent: int | None
    """The earlier step whose stream its prompt shares the longest prefix with."""
    shared_length: int
    """Length of that prefix in tokens."""
    parent_length: int
    """Length of the parent's stream in tokens."""
    prompt_length: int
    """Tokens that the engine read."""
    completion_length: int
    """Tokens that the engine sampled."""
    finish_reason: str
    """Why the completion ended."""
    has_entropy: bool | None = None
    """Whether the entropy of its completion is kept."""
    n_alternatives: int | None = None
    """Alternatives that are kept for each sampled token; None = none."""
    least_kept: int | None = None
    """The size of the smallest kept set of its tokens; None = none is recorded."""
    stop_reason: str = ""
    """What stopped it, in the word of the engine."""
    logprobs_mode: str = ""
    """``raw``, ``processed``, or empty when nobody recorded it."""
    temperature: float | None = None
    """Of the sampling; null = not recorded."""
    top_p: float | None = None
    """Of the sampling; null = not recorded."""
    top_k: int | None = None
    """Of the sampling; null = not recorded."""
    engine: str = ""
    """The engine and its version."""
    policy_version: str = ""
    """The version of the weights."""

    @property
    def breaks(self) -> bool:
        """Its prompt does not start with the whole stream of its parent."""
        return self.parent is not None and self.shared_length < self.parent_length


STEP_COLUMNS = (
    "pk", "index", "row_index", "parent__index",
    *(field.name for field in fields(StepSummary) if field.name not in ("pk", "index", "row", "parent")),
)


@dataclass(frozen=True)
class StepWiseRows:
    """The cost of one row per step, and of rows that join steps that extend each other."""

    scope: str  # The trajectories that are counted, in words.
    trajectories: int
    turns_least: int
    turns_most: int
    samples: int  # Rows, one per step.
    forwarded: int  # Tokens of those rows.
    samples_merged: int
    forwarded_merged: int
    times: float  # ``forwarded / forwarded_merged``, two decimals.


def rows_and_steps(trajectory: StoredTrajectory) -> tuple[list[RowSummary], list[StepSummary]]:
    """All rows and steps of a trajectory. Two queries. A running or failed trajectory has steps and no stored rows. It
    gets the rows that its steps make so far."""
    stored = trajectory.rows.order_by("index").values_list(
        "index", "n_tokens", "n_trained", "step_indices", "last_step_id", "pk"
    )
    rows = [
        RowSummary(i, n, trained, frozenset(step_indices or ()), last, key)
        for i, n, trained, step_indices, last, key in stored
    ]
    steps = read_steps(trajectory)
    return (rows, steps) if rows else _draft_rows(steps)


def read_steps(trajectory: StoredTrajectory, first: int = 0, limit: int | None = None) -> list[StepSummary]:
    """The steps from the one at position ``first`` on, with the row that is stored of each. One query."""
    steps = trajectory.steps.order_by("index").values_list(*STEP_COLUMNS)
    return [StepSummary(*step) for step in steps[first : None if limit is None else first + limit]]


def _draft_rows(steps: Sequence[StepSummary]) -> tuple[list[RowSummary], list[StepSummary]]:
    """The rows that steps make so far: a step joins the row whose last step it extends, else it opens a row.
    ``merge_steps`` makes the stored rows. That rule compares token arrays, so it also finds rows that a step extends
    without a link. A page of a growing trajectory reads no arrays."""
    chains: list[list[StepSummary]] = []
    placed = []
    for step in steps:
        chain = next((c for c in chains if c[-1].index == step.parent and not step.breaks), None)
        if chain is None:
            chain = []
            chains.append(chain)
        chain.append(step)
        placed.append(replace(step, row=chains.index(chain)))
    rows = []
    for index, chain in enumerate(chains):
        last = chain[-1]
        trained = sum(step.completion_length for step in chain)
        n_tokens = last.prompt_length + last.completion_length
        rows.append(RowSummary(index, n_tokens, trained, frozenset(step.index for step in chain), last.pk, None))
    return rows, placed


def new_messages(trajectory: StoredTrajectory, steps: Collection[int]) -> list[tuple[int, int, str | None]]:
    """Of some steps: index, number of messages shared with the parent, and the new messages as JSON. One query."""
    with_messages = trajectory.steps.filter(index__in=steps, messages_new__isnull=False)
    return list(with_messages.values_list("index", "messages_shared", "messages_new__body"))


def said_of_steps(
    trajectory: StoredTrajectory, steps: Collection[int], n_characters: int
) -> list[tuple[int, str | None, str | None, str | None]]:
    """Of some steps: index, the messages that its request adds to its parent's, its reply, its extra. One query. All
    are JSON. Steps without messages, and steps with a message or reply of more than ``n_characters``, are left out. A
    longer extra is None."""
    with_messages = trajectory.steps.filter(index__in=steps, messages_new__isnull=False).order_by("index")
    sizes = with_messages.annotate(n_new=Length("messages_new__body"), n_reply=Length("reply__body"))
    short = sizes.filter(Q(n_reply=None) | Q(n_reply__lte=n_characters), n_new__lte=n_characters)
    extra = Case(When(n_extra__lte=n_characters, then=F("extra__body")))
    short = short.annotate(n_extra=Length("extra__body")).annotate(short_extra=extra)
    return list(short.values_list("index", "messages_new__body", "reply__body", "short_extra"))


def steps_with_tokens(trajectory: StoredTrajectory, indices: Collection[int | None]) -> dict[int, StoredStep]:
    """Some steps by index, with their arrays. One query."""
    stored = trajectory.steps.filter(index__in=[index for index in indices if index is not None])
    return {step.index: step for step in reading.steps_with_tokens(stored)}


def continuing_steps(trajectory: StoredTrajectory, first: int, limit: int) -> list[StoredStep]:
    """Steps with a parent, from index ``first`` on, with arrays, messages and tools. One query."""
    stored = trajectory.steps.filter(parent__isnull=False, index__gte=first)
    related = ("parent", "messages_new", "tools", "template_kwargs")
    return reading.steps_with_tokens(stored.select_related(*related).order_by("index")[:limit])


def step_values(trajectory: StoredTrajectory, names: Iterable[str], first: int, limit: int) -> list[dict[str, Any]]:
    """The columns ``names`` of at most ``limit`` steps, from the step at position ``first`` on. One query."""
    return list(trajectory.steps.order_by("index").values(*names)[first : first + limit])


def step_bodies(trajectory: StoredTrajectory, index: int, names: Iterable[str]) -> list[str | None]:
    """Whole stored texts of one step, by the names of columns; empty when there is no such step. One query."""
    return list(trajectory.steps.filter(index=index).values_list(*names).first() or ())


def row_extras(trajectory: StoredTrajectory, limit: int) -> list[tuple[int, str]]:
    """Index of each row that has fields of its source, and the key of their text. One query."""
    with_extra = trajectory.rows.exclude(extra=None).order_by("index")
    return list(with_extra.values_list("index", "extra_id")[:limit])


def content_starts(keys: Iterable[str], n_characters: int) -> list[tuple[str, int, str]]:
    """Key, whole length and first ``n_characters`` of stored texts. One query."""
    contents = Content.objects.filter(pk__in=list(keys))
    cut = contents.annotate(n=Length("body"), start=Substr("body", 1, n_characters))
    return list(cut.values_list("pk", "n", "start"))


def findings_in_order(trajectory: StoredTrajectory) -> QuerySet[StoredFinding]:
    """All findings in reading order, without their ids. One query."""
    return trajectory.findings.defer("expected_ids", "actual_ids").order_by(*READING_ORDER)


def finding_numbers(findings: Iterable[StoredFinding]) -> dict[int, int]:
    """Key of each finding -> its number in its trajectory. One query over the findings of these trajectories."""
    row = Window(RowNumber(), partition_by="trajectory", order_by=READING_ORDER)
    others = StoredFinding.objects.filter(trajectory__in={finding.trajectory_id for finding in findings}).order_by()
    return dict(others.annotate(number=row).values_list("pk", "number"))


def versions_of_findings(trajectory: StoredTrajectory) -> list[int]:
    """The versions of the diagnosis that made the findings, the oldest first. One query."""
    return sorted(set(trajectory.findings.values_list("version", flat=True)))


def ids_of_findings(trajectory: StoredTrajectory, limit: int) -> list[tuple[Ids, Ids]]:
    """Expected and actual ids of the first findings, in reading order. One query."""
    findings = trajectory.findings.order_by(*READING_ORDER)
    return list(findings.values_list("expected_ids", "actual_ids")[:limit])


def places_of(finding: StoredFinding) -> list[tuple[int, int]]:
    """Every stretch ``[start, stop)`` that a finding is about, at least one."""
    if finding.places is None:
        return [(finding.start, finding.stop)]
    edges = finding.places.tolist()
    return list(zip(edges[::2], edges[1::2], strict=True))


def placed_finding(finding: StoredFinding) -> Finding:
    """A stored finding without its ids and texts: what it is, and where."""
    return Finding(
        Axis(finding.axis), finding.kind, Severity(finding.severity), finding.step_index, finding.row_index,
        finding.start, finding.stop, places=tuple(places_of(finding)),
    )


def steps_with_finding(trajectory: StoredTrajectory, kind: str) -> list[int]:
    """The steps that have a finding of a kind, in order. One query, none where the trajectory has no findings."""
    if not trajectory.n_findings:
        return []
    findings = trajectory.findings.filter(kind=kind, step_index__isnull=False)
    return sorted({step for step in findings.values_list("step_index", flat=True) if step is not None})


def numbered_finding(trajectory: StoredTrajectory, number: int) -> StoredFinding | None:
    """The finding with this number, counted from 1 in reading order. One query."""
    if not 0 < number <= trajectory.n_findings:  # the database takes no number of 25 digits
        return None
    return trajectory.findings.order_by(*READING_ORDER)[number - 1 : number].first()


def drift_places(trajectory: StoredTrajectory) -> list[tuple[int, int]]:
    """Step index and start of each finding of a step whose completion is not canonical. One query."""
    findings = trajectory.findings.filter(kind="noncanonical_sampling", step_index__isnull=False)
    return [(step or 0, start) for step, start in findings.values_list("step_index", "start")]


def row_not_sampled(trajectory: StoredTrajectory) -> int | None:
    """The first row that holds trained tokens that were not sampled as they stand; None if none does. One query."""
    findings = trajectory.findings.filter(kind="row_not_sampled", row_index__isnull=False).order_by(
        "row_index", "start"
    )
    return findings.values_list("row_index", flat=True).first()


def row_finding_sentences(
    trajectory: StoredTrajectory, row: RowSummary, without: Collection[str], limit: int
) -> list[tuple[str, str, str]]:
    """Kind, evidence and remedy of the findings of a row and of its steps. One query. Info findings and the kinds in
    ``without`` are left out."""
    of_row = Q(row_index=row.index, step_index=None) | Q(step_index__in=row.steps)
    findings = (
        trajectory.findings.filter(of_row, axis=Axis.ROW).exclude(severity=Severity.INFO).exclude(kind__in=without)
    )
    return list(findings.order_by("start", "id").values_list("kind", "evidence", "remedy")[:limit])


def column_names(trajectory: StoredTrajectory) -> dict[int, list[str]]:
    """Row index -> names of the columns that a trainer wrote for it. One query."""
    names: dict[int, list[str]] = {}
    rows = StoredRow.objects.filter(trajectory=trajectory, last_step=None).order_by("index", "columns__name")
    for row, in_segment, name in rows.values_list("index", "column_names", "columns__name"):
        if in_segment:
            names[row] = list(in_segment)
        elif name is not None:
            names.setdefault(row, []).append(name)
    return names


def column_values(trajectory: StoredTrajectory, row: int, names: Collection[str]) -> dict[str, Floats]:
    """Whole columns of a row by name, each float32 ``[n]``; a name that the row lacks is left out. One query."""
    columns = reading.columns_of_rows(StoredRow.objects.filter(trajectory=trajectory, index=row), names)
    return next(iter(columns.values()), {})


def others_of_group(trajectory: StoredTrajectory, limit: int) -> list[StoredTrajectory]:
    """The other ended trajectories of the group that have rows, the best reward first. At most one query."""
    if not trajectory.group:
        return []
    group = StoredTrajectory.objects.filter(run_id=trajectory.run_id, group=trajectory.group, n_rows__gt=0)
    ended = group.filter(status=StoredTrajectory.Status.DONE).exclude(pk=trajectory.pk)
    others = ended.order_by("index").only("code", "external_id", "index", "reward", "run_id", "status")[:limit]
    return sorted(others, key=lambda one: (one.reward is None, -(one.reward or 0.0), one.index))


def step_wise_scopes(trajectory: StoredTrajectory) -> list[StepWiseRows]:
    """The cost of step-wise training, for this trajectory and for its group. At most three queries each."""
    scopes = [_step_wise("this trajectory", StoredTrajectory.objects.filter(pk=trajectory.pk))]
    if trajectory.group:
        group = StoredTrajectory.objects.filter(run_id=trajectory.run_id, group=trajectory.group)
        scopes.append(_step_wise(f"its group, {trajectory.group}", group))
    return [scope for scope in scopes if scope is not None]


def _step_wise(scope: str, trajectories: QuerySet[StoredTrajectory]) -> StepWiseRows | None:
    size = trajectories.filter(n_steps__gt=0).aggregate(
        m=Count("pk"), low=Min("n_steps"), high=Max("n_steps"), steps=Sum("n_steps")
    )
    if not size["m"] or size["steps"] > MAX_STEP_WISE_STEPS:
        return None
    steps = StoredStep.objects.filter(trajectory__in=trajectories.values("pk"))
    length = Sum(F("prompt_length") + F("completion_length"))
    whole = steps.aggregate(samples=Count("pk"), forwarded=length)
    # A step that is extended by another step is a part of the row of that step.
    extended = StoredStep.objects.filter(parent=OuterRef("pk"), shared_length__gte=F("parent_length"))
    merged = steps.filter(~Exists(extended)).aggregate(samples=Count("pk"), forwarded=length)
    if not merged["forwarded"]:
        return None
    return StepWiseRows(
        scope,
        trajectories=size["m"],
        turns_least=size["low"],
        turns_most=size["high"],
        samples=whole["samples"],
        forwarded=whole["forwarded"],
        samples_merged=merged["samples"],
        forwarded_merged=merged["forwarded"],
        times=round(whole["forwarded"] / merged["forwarded"], 2),
    )
