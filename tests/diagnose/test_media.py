"""Placeholders of images: cut, miscounted, and whole, in the tokens of each family."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from rollout_inspector.diagnose import Diagnosis, examine
from rollout_inspector.diagnose.context import DiagnosisContext
from rollout_inspector.diagnose.media import FAMILIES, MediaFamily, check_media
from rollout_inspector.streams.interfaces import Codec
from rollout_inspector.streams.trajectory import Ids, Row, Step, Trajectory, ids_array
from tests.samples.model_setups import model_setup

WORD = 0
"""An id of plain text."""


@dataclass(frozen=True)
class FamilyCodec:
    """A vocabulary of a word and the control tokens of one family; the placeholder is 1."""

    family: MediaFamily

    @property
    def texts(self) -> list[str]:
        family = self.family
        return ["word", *dict.fromkeys(text for text in (*family.pads, family.opens, family.ends) if text)]

    @property
    def vocab_size(self) -> int:
        return len(self.texts)

    @property
    def special_ids(self) -> frozenset[int]:
        return frozenset(range(1, len(self.texts)))

    def token_bytes(self, ids: Ids) -> list[bytes]:
        return [self.texts[token].encode() for token in ids]

    def ids(self, n: int, opened: bool = True, ended: bool = True, tail: int = 2) -> Ids:
        """Two words, an image of ``n`` placeholders, and ``tail`` words."""
        edge = {text: [self.texts.index(text)] if text else [] for text in (self.family.opens, self.family.ends)}
        before, behind = edge[self.family.opens] * opened, edge[self.family.ends] * ended
        return ids_array([WORD, WORD, *before, *[1] * n, *behind, *[WORD] * tail])


def checked(codec: Any, ids: Ids, **source: Any) -> tuple[str, str]:
    """The evidence of the fault, and what is not known."""
    case = DiagnosisContext(Trajectory(""), codec, None)
    fault = check_media(case, ids, source)
    (lacks,) = case.media_lacks
    return (fault.evidence if fault else "", lacks)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: f"{family.medium} {family.pads[0]}")
def test_the_edges_of_media_are_there(family: MediaFamily) -> None:
    codec, n = FamilyCodec(family), family.count or 12
    assert checked(codec, codec.ids(n))[0] == ""
    if family.ends:
        cut = codec.ids(5, ended=False, tail=0)
        assert "the ids end there" in checked(codec, cut)[0]
        assert "other tokens follow" in checked(codec, codec.ids(5, ended=False))[0]
    if family.opens:
        assert f"without {family.opens}" in checked(codec, codec.ids(n, opened=False))[0]
        assert "before the placeholders" in checked(codec, codec.ids(0, ended=False, tail=0))[0]
    if family.count:
        assert "has 256" in checked(codec, codec.ids(200))[0]


def test_placeholders_are_counted_against_the_grid() -> None:
    codec = FamilyCodec(FAMILIES[0])
    assert checked(codec, codec.ids(40), image_grid_thw=[[1, 16, 10]]) == ("", "")
    assert checked(codec, codec.ids(40), multi_modal_inputs={"image_grid_thw": {"data": [[1, 16, 10]]}}) == ("", "")
    assert checked(codec, codec.ids(160), image_grid_thw=[[1, 16, 10]], merge_size=1) == ("", "")
    assert "16 <|image_pad|> stand at offset 3, and image_grid says 40" in checked(
        codec, codec.ids(16), image_grid_thw=[[1, 16, 10]]
    )[0]
    assert "1 image stand" not in checked(codec, codec.ids(1), image_grid_thw=[[1, 16, 10]])[0], "not expanded"
    assert checked(codec, codec.ids(1), image_grid_thw=[[1, 16, 10]])[1] == "number of image tokens"
    assert "the grid is of 2" in checked(codec, codec.ids(40), image_grid_thw=[[1, 16, 10]] * 2)[0]
    assert checked(codec, codec.ids(40)) == ("", "number of image tokens"), "never passed without a number"
    assert "No placeholder of image" in checked(codec, ids_array([WORD] * 4), image_grid_thw=[[1, 16, 10]])[0]
    case = DiagnosisContext(Trajectory(""), codec, None)  # type: ignore[arg-type]
    assert check_media(case, ids_array([WORD] * 4), {}) is None and not case.media_lacks


def test_frames_of_a_video_are_counted_together() -> None:
    """Qwen3-VL writes a time and a pair of edges for each frame."""
    codec = FamilyCodec(FAMILIES[1])
    frames = np.concatenate([codec.ids(4), codec.ids(4)])
    assert checked(codec, frames, video_grid_thw=[[2, 4, 4]]) == ("", "")
    assert "8 <|video_pad|> stand here, and video_grid says 12" in checked(codec, frames, video_grid_thw=[[3, 4, 4]])[0]


def test_placeholders_stand_in_their_ranges() -> None:
    codec = FamilyCodec(FAMILIES[0])
    right, beyond, beside = ({"image": [{"offset": offset, "length": 12}]} for offset in (3, 9, 4))
    assert checked(codec, codec.ids(12), mm_placeholders=right) == ("", "")
    assert "there are 18 ids" in checked(codec, codec.ids(12), mm_placeholders=beyond)[0]
    assert checked(codec, codec.ids(12), mm_placeholders=beside) == ("", "")  # the range may hold an edge
    assert "other tokens" in checked(codec, codec.ids(6, tail=9), mm_placeholders=right)[0]
    assert "there are 18 ids" in checked(None, codec.ids(12), mm_placeholders=beyond)[0]
    assert checked(None, codec.ids(12), mm_placeholders=right) == ("", "tokenizer")


def test_a_grid_of_another_shape_is_no_fault() -> None:
    codec = FamilyCodec(FAMILIES[0])
    grids: tuple[Any, ...] = ("x", [], [["a"]], [[1, 0, 3]], [[1, 2, 3, 4]], [[True, 2, 2]], 5, [[[[]]]])
    for grid in grids:
        assert checked(codec, codec.ids(40), image_grid_thw=grid)[0] == ""


def media_outcome(diagnosis: Diagnosis) -> tuple[Any, list[str]]:
    return diagnosis.checks.get("media"), [f.kind for f in diagnosis.findings if f.kind == "media_tokens_wrong"]


def test_rows_and_prompts_are_checked() -> None:
    """A tokenizer without placeholders: what can be told without them is told, the rest is not decided."""
    codec: Codec = model_setup("stable").codec
    ids = ids_array([5] * 30)
    ranges = {"image": [{"offset": 20, "length": 16}]}
    row = Row(ids=ids, loss_mask=np.arange(30) > 20, extra={"mm_placeholders": ranges})
    assert media_outcome(examine(Trajectory("t", rows=(row,)), codec)) == ("failed", ["media_tokens_wrong"])
    step = Step(ids[:20], ids[20:], extra=dict(row.extra))
    assert media_outcome(examine(Trajectory("t", (step,)), codec)) == ("failed", ["media_tokens_wrong"])
    plain = Trajectory("t", (Step(ids[:20], ids[20:]),))
    assert media_outcome(examine(plain, codec)) == (None, [])
    grid = Trajectory("t", (Step(ids[:20], ids[20:], extra={"image_grid_thw": [[1, 4, 4]]}),))
    assert media_outcome(examine(grid, None)) == (["tokenizer"], [])
    assert media_outcome(examine(grid, codec)) == (["placeholders in the vocabulary"], [])
