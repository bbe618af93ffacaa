"""Requests of ``/v1/completions`` with ``prompt_logprobs``, and their responses, in the format of vLLM."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import numpy as np

from teacher.errors import TeacherRequestError
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence

MAX_SEQUENCES = 256
MINUS_INFINITY = -9999.0
"""Value in place of -inf, which JSON does not have. vLLM's is the same."""

Prompt = list[int | list[int] | str] | str
"""Ids of a sequence, or of several. Text is accepted here and refused with a reason."""


class CompletionRequest(msgspec.Struct):
    """Body of a request. Other fields of the OpenAI API are ignored, because no token is sampled.

    Attributes:
        prompt: See the type.
        prompt_logprobs: Log-probabilities per position, which the response has for the position's token in addition.
        max_tokens: 0 or 1. Nothing is generated in either case: a server of vLLM needs a 1.
    """

    prompt: Prompt
    model: str | None = None
    prompt_logprobs: int | None = None
    max_tokens: int | None = 1
    stream: bool = False


def read_request(body: bytes, info: TeacherInfo) -> CompletionRequest:
    """Return a checked request.

    Raises:
        TeacherRequestError: The body is no valid request, or asks for something else than scores.
    """
    try:
        request = msgspec.json.decode(body, type=CompletionRequest)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TeacherRequestError(f"the body is no request of this API: {error}") from None
    if request.model is not None and request.model != info.model_name:
        raise TeacherRequestError(f"model: got {request.model!r}, expected {info.model_name!r}", argument="model")
    if request.prompt_logprobs is None or not 0 <= request.prompt_logprobs <= info.n_logprobs:
        raise TeacherRequestError(
            f"prompt_logprobs: got {request.prompt_logprobs}, expected 0 to {info.n_logprobs} (N_LOGPROBS of the "
            "service)",
            argument="prompt_logprobs",
        )
    if (request.max_tokens or 0) > 1 or request.stream:
        raise TeacherRequestError(
            "this service scores sequences and generates no text; set max_tokens=1 and no stream",
            argument="max_tokens",
        )
    return request


def sequences_of(request: CompletionRequest) -> list[TeacherSequence]:
    """Return the sequences of a request. All positions after the first token are scored.

    Raises:
        TeacherRequestError: A prompt is text, has fewer than two tokens, or there are too many.
    """
    prompts = _as_list(request.prompt)
    if len(prompts) > MAX_SEQUENCES:
        raise TeacherRequestError(f"prompt: {len(prompts)} sequences, expected at most {MAX_SEQUENCES}")
    for ids in prompts:
        if len(ids) < 2:
            raise TeacherRequestError(f"prompt: got {len(ids)} tokens, expected at least 2", argument="prompt")
    return [TeacherSequence(ids, 1) for ids in prompts]


def _as_list(prompt: Prompt) -> list[list[int]]:
    """Return the ids of each sequence of a request."""
    sequences = prompt if isinstance(prompt, list) and prompt and isinstance(prompt[0], list) else [prompt]
    for sequence in sequences:
        if not isinstance(sequence, list) or not all(isinstance(token, int) for token in sequence):
            raise TeacherRequestError(
                "prompt: got text, expected lists of token ids: the service has no tokenizer", argument="prompt"
            )
    return cast(list[list[int]], sequences)


def response_body(
    request: CompletionRequest,
    info: TeacherInfo,
    sequences: Sequence[TeacherSequence],
    scored: Sequence[ScoredSequence],
) -> bytes:
    """Return the body of the response."""
    n_tokens = sum(len(sequence.token_ids) for sequence in sequences)
    top_k = request.prompt_logprobs or 0
    choices = [
        {
            "index": index,
            "text": "",
            "finish_reason": "length",
            "prompt_logprobs": _positions(sequence, scores, top_k),
        }
        for index, (sequence, scores) in enumerate(zip(sequences, scored, strict=True))
    ]
    return msgspec.json.encode(
        {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": info.model_name,
            "choices": choices,
            "usage": {"prompt_tokens": n_tokens, "completion_tokens": 0, "total_tokens": n_tokens},
        }
    )


def _positions(sequence: TeacherSequence, scores: ScoredSequence, top_k: int) -> list[dict[int, dict[str, Any]] | None]:
    """Return the entry of each position, null for the first. The position's token precedes the top-k, as in vLLM."""
    ids_TK, logps_TK = scores.topk_ids_TK[:, :top_k].tolist(), _finite(scores.topk_logps_TK[:, :top_k])
    sampled_T, tokens_T = _finite(scores.sampled_logps_T), sequence.token_ids[sequence.prompt_len :].tolist()
    positions: list[dict[int, dict[str, Any]] | None] = [None]
    for token, sampled, ids, logps in zip(tokens_T, sampled_T, ids_TK, logps_TK, strict=True):
        entries: dict[int, dict[str, Any]] = {token: {"logprob": sampled, "rank": None, "decoded_token": None}}
        for rank, (id_, logp) in enumerate(zip(ids, logps, strict=True), start=1):
            entries[id_] = {"logprob": logp, "rank": rank, "decoded_token": None}
        positions.append(entries)
    return positions


def _finite(logps: np.ndarray) -> list[Any]:
    return np.maximum(logps.astype(np.float32), np.float32(MINUS_INFINITY)).tolist()
