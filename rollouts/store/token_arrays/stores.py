"""The two stores: arrays as BLOBs of the database, or as segments in the file storage."""

import secrets
import tempfile
from collections.abc import Sequence
from typing import NamedTuple, Protocol

from rollouts.store import files
from rollouts.store.models import Run, TokenSegment
from rollouts.store.token_arrays.items import TokenItem


class Place(NamedTuple):
    """Where a segment holds the arrays of an item."""

    segment: TokenSegment  # It is saved in the transaction that stores the steps and rows which name it.
    offset: int  # The row of the file.


class TokenStore(Protocol):
    """Where new arrays of a run go."""

    slug: str  # The name in the setting and in ``Run.token_store``.
    min_tokens: int
    """A batch with fewer ids is stored in the database first: a file for each would be many small files."""

    def put(self, run: Run, items: Sequence[TokenItem]) -> Sequence[Place | None]:
        """Make arrays durable, before the transaction that stores their steps and rows. One place for each item. None =
        the transaction inserts the arrays itself. Raises what the file storage raises; nothing is half stored."""
        ...


class DatabaseTokens:
    """``StepTokens``, ``RowTokens`` and ``RowColumn``: a BLOB for each array, read by the query of its step or row."""

    slug = "database"
    min_tokens = 0

    def put(self, run: Run, items: Sequence[TokenItem]) -> Sequence[Place | None]:
        """The transaction inserts the arrays with their steps and rows."""
        return [None] * len(items)


class SegmentTokens:
    """One immutable file for a batch: ``segments/<code of the run>/<random>.parquet``."""

    slug = "segments"
    min_tokens = 1 << 16

    def put(self, run: Run, items: Sequence[TokenItem]) -> Sequence[Place | None]:
        """Write one segment with all items. A file whose transaction fails is removed by the sweep."""
        if not items:
            return []
        from rollouts.store.token_arrays.segment_file import write_items  # it needs pyarrow

        with tempfile.TemporaryFile(dir=files.scratch_folder()) as draft:
            write_items(items, draft)
            n_bytes = draft.tell()
            draft.seek(0)
            key = f"{folder_of(run.code)}{secrets.token_hex(12)}.parquet"
            files.put(key, draft)
        n_tokens = sum(item.n_tokens for item in items)
        segment = TokenSegment(run=run, key=key, n_items=len(items), n_tokens=n_tokens, n_bytes=n_bytes)
        return [Place(segment, offset) for offset in range(len(items))]


SEGMENTS = "segments/"  # The prefix of all segments in the file storage.
STORES: dict[str, TokenStore] = {store.slug: store for store in (DatabaseTokens(), SegmentTokens())}


def folder_of(code: str) -> str:
    """The prefix of the segments of the run with this code."""
    return f"{SEGMENTS}{code}/"
