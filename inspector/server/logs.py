"""Structured logs: one event per line, as key=value text or JSON, with the id of the request that caused it.

Log lines carry names, counts and codes; never the text of tokens, never a login token, never a query string.
"""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from datetime import UTC, datetime

from django.http import HttpRequest, HttpResponse

_request_id: ContextVar[str] = ContextVar("request_id", default="")
_STANDARD = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "request", "taskName", "server_time"}
# Set on every record by vLLM once it is imported.
_STANDARD |= {"vllm_process_name"}
_PLAIN = re.compile(r"[\w./:@+-]+\Z")
_GIVEN_ID = re.compile(r"[A-Za-z0-9-]{8,64}\Z")
log = logging.getLogger("inspector.request")


class RequestIdFilter(logging.Filter):
    """Adds the current request's id to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _request_id.get()
        return True


def _fields(record: logging.LogRecord, formatter: logging.Formatter) -> dict[str, object]:
    """The event's fields in a fixed order: time, level, logger, event, request_id, whatever `extra` gave, error."""
    fields: dict[str, object] = {
        "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
        "level": record.levelname.lower(),
        "logger": record.name,
        "event": record.getMessage(),
    }
    if getattr(record, "request_id", ""):
        fields["request_id"] = record.request_id  # type: ignore[attr-defined]
    fields |= {
        key: value
        for key, value in record.__dict__.items()
        if key not in _STANDARD and key != "request_id" and isinstance(value, str | int | float | bool | None)
    }
    if record.exc_info:
        fields["error"] = formatter.formatException(record.exc_info)
    return fields


class TextFormatter(logging.Formatter):
    """`time=... level=... logger=... event="..." key=value`."""

    def format(self, record: logging.LogRecord) -> str:
        parts = []
        for key, value in _fields(record, self).items():
            text = str(value)
            parts.append(f"{key}={text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=False)}")
        return " ".join(parts)


class JsonFormatter(logging.Formatter):
    """One JSON object per line."""

    def format(self, record: logging.LogRecord) -> str:
        return json.dumps(_fields(record, self), ensure_ascii=False, default=str)


class RequestLogMiddleware:
    """Gives every request an id, answers with it in `X-Request-Id`, and logs one line when it is done."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        given = request.headers.get("X-Request-Id", "")
        request_id = given if _GIVEN_ID.match(given) else uuid.uuid4().hex[:16]
        token = _request_id.set(request_id)
        started = time.perf_counter()
        try:
            response = self.get_response(request)
            response["X-Request-Id"] = request_id
            quiet = request.path.startswith(("/static/", "/health")) and response.status_code < 400
            log.log(
                logging.DEBUG if quiet else logging.INFO,
                "request",
                extra={
                    "method": request.method,
                    "path": request.path,
                    "status": response.status_code,
                    "ms": round((time.perf_counter() - started) * 1000, 1),
                    "bytes": None if response.streaming else len(response.content),
                },
            )
            return response
        finally:
            _request_id.reset(token)
