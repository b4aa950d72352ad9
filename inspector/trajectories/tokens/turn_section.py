"""The part of a turn that the reader shows, with its blocks of tokens and the words of its head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inspector.trajectories.tokens.turns import Turn
from rollout_inspector.streams.figures import trained_words
from rollout_inspector.text.html.tokens import Block


@dataclass(frozen=True)
class TurnSection:
    """The part of one turn that is shown."""

    turn: Turn
    start: int
    stop: int
    url: str
    """The address of the turn in the token view."""
    blocks: Sequence[Block] = ()
    n_foreign: int = 0
    """Tokens of the part that are trained, and not as they were sampled."""

    @property
    def is_continued(self) -> bool:
        return self.start > self.turn.start

    @property
    def tokens_text(self) -> str:
        return f"tokens {self.turn.start:,}-{self.turn.stop:,}" if self.turn.n_tokens else "no tokens"

    @property
    def trained_text(self) -> str:
        n = self.turn.n_trained
        if n is None:
            return ""
        words = trained_words(n, self.turn.n_tokens)
        return words + (f", {self.n_foreign:,} not as sampled" if self.n_foreign else "")

    @property
    def findings_text(self) -> str:
        n = len(self.turn.findings)
        return f"{n} finding{'s' * (n != 1)}" if n else ""
