"""Help, and the pages of errors."""

from __future__ import annotations

import sys

from django.contrib.auth.decorators import login_not_required
from django.contrib.sessions.exceptions import SessionInterrupted
from django.core.exceptions import RequestDataTooBig, TooManyFilesSent
from django.http import Http404, HttpRequest, HttpResponse
from django.shortcuts import render
from django.views.decorators.http import require_safe

from inspector.web.twins import error_page
from inspector.web.uploads import DiskFull
from rollouts.store.files import StorageDown
from rollouts.store.outages import DISK_FULL, is_disk_full


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


def _for_want_of_room(error: BaseException | None) -> bool:
    """Whether a full disk is among the errors that led to this one."""
    while error is not None and not is_disk_full(error):
        error = error.__cause__ or error.__context__
    return error is not None


def bad_request(request: HttpRequest, exception: Exception) -> HttpResponse:
    """400; 413 for an upload beyond the limit; 507 when the disk is full."""
    if isinstance(exception, SessionInterrupted) and _for_want_of_room(exception):
        return error_page(request, 507, "No room on the server", f"{DISK_FULL} Try again when there is room.")
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
    """507 when the disk is full, 503 when the file storage is down; else 500: says where the cause is written."""
    error = sys.exception()
    if isinstance(error, StorageDown):
        away = error_page(request, 503, "The file storage is away", f"{error} Try again in a minute.")
        away["Retry-After"] = "30"
        return away
    if error is not None and is_disk_full(error):
        return error_page(request, 507, "No room on the server", f"{DISK_FULL} Try again when there is room.")
    return error_page(
        request,
        500,
        "Something broke here",
        "The error has been logged with the time and the id of this request; nothing half-done was kept. "
        "Look into the logs folder of the data folder, or try again.",
    )
