"""Text in a whole row: every place of it, wherever the page is."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inspector.trajectories.place import PagePlace
from inspector.trajectories.tokens import page_queries as data
from inspector.trajectories.tokens.tokens_page import TokenText, token_texts
from inspector.web.twins import Page
from rollout_inspector.streams.trajectory import ids_array
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store.models import StoredTrajectory
from rollouts.store.trajectories import engine_columns
from rollouts.store.trajectories.trajectory_parts import RowSummary, StepSummary

MAX_PLACES = 2000  # The most places that one answer names.

MAX_WANTED = 1000  # Characters of the longest text that is looked for.


@dataclass(frozen=True)
class FoundPlaces(Page):
    """Where a text stands in a row."""

    row: int
    """The index of the row."""
    wanted: str
    """The text. Capital ASCII letters are taken for small ones, in the row too."""
    n: int
    """How many places there are. Two places never share a byte."""
    places: list[tuple[int, int]]
    """Tokens ``[start, stop)`` that hold each place; of many the first 2,000."""
    missing: str
    """Why nothing can be found; empty when the row was searched."""


def find_text(table: ByteTable, ids: NDArray[np.int32], wanted: str) -> tuple[int, list[tuple[int, int]]]:
    """The number of places of ``wanted`` in the text of ``ids`` ``[n]``, and the tokens of the first ``MAX_PLACES``."""
    text, ends = table.joined(ids)
    text, needle = text.lower(), wanted.encode().lower()
    places: list[int] = []
    at = text.find(needle)
    while at >= 0 and len(places) < MAX_PLACES:
        places.append(at)
        at = text.find(needle, at + len(needle))
    n = len(places) + (text.count(needle, at) if at >= 0 else 0)
    first = np.searchsorted(ends, places, side="right")
    last = np.searchsorted(ends, [place + len(needle) - 1 for place in places], side="right")
    return n, [(int(a), int(b) + 1) for a, b in zip(first, last, strict=True)]


def find_page(trajectory: StoredTrajectory, row: RowSummary | None, text: str) -> FoundPlaces:
    """Every place of a text in a row. Reads the ids of the whole row."""
    text = text[:MAX_WANTED]
    if row is None:
        return FoundPlaces(0, text, 0, [], "There is no row.")
    table, missing = data.table_of(trajectory.run.tokenizer)
    if table is None or not text:
        return FoundPlaces(row.index, text, 0, [], missing or "No text was named: add ?q=TEXT.")
    tokens = data.read_tokens(trajectory, row, 0, row.n_tokens)
    n, places = find_text(table, tokens.ids, text)
    return FoundPlaces(row.index, text, n, places, "")


@dataclass(frozen=True)
class TokenAlternatives(Page):
    """What an engine told beside one sampled token."""

    row: int
    """The index of the row."""
    offset: int
    """The token, as its offset in the row."""
    sampled: TokenText | None
    """The token that was sampled; None when its log-probability was not recorded."""
    rank: int | None
    """Its place among the alternatives, from 1; None when it is not among them."""
    alternatives: list[TokenText]
    """The likeliest tokens at its place, likeliest first."""
    kept_tokens: list[TokenText]
    """The tokens that sampling could draw from, as far as they are stored."""
    entropy: float | None
    """In nats, of the whole distribution; None when the engine did not know it."""
    entropy_at_least: float | None
    """In nats, what follows from the alternatives alone; None when the entropy is known."""
    behind_likeliest: float | None
    """In nats, how far the sampled token stands behind the likeliest one."""
    missing: str
    """Why there are no alternatives; empty when there are some."""


def alternatives_page(
    trajectory: StoredTrajectory, row: RowSummary | None, steps: list[StepSummary], place: PagePlace
) -> TokenAlternatives:
    """The alternatives of the first token that the address marks. The number of queries is fixed."""
    offset = place.mark[0] if place.mark else 0
    if row is None or place.mark is None or place.notices:
        return _nothing(place.row, offset, " ".join(place.notices) or "No token was named: add ?row=0&t=OFFSET.")
    of_engine = engine_columns.beside_token(engine_columns.parts_beside(trajectory, row, steps), offset)
    if of_engine is None:
        return _nothing(place.row, offset, _why(row, steps, offset))
    logprob, (alternative_ids, logprobs), drawable, columns = of_engine
    if not len(alternative_ids) and not len(drawable):
        is_sized = engine_columns.KEPT_SET in columns
        words = "how many tokens it could draw from, and not which" if is_sized else "no alternatives"
        return _nothing(place.row, offset, f"Of this token the engine told {words}.")
    token_id = int(data.read_tokens(trajectory, row, offset, offset + 1, steps).ids[0])
    table, _ = data.table_of(trajectory.run.tokenizer)
    sampled = None
    if logprob is not None:
        (sampled,) = token_texts(table, ids_array([token_id]), np.array([logprob]))
    ids = alternative_ids.tolist()
    return TokenAlternatives(
        row.index, offset, sampled, ids.index(token_id) + 1 if token_id in ids else None,
        token_texts(table, alternative_ids, logprobs), token_texts(table, drawable, None),
        columns.get(engine_columns.ENTROPY), columns.get(engine_columns.AT_LEAST),
        columns.get(engine_columns.BEHIND), "",
    )


def _nothing(row: int, offset: int, missing: str) -> TokenAlternatives:
    return TokenAlternatives(row, offset, None, None, [], [], None, None, None, missing)


def _why(row: RowSummary, steps: list[StepSummary], offset: int) -> str:
    own = [step for step in steps if step.index in row.steps]
    if not row.follows_steps and not own:
        return "This row has tokens of its own, and its source names no step that sampled them."
    if not row.follows_steps and any(step.n_alternatives or step.least_kept is not None for step in own):
        return "This token does not stand as a step sampled it, or the trajectory is too long to tell."
    if row.follows_steps and not any(0 <= offset - step.prompt_length < step.completion_length for step in own):
        return "No step of this row sampled this token, so it has no alternatives."
    return "No alternatives were kept for this step. A launch keeps them with “Alternatives per token”."
