"""Compare this machine with every web server and worker that uses the same Redis.

Ends with status 1 where a difference is harmful. `manage.py check` says what one machine knows by itself.
"""

from __future__ import annotations

import json
from argparse import ArgumentParser
from dataclasses import asdict
from typing import Any

import redis
from django.core.management.base import CommandError
from django.db import DatabaseError

from inspector.server.health import served_queues
from inspector.server.machines import Difference, Machine, describe, differences, list_machines
from inspector.server.workers import connect, list_workers
from rollouts.management import TerminalCommand
from rollouts.store import storage_mark
from rollouts.store.database import refusal_of_old_database
from rollouts.store.files.values import StorageDown
from rollouts.store.jobs.workload import workload


class Command(TerminalCommand):
    def add_arguments(self, parser: ArgumentParser) -> None:
        parser.add_argument("--json", action="store_true", help="print one JSON object")
        parser.add_argument(
            "--adopt-files",
            action="store_true",
            help="first say that the files of INSPECTOR_FILES belong to this database from now on",
        )

    def handle(self, *_: Any, **options: Any) -> None:
        try:
            if sentence := refusal_of_old_database():
                raise CommandError(sentence)
            if options["adopt_files"]:
                storage_mark.adopt()
            here = describe("this command", "command")
        except (DatabaseError, StorageDown, OSError) as error:
            raise CommandError(f"This machine cannot use what the machines share. {error}") from error
        machines, found = [here], list[Difference]()
        try:
            connection = connect()
            machines += list_machines(connection)
            found += differences(machines)
            found += self._unserved({queue for one in list_workers(connection) if one.is_alive for queue in one.queues})
        except redis.RedisError as error:
            found.append(Difference(f"Redis does not answer ({type(error).__name__}). Look at REDIS_URL.", True))
        if options["json"]:
            body = {"machines": [asdict(one) for one in machines], "differences": [asdict(one) for one in found]}
            self.stdout.write(json.dumps(body))
        else:
            self._say(machines, found)
        if harmful := sum(one.is_harmful for one in found):
            raise CommandError(f"{harmful} of these do harm." if harmful > 1 else "One of these does harm.")

    def _unserved(self, served: set[str]) -> list[Difference]:
        found = [
            Difference(
                f"No worker of this Redis serves the queue {queue}. Start one; docs/operations.md says how.", True
            )
            for queue in served_queues()
            if queue not in served
        ]
        under_way = sum(n for (_, state), n in workload().jobs.items() if state == "running")
        if not served and under_way:
            sentence = f"{under_way} jobs are under way in this database, and this Redis knows no worker."
            found.append(Difference(f"{sentence} Give all machines the same REDIS_URL, or start a worker.", True))
        return found

    def _say(self, machines: list[Machine], found: list[Difference]) -> None:
        for one in machines:
            clock = "" if one.clock_seconds is None else f", clock {one.clock_seconds:+.1f} s"
            self.stdout.write(
                f"{one.name}: {one.role} on {one.host}, program {one.code}, Python {one.python}, "
                f"database {one.database} ({one.database_kind}), files {one.files}, "
                f"{one.free_bytes >> 30} GB free{clock}{', queues ' + ', '.join(one.queues) if one.queues else ''}"
            )
        for difference in found:
            self.stdout.write(f"{'Harmful' if difference.is_harmful else 'Note'}: {difference.sentence}")
        if not found:
            self.stdout.write("Nothing differs.")
