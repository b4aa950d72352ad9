"""A long page that is sent in parts: the browser draws the first ones while the server still writes the others."""

import secrets
from collections.abc import Iterable, Iterator
from gzip import GzipFile
from typing import Any

from django.http import HttpRequest, StreamingHttpResponse
from django.template.loader import render_to_string
from django.utils.cache import patch_vary_headers
from django.utils.safestring import mark_safe
from django.utils.text import StreamingBuffer

PART = 64_000  # The least characters of a part, except the first and the last.


class PageInParts(StreamingHttpResponse):
    """Each part is compressed and sent as soon as it is there."""


def page_in_parts(
    request: HttpRequest, template: str, context: dict[str, Any], name: str, pieces: Iterable[str]
) -> PageInParts:
    """The template with ``pieces`` where it writes the variable ``name``. All else is written before the first part."""
    mark = f"<!-- {secrets.token_hex(16)} -->"  # no text on the page can hold it
    before, _, after = render_to_string(template, {**context, name: mark_safe(mark)}, request).partition(mark)
    response = PageInParts(_parts(before, pieces, after))
    patch_vary_headers(response, ["HX-Request", "HX-Target", "Cookie"])
    return response


def _parts(before: str, pieces: Iterable[str], after: str) -> Iterator[str]:
    yield before
    held, size = [], 0
    for piece in pieces:
        held.append(piece)
        size += len(piece)
        if size >= PART:
            yield "".join(held)
            held, size = [], 0
    yield "".join(held) + after


def compressed(parts: Iterable[bytes]) -> Iterator[bytes]:
    """Each part can be read when it arrives. A name of random length hides the size of the whole, as Django does it."""
    buffer = StreamingBuffer()
    name = "a" * secrets.randbelow(100)
    with GzipFile(filename=name, mode="wb", compresslevel=6, fileobj=buffer, mtime=0) as file:
        for part in parts:
            file.write(part)
            file.flush()
            yield buffer.read()
    yield buffer.read()
