"""Who may use the recorder: no foreign web page, and with a token only who names it."""

import hmac
from ipaddress import ip_address
from urllib.parse import unquote, urlsplit

from aiohttp import web

TOKEN_HEADER = "X-Recorder-Token"
TOKEN_PATH = "/token/"
"""`/token/TOKEN/v1/...` is `/v1/...` with that token, for a harness that can change only its base URL."""
MIN_TOKEN = 16  # Characters. A shorter token could be guessed.


def is_loopback(host: str) -> bool:
    """Whether a host, with or without a port, is this machine."""
    try:
        name = urlsplit(f"//{host}").hostname if not host.startswith("::") else host
        return name == "localhost" or ip_address(name or "").is_loopback
    except ValueError:
        return False


def token_problem(token: str, host: str) -> str:
    """Why the recorder may not listen on ``host`` with ``token`` (empty = none), as a sentence; empty = it may."""
    if token and (
        len(token) < MIN_TOKEN or not token.isascii() or not token.replace("-", "").replace("_", "").isalnum()
    ):
        return (
            f"A token has at least {MIN_TOKEN} letters, digits, - or _. "
            'Make one: python -c "import secrets; print(secrets.token_urlsafe())"'
        )
    if not token and not is_loopback(host):
        return (
            f"On {host} other machines reach the recorder, so it needs a token: set INSPECTOR_RECORDER_TOKEN. "
            "On 127.0.0.1 it listens for this machine alone."
        )
    return ""


def named_token(request: web.Request, path: str) -> tuple[str, str]:
    """The token that a request names by header or by address (empty = none), and the path without it."""
    token = request.headers.get(TOKEN_HEADER, "")
    if path.startswith(TOKEN_PATH):
        of_path, slash, path_left = path[len(TOKEN_PATH) :].partition("/")
        return token or unquote(of_path), slash + path_left
    return token, path


def is_token(named: str, token: str) -> bool:
    """Whether a request that names this token may pass. Takes the same time for each wrong one."""
    return not token or hmac.compare_digest(named.encode("utf-8", "replace"), token.encode())


def foreign(request: web.Request) -> str:
    """Why a request comes from a foreign web page; empty when it does not. A page in a browser can send requests to
    this machine. It names its own site as Origin. With a DNS name of its own for this machine it names that as Host."""
    origin = request.headers.get("Origin")
    if origin is not None and origin.partition("://")[2] != request.host:
        return f"The recorder takes no requests of the web page {origin[:200]}."
    listening = request.transport.get_extra_info("sockname") if request.transport is not None else None
    if listening and is_loopback(listening[0]) and not is_loopback(request.host):
        return f"The recorder listens on {listening[0]}; ask for it by this address, not as {request.host[:200]}."
    return ""
