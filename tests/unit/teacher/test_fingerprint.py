"""Fingerprints are equal if and only if each id stands for the same token."""

from __future__ import annotations

from pathlib import Path

from teacher import tokenizer_fingerprint


class Vocabulary:
    def __init__(self, **vocabulary: int) -> None:
        self._vocabulary = vocabulary

    def get_vocab(self) -> dict[str, int]:
        return self._vocabulary


def test_fingerprint_depends_on_ids_and_tokens_not_order() -> None:
    base = tokenizer_fingerprint(Vocabulary(a=0, b=1, cd=2))
    assert base == tokenizer_fingerprint(Vocabulary(cd=2, b=1, a=0))
    others = [Vocabulary(a=1, b=0, cd=2), Vocabulary(a=0, b=1), Vocabulary(a=0, b=1, ce=2), Vocabulary(a=0, b=1, cd=3)]
    assert len({base, *map(tokenizer_fingerprint, others)}) == 5


def test_fingerprint_separates_adjacent_entries() -> None:
    pair = Vocabulary(**{"1:2": 0}), Vocabulary(**{"2": 0, "1:": 1})
    assert tokenizer_fingerprint(pair[0]) != tokenizer_fingerprint(pair[1])


def test_fingerprint_includes_added_tokens_not_eos_choice(tiny_qwen2: Path) -> None:
    from transformers import AutoTokenizer

    one, two = (AutoTokenizer.from_pretrained(tiny_qwen2) for _ in range(2))
    two.eos_token = "<pad>"
    assert tokenizer_fingerprint(one) == tokenizer_fingerprint(two)
    two.add_tokens(["<tool>"])
    assert tokenizer_fingerprint(one) != tokenizer_fingerprint(two)
