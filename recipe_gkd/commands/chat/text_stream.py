"""Text of tokens that arrive one by one."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


class TextStream:
    """Decoder of a growing sequence of tokens, which returns only complete characters.

    A character may have several tokens, and some tokenizers decode a token differently at the start of a text. New text
    is therefore the difference between two decoded windows that start at the same earlier token.

    Args:
        tokenizer: Tokenizer of the model.
        show_special_tokens: True to return the text of special tokens, too.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, show_special_tokens: bool) -> None:
        self.ids: list[int] = []
        self._tokenizer = tokenizer
        self._skips_special = not show_special_tokens
        self._window, self._returned = 0, 0  # the window's first token; number of tokens whose text was returned

    def add(self, token_id: int) -> str:
        """Add a token, and return the text that is now complete. It may be empty."""
        self.ids.append(token_id)
        return "" if self._new_text().endswith(_INCOMPLETE) else self.flush()

    def flush(self) -> str:
        """Return the remaining text, even if its last character is incomplete."""
        text = self._new_text()
        if text:
            self._window, self._returned = self._returned, len(self.ids)
        return text

    def _new_text(self) -> str:
        before = self._decode(self.ids[self._window : self._returned])
        return self._decode(self.ids[self._window :])[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=self._skips_special))
