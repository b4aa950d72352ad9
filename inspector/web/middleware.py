"""What holds for every request and answer, whichever view it is for."""

from collections.abc import Callable

from django.http import HttpRequest, HttpResponse

View = Callable[[HttpRequest], HttpResponse]


class PlainQueryMiddleware:
    """Removes U+0000 from the query of a page: no name of ours holds it, and PostgreSQL refuses to compare it.

    The push API refuses it in words of its own.
    """

    def __init__(self, get_response: View) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if not request.path.startswith("/api/"):
            request.META["QUERY_STRING"] = request.META.get("QUERY_STRING", "").replace("%00", "")
        return self.get_response(request)


class PrivateAnswersMiddleware:
    """Adds `X-Robots-Tag`, and `Cache-Control: private, no-cache` where the view sets none.

    A browser may keep such an answer, and asks again before it shows the answer.
    """

    def __init__(self, get_response: View) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response["X-Robots-Tag"] = "noindex, nofollow"
        response.setdefault("Cache-Control", "private, no-cache")
        return response
