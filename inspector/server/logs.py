"""Structured logs: one event per line, as key=value text or JSON, with the id of the request that caused it. Log lines
carry names, counts and codes; never the text of tokens, never a login or share token, never a query string."""

import json
import logging
import re
import time
import uuid
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from django.http import HttpRequest, HttpResponse
from pythonjsonlogger.core import RESERVED_ATTRS
from pythonjsonlogger.json import JsonFormatter

_request_id: ContextVar[str] = ContextVar("request_id", default="")
# Beside the standard attributes: what Django and vLLM set on records.
_LEFT_OUT = {*RESERVED_ATTRS, "request", "server_time", "vllm_process_name"}
_PLAIN = re.compile(r"[\w./:@+-]+\Z")
_REQUEST_ID = re.compile(r"[A-Za-z0-9-]{8,64}\Z")
_SECRETS = (
    # Share links, invitations, the recorder's address, login links, API keys, cookies.
    re.compile(
        r"(/s/|/join/|/token/|\btoken=|\bbearer\s+|\bri_"
        r"|\b(?:inspector_session|inspector_shares|csrftoken|csrfmiddlewaretoken|x-csrftoken|x-recorder-token)['\"]?\s*[=:]\s*['\"]?)"
        r"[^\s'\"&;,/<>\\]+",
        re.IGNORECASE,
    ),
    # The password in an address.
    re.compile(r"(://[^\s/:@]*:)[^\s/@]+(?=@)"),
)
log = logging.getLogger("inspector.request")


def without_secrets(text: str) -> str:
    """The text with `...` for each token, cookie and password that its surroundings give away."""
    for pattern in _SECRETS:
        text = pattern.sub(r"\1...", text)
    return text


class AnsweredFilter(logging.Filter):
    """Leaves out the traceback of a request that was answered with a sentence, such as a 403."""

    def filter(self, record: logging.LogRecord) -> bool:
        if getattr(record, "status_code", 500) < 500:
            record.exc_info = None
        return True


class RequestIdFilter(logging.Filter):
    """Adds the current request's id to every record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.request_id = _request_id.get()
        return True


class JsonLineFormatter(JsonFormatter):
    """One JSON object per line: time, level, logger, event, request_id, the scalars of `extra`, error."""

    def __init__(self) -> None:
        names = {"levelname": "level", "name": "logger", "message": "event", "exc_info": "error"}
        fields = ["levelname", "name", "message", "request_id"]
        super().__init__(
            fields, rename_fields=names, reserved_attrs=_LEFT_OUT, timestamp="time", json_ensure_ascii=False
        )

    def process_log_record(self, log_data: dict[str, Any]) -> dict[str, Any]:
        fields = {"time": log_data.pop("time").isoformat(timespec="milliseconds"), **log_data}
        fields["level"] = fields["level"].lower()
        if not fields["request_id"]:
            del fields["request_id"]
        if "error" in fields:
            fields["error"] = fields.pop("error")  # the traceback comes last
        # Django writes the address of what it did not find, and a traceback may name one.
        clean_fields = {
            key: without_secrets(value) if isinstance(value, str) else value for key, value in fields.items()
        }
        return {key: value for key, value in clean_fields.items() if isinstance(value, str | int | float | bool | None)}


class TextLineFormatter(JsonLineFormatter):
    """The same fields as `time=... level=... logger=... event="..." key=value`."""

    def jsonify_log_record(self, log_data: dict[str, Any]) -> str:
        texts = {key: str(value) for key, value in log_data.items()}
        return " ".join(
            f"{key}={text if _PLAIN.match(text) else json.dumps(text, ensure_ascii=False)}"
            for key, text in texts.items()
        )


class RequestLogMiddleware:
    """Sets an id for every request, returns it in `X-Request-Id`, and logs one line when the request is done. The line
    of a request that may change something names its user: who deleted, revoked or cancelled what."""

    def __init__(self, get_response: Callable[[HttpRequest], HttpResponse]) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        client_id = request.headers.get("X-Request-Id", "")
        request_id = client_id if _REQUEST_ID.match(client_id) else uuid.uuid4().hex[:16]
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
                    **_user(request),
                    "status": response.status_code,
                    "ms": round((time.perf_counter() - started) * 1000, 1),
                    "bytes": None if response.streaming else len(response.content),
                },
            )
            return response
        finally:
            _request_id.reset(token)


def _user(request: HttpRequest) -> dict[str, str]:
    """The name of the user who sent a request that may change something."""
    user = getattr(request, "user", None)
    if request.method in ("GET", "HEAD", "OPTIONS") or user is None or not user.is_authenticated:
        return {}
    return {"user": user.get_username()}
