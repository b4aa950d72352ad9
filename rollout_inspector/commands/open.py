"""Show files where they lie, without an import: pages, or figures with --json."""

import json
import os
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

from rollout_inspector.commands.main import refuse, run_on_server
from rollout_inspector.commands.tokenizer_options import (
    add_tokenizer_options, load_renderer, load_tokenizer, template_text
)

READ_SECONDS = 5.0
"""How long ``--json`` reads the lines that were found, so that those without a trajectory are not counted."""


def add_options(parser: ArgumentParser) -> None:
    """Adds the options of this subcommand."""
    parser.add_argument("paths", nargs="+", metavar="PLACE", help="files, folders of them, or s3://BUCKET/PREFIX")
    parser.add_argument("--port", type=int, default=8000, help="the first port to try (8000)")
    parser.add_argument("--no-browser", action="store_true", help="print the address, and start no browser")
    add_tokenizer_options(parser)
    parser.add_argument("--json", action="store_true", help="print how many trajectories of which formats, and end")


def run(options: Namespace) -> int:
    """Print the figures, or start the pages and stay until Ctrl-C."""
    began = time.monotonic()
    from rollout_inspector.guard.audit_settings import AuditSettings
    from rollout_inspector.opened.index import FileIndex

    if options.chat_template or options.tokenizer:
        load_renderer(load_tokenizer(options.tokenizer), options.chat_template)
    folder = str(Path(options.tokenizer).absolute()) if options.tokenizer else ""
    template = template_text(options.chat_template) if options.chat_template else ""
    index = FileIndex(options.paths, AuditSettings(folder, template))
    if not options.json:
        return _serve(index, options, folder, template)
    index.first()
    seconds = time.monotonic() - began
    for _ in index.work():
        if time.monotonic() - began > READ_SECONDS and index.counts()[2]:
            break
    n_read, n_unread, _ = index.counts()
    figures = {"trajectories": n_read + n_unread, "formats": index.formats(), "first_list_seconds": round(seconds, 3)}
    if index.mirrors:
        figures["objects_not_fetched"] = sum(len(mirror.pending) for mirror in index.mirrors)
    print(json.dumps(figures))
    index.close()
    if index.problem:
        return refuse(index.problem)
    return 0 if figures["trajectories"] else 2


def _serve(index: Any, options: Namespace, tokenizer: str, template: str) -> int:
    """The pages, by a server whose data lie in the cache folder. The settings of the user's own server are left out."""
    for mirror in index.mirrors:
        next(mirror.work(), None)  # a bucket that cannot be read is told before a server starts
        if mirror.problem:
            return refuse(mirror.problem)
    of_server = ("DATABASE_URL", "REDIS_URL", "ALLOWED_HOSTS", "DEBUG")
    names = [name for name in os.environ if name.startswith("INSPECTOR_") or name in of_server]
    opened = {
        "places": index.places, "paths": [str(path) for path in index.paths], "tokenizer": tokenizer,
        "chat_template": template, "folder": os.getcwd(), "environment": {name: os.environ.pop(name) for name in names},
    }
    os.environ |= {"INSPECTOR_DATA": str(index.folder / "server"), "INSPECTOR_OPENED": json.dumps(opened)}
    return run_on_server(["serve_opened", "--port", str(options.port), *["--no-browser"] * options.no_browser])
