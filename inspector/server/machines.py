"""What machines must share, and what differs between them: each web server and worker tells Redis about itself. Each
writes an entry of one Redis hash once a minute, as workers do with their load. `manage.py doctor` compares them."""

import hashlib
import hmac
import logging
import os
import platform
import shutil
import socket
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from io import BytesIO

import msgspec
import redis
from django.conf import settings
from django.db import connection as database

from inspector.server.health import MIN_FREE_BYTES
from inspector.server.workers import read_entries
from rollouts.jobs.broker import redis_fault
from rollouts.store import files, storage_mark
from rollouts.store.database import clock_offset, database_identity

log = logging.getLogger(__name__)

KEY = "inspector:processes"
TELL_SECONDS = 60.0
LIVES_SECONDS = 200  # A process that has told nothing for so long is gone.
MAX_CLOCK_SECONDS = 2.0  # Leases last 20 seconds and are compared by the clocks of the workers.
PACKAGES = ("transformers", "tokenizers", "fastokens", "vllm", "torch", "numpy", "Django", "celery")
MARK = "machines/identity"  # A file of the file storage, which tells storages apart.


@dataclass(frozen=True)
class Machine:
    """A process that uses the database, as it described itself."""

    name: str
    role: str  # web, worker or command.
    host: str
    code: str  # A digest of the program's own files.
    python: str
    packages: dict[str, str]
    secret: str  # A fingerprint of SECRET_KEY, from which nobody finds the key.
    database: str  # Which database it uses.
    database_kind: str
    files: str  # Which file storage it uses.
    files_of: str = field(default="", kw_only=True)
    """The database that the files belong to; empty = this version did not tell."""
    clock_seconds: float | None  # By how much its clock is ahead of the database's; None = it has no clock of its own.
    free_bytes: int  # Room on the disk of its data folder.
    queues: list[str] = field(default_factory=list)
    seen_at: float = 0.0  # Unix time.


Difference = tuple[str, bool]
"""Something that is not as it should be: what differs and the way out, and whether it does harm."""


def describe(name: str, role: str, queues: Sequence[str] = ()) -> Machine:
    """This process. Raises what the database and the file storage raise."""
    return Machine(
        name=name, role=role, host=socket.gethostname(), code=code_version(), python=platform.python_version(),
        packages=_packages(),
        secret=hmac.new(settings.SECRET_KEY.encode(), b"rollout-inspector", "sha256").hexdigest()[:12],
        database=database_identity(), database_kind=database.vendor, files=_storage_identity(),
        files_of=storage_mark.owner(), clock_seconds=clock_offset(),
        free_bytes=shutil.disk_usage(settings.INSPECTOR_DATA).free, queues=list(queues), seen_at=time.time(),
    )


def tell(connection: redis.Redis, machine: Machine) -> None:
    """Without Redis nothing is told; the next call tells it."""
    try:
        connection.hset(KEY, machine.name, msgspec.json.encode(machine))
    except redis.RedisError as error:
        log.warning("this process is not told to other machines: %s", redis_fault(error))


def withdraw(connection: redis.Redis, name: str) -> None:
    """Raises ``redis.RedisError``."""
    connection.hdel(KEY, name)


def list_machines(connection: redis.Redis) -> list[Machine]:
    """Every process that has told lately, by name. Raises ``redis.RedisError``."""
    return read_entries(connection, KEY, Machine, LIVES_SECONDS)


def differences(machines: Sequence[Machine]) -> list[Difference]:
    """What machines should share and do not, and what is wrong with one of them. The harmful ones come first."""
    found_differences = [
        *_split(machines, "The database", lambda one: one.database, "Give all of them the same DATABASE_URL."),
        *_split(machines, "The file storage", lambda one: one.files, "Give all of them the same INSPECTOR_FILES."),
        *_split(
            machines, "SECRET_KEY", lambda one: one.secret, "Give all of them the same SECRET_KEY.", "fingerprint "
        ),
        *_split(machines, "The program", lambda one: one.code, "Install the same version and start them again."),
    ]
    hosts = {machine.host for machine in machines}
    if len(hosts) > 1 and any(machine.database_kind == "sqlite" for machine in machines):
        sentence = f"SQLite is a file of one machine, and processes run on {_listed(hosts)}. Use PostgreSQL."
        found_differences.append((sentence, True))
    foreign = {(machine.files_of, machine.database) for machine in machines if machine.files_of}
    found_differences += [
        (foreign_sentence, True)
        for pair in sorted(foreign)
        if (foreign_sentence := storage_mark.sentence_of(*pair))
    ]
    for machine in machines:
        if machine.clock_seconds is not None and abs(machine.clock_seconds) > MAX_CLOCK_SECONDS:
            way = "ahead of" if machine.clock_seconds > 0 else "behind"
            seconds = abs(machine.clock_seconds)
            sentence = f"The clock of {machine.host} ({machine.name}) is {seconds:.1f} s {way} the database's."
            found_differences.append((f"{sentence} Let NTP set the clocks of both machines.", True))
        if machine.free_bytes < MIN_FREE_BYTES:
            sentence = (
                f"The disk of the data folder of {machine.name} has {machine.free_bytes >> 20} MB left. Make room."
            )
            found_differences.append((sentence, True))
    found_differences += _split(
        machines, "Python", lambda one: one.python.rpartition(".")[0], "Install the same minor version.", harmful=False
    )
    for package in PACKAGES:
        having = [machine for machine in machines if package in machine.packages]
        way_out = "Renders and encodings may differ between them; install the same version."
        found_differences += _split(having, package, lambda one: one.packages[package], way_out, harmful=False)  # noqa: B023
    return found_differences


@cache
def code_version() -> str:
    """A digest of the program's files as this process found them: two checkouts of one version may differ. A wheel has
    the digest of the checkout that it was built from."""
    digest = hashlib.sha256()
    base, web = settings.BASE_DIR, settings.WEB_FILES
    for folder, pattern in ((base, "inspector/**/*.py"), (base, "rollouts/**/*.py"), (web, "templates/**/*.html")):
        for path in sorted(folder.glob(pattern)):
            digest.update(f"{path.relative_to(folder)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def _packages() -> dict[str, str]:
    versions = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _storage_identity() -> str:
    try:
        mark = files.read_range(MARK, 0, 64)
    except FileNotFoundError:
        # Of two that begin at once the last one stays, and the other reads it a minute later.
        files.put(MARK, BytesIO(os.urandom(6).hex().encode()))
        mark = files.read_range(MARK, 0, 64)
    return mark.decode(errors="replace")


def _split(
    machines: Iterable[Machine], what: str, of: Callable[[Machine], str], way_out: str, label: str = "",
    harmful: bool = True,
) -> list[Difference]:
    hosts_by_value: dict[str, list[str]] = defaultdict(list)
    for machine in machines:
        hosts_by_value[of(machine)].append(machine.name)
    if len(hosts_by_value) < 2:
        return []
    parts = "; ".join(f"{_listed(names)}: {label}{value}" for value, names in sorted(hosts_by_value.items()))
    return [(f"{what} differs. {parts}. {way_out}", harmful)]


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
