"""Token HTML: hostile text stays text, bytes stay bytes, and the copy of a page is what was sampled."""

import re
import unicodedata
from html.parser import HTMLParser

import numpy as np
import pytest
from hypothesis import given, strategies as st

from inspector.trajectories.place import PagePlace
from inspector.trajectories.tokens.finding_marks import DiffIds, row_marks
from inspector.trajectories.tokens.findings import DrawnFinding
from rollout_inspector.streams.trajectory import Tokens, ids_array
from rollout_inspector.text.html.text import characters, runs_right_to_left, split_fragments, text_html
from rollout_inspector.text.html.tokens import (
    MAX_LINE_BLOCKS, NO_LOGPROB, Marks, TokenPainter, gap_html, logprob_classes
)
from rollout_inspector.text.tokenizers import ByteTable
from rollouts.store.models import StoredFinding

WORDS = (" the", "\n\n", "<script>alert(1)</script>", "\u202eevil", "naïve", "\t\r\n", "<|im_end|>")


class Table(ByteTable):
    """Id 0-255 = that byte, then some words, then one control token."""

    vocab_size = 256 + len(WORDS)

    def __init__(self) -> None:
        pieces = [*(bytes([i]) for i in range(256)), *(word.encode() for word in WORDS)]
        special = np.zeros(self.vocab_size, dtype=np.bool_)
        special[-1] = True
        offsets = np.cumsum([0, *map(len, pieces)]).astype(np.uint32)
        super().__init__(offsets, b"".join(pieces), special, "byte_level")


class Copied(HTMLParser):
    """The text of a page, and each tag with its attributes."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.depth = 0
        self.pieces: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag == "i":
            self.pieces.append("")

    def handle_data(self, data):
        self.text.append(data)
        if self.pieces:
            self.pieces[-1] += data


def tokens(ids, start=0, origin=0, mask=False, logprobs=None):
    ids = np.asarray(ids, dtype=np.int32)
    return Tokens(
        start,
        ids,
        np.broadcast_to(np.asarray(origin, dtype=np.uint8), ids.shape).copy(),
        np.broadcast_to(np.asarray(mask, dtype=np.bool_), ids.shape).copy(),
        None if logprobs is None else np.asarray(logprobs, dtype=np.float32),
    )


@given(st.text())
def test_the_copy_of_escaped_text_is_the_text(text):
    copied = Copied(text_html(text, spaces=True))
    assert "".join(copied.text) == text.replace("\x00", "\ufffd")
    assert {tag for tag, _ in copied.tags} <= {"b", "bdi"}


@given(st.binary(max_size=60))
def test_characters_lose_no_byte(data):
    assert b"".join(chunk for _, chunk, _ in characters(data)) == data
    assert "".join(char for _, _, char in characters(data) if char) == data.decode("utf-8", "ignore")


@given(st.text(min_size=1, max_size=12), st.data())
def test_tokens_that_cut_characters_still_show_each_once(text, data):
    raw = text.encode()
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=6)))
    pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]
    fragments = split_fragments(pieces)
    assert "".join(Copied("".join(html for html, _, _ in fragments)).text) == text.replace("\x00", "\ufffd")
    assert sum(opens for _, opens, _ in fragments) == sum(closes for _, _, closes in fragments)


@given(st.lists(st.integers(0, Table.vocab_size - 1), min_size=1, max_size=80))
def test_an_element_per_token_in_order(ids):
    copied = Copied(TokenPainter(Table()).window(tokens(ids)))
    assert len(copied.pieces) == len(ids)
    table = Table()
    raw = b"".join(table.token_bytes(np.asarray(ids)))
    if b"\x00" not in raw and raw.decode("utf-8", "replace").encode() == raw:
        assert "".join(copied.pieces).encode() == raw


@given(st.lists(st.integers(0, Table.vocab_size - 1), max_size=80), st.integers(1, 9))
def test_runs_and_blocks_hold_the_same_text(ids, size):
    table = Table()
    blocks = list(TokenPainter(table).blocks(tokens(ids, start=7), size=size))
    raw = b"".join(table.token_bytes(np.asarray(ids, dtype=np.int32)))
    assert "".join(Copied("".join(html for _, _, html in blocks)).text).count("\ufffd") >= raw.count(b"\xff")
    if b"\x00" not in raw and raw.decode("utf-8", "replace").encode() == raw and not any(Table().special[ids]):
        assert "".join(Copied("".join(html for _, _, html in blocks)).text).encode() == raw
    assert [start for start, _, _ in blocks[1:]] == [stop for _, stop, _ in blocks[:-1]]
    assert not ids or (blocks[0][0], blocks[-1][1]) == (7, 7 + len(ids))


@given(st.lists(st.sampled_from([65, 66, 10]), min_size=30, max_size=200))
def test_a_block_ends_where_a_line_ends(ids):
    table = Table()
    blocks = list(TokenPainter(table).blocks(tokens(ids), size=5))
    longest = max(len(line) for line in bytes(ids).split(b"\n"))
    if longest < 5 * MAX_LINE_BLOCKS - 10:
        assert all(ids[stop - 1] == 10 for _, stop, _ in blocks[:-1])


def test_a_script_in_a_token_is_text():
    html = TokenPainter(Table()).window(tokens([258]))
    assert "<script" not in html
    assert "".join(Copied(html).text) == "<script>alert(1)</script>"


def test_a_bidi_override_is_isolated_and_named():
    html = TokenPainter(Table()).window(tokens([259]))
    assert "<bdi class=c data-x=202E>\u202e</bdi>evil" in html


def test_text_that_runs_from_right_to_left_is_known():
    wrong = []
    for code in range(0x110000):
        kind = unicodedata.bidirectional(letter := chr(code))
        if kind in ("R", "AL", "L") and not 0xD800 <= code < 0xE000 and code != 0x200F:  # a mark without a letter
            wrong += [letter] * (runs_right_to_left(letter.encode()) != (kind != "L"))
    assert not wrong, "of all letters of Unicode"
    painter = TokenPainter(Table())
    assert painter.runs_right_to_left(ids_array([97, *"م".encode()]))  # its two bytes are two tokens
    assert not painter.runs_right_to_left(ids_array([97, 98]))
    assert not TokenPainter(None).runs_right_to_left(ids_array([97]))


def test_a_split_character_is_bracketed_and_its_bytes_are_shown():
    html = TokenPainter(Table()).window(tokens([0xE2, 0x82, 0xAC]))
    assert Copied(html).pieces == ["€", "", ""]
    assert [attrs["data-x"] for tag, attrs in Copied(html).tags if tag == "i"] == ["E2", "82", "AC"]
    assert [attrs["class"] for tag, attrs in Copied(html).tags if tag == "i"] == ["s y yo", "y yo yc", "y yc"]


def test_a_lone_byte_is_shown_as_a_byte_and_a_real_replacement_character_is_not():
    lone = TokenPainter(Table()).window(tokens([0xFF]))
    real = TokenPainter(Table()).window(tokens([0xEF, 0xBF, 0xBD]))
    assert "data-x=FF" in lone
    assert "<bdi class=c data-x=FFFD>" in real
    assert "<bdi" not in lone


def test_an_edge_may_fall_inside_a_character():
    painter = TokenPainter(Table())
    stretch = tokens([0xE2, 0x82, 0xAC, 0x41], start=10)
    html = painter.window(stretch, margin=(1, 0))
    assert Copied(html).pieces == ["", "", "A"]
    assert "data-x=FF" not in html and "\ufffd" not in html


def test_states_are_classes_and_default_tokens_have_none():
    painter = TokenPainter(Table())
    html = painter.window(
        tokens([256, 256, 262], 100, origin=[0, 1, 2], mask=[False, True, False], logprobs=[np.nan, -0.5, np.nan]),
        Marks(faults=[(101, 102)], notes=[(100, 102)], chosen=(102, 103), foreign=[(100, 102)]),
    )
    assert [attrs for tag, attrs in Copied(html).tags if tag == "i"] == [
        {"class": "fi s"},
        {"class": "o1 m q3 f w s"},
        {"class": "o2 k s x"},
    ]


def test_a_screen_reader_is_told_where_origin_mask_or_finding_change():
    stretch = tokens([65, 66, 67, 68], origin=[0, 1, 1, 1], mask=[False, True, True, False])
    window = TokenPainter(Table()).window(stretch, Marks(notes=[(1, 2)], faults=[(1, 3)]))
    assert window == '<i class=s>A</i><i class="o1 m f s">B</i><i class="o1 m f">C</i><i class="o1 s">D</i>'
    # Each block begins with it, and runs that differ by a mark alone are not told again.
    blocks = list(TokenPainter(Table()).blocks(tokens([65, 66, 67, 10, 68]), Marks(chosen=(1, 2)), size=4))
    assert [re.findall(r"class=\"?([a-z]*)", html) for _, _, html in blocks] == [["s", "k", "n"], ["s"]]


def test_spaces_are_one_element_that_holds_them():
    assert text_html("a  b\n c", spaces=True) == "a<b>  </b>b<b class=n></b>\n<b> </b>c"
    assert text_html("a  b") == "a  b"


def test_a_finding_between_two_tokens_is_drawn_on_the_next():
    html = TokenPainter(Table()).window(tokens([65, 66, 67]), Marks(faults=[(1, 1)]))
    assert html == '<i class=s>A</i><i class="f s">B</i><i class=s>C</i>'


@pytest.mark.parametrize("held", [True, False])
def test_each_place_where_tokens_are_missing_has_its_own_caret(held):
    end = 256 + WORDS.index("<|im_end|>")
    places = ((101, 102), (103, 104))
    finding = StoredFinding(
        kind="special_tokens_dropped", severity="error", axis="stream", step_index=1, start=101, stop=103
    )
    item = DrawnFinding.of(finding, "code", 1, drawn_row=0, drawn_places=places, is_held=held)
    left, right = ids_array([end, 66, 67, end, end]), ids_array([66, 67])
    drawn = tokens([65, 66, 67, 68], 100)
    both = [DiffIds(item, "sampled", left, "read next", right, True)]
    gaps = row_marks(PagePlace(), [item], both, drawn, 104, TokenPainter(Table())).gaps
    words = {at: Copied(gap).tags[0][1]["data-gap"] for at, gap in gaps.items()}
    carets = {101: "1 token missing here: <|im_end|>", 103: "2 tokens missing here: <|im_end|><|im_end|>"}
    whole = {101: "5 sampled tokens replaced here: <|im_end|>BC<|im_end|><|im_end|>"}
    assert words == (carets if held else whole)


def test_a_gap_stands_in_the_token_behind_it_and_no_copy_holds_its_text():
    gap = gap_html("2 tokens missing here", '<b>"\n\u202e', "#finding-1")
    marks = Marks(gaps={101: gap})
    painter = TokenPainter(Table())
    for html in (
        painter.window(tokens([65, 66, 67], 100), marks),
        "".join(html for _, _, html in painter.blocks(tokens([65, 66, 67], 100), marks)),
    ):
        read = Copied(html)
        assert "".join(read.text) == "ABC"
        label = '2 tokens missing here: <b>"⏎<U+202E>'
        found = {"class": "gap", "href": "#finding-1", "data-gap": label, "aria-label": f"{label}. Show both sides."}
        assert [attrs for tag, attrs in read.tags if tag == "a"] == [found]
        assert html.index("A") < html.index("<a") < html.index("B")
    # In the token view each child of the pane is one token.
    assert Copied(painter.window(tokens([65, 66, 67], 100), marks)).pieces == ["A", "B", "C"]


def test_without_a_tokenizer_ids_are_shown_as_ids():
    painter = TokenPainter(None)
    assert painter.window(tokens([5, 6])) == '<i class="s u">5</i><i class=u>6</i>'
    assert "<u>5</u>" in next(painter.blocks(tokens([5, 6])))[2]


@pytest.mark.parametrize("outside", [-1, Table.vocab_size, 2**31 - 1])
def test_an_id_outside_the_vocabulary_is_shown_as_an_id(outside):
    painter = TokenPainter(Table())
    assert painter.window(tokens([outside])) == f'<i class="s u">{outside}</i>'
    assert f"<u>{outside}</u>" in next(painter.blocks(tokens([65, outside, 66])))[2]


def test_logprob_classes_cover_the_whole_range():
    values = np.asarray([0.0, -0.01, -0.05, -0.2, -0.5, -1.0, -2.0, -3.0, -8.0, -50.0, -np.inf, np.nan], np.float32)
    assert logprob_classes(values, 12).tolist() == [0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, NO_LOGPROB]
    assert logprob_classes(None, 2).tolist() == [NO_LOGPROB, NO_LOGPROB]


def test_the_memo_does_not_mix_states():
    painter = TokenPainter(Table())
    first = painter.window(tokens([256, 0xC3, 0xA9], mask=True))
    assert painter.window(tokens([256, 0xC3, 0xA9])) != first
    assert painter.window(tokens([256, 0xC3, 0xA9], mask=True)) == first
