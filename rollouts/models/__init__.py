"""The tables. A step stores only the tokens that it adds; ``shared_length < parent_length`` means a break.

Arrays lie in tables of their own (``StepTokens``, ``RowTokens``) or in a segment, a file that a ``TokenSegment`` names.
So no list of rows or steps reads them.
"""

from __future__ import annotations

from django.conf import settings
from django.db import models
from django.db.models import F, Q
from django.utils import timezone

from rollouts.fields import FloatsField, IdsField, MaskField, OriginsField
from rollouts.models.codes import ALPHABET, code_of_number, new_code
from rollouts.models.people import (
    DEFAULT_PROJECT,
    ApiToken,
    AuditEvent,
    ExternalIdentity,
    Invitation,
    LoginSession,
    Membership,
    Project,
    Role,
    ShareLink,
    default_project,
)

__all__ = [
    "ACTIVE",
    "ALPHABET",
    "DEFAULT_PROJECT",
    "ApiToken",
    "AuditEvent",
    "ChatTemplate",
    "Content",
    "ExternalIdentity",
    "Invitation",
    "Job",
    "LoginSession",
    "Membership",
    "Project",
    "ProjectTemplate",
    "Rejection",
    "Replay",
    "ReplayRows",
    "Role",
    "RowColumn",
    "RowTokens",
    "Run",
    "RunFigures",
    "ShareLink",
    "StepTokens",
    "StoredFinding",
    "StoredRow",
    "StoredStep",
    "StoredTrajectory",
    "TemplateCheck",
    "TokenSegment",
    "Tokenizer",
    "WorkStatus",
    "code_of_number",
    "default_project",
    "new_code",
    "template_name",
]  # fmt: skip


class WorkStatus(models.TextChoices):
    """Where a run, a trajectory or a job stands."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    """``error`` says why."""
    CANCELLED = "cancelled"


ACTIVE = (WorkStatus.QUEUED, WorkStatus.RUNNING)
"""Work with one of these states still changes."""


class Content(models.Model):
    """JSON text stored once by its hash: messages, tools, template kwargs, replies, tasks."""

    sha256 = models.CharField(max_length=64, primary_key=True)
    body = models.TextField()


class ChatTemplate(models.Model):
    """A Jinja chat template, identified by the sha256 of its bytes. ``ProjectTemplate`` says who knows it."""

    sha256 = models.CharField(max_length=64, primary_key=True)
    text = models.TextField()
    created_at = models.DateTimeField(auto_now_add=True)


class ProjectTemplate(models.Model):
    """A chat template as one project knows it: the text is stored once, its name is the project's."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="+")
    chat_template = models.ForeignKey(ChatTemplate, on_delete=models.CASCADE, related_name="names")
    label = models.CharField(max_length=200, blank=True)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "chat_template"], name="template_in_project")]

    def __str__(self) -> str:
        return template_name(self.label, self.chat_template_id)


def template_name(label: str, sha256: str) -> str:
    """What pages call a chat template."""
    return label or f"unnamed template {sha256[:8]}"


class Tokenizer(models.Model):
    """A registered tokenizer: files of the storage that are named by their contents."""

    project = models.ForeignKey(Project, on_delete=models.PROTECT, default=default_project, related_name="tokenizers")
    name = models.CharField(max_length=200, help_text="Unique in its project.")
    sha256 = models.CharField(max_length=64, db_index=True, help_text="Of tokenizer.json.")
    files_sha256 = models.CharField(max_length=64, help_text="Names its files in the storage; empty = they are lost.")
    source = models.CharField(max_length=500, help_text="Where it came from: name of a folder, upload, or hub id.")
    revision = models.CharField(max_length=100, blank=True, help_text="Of a hub id.")
    vocab_size = models.PositiveIntegerField()
    encoder = models.CharField(max_length=20, help_text="fastokens or tokenizers: which encoder was found exact.")
    chat_template = models.ForeignKey(ChatTemplate, null=True, blank=True, on_delete=models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "name"], name="tokenizer_name_in_project")]

    def __str__(self) -> str:
        return self.name


class Run(models.Model):
    """One launch or one import."""

    makers_shown = True
    """Not stored. False for the visitor of a share link, who learns no name of an account."""

    class Kind(models.TextChoices):
        LAUNCH = "launch"
        """Trajectories that are sampled here."""
        IMPORT = "import"
        """Trajectories that were sampled elsewhere and come from files or pushes."""

    Status = WorkStatus

    project = models.ForeignKey(Project, on_delete=models.PROTECT, default=default_project, related_name="runs")
    code = models.CharField(max_length=16, unique=True, default=new_code)
    name = models.CharField(max_length=200)
    kind = models.CharField(max_length=10, choices=Kind.choices)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.QUEUED)
    error = models.TextField(blank=True)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)
    started_at = models.DateTimeField(null=True, blank=True)
    finished_at = models.DateTimeField(null=True, blank=True)
    heartbeat_at = models.DateTimeField(null=True, blank=True, help_text="Last sign of life of the work.")
    cancel_requested = models.BooleanField(default=False)

    model = models.CharField(max_length=200, blank=True)
    token_store = models.CharField(
        max_length=20, default="database", help_text="Where its token arrays go: a name of ``rollouts.token_store``."
    )
    engine = models.CharField(max_length=60, blank=True)
    environment = models.CharField(max_length=60, blank=True)
    strategy = models.CharField(max_length=40, blank=True)
    tokenizer = models.ForeignKey(Tokenizer, null=True, blank=True, on_delete=models.SET_NULL)
    chat_template = models.ForeignKey(ChatTemplate, null=True, blank=True, on_delete=models.SET_NULL)
    rows_chat_template = models.ForeignKey(
        ChatTemplate,
        null=True,
        blank=True,
        on_delete=models.SET_NULL,
        related_name="+",
        help_text="Of a launch whose rows are made with another template than its prompts; empty = the same.",
    )
    format = models.CharField(max_length=200, blank=True, help_text="Of an import: the formats that were recognised.")
    settings = models.JSONField(
        default=dict, help_text="What the form asked for: prompts, group, sampling, seed, limits."
    )

    # Totals are written when work is saved, so that no page counts.
    n_expected = models.PositiveIntegerField(default=0, help_text="Trajectories a launch will make.")
    n_trajectories = models.PositiveIntegerField(default=0)
    n_finished = models.PositiveIntegerField(default=0)
    n_failed = models.PositiveIntegerField(default=0)
    n_steps = models.PositiveIntegerField(default=0)
    n_rows = models.PositiveIntegerField(default=0)
    n_tokens = models.PositiveBigIntegerField(default=0, help_text="New tokens stored: deltas and completions.")
    n_sampled = models.PositiveBigIntegerField(default=0)
    n_rejected = models.PositiveIntegerField(default=0)
    n_rewards = models.PositiveIntegerField(default=0, help_text="Trajectories that have a reward.")
    reward_sum = models.FloatField(default=0.0)
    finding_counts = models.JSONField(default=dict, help_text="kind -> number of findings.")
    diagnosis_version = models.PositiveIntegerField(
        null=True, help_text="The oldest version that diagnosed a trajectory of the run; null = none has."
    )
    bytes_done = models.PositiveBigIntegerField(default=0, help_text="Of an import: how far the reader is.")
    bytes_total = models.PositiveBigIntegerField(default=0)

    class Meta:
        indexes = [
            # The list of runs, newest first: of all projects, and of one.
            models.Index(fields=["-created_at", "-id"], name="run_newest"),
            models.Index(fields=["project", "-created_at", "-id"], name="run_newest_of_project"),
            # Runs that are not finished, for workers that look for work and for the page of workers.
            models.Index(fields=["created_at", "id"], condition=Q(status__in=("queued", "running")), name="run_active"),
        ]

    def __str__(self) -> str:
        return f"{self.name} ({self.code})"


class RunFigures(models.Model):
    """The figures on the pages of a large run. The worker that ended the run counts them once."""

    run = models.OneToOneField(Run, on_delete=models.CASCADE, primary_key=True, related_name="figures")
    state = models.CharField(max_length=64, help_text="Hash of the totals it was counted at; others make it stale.")
    body = models.JSONField(help_text="``rollouts.selectors.figures.count``.")


class Rejection(models.Model):
    """A line of an imported file that could not be read."""

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="rejections")
    file = models.CharField(max_length=500)
    line = models.PositiveIntegerField(null=True)
    reason = models.TextField()


FILTERED = (
    "id", "external_id", "status", "stop_reason", "reward", "n_tokens", "n_steps", "n_findings", "worst_severity",
)  # fmt: skip
"""The columns of the filters of a run's list, and the key."""


class StoredTrajectory(models.Model):
    """One episode."""

    Status = WorkStatus

    code = models.CharField(max_length=16, unique=True, default=new_code)
    run = models.ForeignKey(Run, on_delete=models.CASCADE, db_index=False, related_name="trajectories")
    external_id = models.CharField(max_length=200)
    index = models.PositiveIntegerField(help_text="Position in its run.")
    group = models.CharField(max_length=200, blank=True, help_text="Trajectories of one prompt share it.")
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.DONE)
    error = models.TextField(blank=True)
    stop_reason = models.CharField(max_length=60, blank=True)
    reward = models.FloatField(null=True)
    reward_parts = models.JSONField(default=dict)
    task = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+", help_text="Of a launch.")
    seed = models.BigIntegerField(null=True)
    tokenizer_name = models.CharField(max_length=200, blank=True, help_text="As the source gives it.")
    extra = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    finished_at = models.DateTimeField(null=True)

    # A worker's lease on a trajectory of a launch. It is taken by compare-and-set on (attempt, lease_until).
    attempt = models.PositiveIntegerField(default=0)
    lease_until = models.DateTimeField(null=True)

    n_steps = models.PositiveIntegerField(default=0)
    n_rows = models.PositiveIntegerField(default=0)
    n_tokens = models.PositiveIntegerField(default=0, help_text="New tokens: deltas and completions.")
    n_sampled = models.PositiveIntegerField(default=0)
    n_trained = models.PositiveIntegerField(default=0)
    n_lost = models.PositiveIntegerField(
        null=True, help_text="Sampled tokens that no row trains as they were sampled. None = not known."
    )
    n_findings = models.PositiveIntegerField(default=0)
    worst_severity = models.CharField(max_length=10, blank=True)
    checks = models.JSONField(
        null=True, help_text="Check -> passed, noted, failed, or the fields that it lacks. None = not known."
    )

    class Meta:
        db_table = "rollouts_trajectory"
        constraints = [
            models.UniqueConstraint(fields=["run", "index"], name="trajectory_index_in_run"),
            models.UniqueConstraint(fields=["run", "external_id"], name="trajectory_external_id_in_run"),
        ]
        # Each index of an order holds the columns of the filters too: a filter that few trajectories pass then reads
        # the index alone. SQLite has no such columns.
        indexes = [
            # The list of a run in its own order.
            models.Index(fields=["run", "index"], include=FILTERED, name="trajectory_in_order"),
            # The list of a run sorted by reward, by length, by number of findings. Equal ones are sorted by index, so
            # no database index can be read backwards for the other order.
            models.Index(fields=["run", "reward", "index"], include=FILTERED, name="trajectory_by_reward"),
            models.Index(fields=["run", "-reward", "index"], include=FILTERED, name="trajectory_by_best"),
            models.Index(fields=["run", "n_tokens", "index"], include=FILTERED, name="trajectory_by_tokens"),
            models.Index(fields=["run", "-n_tokens", "index"], include=FILTERED, name="trajectory_by_longest"),
            models.Index(fields=["run", "-n_findings", "index"], include=FILTERED, name="trajectory_by_findings"),
            # Siblings: trajectories of one prompt.
            models.Index(fields=["run", "group", "index"], name="trajectory_by_group"),
            # What a worker may take next.
            models.Index(fields=["run", "status", "index"], name="trajectory_by_status"),
            # How many trajectories of a run have which worst severity, for the list of runs.
            models.Index(fields=["run", "worst_severity"], condition=~Q(worst_severity=""), name="trajectory_by_worst"),
        ]


class TokenSegment(models.Model):
    """An immutable file with the arrays of many steps and rows of a run, in the file storage.

    The file is there before the row is. A file without a row, and a row that nothing names any more, are swept later.
    """

    run = models.ForeignKey(Run, on_delete=models.CASCADE, related_name="token_segments")
    key = models.CharField(max_length=200, unique=True, help_text="Of the file in the storage.")
    n_items = models.PositiveIntegerField(help_text="Steps and rows in the file.")
    n_tokens = models.PositiveBigIntegerField(help_text="Ids in the file.")
    n_bytes = models.PositiveBigIntegerField(help_text="Size of the file.")
    created_at = models.DateTimeField(auto_now_add=True)
    replaced_at = models.DateTimeField(null=True, help_text="When its arrays went elsewhere; null = it is in use.")

    class Meta:
        indexes = [
            # The segments that wait for the sweep.
            models.Index(fields=["replaced_at"], name="segment_replaced", condition=Q(replaced_at__isnull=False)),
        ]


class StoredRow(models.Model):
    """One training row. A row that equals the stream of a step has no stored tokens: ``last_step`` names the step."""

    trajectory = models.ForeignKey(StoredTrajectory, on_delete=models.CASCADE, db_index=False, related_name="rows")
    index = models.PositiveIntegerField()
    last_step = models.ForeignKey("StoredStep", null=True, on_delete=models.CASCADE, related_name="+")
    n_tokens = models.PositiveIntegerField()
    n_trained = models.PositiveIntegerField()
    step_indices = models.JSONField(default=list, help_text="Steps whose completions it trains.")
    extra = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")

    segment = models.ForeignKey(
        TokenSegment, null=True, on_delete=models.DO_NOTHING, related_name="+", db_index=False,
        help_text="The file with its arrays; null = ``RowTokens`` has them, or they follow from ``last_step``.",
    )  # fmt: skip
    segment_offset = models.PositiveIntegerField(null=True, help_text="Its row in the file.")
    column_names = models.JSONField(null=True, help_text="The trainer's columns in the file; null = ``RowColumn``.")

    class Meta:
        db_table = "rollouts_row"
        constraints = [models.UniqueConstraint(fields=["trajectory", "index"], name="row_index_in_trajectory")]
        indexes = [
            # Whether anything still names a segment.
            models.Index(fields=["segment"], name="row_in_segment", condition=Q(segment__isnull=False)),
        ]


class RowTokens(models.Model):
    """The arrays of a row that equals no step's stream, each as long as in the source."""

    row = models.OneToOneField(StoredRow, on_delete=models.CASCADE, primary_key=True, related_name="tokens")
    ids = IdsField()
    loss_mask = MaskField()
    logprobs = FloatsField(null=True)
    origin = OriginsField(null=True)


class RowColumn(models.Model):
    """A trainer-side column of a row: advantages, entropy, trainer logprobs, ..."""

    row = models.ForeignKey(StoredRow, on_delete=models.CASCADE, db_index=False, related_name="columns")
    name = models.CharField(max_length=60)
    values = FloatsField()

    class Meta:
        constraints = [models.UniqueConstraint(fields=["row", "name"], name="column_name_in_row")]


class StoredStep(models.Model):
    """One engine call."""

    trajectory = models.ForeignKey(StoredTrajectory, on_delete=models.CASCADE, db_index=False, related_name="steps")
    index = models.PositiveIntegerField()
    parent = models.ForeignKey("self", null=True, on_delete=models.CASCADE, related_name="children")
    shared_length = models.PositiveIntegerField(
        default=0, help_text="Leading prompt ids shared with the parent's stream."
    )
    parent_length = models.PositiveIntegerField(default=0, help_text="Length of the parent's stream.")
    prompt_length = models.PositiveIntegerField()
    completion_length = models.PositiveIntegerField()
    row_index = models.PositiveIntegerField(default=0, help_text="The row that trains this step.")

    finish_reason = models.CharField(max_length=30, blank=True)
    stop_reason = models.CharField(max_length=100, blank=True)
    logprobs_mode = models.CharField(max_length=20, blank=True)
    temperature = models.FloatField(null=True)
    top_p = models.FloatField(null=True)
    top_k = models.IntegerField(null=True)
    engine = models.CharField(max_length=60, blank=True)
    policy_version = models.CharField(max_length=100, blank=True)
    chat_template_sha256 = models.CharField(max_length=64, blank=True, help_text="Empty = the run's own.")

    # The messages of the request, stored as deltas like the ids: the parent's first messages, then the new ones.
    messages_shared = models.PositiveIntegerField(default=0)
    messages_new = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")
    tools = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")
    template_kwargs = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")
    reply = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")
    text = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")
    extra = models.ForeignKey(Content, null=True, on_delete=models.PROTECT, related_name="+")

    segment = models.ForeignKey(
        TokenSegment, null=True, on_delete=models.DO_NOTHING, related_name="+", db_index=False,
        help_text="The file with its arrays; null = ``StepTokens`` has them.",
    )  # fmt: skip
    segment_offset = models.PositiveIntegerField(null=True, help_text="Its row in the file.")
    has_origin = models.BooleanField(null=True, help_text="Of a step in a segment: whether its delta has origins.")

    class Meta:
        db_table = "rollouts_step"
        constraints = [models.UniqueConstraint(fields=["trajectory", "index"], name="step_index_in_trajectory")]
        indexes = [
            # The few steps with a break among millions.
            models.Index(
                fields=["trajectory", "index"],
                name="step_broken",
                condition=Q(shared_length__lt=F("parent_length")),
            ),
            # Whether anything still names a segment.
            models.Index(fields=["segment"], name="step_in_segment", condition=Q(segment__isnull=False)),
        ]


class StepTokens(models.Model):
    """The tokens that a step adds."""

    step = models.OneToOneField(StoredStep, on_delete=models.CASCADE, primary_key=True, related_name="tokens")
    delta_ids = IdsField(help_text="prompt_ids[shared_length:]")
    delta_origin = OriginsField(null=True)
    completion_ids = IdsField()
    logprobs = FloatsField(null=True)


class StoredFinding(models.Model):
    """One finding of the diagnosis."""

    trajectory = models.ForeignKey(StoredTrajectory, on_delete=models.CASCADE, db_index=False, related_name="findings")
    run = models.ForeignKey(Run, on_delete=models.CASCADE, db_index=False, related_name="findings")
    step_index = models.PositiveIntegerField(null=True)
    row_index = models.PositiveIntegerField(null=True)
    axis = models.CharField(max_length=10)
    kind = models.CharField(max_length=40)
    severity = models.CharField(max_length=10)
    start = models.PositiveIntegerField()
    stop = models.PositiveIntegerField()
    expected_ids = IdsField()
    actual_ids = IdsField()
    expected_text = models.TextField(blank=True)
    actual_text = models.TextField(blank=True)
    message_index = models.PositiveIntegerField(null=True)
    evidence = models.TextField()
    remedy = models.TextField(blank=True)
    missing = models.CharField(max_length=200, blank=True)
    places = IdsField(null=True, help_text="Start and stop of every stretch, when there are several.")
    trained_tokens_lost = models.PositiveIntegerField(null=True, default=0, help_text="None = not known.")
    trained_tokens_wrong = models.PositiveIntegerField(null=True, default=0, help_text="None = not known.")
    rows = models.PositiveIntegerField(default=1)
    prompt_tokens_repaid = models.PositiveIntegerField(default=0)
    lost_in_one_row = models.PositiveIntegerField(default=0)
    version = models.PositiveIntegerField(help_text="Of the diagnosis that made it.")

    class Meta:
        db_table = "rollouts_finding"
        indexes = [
            # The findings of one trajectory, in reading order; whether one of them is of a kind and severity.
            models.Index(
                fields=["trajectory", "step_index", "start"],
                include=("run", "kind", "severity"),
                name="finding_in_trajectory",
            ),
            # Trajectories of a run that have a finding of a kind, at a step; and how many, by kind and by step.
            models.Index(
                fields=["run", "kind", "step_index", "trajectory"], include=("severity",), name="finding_by_kind"
            ),
            # Trajectories with a finding of any kind at a step.
            models.Index(fields=["run", "step_index", "trajectory"], include=("severity",), name="finding_by_step"),
            # Trajectories with a finding of a severity.
            models.Index(fields=["run", "severity", "trajectory"], name="finding_by_severity"),
        ]


class TemplateCheck(models.Model):
    """A chat-template check: the same question has the same code. ``job`` answers it, then looks for a repair."""

    Status = WorkStatus

    project = models.ForeignKey(Project, on_delete=models.PROTECT, default=default_project, related_name="checks")
    code = models.CharField(max_length=16, unique=True, help_text="From the hash of the question.")
    tokenizer = models.ForeignKey(Tokenizer, null=True, on_delete=models.SET_NULL)
    chat_template = models.ForeignKey(ChatTemplate, on_delete=models.PROTECT)
    label = models.CharField(max_length=200, blank=True, help_text="The project's name for the template.")
    question = models.JSONField(default=dict, help_text="tools, kwargs, own conversation.")
    report = models.JSONField(null=True, help_text="rollouts.chat_templates' report.")
    cells = models.JSONField(null=True, help_text="The report in short, for the matrix: each probe with its outcome.")
    version = models.PositiveIntegerField(default=0)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        indexes = [
            # The checks that were asked last: of all projects, and of one.
            models.Index(fields=["-created_at", "-id"], name="check_newest"),
            models.Index(fields=["project", "-created_at", "-id"], name="check_newest_of_project"),
        ]

    @property
    def template_name(self) -> str:
        """What pages call its chat template."""
        return template_name(self.label, self.chat_template_id)

    @property
    def is_answered(self) -> bool:
        """Whether the report is stored: by the current job, or before a job that looks for a repair alone."""
        return self.job.kind == Job.Kind.REPAIR_TEMPLATE or self.job.n_done > 0

    @property
    def status(self) -> str:
        """The state of the job; done as soon as the report is stored, although the search for a repair may continue."""
        return WorkStatus.DONE if self.is_answered else self.job.status

    @property
    def error(self) -> str:
        """Why the check failed; empty = it did not."""
        return "" if self.is_answered else self.job.error

    @property
    def progress(self) -> str:
        """How far the search for a repair is; empty = no search is under way."""
        searching = self.is_answered and self.job.status in ACTIVE
        return (self.job.progress or "waiting for a worker") if searching else ""


class Replay(models.Model):
    """What every strategy would make of a trajectory. It is made again only when ``key`` has changed."""

    trajectory = models.OneToOneField(StoredTrajectory, on_delete=models.CASCADE, related_name="replay")
    key = models.CharField(max_length=64, help_text="Hash of all that it follows from; another one makes it stale.")
    report = models.JSONField(null=True, help_text="The figures of each strategy.")


class ReplayRows(models.Model):
    """The rows that one strategy made, concatenated."""

    replay = models.ForeignKey(Replay, on_delete=models.CASCADE, db_index=False, related_name="rows")
    strategy = models.CharField(max_length=40)
    lengths = models.JSONField(help_text="Tokens of each row.")
    ids = IdsField()
    loss_mask = MaskField()
    origin = OriginsField(null=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["replay", "strategy"], name="strategy_in_replay")]


class Job(models.Model):
    """Background work of the queue ``default``. It belongs to one run, one replay or one template check.

    A run keeps the jobs that were asked for. A replay and a template check have one job: the last one. A large job is
    cut into shards, which any workers do. A shard is a job that belongs to the whole one, and goes when that has ended.
    """

    Status = WorkStatus

    class Kind(models.TextChoices):
        DIAGNOSE = "diagnose"
        """Every finished trajectory of a run is diagnosed again."""
        EXPORT = "export"
        """A run is written to a file; ``options`` says how."""
        REPLAY = "replay"
        """Every strategy is replayed over a run; ``report`` sums what each one makes."""
        IMPORT = "import"
        """The files that ``options`` names are read into a run."""
        MOVE_TOKENS = "move_tokens"
        """The token arrays of a run move into the store that ``options`` names."""
        DIAGNOSE_PUSHED = "diagnose_pushed"
        """The trajectories that were pushed since the last diagnosis are diagnosed."""
        REPLAY_TRAJECTORY = "replay_trajectory"
        """Every strategy is replayed over one trajectory."""
        CHECK_TEMPLATE = "check_template"
        """A template check is answered. With ``options["repair"]`` a repair is searched for afterwards."""
        REPAIR_TEMPLATE = "repair_template"
        """A repair is searched for a template check that was answered before without one."""

    code = models.CharField(max_length=16, unique=True, default=new_code)
    run = models.ForeignKey(Run, null=True, on_delete=models.CASCADE, related_name="jobs")
    replay = models.OneToOneField(Replay, null=True, on_delete=models.CASCADE)
    template_check = models.OneToOneField(TemplateCheck, null=True, on_delete=models.CASCADE)
    whole = models.ForeignKey(
        "self", null=True, on_delete=models.CASCADE, related_name="shards",
        help_text="Of a shard: the job of which it is a part.",
    )  # fmt: skip
    kind = models.CharField(max_length=20, choices=Kind.choices)
    status = models.CharField(max_length=10, choices=Status.choices, default=Status.QUEUED)
    error = models.TextField(blank=True)
    options = models.JSONField(default=dict)
    attempt = models.PositiveIntegerField(default=0, help_text="Goes up with each worker that takes it.")
    n_done = models.PositiveIntegerField(default=0)
    n_total = models.PositiveIntegerField(default=0, help_text="Trajectories it has to go through.")
    progress = models.CharField(
        max_length=200, blank=True, help_text="Of a search for a repair, and of a job in shards: how far it is."
    )
    reached = models.BigIntegerField(
        default=-1,
        help_text="Index of the last trajectory that is done for good; of a shard of an import, bytes that are read.",
    )
    n_written = models.PositiveIntegerField(default=0, help_text="Of an export: rows or trajectories in the file.")
    bytes_written = models.PositiveBigIntegerField(default=0)
    notes = models.JSONField(default=list, help_text="Sentences about what was left out.")
    report = models.JSONField(
        null=True, help_text="Of a replay: figures so far, in the end of the whole run. Of a shard: what it found."
    )
    cancel_requested = models.BooleanField(default=False)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, blank=True, on_delete=models.SET_NULL)
    created_at = models.DateTimeField(auto_now_add=True)
    heartbeat_at = models.DateTimeField(default=timezone.now, help_text="Last sign of life of the work.")
    finished_at = models.DateTimeField(null=True, blank=True)
    expires_at = models.DateTimeField(null=True, blank=True, help_text="When its file goes.")

    class Meta:
        constraints = [
            # A run has one active job of each kind: a second press finds the first job.
            models.UniqueConstraint(
                fields=["run", "kind"], condition=Q(status__in=("queued", "running")), name="job_at_a_time"
            ),
            models.CheckConstraint(
                condition=Q(run__isnull=False, replay=None, template_check=None, whole=None)
                | Q(run=None, replay__isnull=False, template_check=None, whole=None)
                | Q(run=None, replay=None, template_check__isnull=False, whole=None)
                | Q(run=None, replay=None, template_check=None, whole__isnull=False),
                name="job_of_one_subject",
            ),
        ]
        indexes = [
            # What waits and what is under way, among many jobs that have ended.
            models.Index(fields=["status"], name="job_active", condition=Q(status__in=("queued", "running"))),
        ]
