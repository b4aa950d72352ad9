"""Every address of the site, by noun. A page made by `twins` has `.json` at the same address."""

from django.urls import include, path, register_converter

from inspector.web import errors


class CodeConverter:
    """An opaque code: small letters and digits, so that `.json` is never part of it."""

    regex = "[0-9a-z]{4,64}"

    def to_python(self, value: str) -> str:
        return value

    def to_url(self, value: str) -> str:
        return value


# Before the lists below are imported: their addresses name the converter.
register_converter(CodeConverter, "code")

handler400 = errors.bad_request
handler403 = errors.forbidden
handler404 = errors.not_found
handler500 = errors.server_error

urlpatterns = [
    path("", include("inspector.runs.urls")),
    path("", include("inspector.trajectories.urls")),
    path("", include("inspector.search.urls")),
    path("", include("inspector.chat_templates.urls")),
    path("", include("inspector.team.urls")),
    path("", include("inspector.api.urls")),
    path("", include("inspector.web.urls")),
]
