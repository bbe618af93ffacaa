"""What has to be the same of two tokenizers: which ids there are, and what each means."""

from __future__ import annotations

import hashlib
from typing import Protocol


class HasVocabulary(Protocol):
    """The one method needed; every `transformers` tokenizer has it, and it includes the added tokens."""

    def get_vocab(self) -> dict[str, int]: ...


def count_ids(tokenizer: HasVocabulary) -> int:
    """One more than the largest id: rows of an output layer from there on are padding."""
    return 1 + max(tokenizer.get_vocab().values())


def tokenizer_fingerprint(tokenizer: HasVocabulary) -> str:
    """Stable hash of the (id, token) map, added tokens included.

    Top-k distillation compares two distributions id by id, so what has to agree is what each id stands for. Which ids
    end, pad or begin a text is left out on purpose: a base and an instruct model of one family share the map but not
    the end-of-sequence id, and distilling one into the other is sound. Merges and chat template are left out too: the
    teacher is given ids, it never tokenizes.

    Returns: "sha256:" and 64 hexadecimal digits.
    """
    digest = hashlib.sha256()
    for token_id, token in sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items()):
        text = token.encode("utf-8", "surrogatepass")
        # Lengths are part of the hash: without them ("1", "23") and ("12", "3") would look alike.
        digest.update(b"%d:%d:" % (token_id, len(text)))
        digest.update(text)
    return f"sha256:{digest.hexdigest()}"
