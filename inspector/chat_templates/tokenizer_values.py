"""A registered tokenizer as pages show it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Self

from inspector.web.twins import Page, from_columns
from rollouts.store.models import Tokenizer


@dataclass(frozen=True)
class TokenizerValues(Page):
    """A registered tokenizer; in the matrix with the check of its chat template."""

    name: str
    """Names it on forms and in files; unique in its project."""
    project: str | None
    """Name of its project, for a user who sees several."""
    project_code: str
    """Code of its project."""
    sha256: str
    """Of its tokenizer.json."""
    source: str
    """Where it came from: name of the folder, upload, or hub id."""
    revision: str
    """Of a hub id."""
    vocab_size: int
    """Tokens that it has."""
    encoder: str
    """Which library encodes with it exactly."""
    chat_template: str | None
    """Hash of the template that it came with."""
    created_at: datetime
    """When it was registered."""
    code: str | None = None
    """In the matrix: code of the check; null where nobody has asked."""
    status: str = ""
    """In the matrix: status of the check, or ``missing``."""
    error: str = ""
    """In the matrix: why the check failed."""
    prefix_preserving: bool | None = None
    """In the matrix: as of the check."""
    cells: dict[str, str] = field(default_factory=dict)
    """In the matrix: probe -> one of ``template_matrix.WORDS``."""

    @classmethod
    def of(cls, tokenizer: Tokenizer, project: str | None, **check: Any) -> Self:
        """A tokenizer whose project is loaded, and what the matrix shows of its check."""
        return from_columns(
            cls, tokenizer, project=project, project_code=tokenizer.project.code,
            chat_template=tokenizer.chat_template_id, **check,
        )
