"""Texts for people: escapes, cuts between characters, and columns of a terminal."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from teacher.common.display_text import count_columns, excerpt, make_visible, pad_left, pad_right, shorten

ANY_TEXT = st.text(st.characters(exclude_categories=()))
"""Texts with control characters and halves of surrogate pairs."""
FAMILY, THUMB, FLAGS, ACCENT = "👨‍👩‍👧‍👦", "👍🏽", "🇩🇪🇫🇷", "e\u0301"


class TestMakeVisible:
    @given(ANY_TEXT)
    def test_result_is_one_line_that_controls_nothing(self, text: str) -> None:
        shown = make_visible(text)
        assert not {unicodedata.category(char) for char in shown} & {"Cc", "Cs", "Zl", "Zp"}
        assert not {unicodedata.bidirectional(char) for char in shown} & {"RLO", "LRO", "RLE", "LRE", "RLI", "LRI"}
        assert len(f"{shown}|".encode().decode().splitlines()) == 1

    @given(ANY_TEXT)
    def test_result_is_a_fixed_point(self, text: str) -> None:
        assert make_visible(make_visible(text)) == make_visible(text)

    def test_escapes_are_those_of_python(self) -> None:
        assert make_visible("\x00\x1b[31m\r\n\x9b\u202e\ud83d") == r"\x00\x1b[31m\r\n\x9b\u202e\ud83d"

    def test_characters_to_keep_remain(self) -> None:
        assert make_visible("a\n\tb\r", keep="\n\t") == "a\n\tb\\r"

    @pytest.mark.parametrize("text", ["你好", "שלום", "مرحبا", FAMILY, ACCENT, "می‌خواهم", "\ufffd"])
    def test_text_of_all_languages_is_unchanged(self, text: str) -> None:
        assert make_visible(text) == text


class TestCuts:
    @given(ANY_TEXT, st.integers(0, 20))
    def test_shorten_returns_the_beginning(self, text: str, n: int) -> None:
        cut = shorten(text, n, "")
        assert text.startswith(cut) and len(cut) <= n
        assert shorten(text, len(text)) == text

    @given(ANY_TEXT, st.integers(2, 20))
    def test_excerpt_returns_beginning_and_end(self, text: str, n: int) -> None:
        shown = excerpt(text, n)
        if len(text) <= n:
            assert shown == text
        else:
            assert len(shown) <= n + len(" ... ")
            assert any(text.startswith(shown[:i]) and text.endswith(shown[i + 5 :]) for i in range(len(shown) - 4))

    @pytest.mark.parametrize("char", [FAMILY, THUMB, FLAGS[:2], ACCENT, "\u1112\u1161\u11ab"])
    def test_cut_divides_no_character(self, char: str) -> None:
        text = char * 9
        for n in range(2 * len(char), len(text)):
            assert len(shorten(text, n, "")) % len(char) == 0
            begin, _, end = excerpt(text, n).partition(" ... ")
            assert len(begin) % len(char) == len(end) % len(char) == 0

    def test_text_of_marks_only_is_cut_too(self) -> None:
        assert shorten("\u0301" * 1000, 100, "") == "\u0301" * 100


class TestColumns:
    @pytest.mark.parametrize(
        ("text", "n_columns"), [("abc", 3), ("你好", 4), (ACCENT, 1), (FAMILY, 2), (THUMB, 2), ("שלום", 4), ("ﾊﾛ", 2)]
    )
    def test_columns_of_a_terminal_are_counted(self, text: str, n_columns: int) -> None:
        assert count_columns(text) == n_columns
        assert pad_right(text, 6) == text + " " * (6 - n_columns)
        assert pad_left(text, 6) == " " * (6 - n_columns) + text
