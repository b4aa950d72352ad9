"""The API key that a request carries: one check for pushes and for the API."""

from django.http import HttpRequest

from inspector.web.access import guessed_too_often
from inspector.web.problems import ApiProblem
from rollouts.store.models import ApiToken
from rollouts.store.people.access import access_of_api_key
from rollouts.store.people.shares import api_key_fault, find_api_key


def api_key_of(request: HttpRequest, token: str) -> ApiToken:
    """The record of a token that works; from now on the request is its maker's, with the access of the token. Raises
    :class:`ApiProblem` 401 with the reason, or 429 when wrong tokens came from the address too often."""
    record = find_api_key(token.strip())
    if record is None:
        # A right token always passes: programs of one address must not lock each other out.
        if guessed_too_often(request, "token", again=True):
            raise ApiProblem(429, "Too many wrong API keys came from this address. Try again in five minutes.")
        raise ApiProblem(401, api_key_fault(token.strip()))
    request.user = record.created_by  # the lines of the logs name who asks
    request.access = access_of_api_key(record)  # type: ignore[attr-defined]
    return record
