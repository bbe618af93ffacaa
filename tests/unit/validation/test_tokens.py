"""Tokens of validation responses: their texts, their divergences, and which responses have them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe_gkd.data.samples import InsertedTokens, Response, Rewrite
from recipe_gkd.validation import tokens as tokens_module
from recipe_gkd.validation.tokens import token_fields, token_texts


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each byte, and a special token with the last id."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({byte: index for index, byte in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>")


TOKENIZER = byte_tokenizer()


def response(ids: Sequence[int], **more: object) -> Response:
    ids_T = np.array(ids, np.int32)
    zeros_T = np.zeros(len(ids))
    return Response(
        uid=0, ids=ids_T, logprobs=zeros_T, finish_reason="stop", weights_version=0, versions_T=zeros_T, **more
    )  # type: ignore[arg-type]


def test_divided_character_is_at_its_first_token() -> None:
    ids = TOKENIZER("a你🤖.<|end|>")["input_ids"]
    assert token_texts(ids, TOKENIZER) == ["a", "你", "", "", "🤖", "", "", "", ".", "<|end|>"]


def test_incomplete_character_at_the_end_is_visible() -> None:
    assert token_texts(TOKENIZER("a你")["input_ids"][:-1], TOKENIZER) == ["a", "\ufffd", ""]


@given(st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=40))
def test_texts_of_any_tokens_are_those_of_the_response(ids: list[int]) -> None:
    texts = token_texts(ids, TOKENIZER)
    assert len(texts) == len(ids)
    visible = "".join(texts).replace("\ufffd", "")
    assert visible == TOKENIZER.decode(ids, skip_special_tokens=False).replace("\ufffd", "")


def test_turns_begin_where_tokens_were_added_or_the_history_was_written_anew() -> None:
    ids = TOKENIZER("abcd")["input_ids"]
    inserted = InsertedTokens(ids_N=np.zeros(2, np.int32), before_N=np.array([1, 1], np.int32))
    conversation = response(ids, inserted=inserted, rewrites=(Rewrite(before=3, context_ids=np.zeros(2, np.int32)),))
    [field] = token_fields([conversation], [np.array([0.12345, np.nan, 0, 2], np.float32)], TOKENIZER)
    assert field == {"texts": list("abcd"), "kl": [0.1235, None, 0.0, 2.0], "turns": [0, 1, 3]}


@pytest.mark.parametrize(("limit", "expected"), [(100, range(7)), (20, range(0, 7, 2)), (9, [0, 4]), (1, [0])])
def test_large_validation_has_the_tokens_of_some_responses(
    limit: int, expected: Sequence[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tokens_module, "MAX_TOKENS", limit)
    responses = [response(TOKENIZER("abcd")["input_ids"])] * 7
    fields = token_fields(responses, [np.zeros(4, np.float32)] * 7, TOKENIZER)
    assert [index for index, field in enumerate(fields) if field is not None] == list(expected)
