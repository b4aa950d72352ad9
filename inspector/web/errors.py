"""Help, and the pages of errors."""

import sys

from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.models import AnonymousUser
from django.contrib.sessions.exceptions import SessionInterrupted
from django.core.exceptions import RequestDataTooBig, TooManyFilesSent
from django.db import InterfaceError, OperationalError
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from inspector.web.forms import DiskFull
from inspector.web.twins import error_page
from rollouts.store.files import StorageDown
from rollouts.store.outages import disk_fault, is_busy, lacks_memory, said_of


@login_not_required
@require_safe
def robots(request: HttpRequest) -> HttpResponse:
    """Asks search engines to read nothing."""
    return HttpResponse("User-agent: *\nDisallow: /\n", content_type="text/plain")


@login_not_required
@require_safe
def help_page(request: HttpRequest) -> HttpResponse:
    """The words of the product and the list of keys; needs no login."""
    return render(request, "help.html")


def _outage(request: HttpRequest, error: BaseException | None) -> HttpResponse | None:
    """507 for a disk that takes no more, 503 for what is away or busy, among the errors that led here."""
    while error is not None:
        if sentence := disk_fault(error):
            return error_page(request, 507, "No room on the server", f"{sentence} Try again when there is room.")
        if title := _title(error):
            request.user = AnonymousUser()  # who asks is not known without a database
            away = error_page(request, 503, title, f"{said_of(error)} Try again in a minute.")
            away["Retry-After"] = "30"
            return away
        error = error.__cause__ or error.__context__
    return None


def _title(error: BaseException) -> str:
    """What is away or busy; empty = nothing is."""
    if isinstance(error, StorageDown):
        return "The file storage is away"
    if lacks_memory(error):
        return "The server has no memory left"
    if is_busy(error):
        return "The database is busy"
    return "The database is away" if isinstance(error, OperationalError | InterfaceError) else ""


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """400; 413 for an upload beyond the limit; 507 and 503 for an outage."""
    if isinstance(exception, SessionInterrupted) and (outage := _outage(request, exception)) is not None:
        return outage
    if isinstance(exception, DiskFull):
        return error_page(request, 507, "No room on the server", str(exception))
    if isinstance(exception, RequestDataTooBig):
        sentence = str(exception)
        if "INSPECTOR_UPLOAD_MAX_MB" not in sentence:
            sentence = "The form's text is larger than this server accepts. Upload it as a file instead."
        return error_page(request, 413, "Too large", sentence)
    if isinstance(exception, TooManyFilesSent):
        return error_page(
            request, 400, "Too many files", "At most 200 files can be sent at once. Send the rest in a second import."
        )
    return error_page(
        request, 400, "This request cannot be read", "The address or the form is malformed. Go back and try once more."
    )


def forbidden(request: HttpRequest, exception: Exception) -> HttpResponse:
    return error_page(request, 403, "Not allowed", str(exception) or "Your login does not allow this.")


def not_found(request: HttpRequest, exception: Exception) -> HttpResponse:
    """404 with the sentence of the view that raised it, if there is one."""
    sentence = str(exception.args[0]) if isinstance(exception, Http404) and exception.args else ""
    if not sentence or sentence.startswith("{"):  # the resolver's own arguments are a dict
        sentence = "There is nothing at this address. It may have been deleted, or the link is cut short."
    return error_page(request, 404, "Not found", sentence)


def server_error(request: HttpRequest) -> HttpResponse:
    """507 and 503 for an outage; else 500: says where the cause is written."""
    return _outage(request, sys.exception()) or error_page(
        request,
        500,
        "Something broke here",
        "The error has been logged with the time and the id of this request; nothing half-done was kept. "
        "Look into the logs folder of the data folder, or try again.",
    )
