r"""Texts for people: terminal tables, log lines and HTML pages.

Texts of models and data have any character. The policy for all of them:

- A character that has no glyph and can change its surroundings is shown as its Python escape, such as ``\x1b``. These
  are control characters, line separators, bidirectional controls and halves of surrogate pairs.
- U+FFFD stays: the decoder writes it where the bytes of a character are incomplete.
- A long text is cut between characters as a reader counts them, see :func:`shorten`.
"""

from __future__ import annotations

import re
import unicodedata

MAX_CLUSTER = 32
"""Code points before or after a cut that are searched for the border of a character."""
_ZWJ = "\u200d"
_INVISIBLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ud800-\udfff\ufeff\ufff9-\ufffb]"
)
_EXTENDING = re.compile("[\u1160-\u11ff\U0001f3fb-\U0001f3ff\U000e0020-\U000e007f]")
"""Vowels and final consonants of Hangul syllables, skin tones, and tags of flags. They belong to the one before."""
_FLAG_LETTER = re.compile("[\U0001f1e6-\U0001f1ff]")


def make_visible(text: str, keep: str = "") -> str:
    r"""Return a text with escapes instead of characters that could break a terminal, a table or a page.

    Args:
        text: Any text, also one with halves of surrogate pairs.
        keep: Characters that remain, such as ``"\n"`` where a text may have several lines.
    """
    return _INVISIBLE.sub(lambda match: match[0] if match[0] in keep else _escape(match[0]), text)


def _escape(char: str) -> str:
    return char.encode("unicode_escape").decode("ascii")


def shorten(text: str, max_chars: int, mark: str = "...") -> str:
    """Return the beginning of a text, followed by ``mark`` if the text is longer.

    The cut is between characters as a reader counts them: not inside an emoji of several code points, nor between a
    letter and its accent.

    Args:
        text: Text before :func:`make_visible`, which may divide no escape.
        max_chars: Maximum number of code points, ``mark`` excluded.
    """
    return text if len(text) <= max_chars else text[: _border(text, max_chars, -1)] + mark


def excerpt(text: str, max_chars: int) -> str:
    """Return the beginning and the end of a text that is longer than ``max_chars`` code points; see :func:`shorten`."""
    if len(text) <= max_chars:
        return text
    half = max_chars // 2
    return f"{text[: _border(text, half, -1)]} ... {text[_border(text, len(text) - half, 1) :]}"


def _border(text: str, cut: int, direction: int) -> int:
    """Return the border of a character that is next to ``cut`` in a direction; ``cut`` if all are far away."""
    for index in range(cut, cut + direction * MAX_CLUSTER, direction):
        if not 0 < index < len(text) or not _is_inside(text, index):
            return min(max(index, 0), len(text))
    return cut


def _is_inside(text: str, index: int) -> bool:
    """Return True if the code points before and after ``index`` belong to one character."""
    before, after = text[index - 1], text[index]
    if _ZWJ in (before, after) or _EXTENDING.match(after) or unicodedata.category(after).startswith("M"):
        return True
    if not _FLAG_LETTER.match(after):
        return False
    n_letters = 0  # two letters are one flag
    while n_letters < min(index, MAX_CLUSTER) and _FLAG_LETTER.match(text[index - 1 - n_letters]):
        n_letters += 1
    return n_letters % 2 == 1


def count_columns(text: str) -> int:
    """Return the number of terminal columns of a text without control characters.

    East Asian wide characters and emojis have two columns, accents and joiners none.
    """
    if text.isascii():
        return len(text)
    return sum(map(_columns, "\0" + text, text))


def _columns(before: str, char: str) -> int:
    if before == _ZWJ or _EXTENDING.match(char) or unicodedata.category(char) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


def pad_right(text: str, n_columns: int) -> str:
    """Return a text with spaces after it, so that it fills ``n_columns`` terminal columns."""
    return text + " " * (n_columns - count_columns(text))


def pad_left(text: str, n_columns: int) -> str:
    """Return a text with spaces before it, so that it fills ``n_columns`` terminal columns."""
    return " " * (n_columns - count_columns(text)) + text
