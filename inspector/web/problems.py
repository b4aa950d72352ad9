"""Errors of the API as problem documents (RFC 9457): one shape, one media type, one plain sentence."""

from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from django.http import JsonResponse

API = "/api/v1/"
MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = {429: 60, 503: 10, 507: 10}  # After how many seconds trying again may help, by status.


class ApiProblem(Exception):
    """A request to the API that is refused, with a status and a sentence; ``errors`` names faulty fields."""

    def __init__(self, status: int, sentence: str, errors: dict[str, list[str]] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.errors = status, sentence, errors or {}


@dataclass(frozen=True)
class ProblemDocument:
    """Why a request was refused, and what to do."""

    type: str
    """Always ``about:blank``: the status says which kind of problem it is."""
    title: str
    """The status in words."""
    status: int
    """The HTTP status."""
    detail: str
    """A sentence that says what is wrong and what to do about it."""
    errors: dict[str, list[str]] = field(default_factory=dict)
    """Field -> what is wrong with it; missing where no single field is to blame."""


def problem(status: int, sentence: str, errors: dict[str, list[str]] | None = None, **more: Any) -> JsonResponse:
    """A problem document as an answer. ``more``: further members."""
    try:
        title = HTTPStatus(status).phrase
    except ValueError:
        title = "Error"
    body = {"type": "about:blank", "title": title, "status": status, "detail": sentence}
    answer = JsonResponse(
        {**more, **body, **({"errors": errors} if errors else {})}, status=status, content_type=MEDIA_TYPE
    )
    if status == 401:
        answer["WWW-Authenticate"] = 'Bearer realm="Rollout Inspector"'
    if status in RETRY_SECONDS:
        answer["Retry-After"] = str(RETRY_SECONDS[status])
    answer["Cache-Control"] = "private, no-store"
    return answer
