"""`/api/runs` and `/api/runs/<code>/trajectories`: a trainer makes a run and pushes trajectories, with an API token."""

from __future__ import annotations

import json
import tempfile
import threading
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import IO, Any

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse, UnreadablePostError
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt

from inspector.web.access import access
from inspector.web.bearer import token_of
from inspector.web.problems import ApiProblem
from inspector.web.twins import json_page, whole_number
from rollout_inspector.formats.limits import memory_of
from rollout_inspector.formats.training_step import checked_rule
from rollouts.jobs import push_process
from rollouts.jobs.push_process import PushedBody, PushesBusy
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import tokenizer_named, tokenizer_names
from rollouts.store.models import ApiToken, Role, Run
from rollouts.store.outages import is_disk_full
from rollouts.store.people import activity_log
from rollouts.store.people.activity_log import Action
from rollouts.store.runs import runs
from rollouts.store.runs.runs import find_run

CHUNK_BYTES = 1 << 20
MAX_RUN_BYTES = 4 << 20
"""The largest request that makes a run: a name and perhaps a chat template."""
MAX_RUN_MEMORY = 32 << 20
"""Bytes of memory that the values of such a request take."""
MAX_PREFIX = 60
MAX_PUSHES = 6
"""Pushes that wait in a web process to be read. Further ones are refused, so that pages find a thread."""
RETRY_SECONDS = 10
TYPES = (
    "", "text/plain", "application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines",
    "application/json", "application/octet-stream", "application/gzip", "application/zstd",
)

_places = threading.BoundedSemaphore(MAX_PUSHES)

View = Callable[..., HttpResponse]


class Refused(Exception):
    """A request that is refused, with a status and a sentence."""

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status, self.sentence = status, sentence


def api(view: View) -> View:
    """Accepts a POST with a live token, the second argument of the view. Every refusal is JSON with a sentence."""

    @wraps(view)
    def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponse:
        try:
            if request.method != "POST":
                raise Refused(405, "This address takes POST requests of a trainer; docs/push.md says how.")
            return view(request, _token(request), *args, **kwargs)
        except Refused as error:
            refused = error
        except (OSError, DatabaseError) as error:
            if not is_disk_full(error):
                raise
            refused = Refused(507, "The disk of the server is full. Push again when there is room.")
        response = JsonResponse({"error": refused.sentence}, status=refused.status)
        if refused.status == 401:
            response["WWW-Authenticate"] = "Bearer"
        if refused.status == 405:
            response["Allow"] = "POST"
        return _later(response)

    return csrf_exempt(login_not_required(never_cache(wrapped)))


def _later(response: HttpResponse) -> HttpResponse:
    """The answer, with the time after which a sender shall try again where trying again helps."""
    if response.status_code in (429, 503, 507):
        response["Retry-After"] = str(RETRY_SECONDS)
    return response


def _token(request: HttpRequest) -> ApiToken:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Refused(
            401, "Send an API token as `Authorization: Bearer TOKEN`; /tokens and `manage.py api_token` make one."
        )
    try:
        found = token_of(request, token)
    except ApiProblem as error:
        raise Refused(error.status, error.sentence) from error
    if ApiToken.Scope.PUSH not in found.scopes:
        raise Refused(403, f"This API token may not push: its scopes are {', '.join(found.scopes) or 'none'}. Make one "
                      "with the scope push on the page /tokens.")
    if not access(request).may(found.project_id, Role.MEMBER):
        raise Refused(
            403,
            f"Pushing takes the role {Role.MEMBER} in the project “{found.project.name}”, which the maker of this API "
            "token does not have. Ask an admin of the project for it.",
        )
    return found


@api
def create_run(request: HttpRequest, token: ApiToken) -> HttpResponse:
    """Make a run to push to: `{"name", "tokenizer"?, "chat_template"?}` -> `{"run", "url"}`."""
    asked = _object(request)
    name, tokenizer_name, template = (_text(asked, key) for key in ("name", "tokenizer", "chat_template"))
    tokenizer = tokenizer_named(token.project, tokenizer_name) if tokenizer_name else None
    if tokenizer_name and tokenizer is None:
        names = ", ".join(tokenizer_names(token.project, 50)) or "none"
        raise Refused(400, f"No tokenizer is registered as {tokenizer_name[:200]!r}. Registered: {names}.")
    chat_template = register_chat_template(template, project=token.project) if template else None
    run = runs.create_run(
        Run.Kind.IMPORT,
        name.strip() or "pushed",
        user=token.created_by,
        project=token.project,
        tokenizer=tokenizer,
        chat_template=chat_template or (tokenizer.chat_template if tokenizer else None),
        # No worker works on the run, so it counts as done.
        status=Run.Status.DONE,
    )
    activity_log.record(Action.PUSHED_TO, run)
    return json_page({"run": run.code, "url": request.build_absolute_uri(f"/runs/{run.code}")}, 201)


def _object(request: HttpRequest) -> dict[str, Any]:
    with tempfile.SpooledTemporaryFile(max_size=MAX_RUN_BYTES) as body:
        _receive(request, body, MAX_RUN_BYTES, f"A run is described in at most {MAX_RUN_BYTES >> 20} MB.")
        body.seek(0)
        raw = body.read()
    if memory_of(raw) > MAX_RUN_MEMORY:
        raise Refused(413, f"The description holds too many values: they would take over {MAX_RUN_MEMORY >> 20} MB.")
    try:
        found = json.loads(raw)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Refused(400, 'Describe the run as a JSON object, e.g. {"name": "grpo-7", "tokenizer": "qwen3"}.')
    return found


def _text(asked: dict[str, Any], key: str) -> str:
    value = asked.get(key)
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise Refused(400, f"{key} must be a text without U+0000 and lone surrogates.")
    return value


@api
def push(request: HttpRequest, token: ApiToken, code: str) -> HttpResponse:
    """Take NDJSON of any importable format: `{"run", "trajectories", "known", "rejected": [{"line", "reason"}]}`."""
    run = find_run(code=code)
    if run is None or run.project_id != token.project_id:
        raise Refused(
            404, f"There is no run with the code {code} in the project of this API token. POST /api/runs makes one."
        )
    if run.kind != Run.Kind.IMPORT:
        raise Refused(409, f"The run {code} was launched here; nothing can be pushed to it. POST /api/runs makes one.")
    if (request.content_type or "") not in TYPES:
        raise Refused(
            415,
            f"The content type {request.content_type} is not read. Send JSON Lines as application/x-ndjson, "
            "plain or compressed with gzip or zstd.",
        )
    prefix = _prefix(request)
    try:
        rule = checked_rule(request.GET.get("training_step", ""))
    except ValueError as error:
        raise Refused(400, f"training_step: {error}") from None
    folder = Path(settings.INSPECTOR_DATA) / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix="push-") as body:
        limit = settings.UPLOAD_MAX_BYTES
        too_large = f"The push is larger than {limit >> 20} MB. Send it in parts, each with whole sessions."
        _receive(request, body, limit, too_large)
        # After the body has come: a client that is slow with it keeps no other push out.
        if not _places.acquire(blocking=False):
            raise Refused(503, f"The server takes {MAX_PUSHES} pushes at once. Push again later.")
        try:
            asked = PushedBody(run.code, body.name, request.GET.get("format", "auto"), prefix, rule.step)
            found = push_process.ask(asked)
        except PushesBusy as busy:
            raise Refused(503, str(busy)) from None
        finally:
            _places.release()
    return _later(json_page(found.body, found.status))


def _receive(request: HttpRequest, body: IO[bytes], limit: int, too_large: str) -> None:
    """Write the body to a file as it arrives. Raises ``Refused`` beyond ``limit`` bytes."""
    length = request.META.get("CONTENT_LENGTH") or ""
    stream: Any = request
    if not length:
        # Sent in chunks: Django sees an empty body, but the stream of the server ends where the body ends.
        stream = request.META.get("wsgi.input") if request.META.get("wsgi.input_terminated") else None
        if stream is None or not request.META.get("HTTP_TRANSFER_ENCODING"):
            raise Refused(411, "The request does not say how long it is: send Content-Length or a chunked body.")
    said = whole_number(length, 18)
    if said is not None and said > limit:
        raise Refused(413, too_large)
    received = 0
    try:
        while chunk := stream.read(CHUNK_BYTES):
            received += len(chunk)
            if received > limit:
                raise Refused(413, too_large)
            body.write(chunk)
        body.flush()
    except (UnreadablePostError, OSError) as error:
        if is_disk_full(error):
            raise
        raise Refused(400, "The request broke off before its end; nothing of it was stored.") from error
    if said is not None and received < said:
        raise Refused(400, "The request broke off before its end; nothing of it was stored.")


def _prefix(request: HttpRequest) -> str:
    prefix = request.GET.get("prefix", "")
    if len(prefix) > MAX_PREFIX or not prefix.isprintable():
        raise Refused(400, f"prefix must be a printable text of at most {MAX_PREFIX} characters.")
    return prefix
