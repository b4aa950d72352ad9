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
        machines, all_differences = [here], list[Difference]()
        try:
            connection = connect()
            machines += list_machines(connection)
            all_differences += differences(machines)
            all_differences += self._unserved(
                {queue for machine in list_workers(connection) if machine.is_alive for queue in machine.queues}
            )
        except redis.RedisError as error:
            all_differences.append(
                Difference(f"Redis does not answer ({type(error).__name__}). Look at REDIS_URL.", True)
            )
        if options["json"]:
            body = {
                "machines": [asdict(machine) for machine in machines],
                "differences": [asdict(machine) for machine in all_differences],
            }
            self.stdout.write(json.dumps(body))
        else:
            self._say(machines, all_differences)
        if harmful := sum(machine.is_harmful for machine in all_differences):
            raise CommandError(f"{harmful} of these do harm." if harmful > 1 else "One of these does harm.")

    def _unserved(self, served: set[str]) -> list[Difference]:
        unserved = [
            Difference(
                f"No worker of this Redis serves the queue {queue}. Start one; docs/operations.md says how.", True
            )
            for queue in served_queues()
            if queue not in served
        ]
        under_way = sum(n for (_, state), n in workload().jobs.items() if state == "running")
        if not served and under_way:
            sentence = f"{under_way} jobs are under way in this database, and this Redis knows no worker."
            unserved.append(Difference(f"{sentence} Give all machines the same REDIS_URL, or start a worker.", True))
        return unserved

    def _say(self, machines: list[Machine], found: list[Difference]) -> None:
        for machine in machines:
            queues = f", queues {', '.join(machine.queues)}" if machine.queues else ""
            clock = "" if machine.clock_seconds is None else f", clock {machine.clock_seconds:+.1f} s"
            self.stdout.write(
                f"{machine.name}: {machine.role} on {machine.host}, program {machine.code}, Python {machine.python}, "
                f"database {machine.database} ({machine.database_kind}), files {machine.files}, "
                f"{machine.free_bytes >> 30} GB free{clock}{queues}"
            )
        for difference in found:
            self.stdout.write(f"{'Harmful' if difference.is_harmful else 'Note'}: {difference.sentence}")
        if not found:
            self.stdout.write("Nothing differs.")
