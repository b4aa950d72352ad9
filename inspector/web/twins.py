"""Every page has a JSON twin: a template draws the same value that the twin writes as JSON."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from datetime import datetime
from enum import Enum
from typing import Any, ClassVar, TypeVar

from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import render
from django.urls import URLPattern, path
from django.utils.cache import patch_vary_headers

from inspector.web.problems import API, problem

T = TypeVar("T")
ViewFunction = Callable[..., HttpResponse]


class Page:
    """The base class of a page's value: a frozen dataclass with a docstring under each field.

    The JSON twin of the page is this value: one key for each field. The template reads the fields by the same names.
    """

    # The schema of the API takes the description of each field from its docstring.
    __pydantic_config__: ClassVar[dict[str, Any]] = {"use_attribute_docstrings": True}


def wants_json(request: HttpRequest) -> bool:
    """The address ends in `.json`, or belongs to the API of trainers."""
    return request.path.endswith(".json") or request.path.startswith("/api/")


def is_fragment(request: HttpRequest, target: str) -> bool:
    """htmx asks only for the element with this id."""
    return request.headers.get("HX-Request") == "true" and request.headers.get("HX-Target") == target


def whole_number(text: str | None, digits: int = 9) -> int | None:
    """The whole number in the text of a parameter; None unless the text is 1 to ``digits`` ASCII digits.

    Nine digits fit an index in the database. ``str.isdigit`` alone also accepts ``²``, which is no number for ``int``.
    """
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
    """The fields of a dataclass by name, one level deep: a template reads them as variables.

    A field whose name is a Python keyword ends in an underscore, which is left out: ``with_`` becomes ``with``.
    """
    return {field.name.rstrip("_"): getattr(value, field.name) for field in dataclasses.fields(value)}


def from_columns(cls: type[T], record: Any, **more: Any) -> T:
    """A dataclass of ``more`` and of columns of the record. The column of the field ``tokens`` may be ``n_tokens``."""
    names = [field.name for field in dataclasses.fields(cls) if field.name not in more]  # type: ignore[arg-type]
    return cls(
        **{name: getattr(record, f"n_{name}" if hasattr(record, f"n_{name}") else name) for name in names}, **more
    )


def json_page(data: Page | Mapping[str, Any], status: int = 200) -> JsonResponse:
    """`data` as JSON."""
    return JsonResponse(jsonable(data), status=status, json_dumps_params={"ensure_ascii": True, "allow_nan": False})


def page(
    request: HttpRequest, template: str, data: Page | Mapping[str, Any], status: int = 200, **only_html: Any
) -> HttpResponse:
    """The page: at the twin's address `data` as JSON, else the template with `data` and `only_html`.

    In the template a name of `only_html` takes the place of the field of that name.
    """
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


def twins(route: str, view: ViewFunction, name: str) -> list[URLPattern]:
    """The two addresses of a page: itself, and `.json` appended (named `NAME-json`)."""
    view.has_json_twin = True  # type: ignore[attr-defined]
    return [path(route, view, name=name), path(f"{route or 'runs'}.json", view, name=f"{name}-json")]
