"""Two tokenizers on one text are aligned by bytes: every byte is covered, and no group could be cut further."""

from collections import Counter
from itertools import combinations
from pathlib import Path

import numpy as np

from rollout_inspector.streams.align import AlignedGroup, align_same_bytes
from rollout_inspector.streams.trajectory import ids_array
from rollout_inspector.text.tokenizers import load

TEXTS = (
    "The answer is 172, not 17.2: see line 40.\n\n    return f(x) ** 2  # ok",
    '{"name": "search", "arguments": {"q": "caf\u00e9 \u6771\u4eac", "n": 3}}',
    ("\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u0e2a\u0e27\u0e31\u0e2a\u0e14\u0e35 "
     "\u05e9\u05dc\u05d5\u05dd"),
    "HAVING\tcount(*) >= 1000000;   \r\n\u3000end",
)


def test_fifteen_pairs_of_tokenizers_cover_every_byte(corpus: Path) -> None:
    folders = sorted(folder for folder in (corpus / "tokenizers").iterdir() if folder.is_dir())
    codecs = {folder.name: load(folder) for folder in folders}
    sides = {}
    for name, codec in codecs.items():
        streams = [ids_array(codec.encode(text)) for text in TEXTS]
        sides[name] = [(ids, codec.token_bytes(ids)) for ids in streams]
        # Some tokenizers change spaces or accents: the texts must be held by all of them alike.
        assert [b"".join(pieces) for _, pieces in sides[name]] == [text.encode() for text in TEXTS], name
    pairs, shapes = list(combinations(codecs, 2)), Counter[str]()
    assert len(pairs) >= 12
    for left, right in pairs:
        for (left_ids, left_bytes), (right_ids, right_bytes) in zip(sides[left], sides[right], strict=True):
            groups = align_same_bytes(left_bytes, right_bytes, left_ids, right_ids)
            assert covered(groups, left_bytes, right_bytes) == sum(map(len, left_bytes))
            shapes.update(shape(group) for group in groups)
    assert {"one to one", "many to one", "one to many", "many to many"} == set(shapes)


def covered(groups: list[AlignedGroup], left: list[bytes], right: list[bytes]) -> int:
    """The bytes that groups hold on both sides alike. Fails where they leave something out or could be cut."""
    place, n = (0, 0), 0
    for group in groups:
        assert (group.left_start, group.right_start) == place
        place = group.left_stop, group.right_stop
        ours, theirs = left[group.left_start : group.left_stop], right[group.right_start : group.right_stop]
        assert b"".join(ours) == b"".join(theirs)
        n += sum(map(len, ours))
        if not group.equal:
            inner = [set(np.cumsum([len(piece) for piece in side])[:-1].tolist()) for side in (ours, theirs)]
            assert not inner[0] & inner[1]
    assert place == (len(left), len(right))
    return n


def shape(group: AlignedGroup) -> str:
    """How many tokens of the teacher stand against how many of the student."""
    if group.equal:
        return "one to one"
    sides = (group.left_stop - group.left_start, group.right_stop - group.right_start)
    return " to ".join("one" if n == 1 else "many" for n in sides)
