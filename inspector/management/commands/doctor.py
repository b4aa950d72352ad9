"""Compare this machine with every web server and worker that uses the same Redis.

Ends with status 1 where a difference is harmful. `manage.py check` says what one machine knows by itself.
"""

from argparse import ArgumentParser
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import redis
from django.core.management.base import CommandError
from django.db import DatabaseError

from inspector.server.health import redis_problem, served_queues
from inspector.server.machines import Difference, Machine, describe, differences, list_machines
from inspector.server.workers import connect, list_workers
from rollouts.jobs.broker import redis_fault
from rollouts.jobs.storage.retention import fault_of_clock
from rollouts.jobs.storage.unused_files import JOB_AGE
from rollouts.management import TerminalCommand
from rollouts.store import files, storage_mark
from rollouts.store.database import refusal_of_old_database
from rollouts.store.files.values import StorageDown
from rollouts.store.jobs.jobs import old_jobs
from rollouts.store.jobs.workload import workload
from rollouts.store.people.accounts import expired_sessions


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
            clock = fault_of_clock()
        except (DatabaseError, StorageDown, OSError) as error:
            raise CommandError(f"This machine cannot use what the machines share. {error}") from error
        machines, all_differences = [here], list[Difference]([(clock, False)] if clock else [])
        try:
            connection = connect()
            if sentence := redis_problem():
                all_differences.append((sentence, True))
            machines += list_machines(connection)
            all_differences += differences(machines)
            all_differences += self._unserved(
                {queue for machine in list_workers(connection) if machine.is_alive for queue in machine.queues}
            )
        except redis.RedisError as error:
            all_differences.append((redis_fault(error), True))
        old = _old_rows()
        body = {
            "machines": [asdict(machine) for machine in machines],
            "old": old,
            "differences": [{"sentence": text, "is_harmful": is_harmful} for text, is_harmful in all_differences],
        }
        self.print_result(options["json"], body, _lines(machines, old, all_differences))
        if harmful := sum(is_harmful for _, is_harmful in all_differences):
            raise CommandError(f"{harmful} of these do harm." if harmful > 1 else "One of these does harm.")

    def _unserved(self, served: set[str]) -> list[Difference]:
        unserved = [
            (f"No worker of this Redis serves the queue {queue}. Start one; docs/operations.md says how.", True)
            for queue in served_queues()
            if queue not in served
        ]
        under_way = sum(n for (_, state), n in workload().jobs.items() if state == "running")
        if not served and under_way:
            sentence = f"{under_way} jobs are under way in this database, and this Redis knows no worker."
            unserved.append((f"{sentence} Give all machines the same REDIS_URL, or start a worker.", True))
        return unserved


def _lines(machines: list[Machine], old: dict[str, int], found: list[Difference]) -> Iterator[str]:
    for machine in machines:
        queues = f", queues {', '.join(machine.queues)}" if machine.queues else ""
        clock = "" if machine.clock_seconds is None else f", clock {machine.clock_seconds:+.1f} s"
        yield (
            f"{machine.name}: {machine.role} on {machine.host}, program {machine.code}, Python {machine.python}, "
            f"database {machine.database} ({machine.database_kind}), files {machine.files}, "
            f"{machine.free_bytes >> 30} GB free{clock}{queues}"
        )
    yield f"To be swept by a worker within ten minutes: {', '.join(f'{n:,} {what}' for what, n in old.items())}."
    for sentence, is_harmful in found:
        yield f"{'Harmful' if is_harmful else 'Note'}: {sentence}"
    if not found:
        yield "Nothing differs."


def _old_rows() -> dict[str, int]:
    """What the sweep removes -> how much of it there is now."""
    return {
        "expired sessions": expired_sessions().count(), "old jobs": old_jobs(JOB_AGE).count(),
        "files of dead writers": sum(1 for _ in files.left_drafts()),
    }
