"""What a request did, for the audit log: the account and the address come from the request."""

from __future__ import annotations

from typing import Any

from django.db.models import Model
from django.http import HttpRequest

from rollouts.services import audit
from rollouts.services.audit import Action


def note(
    request: HttpRequest, action: Action, of: Model | None = None, *,
    user: Any = None, project: int | None = None, detail: str = "",
) -> None:  # fmt: skip
    """Write down what this request did. ``user``: an account or a typed name, when it is not the request's own."""
    by = getattr(request, "user", None) if user is None else user
    audit.record(action, user=by, address=request.META.get("REMOTE_ADDR", ""), of=of, project=project, detail=detail)
