"""JSON bodies stored once by their hash."""

from __future__ import annotations

import hashlib
from typing import Any

from rollouts.formats.containers.json_text import canonical_json
from rollouts.models import Content
from rollouts.services.bulk import insert_values


class Contents:
    """Bodies gathered for one insert."""

    def __init__(self) -> None:
        self._bodies: dict[str, str] = {}

    def add(self, value: Any) -> str:
        """Remember a value. Returns its key."""
        return self.add_text(canonical_json(value))

    def add_text(self, body: str) -> str:
        key = hashlib.sha256(body.encode("utf-8")).hexdigest()
        self._bodies[key] = body
        return key

    def add_unless_empty(self, value: Any) -> str | None:
        """None for an empty mapping or None: nothing is stored for nothing."""
        return self.add(value) if value else None

    def save(self) -> None:
        """Insert bodies that are not stored yet, in the order of their keys, so that two writers cannot deadlock."""
        if self._bodies:
            insert_values(Content, sorted(self._bodies.items()), ignore_conflicts=True)
            self._bodies = {}
