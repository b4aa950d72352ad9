"""The options ``--url``, ``--token``, ``--run``, ``--name`` and ``--tokenizer`` of what pushes to a server."""

import os
import re
from argparse import ArgumentParser, Namespace
from urllib.parse import urlsplit

from rollout_inspector.client.client import Client
from rollout_inspector.refusal import Refusal

_CODE = re.compile(r"[A-Za-z0-9_-]{1,64}")


def add_server_options(parser: ArgumentParser) -> None:
    """Adds the options of a server and of the run that is pushed to."""
    parser.add_argument("--url", default="", help="of the server (default: ROLLOUT_INSPECTOR_URL)")
    parser.add_argument("--token", default="", help="an API key; better in the environment, as ROLLOUT_INSPECTOR_TOKEN")
    parser.add_argument("--run", default="", help="code of the run (default: ROLLOUT_INSPECTOR_RUN, or a new run)")
    parser.add_argument("--name", default="", help="of a new run")
    parser.add_argument("--tokenizer", default="", help="of a new run: a name that is registered on the server")


def client_of(options: Namespace, tries: int = 2) -> Client:
    """The client of these options and of the environment. Raises :class:`Refusal`; asks no server."""
    url = options.url or os.environ.get("ROLLOUT_INSPECTOR_URL", "")
    token = options.token or os.environ.get("ROLLOUT_INSPECTOR_TOKEN", "")
    for value, what in ((url, "URL"), (token, "TOKEN")):
        if not value:
            raise Refusal(f"Say where to push: --{what.lower()} or the environment variable ROLLOUT_INSPECTOR_{what}.")
    if not _is_address(url):
        raise Refusal(f"--url {url}: an address begins with http:// or https://, and names a host.")
    if not (token.isascii() and token.isprintable() and " " not in token):
        raise Refusal("--token is no API key. The page /tokens of the server makes one.")
    run = options.run or os.environ.get("ROLLOUT_INSPECTOR_RUN") or None
    if run is not None and not _CODE.fullmatch(run):
        raise Refusal(f"--run {run}: it is no code of a run. The address of its page ends with the code.")
    return Client(url, token, run, tries=tries)


def tokenizer_of(options: Namespace) -> str | None:
    """The name of the tokenizer of a new run; None = none is named."""
    return options.tokenizer or os.environ.get("ROLLOUT_INSPECTOR_TOKENIZER") or None


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        has_port = parts.port is None or parts.port > 0
    except ValueError:
        return False
    is_plain = url.isascii() and url.isprintable() and " " not in url
    return is_plain and has_port and parts.scheme in ("http", "https") and bool(parts.hostname)
