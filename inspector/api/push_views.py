"""A trainer makes a run and pushes trajectories, with an API key: what API v1 and the older addresses do."""

import json
import tempfile
import threading
from collections.abc import Callable
from functools import wraps
from typing import IO, Annotated, Any, ParamSpec, TypeVar

from django.conf import settings
from django.contrib.auth.decorators import login_not_required
from django.db import DatabaseError
from django.http import HttpRequest, HttpResponse, JsonResponse, UnreadablePostError
from django.views.decorators.cache import never_cache
from django.views.decorators.csrf import csrf_exempt
from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError, WithJsonSchema

from inspector.api.callers import api_key_of
from inspector.runs.run_values import RunValues
from inspector.web.access import access
from inspector.web.twins import ApiProblem, json_page, some_fields, whole_number
from rollout_inspector.formats.limits import memory_of
from rollout_inspector.formats.training_step import checked_rule
from rollout_inspector.outputs import draft_file
from rollouts.jobs import push_process, run_actions
from rollouts.jobs.push_process import PushAnswer, PushesBusy
from rollouts.store import files
from rollouts.store.chat_templates.chat_templates import register_chat_template
from rollouts.store.chat_templates.tokenizers import tokenizer_named, tokenizer_names
from rollouts.store.database import reload
from rollouts.store.models import ApiToken, Role, Run
from rollouts.store.outages import disk_fault
from rollouts.store.people import activity_log
from rollouts.store.people.activity_log import Action
from rollouts.store.runs import runs
from rollouts.store.runs.runs import find_run

CHUNK_BYTES = 1 << 20
MAX_RUN_BYTES = 4 << 20  # The largest request that makes a run: a name and perhaps a chat template.
MAX_RUN_MEMORY = 32 << 20  # Bytes of memory that the values of such a request take.
MAX_PREFIX = 60
MAX_PUSHES = 6  # Pushes that wait in a web process to be read. Further ones are refused, so that pages find a thread.
RETRY_SECONDS = 10
FINAL = (200, 400, 413, 415)  # Answers to a push that stay the same however often it is sent.
TYPES = (
    "", "text/plain", "application/x-ndjson", "application/ndjson", "application/jsonl", "application/x-jsonlines",
    "application/json", "application/octet-stream", "application/gzip", "application/zstd",
)

_places = threading.BoundedSemaphore(MAX_PUSHES)

NO_OBJECT = 'Describe the run as a JSON object, e.g. {"name": "grpo-7", "tokenizer": "qwen3"}.'
View = Callable[..., HttpResponse]
P = ParamSpec("P")
T = TypeVar("T")


def _storable(value: Any) -> str:
    """A text of a description; null is none. Raises ``ValueError``."""
    if value is None:
        return ""
    if not isinstance(value, str) or "\0" in value or any("\ud800" <= letter <= "\udfff" for letter in value):
        raise ValueError
    return value


class RunDescription(BaseModel):
    """A run to push to. An empty value says nothing."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    name: Annotated[
        str, BeforeValidator(_storable), WithJsonSchema({"type": "string", "maxLength": 200, "pattern": "^[ -~]*$"})
    ] = ""
    """What the run is called."""
    tokenizer: Annotated[str, BeforeValidator(_storable)] = ""
    """Name of a registered tokenizer."""
    chat_template: Annotated[str, BeforeValidator(_storable)] = ""
    """Jinja text."""


RunToPush: Any = some_fields(RunValues, "RunToPush", "A run that takes pushes.", "run=code url")


def _may_be_full(function: Callable[P, T]) -> Callable[P, T]:
    @wraps(function)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except (OSError, DatabaseError) as error:
            if sentence := disk_fault(error):
                raise ApiProblem(507, f"{sentence} Push again when there is room.") from error
            raise

    return wrapped


def _token(request: HttpRequest) -> ApiToken:
    scheme, _, token = request.headers.get("Authorization", "").partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise ApiProblem(
            401, "Send an API key as `Authorization: Bearer TOKEN`; /tokens and `manage.py api_token` make one."
        )
    record = api_key_of(request, token)
    if ApiToken.Scope.PUSH not in record.scopes:
        raise ApiProblem(403, f"This API key may not push: its scopes are {', '.join(record.scopes) or 'none'}. Make "
                         "one with the scope push on the page /tokens.")
    if not access(request).may(record.project_id, Role.MEMBER):
        raise ApiProblem(
            403,
            f"Pushing takes the role {Role.MEMBER} in the project “{record.project.name}”, which the maker of this API "
            "token does not have. Ask an admin of the project for it.",
        )
    return record


@_may_be_full
def make_run(request: HttpRequest) -> RunToPush:
    """Make the run that the body describes, a :class:`RunDescription`. Raises :class:`ApiProblem`."""
    token = _token(request)
    description = _description(request)
    tokenizer = tokenizer_named(token.project, description.tokenizer) if description.tokenizer else None
    if description.tokenizer and tokenizer is None:
        names = ", ".join(tokenizer_names(token.project, 50)) or "none"
        raise ApiProblem(400, f"No tokenizer is registered as {description.tokenizer[:200]!r}. Registered: {names}.")
    template = description.chat_template
    chat_template = register_chat_template(template, project=token.project) if template else None
    run = runs.create_run(
        Run.Kind.IMPORT,
        description.name.strip() or "pushed",
        user=token.created_by,
        project=token.project,
        tokenizer=tokenizer,
        chat_template=chat_template or (tokenizer.chat_template if tokenizer else None),
        # No worker works on the run, so it counts as done.
        status=Run.Status.DONE,
    )
    activity_log.record(Action.PUSHED_TO, run)
    return RunToPush(run.code, request.build_absolute_uri(f"/runs/{run.code}"))


def _description(request: HttpRequest) -> RunDescription:
    with tempfile.SpooledTemporaryFile(max_size=MAX_RUN_BYTES) as body:
        _receive(request, body, MAX_RUN_BYTES, f"A run is described in at most {MAX_RUN_BYTES >> 20} MB.")
        body.seek(0)
        raw = body.read()
    if memory_of(raw) > MAX_RUN_MEMORY:
        raise ApiProblem(413, f"The description holds too many values: they would take over {MAX_RUN_MEMORY >> 20} MB.")
    try:
        return RunDescription.model_validate(json.loads(raw))
    except ValidationError as error:
        place = error.errors()[0]["loc"]
        sentence = f"{place[0]} must be a text without U+0000 and lone surrogates." if place else NO_OBJECT
        raise ApiProblem(400, sentence) from None
    except (ValueError, RecursionError):
        raise ApiProblem(400, NO_OBJECT) from None


@_may_be_full
def take_lines(request: HttpRequest, code: str) -> PushAnswer:
    """Store the body, JSON Lines of any importable format, in a run. Raises :class:`ApiProblem`."""
    token, run = _token(request), find_run(code=code)
    if run is None or run.project_id != token.project_id:
        raise ApiProblem(
            404, f"There is no run with the code {code} in the project of this API key. POST /api/runs makes one."
        )
    if run.kind != Run.Kind.IMPORT:
        raise ApiProblem(
            409, f"The run {code} was launched here; nothing can be pushed to it. POST /api/runs makes one."
        )
    status = 0
    try:
        status, body = _take(request, run)
    except ApiProblem as refusal:
        status = refusal.status
        raise
    finally:
        if status in FINAL and request.GET.get("first") == "yes":
            reload(run)
            if not run.n_trajectories:
                run_actions.delete(run)  # it was made for this push alone
    return status, body


def _take(request: HttpRequest, run: Run) -> PushAnswer:
    if (request.content_type or "") not in TYPES:
        raise ApiProblem(
            415,
            f"The content type {request.content_type} is not read. Send JSON Lines as application/x-ndjson, "
            "plain or compressed with gzip or zstd.",
        )
    prefix = _prefix(request)
    try:
        rule = checked_rule(request.GET.get("training_step", ""))
    except ValueError as error:
        raise ApiProblem(400, f"training_step: {error}") from None
    with draft_file(files.scratch_folder(), "push") as body:
        limit = settings.UPLOAD_MAX_BYTES
        too_large = f"The push is larger than {limit >> 20} MB. Send it in parts, each with whole sessions."
        _receive(request, body, limit, too_large)
        # After the body has come: a client that is slow with it keeps no other push out.
        if not _places.acquire(blocking=False):
            raise ApiProblem(503, f"The server takes {MAX_PUSHES} pushes at once. Push again later.")
        try:
            return push_process.ask(run.code, body.name, request.GET.get("format", "auto"), prefix, rule.step)
        except PushesBusy as busy:
            raise ApiProblem(503, str(busy)) from None
        finally:
            _places.release()


def _receive(request: HttpRequest, body: IO[bytes], limit: int, too_large: str) -> None:
    """Write the body to a file as it arrives. Raises :class:`ApiProblem` beyond ``limit`` bytes."""
    length = request.META.get("CONTENT_LENGTH") or ""
    stream: Any = request
    if not length:
        # Sent in chunks: Django sees an empty body, but the stream of the server ends where the body ends.
        stream = request.META.get("wsgi.input") if request.META.get("wsgi.input_terminated") else None
        if stream is None or not request.META.get("HTTP_TRANSFER_ENCODING"):
            raise ApiProblem(411, "The request does not say how long it is: send Content-Length or a chunked body.")
    declared = whole_number(length, 18)
    if declared is not None and declared > limit:
        raise ApiProblem(413, too_large)
    received = 0
    try:
        while chunk := stream.read(CHUNK_BYTES):
            received += len(chunk)
            if received > limit:
                raise ApiProblem(413, too_large)
            body.write(chunk)
        body.flush()
    except (UnreadablePostError, OSError) as error:
        if disk_fault(error):
            raise
        raise ApiProblem(400, "The request broke off before its end; nothing of it was stored.") from error
    if declared is not None and received < declared:
        raise ApiProblem(400, "The request broke off before its end; nothing of it was stored.")


def _prefix(request: HttpRequest) -> str:
    prefix = request.GET.get("prefix", "")
    if len(prefix) > MAX_PREFIX or not prefix.isprintable():
        raise ApiProblem(400, f"prefix must be a printable text of at most {MAX_PREFIX} characters.")
    return prefix


def _old_address(view: View) -> View:
    """A POST with a token. Every refusal is JSON with a sentence, ``error``, as before there was API v1."""

    @wraps(view)
    def wrapped(request: HttpRequest, **address: str) -> HttpResponse:
        try:
            if request.method != "POST":
                raise ApiProblem(405, "This address takes POST requests of a trainer; docs/push.md says how.")
            response = view(request, **address)
        except ApiProblem as refusal:
            response = JsonResponse({"error": refusal.sentence}, status=refusal.status)
        if response.status_code == 401:
            response["WWW-Authenticate"] = "Bearer"
        if response.status_code == 405:
            response["Allow"] = "POST"
        if response.status_code in (429, 503, 507):
            response["Retry-After"] = str(RETRY_SECONDS)
        return response

    return csrf_exempt(login_not_required(never_cache(wrapped)))


@_old_address
def create_run(request: HttpRequest) -> HttpResponse:
    """`POST /api/runs`: what `POST /api/v1/runs` does."""
    return json_page(make_run(request), 201)


@_old_address
def push(request: HttpRequest, code: str) -> HttpResponse:
    """`POST /api/runs/CODE/trajectories`: what `POST /api/v1/runs/CODE/trajectories` does."""
    status, body = take_lines(request, code)
    return json_page(body, status)
