"""What holds for every request and answer, whichever view it is for."""

from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address

from django.conf import settings
from django.http import HttpRequest, HttpResponse
from django.http.response import HttpResponseBase
from django.middleware.gzip import GZipMiddleware

from inspector.web.remedies import WORDS
from inspector.web.twins import PageInParts, compressed, error_page
from rollout_inspector.refusal import Refusal, worded
from rollouts.store.people.activity_log import Actor, acting

View = Callable[[HttpRequest], HttpResponse]


class Middleware:
    """Answers as the view does."""

    def __init__(self, get_response: View) -> None:
        self.get_response = get_response

    def __call__(self, request: HttpRequest) -> HttpResponse:
        return self.get_response(request)


class ClientAddressMiddleware(Middleware):
    """Takes the address of the client from `X-Forwarded-For` where `INSPECTOR_PROXIES` says that proxies write it. Each
    proxy appends the address that it was asked from. With n proxies the nth address from the right is the last one that
    was not written by the client."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if settings.PROXIES:
            hops = [part.strip() for part in request.META.get("HTTP_X_FORWARDED_FOR", "").split(",")]
            with suppress(IndexError, ValueError):
                request.META["REMOTE_ADDR"] = str(ip_address(hops[-settings.PROXIES]))
        return self.get_response(request)


def client_address(request: HttpRequest) -> str:
    """The address by which tries are counted. Requests without an address are counted together."""
    return request.META.get("REMOTE_ADDR") or "0.0.0.0"


class ActorMiddleware(Middleware):
    """Says for the audit log who asks, and from where."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        with acting(lambda: Actor(getattr(request, "user", None), request.META.get("REMOTE_ADDR", ""))):
            return self.get_response(request)


class RefusalMiddleware(Middleware):
    """Answers with the sentence of a refusal, and its remedy, where a view has no form that shows it."""

    def process_exception(self, request: HttpRequest, error: Exception) -> HttpResponse | None:
        """Django calls it with what a view raises."""
        if not isinstance(error, Refusal):
            return None
        return error_page(request, 422, "This cannot be done", worded(str(error), error.remedy, WORDS))


class CompressionMiddleware(GZipMiddleware):
    """Compresses pages and JSON for a client that takes gzip. Django adds padding of a random length to each answer. A
    stream is sent as it is made: an export keeps its length, and no line waits in the buffer of a compressor. A page in
    parts is compressed part by part."""

    def process_response(self, request: HttpRequest, response: HttpResponseBase) -> HttpResponseBase:
        if not isinstance(response, PageInParts):
            return response if response.streaming else super().process_response(request, response)
        parts = iter(response)
        super().process_response(request, response)
        if response.has_header("Content-Encoding"):
            response.streaming_content = compressed(parts)  # Django's own compressor keeps back the first parts
        return response


class PlainTextMiddleware(Middleware):
    """Removes U+0000 from the query of a page, and cookies that hold it: PostgreSQL refuses to compare it. The API
    refuses it in words of its own."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        if not request.path.startswith("/api/"):
            query = request.META.get("QUERY_STRING", "")
            while "%00" in query:  # what is left of `%%0000` is another one
                query = query.replace("%00", "")
            request.META["QUERY_STRING"] = query
        for name in [name for name, value in request.COOKIES.items() if "\0" in value]:  # written as "\\000"
            del request.COOKIES[name]
        return self.get_response(request)


class PrivateAnswersMiddleware(Middleware):
    """Adds `X-Robots-Tag`, and `Cache-Control: private, no-cache` where the view sets none. A browser may keep such an
    answer, and asks again before it shows the answer."""

    def __call__(self, request: HttpRequest) -> HttpResponse:
        response = self.get_response(request)
        response["X-Robots-Tag"] = "noindex, nofollow"
        response.setdefault("Cache-Control", "private, no-cache")
        return response
