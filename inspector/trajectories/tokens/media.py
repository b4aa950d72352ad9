"""`/trajectories/<code>/media/<step>/<n>`: the data of an image or a sound that a source brought, when asked for.

The type follows from the first bytes and a short list, never from what the source states. A browser runs nothing of it.
"""

from __future__ import annotations

import json

from django.http import Http404, HttpRequest, HttpResponse

from inspector.web.access import reads_trajectory
from rollout_inspector.streams.messages import media_data, media_parts
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories import trajectory_parts

_STARTS = (
    (b"\x89PNG\r\n\x1a\n", "image/png", "png"), (b"\xff\xd8\xff", "image/jpeg", "jpg"), (b"GIF87a", "image/gif", "gif"),
    (b"GIF89a", "image/gif", "gif"), (b"ID3", "audio/mpeg", "mp3"), (b"\xff\xfb", "audio/mpeg", "mp3"),
)
_RIFF = {b"WEBP": ("image/webp", "webp"), b"WAVE": ("audio/wav", "wav")}
BODIES = ("messages_new__body", "reply__body", "extra__body")
"""The values of a step in which media parts are counted, in this order."""


def type_of(data: bytes) -> tuple[str, str]:
    """Media type and end of a file name, by the first bytes; any other data is a download without a type."""
    if data[:4] == b"RIFF" and data[8:12] in _RIFF:
        return _RIFF[data[8:12]]
    return next(((kind, end) for start, kind, end in _STARTS if data.startswith(start)), ("", "bin"))


@reads_trajectory
def media(request: HttpRequest, trajectory: StoredTrajectory, step: int, number: int) -> HttpResponse:
    """The data of one media part. 404 for a link, and for data that is no base64."""
    bodies = trajectory_parts.step_bodies(trajectory, step, BODIES) if step < trajectory.n_steps else []
    media_found = [part for body in bodies if body for part in media_parts(json.loads(body))]
    data = media_data(media_found[number]) if number < len(media_found) else None
    if data is None:
        raise Http404("This step holds no such data.")
    kind, end = type_of(data)
    response = HttpResponse(data, content_type=kind or "application/octet-stream")
    how = "inline" if kind else "attachment"
    response["Content-Disposition"] = f'{how}; filename="{trajectory.code}_{step}_{number}.{end}"'
    response["X-Content-Type-Options"] = "nosniff"
    response["Content-Security-Policy"] = "default-src 'none'; sandbox"
    response["Cache-Control"] = "private, no-store"
    return response
