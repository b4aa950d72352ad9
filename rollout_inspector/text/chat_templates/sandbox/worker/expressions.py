"""Compiles and searches regular expressions of users. A short one can take all memory when it is only compiled."""

import resource
import time
from functools import lru_cache
from typing import Any

import regex

WINDOW, OVERLAP = 1 << 17, 1 << 14
"""Characters in which a match begins, and by which it may go beyond them. They bound the memory of one call."""
MAX_GROWTH = 64 << 10
"""Kilobytes by which an expression may make this process grow; then it is not trusted with the next one."""


@lru_cache(maxsize=1)
def _compiled(text: str) -> regex.Pattern[str]:
    """The expression that was asked for last. No other is kept."""
    return regex.compile(text, cache_pattern=False)


def search(request: dict[str, Any]) -> dict[str, Any]:
    """The answer to one request as JSON: about the expression, and its matches in texts where there are some."""
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        answered = _search(request)
    except regex.error as error:
        place = f" at character {error.pos + 1}" if error.pos is not None else ""
        answered = {"error": f"The expression cannot be read{place}: {error.msg}.", "kind": "syntax"}
    except ValueError as error:  # flags that exclude each other
        answered = {"error": f"The expression cannot be read: {error}.", "kind": "syntax"}
    except TimeoutError:
        answered = {"error": "The expression took too long.", "kind": "time"}
    except Exception as error:
        answered = {"error": f"The expression takes too much memory ({type(error).__name__}).", "kind": "memory"}
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - grown
    return {**answered, "spoilt": grown > MAX_GROWTH or answered.get("kind") == "memory"}


def _search(request: dict[str, Any]) -> dict[str, Any]:
    began, pattern = time.process_time(), _compiled(request["expression"])
    answered = {"groups": pattern.groups, "reverse": bool(pattern.flags & regex.REVERSE)}
    first, at = request["at"]
    matches: list[tuple[int, int, int]] = []
    late = began + request["seconds"]
    for n, searched in enumerate(request["texts"][first:], first):
        while at <= len(searched) and len(matches) < request["most"]:
            if (seconds := late - time.process_time()) <= 0:
                raise TimeoutError
            window = at - at % WINDOW + WINDOW
            match = pattern.search(searched, at, window + OVERLAP, timeout=seconds)
            if match is None or match.start() >= window:
                at = window
                continue
            at = max(match.end(), at + 1) if match.end() > match.start() else match.end() + 1
            start, stop = match.span(request["group"])
            if stop > start:
                matches.append((n, start, stop))
        if len(matches) == request["most"]:
            break
        at = 0
    whole = len(matches) < request["most"]
    return {**answered, "matches": matches, "next": None if whole else (n, at), "seconds": time.process_time() - began}
