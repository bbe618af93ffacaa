"""Tokens of validation responses with their KL divergences, for the report.

Field ``tokens`` of a record in ``validation/step_N.jsonl``, with ``trainer.val_kl``::

    texts   text of each token. A character whose bytes are divided among tokens is at the first of them, and the
            others have an empty text
    kl      forward KL(teacher || student) at each token in nats; null for tokens that no teacher has scored
    turns   index of the first token of each turn

A file has at most :data:`MAX_TOKENS` tokens, of evenly spaced responses.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from tokenizers.decoders import DecodeStream

from recipe_gkd.data.samples import Response

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

TOKENS = "tokens"
"""Name of the field."""
MAX_TOKENS = 100_000
"""Tokens in the file of a validation, about 2 MB. The other responses are without the field."""
_DIGITS = 4


def token_fields(
    responses: Sequence[Response], kl_T: Sequence[np.ndarray], tokenizer: PreTrainedTokenizerBase
) -> list[dict[str, Any] | None]:
    """Return the field of each response, None for a response that has none.

    Args:
        responses: Responses of a validation.
        kl_T: Forward KL at each token of each response in nats; NaN at tokens that no teacher has scored.
        tokenizer: The student's.
    """
    n_tokens, every = sum(len(response.ids) for response in responses), 1
    while n_tokens > MAX_TOKENS * every and every < len(responses):
        every *= 2  # so that the same responses have it when the lengths change a little
    return [
        _field(response, values, tokenizer) if index % every == 0 else None
        for index, (response, values) in enumerate(zip(responses, kl_T, strict=True))
    ]


def _field(response: Response, kl_T: np.ndarray, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
    rounded = [float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None for value in kl_T.tolist()]
    return {"texts": token_texts(response.ids.tolist(), tokenizer), "kl": rounded, "turns": response.turn_starts}


def token_texts(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each token, with special tokens.

    Returns:
        Texts whose concatenation is the text of all tokens. A character whose bytes are divided among tokens is at the
        first of them. Incomplete characters are U+FFFD.
    """
    texts, first, stream = [""] * len(ids), 0, DecodeStream(skip_special_tokens=False)
    for index, token_id in enumerate(ids):
        try:
            text = stream.step(tokenizer.backend_tokenizer, token_id)
        except Exception:  # noqa: BLE001 - tokenizers has no narrower type; it refuses bytes that end no character
            text, stream = _decode(ids[first : index + 1], tokenizer), DecodeStream(skip_special_tokens=False)
        if text is not None:
            texts[first], first = text, index + 1
    if first < len(ids):
        texts[first] = _decode(ids[first:], tokenizer)
    return texts


def _decode(ids: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> str:
    return str(tokenizer.decode(list(ids), skip_special_tokens=False))
