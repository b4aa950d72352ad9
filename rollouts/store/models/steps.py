"""Steps. A step stores only the tokens that it adds; ``shared_length < parent_length`` means a break."""

from django.db import models
from django.db.models import F, Q

from rollouts.store.fields import FloatsField, IdsField, OriginsField
from rollouts.store.models.token_segments import Content, InSegment
from rollouts.store.models.trajectories import StoredTrajectory


class StoredStep(InSegment):
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
    # Known without the arrays, so that a page offers only lenses that colour something.
    has_entropy = models.BooleanField(null=True, help_text="Whether the entropy of its completion is kept; null = no.")
    n_alternatives = models.PositiveSmallIntegerField(
        null=True, help_text="Alternatives that are kept for each sampled token; null = none."
    )
    least_kept = models.PositiveIntegerField(
        null=True, help_text="The size of the smallest kept set of its tokens; null = none is recorded."
    )
    has_origin = models.BooleanField(null=True, help_text="Of a step in a segment: whether its delta has origins.")

    class Meta:
        db_table = "rollouts_step"
        constraints = [models.UniqueConstraint(fields=["trajectory", "index"], name="step_index_in_trajectory")]
        indexes = [
            # The few steps with a break among millions.
            models.Index(
                fields=["trajectory", "index"], name="step_broken", condition=Q(shared_length__lt=F("parent_length")),
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
    entropy = FloatsField(null=True)
    kept_set = FloatsField(null=True)
    kept_ids = IdsField(null=True, help_text="The ids of the kept sets, one set after the other.")
    alternative_ids = IdsField(null=True, help_text="The likeliest ids at each token, one token after the other.")
    alternative_logprobs = FloatsField(null=True)
