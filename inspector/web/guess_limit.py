"""How many wrong tokens one address may try: share links, invitations, API keys."""

from __future__ import annotations

import logging

from django.http import HttpRequest
from django_ratelimit.core import is_ratelimited

MAX_GUESSES = "30/5m"
"""Wrong tokens of one kind from one address. A right one counts nothing."""

log = logging.getLogger(__name__)


def guessed_too_often(request: HttpRequest, kind: str, *, again: bool = False, rate: str = MAX_GUESSES) -> bool:
    """Whether the address of a request has tried too many wrong tokens of a kind; ``again`` counts one more.

    What cannot be counted, without Redis or an address, refuses nothing.
    """
    try:
        return bool(is_ratelimited(request, f"guess {kind}", key="ip", rate=rate, increment=again))
    except Exception as error:
        log.warning("wrong tokens are not counted kind=%s: %s", kind, error)
        return False
