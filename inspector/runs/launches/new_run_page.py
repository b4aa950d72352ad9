"""What the forms of a new run show: the one that launches it, and the one that uploads it."""

from dataclasses import dataclass, field
from typing import Any

from inspector.web.twins import Page


@dataclass(frozen=True)
class NewRunPage(Page):
    """The form of a new run."""

    project: str
    """Code of the project that takes the run, unless the form names another one."""
    errors: dict[str, list[str]]
    """Field -> what is wrong with it; empty before a POST."""
    fields: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of a launch: each field with its default, its help and its choices, so that a script can fill the form in."""
    notices: list[str] = field(default_factory=list)
    """Of a launch: where the form's values come from, and what in the address leads nowhere."""
    tokenizers: list[str] = field(default_factory=list)
    """Of an import: names of the tokenizers of the project."""
    upload_max_bytes: int | None = None
    """Of an import: the most bytes of one request."""
