"""The shards of an audit on the workers. Tables travel through the cache, so workers write no files."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from celery import current_app, shared_task
from django.conf import settings
from django.core.cache import cache

from rollout_inspector.guard.audit_runners import Done, Todo
from rollout_inspector.guard.shard_audit import AuditSettings, AuditShard, audit, reason_of
from rollout_inspector.refusal import Refusal
from rollouts.jobs.sending import NO_BROKER
from rollouts.store.models import new_code
from rollouts.worker.heartbeat import Heartbeat

AUDIT_SHARD = "rollouts.audit_shard"
QUEUE = "default"
BEAT_SECONDS = 3.0
SILENT_SECONDS = 20.0
"""A shard whose worker was not heard of for so long is sent again."""
POLL_SECONDS = 0.1
ANSWER_SECONDS = 3600
"""How long the cache keeps a table that nobody takes."""
MAX_ANSWER_BYTES = 256 << 20
MAX_ASKED = 3
MAX_SENT = 3
"""A shard that lost so many workers is given up."""


@shared_task(name=AUDIT_SHARD)
def audit_shard(pieces: Sequence[Mapping[str, Any]], compared: Mapping[str, Any], answer: str) -> None:
    """Audit a shard and store its table in the cache as Arrow IPC, or a sentence that says why there is none.

    Files and tokenizer must lie below ``INSPECTOR_AUDIT_FOLDERS``: a message alone opens no other file.
    """
    beat = partial(cache.set, f"{answer}:beat", True, SILENT_SECONDS)
    beat()
    with Heartbeat(f"audit-{answer}", beat, BEAT_SECONDS):
        found = _answer(AuditShard(tuple(dict(piece) for piece in pieces)), AuditSettings(**compared))
        cache.set(answer, found, ANSWER_SECONDS)


def _answer(shard: AuditShard, compared: AuditSettings) -> bytes | str:
    for path in (*(piece["path"] for piece in shard.pieces), *([compared.tokenizer] if compared.tokenizer else [])):
        if not any(Path(path).resolve().is_relative_to(one.resolve()) for one in settings.AUDIT_FOLDERS):
            return f"{path} does not lie below INSPECTOR_AUDIT_FOLDERS. Name its folder there, and restart the workers."
    try:
        table = audit(shard, compared)
    except Exception as error:
        return reason_of(error)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as writer:
        writer.write_table(table)
    found = sink.getvalue().to_pybytes()
    return found if len(found) <= MAX_ANSWER_BYTES else "The findings of a shard are too large to send."


@dataclass
class _Sent:
    key: str
    shard: AuditShard
    n: int = 1
    heard: float | None = None
    """When its worker was last heard of; None = it waits in the queue."""


def on_celery(todo: Todo, compared: AuditSettings) -> Done:
    """Read shards on the workers of the queue ``default``, as many at once as they have processes.

    Each worker finds the files and the tokenizer at the same paths. Raises :class:`Refusal` where none answers.
    """
    most = _processes()
    waiting = iter(todo.items())
    under_way: dict[str, _Sent] = {}
    last = time.monotonic()
    while True:
        while len(under_way) < most and (one := next(waiting, None)) is not None:
            answer = f"audit:{new_code()}"
            under_way[answer] = _Sent(*one)
            _send(one[1], compared, answer)
        if not under_way:
            return
        found = cache.get_many([name for answer in under_way for name in (answer, f"{answer}:beat")])
        now = time.monotonic()
        for answer, sent in list(under_way.items()):
            if answer in found:
                del under_way[answer]
                cache.delete(answer)
                last = now
                yield (
                    sent.key,
                    found[answer] if isinstance(found[answer], str) else pa.ipc.open_stream(found[answer]).read_all(),
                )
            elif f"{answer}:beat" in found:
                sent.heard = last = now
            elif sent.heard is not None and sent.n >= MAX_SENT:
                del under_way[answer]
                yield sent.key, f"{MAX_SENT} workers were lost with a part of {sent.shard.pieces[0]['path']}."
            elif sent.heard is not None:
                sent.n, sent.heard = sent.n + 1, None
                _send(sent.shard, compared, answer)
        if now - last > SILENT_SECONDS:
            _processes()
            last = now
        time.sleep(POLL_SECONDS)


def _send(shard: AuditShard, compared: AuditSettings, answer: str) -> None:
    try:
        current_app.send_task(AUDIT_SHARD, (list(shard.pieces), asdict(compared), answer), queue=QUEUE)
    except Exception as error:  # kombu's OperationalError, and what redis raises below it
        raise Refusal(NO_BROKER) from error


def _processes() -> int:
    """How many processes the workers of the queue have together. Raises :class:`Refusal` where there are none."""
    n = 0
    for _ in range(MAX_ASKED):  # a busy worker may not answer the first time
        try:
            asked = current_app.control.inspect(timeout=2.0)
            queues, stats = asked.active_queues() or {}, asked.stats() or {}
        except Exception as error:
            raise Refusal(NO_BROKER) from error
        names = [name for name, held in queues.items() if any(one["name"] == QUEUE for one in held)]
        n = sum(int(stats.get(name, {}).get("pool", {}).get("max-concurrency", 1)) for name in names)
        if n:
            break
    if not n:
        raise Refusal(f"No worker of the queue {QUEUE} answers. Start one: rollout-inspector serve.")
    return n
