"""The Celery application of every worker, and the heartbeat by which the pages know that workers live."""

import logging.config
import mmap
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

# Before anything imports torch: the engine lives in this process, and one thread per operator is the fastest by far for
# small models on a CPU. Set any of them in the environment to choose otherwise.
for _name, _value in {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}.items():
    os.environ.setdefault(_name, _value)
os.environ.setdefault("DJANGO_SETTINGS_MODULE", "inspector.settings")

from celery import Celery, signals  # noqa: E402

HEARTBEAT_SECONDS = 2.0
THREAD_BYTES = 8 << 20  # What a thread takes. A worker that does not get it ends, and what it had is taken over.

app = Celery("inspector")
# Celery has put the current folder first, and the project of a user may have packages of our names.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks(related_name="worker")


@signals.setup_logging.connect
def _use_django_logging(**_: Any) -> None:
    from django.conf import settings

    logging.config.dictConfig(settings.LOGGING)


@signals.worker_init.connect
def _write_privately(**_: Any) -> None:
    from inspector.server.paths import write_privately

    write_privately()


@signals.worker_ready.connect
def _start_heartbeat(sender: Any, **_: Any) -> None:
    """Tell Redis every two seconds what this worker is and does; health and the Workers page read it."""
    from django.core.cache import cache

    from inspector.server import machines, workers
    from inspector.server.health import heartbeat_key
    from rollouts.jobs.broker import redis_fault
    from rollouts.store.outages import lacks_memory
    from rollouts.worker.heartbeat import queues_of, repeat

    queues = queues_of(sender)
    describer = workers.Describer(sender.hostname, queues, sender.controller.concurrency)
    stop = threading.Event()

    def beat() -> None:
        redis = workers.connect()
        while not stop.is_set():
            try:
                mmap.mmap(-1, THREAD_BYTES).close()
            except (MemoryError, OSError):
                # A thread that gets no memory may never begin, and who started it waits without an end: others go on.
                os._exit(os.EX_TEMPFAIL)
            try:
                for queue in queues:
                    cache.set(heartbeat_key(queue), sender.hostname, workers.LIVES_SECONDS)
                workers.announce(redis, describer.describe())
            except Exception as error:
                logging.getLogger(__name__).warning("heartbeat not written: %s", redis_fault(error))
            stop.wait(HEARTBEAT_SECONDS)
        for queue in queues:
            cache.delete(heartbeat_key(queue))
        workers.withdraw(redis, sender.hostname)
        machines.withdraw(redis, sender.hostname)

    def thread_ended(fault: Any) -> None:
        """Nobody does the work of a thread that has ended for lack of memory: another worker goes on with all of it."""
        threading.__excepthook__(fault)
        if lacks_memory(fault.exc_value):
            os._exit(os.EX_TEMPFAIL)

    def tell() -> None:
        machines.tell(workers.connect(), machines.describe(sender.hostname, "worker", queues))

    threading.excepthook = thread_ended
    thread = threading.Thread(target=beat, name="heartbeat", daemon=True)
    thread.start()
    repeat("machine", machines.TELL_SECONDS, tell)

    def end(**_: Any) -> None:
        stop.set()
        thread.join(1.0)

    signals.worker_shutting_down.connect(end, weak=False)


@signals.worker_process_init.connect
def _die_with_parent(**_: Any) -> None:
    """A pool process never outlives its worker, even one that was killed."""
    from inspector.server.supervisor import die_with_parent

    die_with_parent(signal.SIGKILL)
