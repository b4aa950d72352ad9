"""The alternatives that a server's answer names beside each token, where it names them by their ids. vLLM writes ids as
``token_id``, or as ``token_id:123`` when it is asked to. A token that is named by its text alone may be one of several
ids, so nothing is guessed: such an answer has no alternatives."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollout_inspector.formats import shapes
from rollout_inspector.formats.shapes import BadLine
from rollout_inspector.streams.alternatives import MAX_STORED, packed
from rollout_inspector.streams.trajectory import Ids

PREFIX = "token_id:"


def id_named(name: Any, where: str) -> int | None:
    """The id in ``token_id:123``; None for any other value. Raises :class:`BadLine` where no number follows."""
    if not isinstance(name, str) or not name.startswith(PREFIX):
        return None
    digits = name.removeprefix(PREFIX)
    if not (digits.isascii() and digits.isdigit() and len(digits) < 12):
        raise BadLine(f"{where} names a token that is no token_id:NUMBER.")
    return int(shapes.ids([int(digits)], where)[0])


def alternatives_of(entries: Any, completion_ids: Ids, where: str) -> dict[str, Any]:
    """The fields of a ``Step`` for the ``top_logprobs`` of each token; empty unless all are named by their ids.

    ``entries``: for each token a list of objects with ``logprob`` and a name, or an object of names and
    log-probabilities. A server adds the sampled token where it is not among the likeliest. It then has the least
    log-probability, and is left out. Raises :class:`BadLine`.
    """
    if not isinstance(entries, Sequence) or isinstance(entries, str) or len(entries) != len(completion_ids):
        return {}
    entries_by_token: list[list[tuple[int, float]]] = []
    for n, (entry, sampled) in enumerate(zip(entries, completion_ids.tolist(), strict=True)):
        pairs: dict[int, float] = {}
        for token_id, value in _pairs(entry, f"{where}[{n}]"):
            if token_id is None:
                return {}
            if value is not None:
                pairs[token_id] = value
        if len(pairs) > MAX_STORED:
            raise BadLine(f"{where}[{n}] names {len(pairs)} tokens; at most {MAX_STORED} are kept.")
        if len(pairs) > 1 and sampled in pairs and pairs[sampled] == min(pairs.values()):
            del pairs[sampled]
        entries_by_token.append(list(pairs.items()))
    alternatives = packed(entries_by_token)
    return {} if alternatives is None else {"alternative_ids": alternatives[0], "alternative_logprobs": alternatives[1]}


def _pairs(entry: Any, where: str) -> Iterator[tuple[int | None, float | None]]:
    """Id and log-probability of each token that an entry names; an id of None = only its text is known."""
    if entry is None:
        return
    if isinstance(entry, Mapping):
        for name, value in entry.items():
            yield id_named(name, where), shapes.number(value, where)
        return
    for entry_of_token in shapes.sequence(entry, where):
        entry_of_token = shapes.mapping(entry_of_token, where)
        token_id = shapes.whole(entry_of_token.get("token_id"), f"{where}.token_id", least=0)
        yield (
            id_named(entry_of_token.get("token"), where) if token_id is None else token_id,
            shapes.number(entry_of_token.get("logprob"), where),
        )
