"""What a refusal of the API looks like."""

from typing import Any


def assert_problem(answer: Any, status: int) -> dict[str, Any]:
    """The problem document of an answer with that status."""
    assert (answer.status_code, answer["Content-Type"]) == (status, "application/problem+json"), answer.content
    found: dict[str, Any] = answer.json()
    assert found["status"] == status and found["type"] == "about:blank" and found["detail"].endswith((".", "?"))
    return found
