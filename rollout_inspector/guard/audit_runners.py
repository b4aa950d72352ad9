"""Where the shards of an audit are read: in processes of this machine, or on the nodes of a Ray cluster. Both call the
same pure function, :func:`audit`. A lost process or node costs the shards that it was reading, and they are read
again."""

import logging
import multiprocessing
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pyarrow as pa

from rollout_inspector.guard.audit_settings import AuditSettings
from rollout_inspector.guard.shard_audit import Shard, audit, reason_of
from rollout_inspector.refusal import Refusal

MAX_DEATHS = 2  # A shard that ends so many processes in which it was read alone is given up.
LOOK_SECONDS = 15.0  # How often a Ray cluster that tells of no shard is asked whether it has a node.
ANSWER_SECONDS = 5.0
"""How long a Ray cluster may take to answer. Ray itself waits for minutes, and then ends the whole process."""

Todo = Mapping[str, Shard]  # Key -> shard.
Done = Iterator[tuple[str, pa.Table | str]]
"""(key, table) of each shard as soon as it is read; instead of a table a sentence that says why there is none."""


def on_processes(
    todo: Todo, settings: AuditSettings, n: int | None = None, read: Callable[..., pa.Table] = audit
) -> Done:
    """Read shards in ``n`` processes (default: one for each processor). ``read``: the function that reads a shard, of
    the top level of its module."""
    n = max(1, min(n or os.cpu_count() or 1, len(todo)))
    todo_left, suspects = dict(todo), list[str]()
    while todo_left:
        untried = {key: shard for key, shard in todo_left.items() if key not in suspects}
        if untried:
            yield from _in_pool(untried, settings, n, read, todo_left, suspects)
            continue
        for key in suspects:  # one by one: the next death tells which shard it was
            yield from _alone(key, todo_left.pop(key), settings, read)


def _pool(n: int) -> ProcessPoolExecutor:
    context = multiprocessing.get_context("forkserver")
    # imported once, not in each process; pyarrow imports pandas where it is installed
    context.set_forkserver_preload(["rollout_inspector.guard.shard_audit", "pandas"])
    return ProcessPoolExecutor(n, mp_context=context, initializer=_end_with_parent)


def _end_with_parent() -> None:
    """End this process when the audit was killed; otherwise it would wait for a shard forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _in_pool(
    todo: Todo, settings: AuditSettings, n: int, read: Callable[..., pa.Table],
    left: dict[str, Shard], suspects: list[str],
) -> Done:
    """Read shards until all are done or a process died. What was being read then is suspected."""
    waiting = iter(todo.items())
    under_way: dict[Future[pa.Table], str] = {}
    ready: list[tuple[str, pa.Table | str]] = []
    with _pool(n) as pool:
        try:
            while True:
                while len(under_way) < n and (item := next(waiting, None)) is not None:
                    under_way[pool.submit(read, item[1], settings)] = item[0]
                for key, table in ready:  # after the next shards were sent: a process never waits for our caller
                    left.pop(key)
                    yield key, table
                if not under_way:
                    return
                done = wait(under_way, return_when=FIRST_COMPLETED).done
                ready = [(under_way[future], _result(future)) for future in done]
                for future in done:
                    under_way.pop(future)
        except BrokenProcessPool:
            suspects += under_way.values()
            suspects[:] = [key for key in dict.fromkeys(suspects) if key in left]
        finally:
            for future in under_way:
                future.cancel()


def _alone(key: str, shard: Shard, settings: AuditSettings, read: Callable[..., pa.Table]) -> Done:
    for _ in range(MAX_DEATHS):
        with _pool(1) as pool:
            try:
                yield key, _result(pool.submit(read, shard, settings))
                return
            except BrokenProcessPool:
                continue
    files = ", ".join(dict.fromkeys(piece["path"] for piece in shard))
    why = f"The process that read a part of {files} was killed {MAX_DEATHS} times, perhaps because memory was short."
    yield key, f"{why} Audit it on a larger machine, or with fewer processes."


def _result(future: Future[pa.Table]) -> pa.Table | str:
    try:
        return future.result()
    except BrokenProcessPool:
        raise
    except Exception as error:
        return reason_of(error)


def on_ray(todo: Todo, settings: AuditSettings, address: str = "auto") -> Done:
    """Read shards on the nodes of a Ray cluster. Every node finds the files and the tokenizer at the same paths.
    ``address``: the cluster's, or ``auto`` for the one that runs on this machine. Ray reads the shards of a lost node
    on another one. Raises :class:`Refusal` where Ray is not installed or no cluster answers."""
    try:
        import ray
    except ImportError as error:
        raise Refusal("A Ray cluster needs the package ray: pip install 'rollout-inspector[ray]'.") from error
    if not ray.is_initialized():
        _must_answer(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise Refusal(f"No Ray cluster answers at {address!r}. Start one: ray start --head.") from error
    remote = ray.remote(audit).options(num_cpus=1, max_retries=3)  # retries are for lost nodes alone
    settings_reference = ray.put(settings)
    under_way: dict[Any, str] = {}
    waiting = iter(todo.items())
    most = 2 * max(1, int(ray.cluster_resources().get("CPU", 1)))
    try:
        while True:
            while len(under_way) < most and (item := next(waiting, None)) is not None:
                under_way[remote.remote(item[1], settings_reference)] = item[0]
            if not under_way:
                return
            done = ray.wait(list(under_way), timeout=LOOK_SECONDS)[0]
            if not done and not ray.cluster_resources().get("CPU"):  # Ray would wait for another node without an end
                for key in (*under_way.values(), *(key for key, _ in waiting)):
                    yield key, "No node is left in the Ray cluster. Start one, and audit again: what is done is kept."
                return
            for reference in done:
                yield under_way.pop(reference), _of_ray(ray, reference)
    finally:
        for reference in under_way:
            ray.cancel(reference)


def _must_answer(address: str) -> None:
    """Raises :class:`Refusal` where nothing listens at ``HOST:PORT``."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdecimal():
        return  # auto: Ray itself knows at once whether a cluster runs here
    try:
        socket.create_connection((host, int(port)), ANSWER_SECONDS).close()
    except (OSError, OverflowError) as error:
        raise Refusal(f"No Ray cluster answers at {address!r}. Start one: ray start --head.") from error


def _of_ray(ray: Any, reference: Any) -> pa.Table | str:
    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        return reason_of(error.cause or error)
    except ray.exceptions.RayError as error:
        return f"A shard was lost with its node four times ({type(error).__name__}). Audit again: what is done is kept."
