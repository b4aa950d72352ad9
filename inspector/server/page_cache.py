"""The cache of the pages: it holds plain values as MessagePack. A value that cannot be read is a miss, never code.
Whoever reaches Redis can write there, so Django's own serializer, which reads pickles, is not used."""

import logging
from functools import partialmethod
from typing import Any, TypeVar

import msgspec
from django.core.cache import cache
from django.core.cache.backends.locmem import LocMemCache

from rollouts.jobs.broker import redis_fault

log = logging.getLogger(__name__)

T = TypeVar("T")


class MsgpackSerializer:
    """How the Redis cache writes values. An int is written in digits, so that Redis can count with it."""

    def dumps(self, value: Any) -> int | bytes:
        return value if type(value) is int else msgspec.msgpack.encode(value)

    def loads(self, data: bytes) -> Any:
        """The value; None, as for a missing key, where ``data`` is none of ours."""
        try:
            return int(data)
        except ValueError:
            pass
        try:
            return msgspec.msgpack.decode(data)
        except (msgspec.DecodeError, ValueError, RecursionError):
            log.warning("a value of the cache cannot be read, so it counts as missing")
            return None


def recall(key: str, kind: type[T]) -> T | None:
    """The dataclass of a key. None when there is none, when it has another shape, and without Redis."""
    try:
        data = cache.get(key)
        return None if data is None else msgspec.convert(data, kind)
    except Exception as error:
        log.warning("not read from the cache key=%s: %s", key, error)
        return None


def keep(key: str, value: Any, seconds: int) -> None:
    """Keep a dataclass under a key. Without Redis nothing is kept."""
    try:
        cache.set(key, msgspec.to_builtins(value), seconds)
    except Exception as error:
        log.warning("not kept in the cache key=%s: %s", key, error)


class RequestCounts(LocMemCache):
    """How often something was tried: counted in Redis; while that takes no count, in the memory of each process."""

    def _ask(self, method: str, *arguments: Any, **options: Any) -> Any:
        try:
            return getattr(cache, method)(*arguments, **options)
        except ValueError:
            pass  # Redis lacks the key: it took none when the count began
        except Exception as error:
            log.warning("tries are counted by this process alone: %s", redis_fault(error))
        return getattr(super(), method)(*arguments, **options)

    add = partialmethod(_ask, "add")  # type: ignore[assignment]
    incr = partialmethod(_ask, "incr")  # type: ignore[assignment]
    get = partialmethod(_ask, "get")  # type: ignore[assignment]
