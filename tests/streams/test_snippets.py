"""Snippets: whole characters, cuts that are seen, differences that are shown."""

import pytest

from rollout_inspector.streams.snippets import clipped, contrast, listed, quoted, window_text
from rollout_inspector.streams.trajectory import ids_array

FAMILY = "👩‍👩‍👧"
FLAG = "🇩🇪"


def test_a_short_text_is_quoted_whole_and_a_long_one_ends_at_a_word() -> None:
    assert quoted("a\nb") == r"'a\nb'" and quoted("it's") == '"it\'s"'
    assert quoted("You are a helpful assistant. Please answer", 30) == "'You are a helpful assistant.' …"
    assert quoted("x" * 50, 20) == f"'{'x' * 20}' …"
    assert "\u202e" not in quoted("\u202eabc")


@pytest.mark.parametrize("whole", [FAMILY, FLAG, "é", "👍🏽", "नि"])
def test_a_cut_never_goes_through_a_character(whole: str) -> None:
    for room in range(1, len(whole)):
        assert clipped("a" * 20 + whole + "b" * 20, 20 + room) in ("a" * 20, "a" * 20 + whole)


def test_two_texts_are_shown_where_they_differ() -> None:
    head = '[{"name": "calculator", "arguments": {"expression": '
    one, other = contrast(head + '"274*546"}}]', head + '"274 times 546"}}]')
    assert one.startswith("… ") and "274*546" in one and "274 times 546" in other
    call = "A sentence of some words.\n<tool_call>\n"
    assert contrast(call + '{"a":1}', call + '{"a": 1}')[0] == r"""… 'tool_call>\n{"a":1}'"""
    assert contrast("", " ") == ("nothing", "' '")
    assert contrast("same", "same and more") == ("'same'", "'same and more'")
    assert contrast("\n\n\n", "\n") == (r"'\n\n\n'", r"'\n'")


def test_ids_say_how_many_there_are() -> None:
    assert listed([1, 2]) == "[1, 2]" and listed(ids_array([])) == "[]"
    assert listed(ids_array(range(20)), 3) == "[0, 1, 2, … 20 in all]"


def test_a_window_of_tokens_drops_halves_of_characters_at_its_own_cuts_alone() -> None:
    data = "é👍x👍é".encode()
    assert window_text(data, False, False) == "é👍x👍é"
    assert window_text(data[1:-1], True, True) == "…👍x👍…"
    assert window_text(data[3:-3], True, True) == "…x…"
    assert window_text(data[:-1], False, True) == "é👍x👍…"
    # Half a character that the model sampled is shown as what it is.
    assert window_text(b"a\xf0\x9f", False, False) == "a\ufffd"
    for cut in range(len(data)):
        assert "\ufffd" not in window_text(data[cut:], cut > 0, False) + window_text(data[:cut], False, True)
    assert window_text(b"", True, True) == "……"
