"""Two addresses of the tests: a page and an upload. Both need a login."""

from django.http import HttpRequest, HttpResponse
from django.urls import include, path


def page(request: HttpRequest) -> HttpResponse:
    return HttpResponse("seen")


def upload(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(request.FILES["file"].size))


urlpatterns = [
    path("page", page),
    path("page.json", page),
    path("upload", upload),
    path("", include("inspector.urls")),
]
