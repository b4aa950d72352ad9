"""Who works here: projects, their members and invitations, API keys, share links, and the audit log."""

from django.conf import settings
from django.db import models

from rollouts.store.models.codes import new_code

DEFAULT_PROJECT = "default"
"""The code of the project that every installation has. Nothing else can have it: other codes are longer."""


class Project(models.Model):
    """What belongs together: runs, template checks, tokenizers, API keys, and who may see and change them."""

    code = models.CharField(max_length=16, unique=True, default=new_code)
    name = models.CharField(max_length=100, unique=True)
    created_at = models.DateTimeField(auto_now_add=True)

    def __str__(self) -> str:
        return self.name


def default_project() -> int:
    """The key of the project that takes what names no other one. It is made on first use."""
    return Project.objects.get_or_create(code=DEFAULT_PROJECT, defaults={"name": "Default"})[0].pk


class Role(models.TextChoices):
    """What a member may do in a project. Each role may do what the one before it may."""

    VIEWER = "viewer"  # Reads everything of the project.
    MEMBER = "member"  # Launches, imports, checks, exports and shares; deletes and revokes what is their own.
    ADMIN = "admin"  # Deletes and revokes what others made; says who is in the project.


class Membership(models.Model):
    """A user's role in a project."""

    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="memberships")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=10, choices=Role.choices)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["project", "user"], name="one_role_in_project")]


class Invitation(models.Model):
    """A link by which one person joins a project, once."""

    token_sha256 = models.CharField(
        max_length=64, unique=True, help_text="The token itself is shown once and not kept."
    )
    hint = models.CharField(max_length=8, help_text="First characters of the token, to tell links apart.")
    project = models.ForeignKey(Project, on_delete=models.CASCADE, related_name="invitations")
    role = models.CharField(max_length=10, choices=Role.choices)
    note = models.CharField(max_length=200, blank=True, help_text="For whom it is.")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="+")
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    used_by = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    used_at = models.DateTimeField(null=True)
    revoked_at = models.DateTimeField(null=True)


class ShareLink(models.Model):
    """A read-only link that works without login until it expires, is revoked, or its maker may not share any more."""

    token_sha256 = models.CharField(
        max_length=64, unique=True, help_text="The token itself is shown once and not kept."
    )
    hint = models.CharField(max_length=8, help_text="First characters of the token, to tell links apart.")
    run = models.ForeignKey("rollouts.Run", null=True, on_delete=models.CASCADE)
    trajectory = models.ForeignKey("rollouts.StoredTrajectory", null=True, on_delete=models.CASCADE)
    check_result = models.ForeignKey("rollouts.TemplateCheck", null=True, on_delete=models.CASCADE)
    project = models.ForeignKey(
        Project, on_delete=models.CASCADE, default=default_project, help_text="Of what it opens."
    )
    query = models.CharField(max_length=500, blank=True, help_text="The view that the link opens, e.g. t=1204-1260.")
    row_index = models.PositiveIntegerField(null=True, help_text="The one row that it shows; null = everything.")
    start = models.PositiveIntegerField(null=True, help_text="The first token of that row that it shows.")
    stop = models.PositiveIntegerField(null=True, help_text="The first token behind those that it shows.")
    note = models.CharField(max_length=500, blank=True)
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    created_at = models.DateTimeField(auto_now_add=True)
    expires_at = models.DateTimeField()
    revoked_at = models.DateTimeField(null=True)
    n_opened = models.PositiveIntegerField(default=0, help_text="How often it was opened.")
    opened_at = models.DateTimeField(null=True, help_text="When it was opened last.")


class ApiToken(models.Model):
    """A token by which a program works in one project, as the user who made it."""

    class Scope(models.TextChoices):
        """What a token may be used for."""

        PUSH = "push"  # Makes runs to push to, and pushes to runs.
        READ = "read"  # Reads what its project holds.
        LAUNCH = "launch"  # Launches, imports, exports, checks, cancels.

    token_sha256 = models.CharField(
        max_length=64, unique=True, help_text="The token itself is shown once and not kept."
    )
    hint = models.CharField(max_length=12, help_text="First characters of the token, to tell tokens apart.")
    name = models.CharField(max_length=200, help_text="What uses it.")
    project = models.ForeignKey(Project, on_delete=models.CASCADE, default=default_project)
    scopes = models.JSONField(default=list, help_text="Values of ``Scope``.")
    created_by = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE)
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(null=True, help_text="To the minute.")
    expires_at = models.DateTimeField(null=True, help_text="null = never.")
    revoked_at = models.DateTimeField(null=True)


class AuditEvent(models.Model):
    """What somebody did that others may have to know: logins, shares, launches, deletions, exports, new roles."""

    at = models.DateTimeField(auto_now_add=True)
    user = models.ForeignKey(settings.AUTH_USER_MODEL, null=True, on_delete=models.SET_NULL, related_name="+")
    user_name = models.CharField(max_length=150, blank=True, help_text="It stays when the account goes.")
    address = models.CharField(max_length=45, blank=True, help_text="The address of the client.")
    project = models.ForeignKey(Project, null=True, on_delete=models.SET_NULL, related_name="+")
    action = models.CharField(max_length=40, help_text="``rollouts.store.people.activity_log.Action``.")
    target = models.CharField(max_length=40, blank=True, help_text="Kind of the object: run, trajectory, check, ...")
    code = models.CharField(max_length=16, blank=True, help_text="Code of the object, or its key.")
    detail = models.CharField(max_length=500, blank=True, help_text="Its name, or what changed. Never a secret.")

    class Meta:
        indexes = [
            # The log of a project, and of the server, newest first.
            models.Index(fields=["project", "-at", "-id"], name="audit_of_project"),
            models.Index(fields=["-at", "-id"], name="audit_newest"),
        ]


class LoginSession(models.Model):
    """A session of Django that somebody is logged in with: on which device, from where. It goes with the session."""

    session = models.OneToOneField("sessions.Session", on_delete=models.CASCADE, related_name="+")
    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="login_sessions")
    device = models.CharField(max_length=200, blank=True, help_text="What the browser says of itself.")
    address = models.CharField(max_length=45, blank=True, help_text="The address it was used from last.")
    created_at = models.DateTimeField(auto_now_add=True)
    last_used_at = models.DateTimeField(help_text="To ten minutes.")


class ExternalIdentity(models.Model):
    """Whom an OpenID Connect provider means by a subject. An account is found by both, never by an email address."""

    user = models.ForeignKey(settings.AUTH_USER_MODEL, on_delete=models.CASCADE, related_name="external_identities")
    issuer = models.CharField(max_length=255)
    subject = models.CharField(max_length=255)
    created_at = models.DateTimeField(auto_now_add=True)

    class Meta:
        constraints = [models.UniqueConstraint(fields=["issuer", "subject"], name="one_account_of_subject")]
