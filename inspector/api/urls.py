"""Addresses of the API, of its schema, and of the page that shows the schema."""

import json
from collections.abc import Callable
from functools import wraps
from typing import Any

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.shortcuts import render
from django.urls import URLPattern, path
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_safe

from inspector.api.app import api, schema
from inspector.web.twins import API, problem


@login_not_required
@require_safe
def openapi(request: HttpRequest) -> HttpResponse:
    """The OpenAPI document. It says nothing about data, so it needs no login."""
    return HttpResponse(schema(), content_type="application/json")


@require_safe
def docs(request: HttpRequest) -> HttpResponse:
    """The page on which the operations are read and tried."""
    operations = [
        {"method": method.upper(), "path": address, "text": operation["description"].partition("\n")[0]}
        for address, methods in json.loads(schema())["paths"].items()
        for method, operation in methods.items()
    ]
    return render(request, "api/docs.html", {"operations": operations})


def _door(view: Callable[..., Any]) -> Callable[..., Any]:
    """A view that decides itself who may enter. HEAD is answered as GET, and a refusal of a method is a problem."""

    @wraps(view)
    def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        is_head = request.method == "HEAD"
        if is_head:
            request.method = "GET"
        answer = view(request, *args, **kwargs)
        if is_head:
            request.method = "HEAD"
            return HttpResponse(status=answer.status_code, headers=dict(answer.items()))
        if answer.status_code == 405:
            refusal = problem(405, f"This address does not take {request.method}. Take one of: {answer['Allow']}.")
            refusal["Allow"] = answer["Allow"]
            return refusal
        return answer

    return csrf_exempt(login_not_required(wrapped))


_operations = api.urls[0]
for _pattern in _operations:
    if isinstance(_pattern, URLPattern) and _pattern.callback is not None:
        _pattern.callback = _door(_pattern.callback)
urlpatterns = [
    path(f"{API.strip('/')}/openapi.json", openapi, name="api-schema"),
    path("api/docs", docs, name="api-docs"),
    path(f"{API.strip('/')}/", (_operations, "api", "api")),
]
