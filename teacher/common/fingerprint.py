"""Fingerprint of a tokenizer's vocabulary. Student and teacher must have the same one."""

from __future__ import annotations

import hashlib
from typing import Protocol

from teacher.records import LastToken


class HasVocabulary(Protocol):
    """Object with a vocabulary, such as every ``transformers`` tokenizer."""

    def get_vocab(self) -> dict[str, int]:
        """Return the id of each token, added tokens included."""
        ...


def count_ids(tokenizer: HasVocabulary) -> int:
    """Return the largest id plus one. Rows of an output layer from there on are padding."""
    return 1 + max(tokenizer.get_vocab().values())


N_LAST_TOKENS = 1024
"""Number of tokens that :func:`last_tokens` returns. A family may reserve several hundred."""
MAX_TEXT_CHARS = 64
"""Number of characters of a token that :func:`last_tokens` returns."""


def tokenizer_fingerprint(tokenizer: HasVocabulary) -> str:
    """Return a stable hash of the (id, token) map, added tokens included.

    Top-k distillation compares two distributions id by id, so each id must stand for the same token. Special tokens
    are not part of the hash: a base and an instruct model of one family share the map but not the end-of-sequence id,
    and distilling one into the other is valid. Merges and chat template are not part of it either, because the teacher
    receives ids and never tokenizes.

    Returns:
        "sha256:" and 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for token_id, token in _by_id(tokenizer):
        _update(digest, token_id, token)
    return f"sha256:{digest.hexdigest()}"


def last_tokens(tokenizer: HasVocabulary) -> tuple[LastToken, ...]:
    """Return the last :data:`N_LAST_TOKENS` tokens by id, each with the fingerprint of the tokens below it.

    A tokenizer whose fingerprint is one of these has the same tokens as this one, without its last ones.
    """
    tokens = _by_id(tokenizer)
    digest = hashlib.sha256()
    found = []
    for index, (token_id, token) in enumerate(tokens):
        if index >= len(tokens) - N_LAST_TOKENS:
            text = token[:MAX_TEXT_CHARS].encode("utf-8", "replace").decode()
            found.append(LastToken(token_id, text, f"sha256:{digest.hexdigest()}"))
        _update(digest, token_id, token)
    return tuple(found)


def _by_id(tokenizer: HasVocabulary) -> list[tuple[int, str]]:
    return sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())


def _update(digest: hashlib._Hash, token_id: int, token: str) -> None:
    text = token.encode("utf-8", "surrogatepass")
    # Without the length, the pairs ("1", "23") and ("12", "3") would have the same hash.
    digest.update(b"%d:%d:" % (token_id, len(text)))
    digest.update(text)
