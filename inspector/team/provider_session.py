"""What this server asks the provider: one answer of bounded size within seconds, with no redirect, from few threads."""

import asyncio
import threading
from io import BytesIO
from typing import Any

import aiohttp
from authlib.integrations.django_client import DjangoOAuth2App
from authlib.integrations.requests_client import OAuth2Session
from requests import PreparedRequest, RequestException, Response
from requests.adapters import BaseAdapter
from requests.certs import where
from requests.utils import select_proxy

ANSWER_SECONDS = 10.0  # The whole of one answer, from the name of the host to the last byte.
MAX_ANSWER_BYTES = 1 << 20
MAX_WAITING = 8
"""Threads of a process that wait for the provider at once: half of them, so that one that hangs stops no page."""

_places = threading.BoundedSemaphore(MAX_WAITING)


class _BoundedAdapter(BaseAdapter):
    def send(
        self, request: PreparedRequest, stream: bool = False, timeout: Any = None, verify: bool | str = True,
        cert: Any = None, proxies: Any = None,
    ) -> Response:
        if not _places.acquire(blocking=False):
            raise RequestException(f"{MAX_WAITING} threads wait for the provider already", request=request)
        authorities = verify if isinstance(verify, str) else where()
        try:
            return asyncio.run(_answer(request, authorities, select_proxy(str(request.url), proxies)))
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            raise RequestException(f"{type(error).__name__}: {error}", request=request) from error
        finally:
            _places.release()

    def close(self) -> None:
        pass


async def _answer(request: PreparedRequest, authorities: str, proxy: str | None) -> Response:
    import ssl

    headers = {name: value if isinstance(value, str) else value.decode() for name, value in request.headers.items()}
    limit, tls = aiohttp.ClientTimeout(total=ANSWER_SECONDS), ssl.create_default_context(cafile=authorities)
    async with (
        aiohttp.ClientSession(timeout=limit, cookie_jar=aiohttp.DummyCookieJar(), auto_decompress=False) as session,
        session.request(
            str(request.method), str(request.url), data=request.body, headers=headers, ssl=tls,
            proxy=proxy, allow_redirects=False,
        ) as answer,
    ):
        body = bytearray()
        async for piece in answer.content.iter_any():
            body += piece
            if len(body) > MAX_ANSWER_BYTES:
                raise ValueError(f"the provider answers more than {MAX_ANSWER_BYTES:,} bytes")
        response = Response()
        response.status_code, response.url, response.request = answer.status, str(request.url), request
        response.headers.update(answer.headers)
        response.raw = BytesIO(body)
        return response


class ProviderSession(OAuth2Session):
    """A session of Authlib that asks within these bounds."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.max_redirects = 0  # what is asked may hold a code and the secret
        self.headers["Accept-Encoding"] = "identity"
        for scheme in ("https://", "http://"):
            self.mount(scheme, _BoundedAdapter())


class ProviderClient(DjangoOAuth2App):
    """Authlib's client of the provider, with such sessions."""

    client_cls = ProviderSession
