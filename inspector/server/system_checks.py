"""Turns each wrong setting into a sentence that says how to correct it."""

import os
import shutil
import sqlite3
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.conf import settings
from django.core.checks import CheckMessage, Tags, register
from django.db import DatabaseError

from inspector.server.file_storage import FOLDER
from inspector.server.paths import LOCAL_HOSTS
from inspector.server.team_checks import flaw
from rollout_inspector.text import confinement
from rollouts.jobs.launch import served_models
from rollouts.store import storage_mark
from rollouts.store.database import database_identity, refusal_of_old_database
from rollouts.store.files.values import StorageDown


@register()
def check_environment(**_: Any) -> Iterable[CheckMessage]:
    """Values that could not be read at all."""
    return [flaw(message, hint, "E001") for message, hint in settings.ENV_PROBLEMS]


@register()
def check_data_folder(**_: Any) -> Iterable[CheckMessage]:
    """The data folder can be written and has room."""
    folder = settings.INSPECTOR_DATA
    existing = next(path for path in (folder, *folder.parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield flaw(f"The data folder {folder} cannot be written.",
                   "Make it writable, or set INSPECTOR_DATA to a folder that is.", "E002")
        return
    if folder.exists() and (mode := stat.S_IMODE(folder.stat().st_mode)) & 0o077:
        yield flaw(f"Other users of this machine can enter the data folder {folder} (mode {mode:04o}).",
                   "Its owner can close it: chmod 700.", "W009")
    free = shutil.disk_usage(existing).free
    if free < 200 << 20:
        yield flaw(f"Only {free >> 20} MB are free where the data folder lies ({folder}).",
                   "Free some space, or set INSPECTOR_DATA to a folder on a larger disk.", "W002")


@register()
def check_files(**_: Any) -> Iterable[CheckMessage]:
    """A folder that INSPECTOR_FILES names can be written. `manage.py doctor` asks a bucket."""
    entry = settings.STORAGES["default"]
    if entry["BACKEND"] != FOLDER or not (location := entry["OPTIONS"].get("location")):
        return
    existing = next(path for path in (Path(location), *Path(location).parents) if path.exists())
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        yield flaw(f"The folder {location} of INSPECTOR_FILES cannot be written.",
                   "Make it writable, or set INSPECTOR_FILES to a folder that is.", "E010")


@register(Tags.database)
def check_owner_of_files(databases: Sequence[str] | None = None, **_: Any) -> Iterable[CheckMessage]:
    """`manage.py check --database default`: the file storage belongs to this database."""
    if not databases:
        return
    try:
        owner = storage_mark.marked()
        sentence = storage_mark.sentence_of(owner, database_identity()) if owner else ""
    except (DatabaseError, StorageDown, OSError):
        return  # other checks say so
    if sentence:
        yield flaw(sentence, None, "E011")


@register(Tags.database)
def check_age_of_database(databases: Sequence[str] | None = None, **_: Any) -> Iterable[CheckMessage]:
    """Before `manage.py migrate`, and by `manage.py check --database default`."""
    try:
        sentence = refusal_of_old_database() if databases else ""
    except DatabaseError:
        return  # the command says so
    if sentence:
        yield flaw(sentence, None, "E012")


@register()
def check_redis_url(**_: Any) -> Iterable[CheckMessage]:
    scheme = urlsplit(settings.REDIS_URL).scheme
    if scheme not in ("redis", "rediss", "unix"):
        yield flaw(
            f"REDIS_URL begins with {scheme or 'no scheme'!r}.",
            "Write redis://HOST:6379/0, rediss://... or unix:///path/to.sock; unset it for the embedded Redis.", "E003",
        )


@register()
def check_database(**_: Any) -> Iterable[CheckMessage]:
    engine = str(settings.DATABASES["default"]["ENGINE"])
    if engine not in ("django.db.backends.sqlite3", "django.db.backends.postgresql"):
        yield flaw(f"DATABASE_URL names {engine.rsplit('.', 1)[-1]}, which is not served.",
                   "Use PostgreSQL (postgres://...) or leave DATABASE_URL unset for SQLite.", "E004")
    elif engine.endswith("sqlite3") and sqlite3.sqlite_version_info < (3, 35):
        yield flaw(f"Python's SQLite is {sqlite3.sqlite_version}; 3.35 or newer is needed.",
                   "Use a newer Python, or set DATABASE_URL to a PostgreSQL.", "E005")


@register()
def check_safety(**_: Any) -> Iterable[CheckMessage]:
    """Settings that are fine on a laptop and dangerous on a network."""
    open_hosts = [host for host in settings.ALLOWED_HOSTS if host not in LOCAL_HOSTS]
    if settings.DEBUG and open_hosts:
        yield flaw(
            f"DEBUG is on while the server answers to {', '.join(open_hosts)}: error pages would show the settings.",
            "Unset DEBUG.", "E006",
        )
    if "*" in settings.ALLOWED_HOSTS:
        yield flaw("ALLOWED_HOSTS is *: the server answers to any name.",
                   "List the names that people type into the browser, separated by commas.", "W006")
    if len(settings.SECRET_KEY) < 32:
        yield flaw("SECRET_KEY is shorter than 32 characters.",
                   "Unset it: a good one is made once and kept in the data folder.", "E007")
    if settings.REDIS_URL.startswith("redis://") and open_hosts:
        host = urlsplit(settings.REDIS_URL).hostname or ""
        if host not in LOCAL_HOSTS and "@" not in settings.REDIS_URL:
            yield flaw(f"Redis at {host} is reached over the network without a password.",
                       "Give it one and write rediss://:PASSWORD@HOST:6379/0.", "W007")


@register()
def check_metrics_token(**_: Any) -> Iterable[CheckMessage]:
    if settings.METRICS_TOKEN and len(settings.METRICS_TOKEN) < 20:
        yield flaw(f"INSPECTOR_METRICS_TOKEN has {len(settings.METRICS_TOKEN)} characters, so that it can be guessed.",
                   "Make one with: openssl rand -hex 24", "E030")


@register()
def check_models(**_: Any) -> Iterable[CheckMessage]:
    """Models that can never be launched. Only the machine of their worker knows whether the folder exists."""
    for model in served_models().values():
        if fault := model.faults():
            yield flaw(f"INSPECTOR_MODELS, {model.name}: {fault}", "See docs/configuration.md.", "E009")


@register()
def check_demo_policy(**_: Any) -> Iterable[CheckMessage]:
    folder = settings.BASE_DIR / "rollouts" / "sampling" / "demo_policy" / "model"
    if not (folder / "model.safetensors").exists():
        yield flaw(
            f"The demo policy is missing from {folder.relative_to(settings.BASE_DIR)}.",
            "Train it with `python manage.py train_demo_policy` (about half an hour), or restore the folder.", "W008",
        )


@register()
def check_confinement(**_: Any) -> Iterable[CheckMessage]:
    """Whether the kernel can refuse system calls to the processes that run what strangers wrote."""
    if lacks := confinement.missing():
        yield flaw(
            f"Chat templates and tokenizers run with limits of time and memory only. {lacks}",
            "On Linux install libseccomp2 (Debian, Ubuntu) or libseccomp (others). Without it, a template that "
            "escaped from Jinja could read the files of the server.", "W010",
        )
