"""Two addresses of the tests: a page that needs a login, and an upload that does not."""

from django.contrib.auth.decorators import login_not_required
from django.http import HttpRequest, HttpResponse
from django.urls import include, path


def page(request: HttpRequest) -> HttpResponse:
    return HttpResponse("seen")


@login_not_required
def upload(request: HttpRequest) -> HttpResponse:
    return HttpResponse(str(request.FILES["file"].size))


urlpatterns = [
    path("page", page),
    path("page.json", page),
    path("upload", upload),
    path("", include("inspector.urls")),
]
