"""Every page has a JSON twin: a template draws the same value that the twin writes as JSON. A refusal of the API is a
problem document (RFC 9457): one shape, one media type, one plain sentence."""

import ast
import dataclasses
import inspect
import math
import secrets
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from enum import Enum
from gzip import GzipFile
from http import HTTPStatus
from itertools import pairwise
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from django.contrib import messages
from django.http import HttpRequest, HttpResponse, JsonResponse, StreamingHttpResponse
from django.shortcuts import redirect, render
from django.template.loader import render_to_string
from django.urls import URLPattern, path
from django.utils.cache import patch_vary_headers
from django.utils.safestring import mark_safe
from django.utils.text import StreamingBuffer
from pydantic import Field

T = TypeVar("T")
ViewFunction = Callable[..., HttpResponse]


class Page:
    """The base class of a page's value: a frozen dataclass with a docstring under each field. The JSON twin of the page
    is this value: one key for each field. The template reads the fields by the same names. A page of two or three
    values may be a mapping of them."""

    # The schema of the API takes the description of each field from its docstring.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"use_attribute_docstrings": True}


def wants_json(request: HttpRequest) -> bool:
    """The address ends in `.json`, or belongs to the API of trainers."""
    return request.path.endswith(".json") or request.path.startswith("/api/")


def is_fragment(request: HttpRequest, target: str) -> bool:
    """htmx asks only for the element with this id."""
    return request.headers.get("HX-Request") == "true" and request.headers.get("HX-Target") == target


def whole_number(text: str | None, digits: int = 9) -> int | None:
    """The whole number in the text of a parameter; None unless the text is 1 to ``digits`` ASCII digits. Nine digits
    fit an index in the database. ``str.isdigit`` alone also accepts ``²``, which is no number for ``int``."""
    return int(text) if text and text.isascii() and text.isdigit() and len(text) <= digits else None


def jsonable(value: Any) -> Any:
    """`value` as plain JSON types: dataclasses as objects, moments as ISO 8601, numbers that JSON lacks as null."""
    if value is None or (isinstance(value, bool | int | str) and not isinstance(value, Enum)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, datetime):
        return value.isoformat()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {name: jsonable(item) for name, item in fields_of(value).items()}
    if isinstance(value, Mapping):
        return {str(key): jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [jsonable(item) for item in value]
    if hasattr(value, "tolist"):  # numpy
        return jsonable(value.tolist())
    return str(value)


def fields_of(value: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, one level deep: a template reads them as variables. A field whose name is a
    Python keyword ends in an underscore, which is left out: ``with_`` becomes ``with``."""
    return {field.name.rstrip("_"): getattr(value, field.name) for field in dataclasses.fields(value)}


def from_columns(cls: type[T], record: Any, **more: Any) -> T:
    """A dataclass of ``more`` and of columns of the record. The column of the field ``tokens`` may be ``n_tokens``. A
    field with a default keeps it unless ``more`` has another value."""
    names = [
        field.name
        for field in dataclasses.fields(cls)  # type: ignore[arg-type]
        if field.name not in more and field.default is field.default_factory is dataclasses.MISSING
    ]
    return cls(
        **{name: getattr(record, f"n_{name}" if hasattr(record, f"n_{name}") else name) for name in names}, **more
    )


def field_docs(page: type) -> dict[str, str]:
    """Field -> its docstring, of a dataclass and of those that it extends."""
    texts: dict[str, str] = {}
    for cls in (base for base in reversed(page.__mro__) if base not in (Page, object)):
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
        assert isinstance(body, ast.ClassDef)
        for field, after in pairwise(body.body):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(after, ast.Expr):
                texts[field.target.id] = inspect.cleandoc(str(ast.literal_eval(after.value)))
    return texts


def some_fields(cls: type, name: str, about: str, fields: str) -> Any:
    """A dataclass of some fields and properties of another, with their types and docstrings; ``.of(value)`` makes it.
    So the API declares in one line what it shows of a value that pages have too. ``a=b``: the field ``b`` as ``a``."""
    hints, texts = get_type_hints(cls), field_docs(cls)
    for field, value in inspect.getmembers(cls, lambda value: isinstance(value, property)):
        hints[field], texts[field] = get_type_hints(value.fget).get("return", Any), inspect.getdoc(value) or ""
    sources = {field.partition("=")[0]: field.rpartition("=")[2] for field in fields.split()}

    def of(value: Any) -> Any:
        return schema(*(getattr(value, source) for source in sources.values()))

    typed = [(field, Annotated[hints[source], Field(description=texts[source])]) for field, source in sources.items()]
    schema = dataclasses.make_dataclass(name, typed, frozen=True, namespace={"__doc__": about, "of": staticmethod(of)})
    return schema


def json_page(data: Page | Mapping[str, Any], status: int = 200) -> JsonResponse:
    """`data` as JSON."""
    return JsonResponse(jsonable(data), status=status, json_dumps_params={"ensure_ascii": True, "allow_nan": False})


def page(
    request: HttpRequest, template: str, data: Page | Mapping[str, Any], status: int = 200, **only_html: Any
) -> HttpResponse:
    """The page: at the twin's address `data` as JSON, else the template with `data` and `only_html`. In the template a
    name of `only_html` takes the place of the field of that name."""
    if wants_json(request):
        return json_page(data, status)
    fields = fields_of(data) if isinstance(data, Page) else data
    response = render(request, template, {**fields, **only_html}, status=status)
    patch_vary_headers(response, ["HX-Request", "HX-Target", "Cookie"])
    return response


def error_page(request: HttpRequest, status: int, title: str, sentence: str, run: str = "") -> HttpResponse:
    """A page that says what happened and links to the run with that code, if there is one."""
    if request.path.startswith(API):
        return problem(status, sentence)
    if wants_json(request):
        return JsonResponse({"error": sentence}, status=status)
    context = {"status": status, "title": title, "sentence": sentence, "run_code": run}
    return render(request, "errors/error.html", context, status=status)


def told(
    request: HttpRequest, sentence: str, to: str, *args: Any, twin: Page | Mapping[str, Any] | None = None,
    status: int = 200,
) -> HttpResponse:
    """What came of a wish: to a program ``twin``, where there is one; else the sentence, on the page ``to``. A status
    from 400 on is that of a refusal."""
    if twin is not None and wants_json(request):
        return json_page(twin, status)
    if status < 400:
        messages.success(request, sentence)
    else:
        messages.error(request, sentence, extra_tags="error")
    return redirect(to, *args)


def twins(route: str, view: ViewFunction, name: str) -> list[URLPattern]:
    """The two addresses of a page: itself, and `.json` appended (named `NAME-json`)."""
    view.has_json_twin = True  # type: ignore[attr-defined]
    return [path(route, view, name=name), path(f"{route or 'runs'}.json", view, name=f"{name}-json")]


PART = 64_000  # The least characters of a part, except the first and the last.


class PageInParts(StreamingHttpResponse):
    """Each part is compressed and sent as soon as it is there."""


def page_in_parts(
    request: HttpRequest, template: str, context: dict[str, Any], name: str, pieces: Iterable[str]
) -> PageInParts:
    """The template with ``pieces`` where it writes the variable ``name``. All else is written before the first part."""
    mark = f"<!-- {secrets.token_hex(16)} -->"  # no text on the page can hold it
    before, _, after = render_to_string(template, {**context, name: mark_safe(mark)}, request).partition(mark)
    response = PageInParts(_parts(before, pieces, after))
    patch_vary_headers(response, ["HX-Request", "HX-Target", "Cookie"])
    return response


def _parts(before: str, pieces: Iterable[str], after: str) -> Iterator[str]:
    yield before
    held, size = [], 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PART:
            yield "".join(held)
            held, size = [], 0
    yield "".join(held) + after


def compressed(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Each part can be read when it arrives. A name of random length hides the size of the whole, as Django does it."""
    buffer = StreamingBuffer()
    name = "a" * secrets.randbelow(100)
    with GzipFile(filename=name, mode="wb", compresslevel=6, fileobj=buffer, mtime=0) as file:
        for part in parts:
            file.write(part)
            file.flush()
            yield buffer.read()
    yield buffer.read()


API = "/api/v1/"
MEDIA_TYPE = "application/problem+json"
RETRY_SECONDS = {429: 60, 503: 10, 507: 10}  # After how many seconds trying again may help, by status.


class ApiProblem(Exception):
    """A request to the API that is refused, with a status and a sentence; ``errors`` names faulty fields."""

    def __init__(self, status: int, sentence: str, errors: dict[str, list[str]] | None = None) -> None:
        super().__init__(sentence)
        self.status, self.sentence, self.errors = status, sentence, errors or {}


@dataclasses.dataclass(frozen=True)
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
    errors: dict[str, list[str]] = dataclasses.field(default_factory=dict)
    """Field -> what is wrong with it; missing where no single field is to blame."""


def problem(status: int, sentence: str, errors: dict[str, list[str]] | None = None, **more: Any) -> JsonResponse:
    """A problem document as an answer. ``more``: further members."""
    body = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status, "detail": sentence}
    answer = JsonResponse(
        {**more, **body, **({"errors": errors} if errors else {})}, status=status, content_type=MEDIA_TYPE
    )
    if status == 401:
        answer["WWW-Authenticate"] = 'Bearer realm="Rollout Inspector"'
    if status in RETRY_SECONDS:
        answer["Retry-After"] = str(RETRY_SECONDS[status])
    answer["Cache-Control"] = "private, no-store"
    return answer
