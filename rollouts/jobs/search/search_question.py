"""What a search asks: a kind, what is looked for, and which trajectories are looked at."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from rollout_inspector.refusal import Refusal
from rollouts.jobs.search.patterns import Pattern, read_ids, read_regex, read_text
from rollouts.store.trajectory_filters import TrajectoryFilters

READERS: Mapping[str, Callable[[str], Pattern]] = {"text": read_text, "ids": read_ids, "regex": read_regex}
"""What is looked for in tokens -> what reads it."""
BY = (*READERS, "metadata", "finding")  # What a search may look for.
MAX_METADATA = 200


@dataclass(frozen=True)
class SearchQuestion:
    """What is asked. Make one by :meth:`read`."""

    by: str  # One of :data:`BY`.
    text: str  # What the user wrote.
    filters: TrajectoryFilters = field(default_factory=TrajectoryFilters)
    """Only these trajectories are looked at; for ``finding`` they name the kind."""
    pattern: Pattern | None = None  # What is looked for in tokens; None for metadata and findings.

    @classmethod
    def read(cls, by: str, text: str, filters: TrajectoryFilters | None = None) -> SearchQuestion:
        """Raises :class:`Refusal` with a sentence. Without a text it asks for the findings of the kind that ``filters``
        names."""
        filters = filters or TrajectoryFilters()
        if by == "finding" and text.strip():
            filters, text = filters.model_copy(update={"kind": text.strip()}), ""
        if by == "finding" or (not text and filters.kind):
            if not filters.kind:
                raise Refusal("Name the kind of finding, such as boundary_merge.")
            return cls("finding", "", filters)
        if by not in BY:
            raise Refusal(f"One searches by {', '.join(BY)}; not by “{by[:40]}”.")
        if by != "metadata":
            return cls(by, text, filters, READERS[by](text))
        if not text.strip():
            raise Refusal("Write a part of a name or of the metadata.")
        if len(text) > MAX_METADATA:
            raise Refusal(f"This has {len(text):,} characters; at most {MAX_METADATA} of metadata are looked for.")
        return cls(by, text.strip().replace("\0", ""), filters)

    @property
    def as_json(self) -> str:
        """The text as it stands inside a stored JSON text."""
        return json.dumps(self.text, ensure_ascii=False)[1:-1]
