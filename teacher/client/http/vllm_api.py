"""Format of ``vllm serve``: ``prompt_logprobs`` of ``/v1/completions``, or of ``/inference/v1/generate``.

A position's entry maps an id to its log-probability and rank, and has the token of the sequence in addition to the
top-k if it is not among them. An entry without a rank is that token. vLLM replaces -inf by -9999, because JSON has no
infinity. It returns entries for all positions of the prompt too, as it has no parameter for the first position.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import msgspec
import numpy as np

from teacher.client.http.scoring_api import as_top_k, decode
from teacher.errors import TeacherProtocolError
from teacher.records import ScoredSequence, TeacherSequence

_MINUS_INFINITY = -9999.0


class _Entry(msgspec.Struct):
    logprob: float
    rank: int | None = None


_Positions = list[dict[int, _Entry] | None]


class _Choice(msgspec.Struct):
    prompt_logprobs: _Positions | None = None


class _Completion(msgspec.Struct):
    choices: list[_Choice]


class _Generated(msgspec.Struct):
    prompt_logprobs: _Positions | None = None


class CompletionsApi:
    """Endpoint ``/v1/completions``."""

    path = "/v1/completions"
    limit_flag = "--max-logprobs"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_Completion)

    def body(self, sequence: TeacherSequence, top_k: int, model: str) -> dict[str, Any]:
        """Return the body of a request; see `ScoringApi`. One token is generated, as vLLM has no lower limit."""
        return {
            "model": model,
            "prompt": sequence.token_ids.tolist(),
            "max_tokens": 1,
            "temperature": 0,
            "prompt_logprobs": top_k,
        }

    def scores(self, content: bytes, sequence: TeacherSequence, top_k: int) -> ScoredSequence:
        """Return the scores of a response; see `ScoringApi`."""
        completion: _Completion = decode(content, self._decoder)
        positions = completion.choices[0].prompt_logprobs if completion.choices else None
        return _scores(positions, sequence, top_k)


class GenerateApi:
    """Endpoint ``/inference/v1/generate``, the only one of a server that was started with ``--tokens-only``."""

    path = "/inference/v1/generate"
    limit_flag = "--max-logprobs"

    def __init__(self) -> None:
        self._decoder = msgspec.json.Decoder(_Generated)

    def body(self, sequence: TeacherSequence, top_k: int, model: str) -> dict[str, Any]:
        """Return the body of a request; see `ScoringApi`."""
        sampling = {"max_tokens": 1, "temperature": 0, "prompt_logprobs": top_k}
        return {"model": model, "token_ids": sequence.token_ids.tolist(), "sampling_params": sampling}

    def scores(self, content: bytes, sequence: TeacherSequence, top_k: int) -> ScoredSequence:
        """Return the scores of a response; see `ScoringApi`."""
        return _scores(decode(content, self._decoder).prompt_logprobs, sequence, top_k)


def _scores(positions: _Positions | None, sequence: TeacherSequence, top_k: int) -> ScoredSequence:
    n_tokens = len(sequence.token_ids)
    if positions is None or len(positions) != n_tokens:
        found = "no prompt_logprobs" if positions is None else f"prompt_logprobs of {len(positions)} positions"
        raise TeacherProtocolError(f"{found}, expected {n_tokens}", entry="prompt_logprobs")
    rows = [positions[position] or {} for position in sequence.scored_positions_T.tolist()]
    response = sequence.scored_ids_T.tolist()
    try:
        sampled_T = np.array([row[token].logprob for row, token in zip(rows, response, strict=True)], np.float32)
    except KeyError as error:
        raise TeacherProtocolError(
            f"no log-probability of the token {error} of the sequence at its position", entry="prompt_logprobs"
        ) from None
    ids_N = np.fromiter(chain.from_iterable(rows), np.int32)
    entries = list(chain.from_iterable(row.values() for row in rows))
    logps_N = np.array([entry.logprob for entry in entries], np.float32)
    is_top_N = np.array([entry.rank or top_k + 1 for entry in entries]) <= top_k
    logps_TK, ids_TK = as_top_k(logps_N[is_top_N], ids_N[is_top_N], len(rows), top_k)
    return ScoredSequence(_with_infinity(logps_TK), ids_TK, _with_infinity(sampled_T))


def _with_infinity(logps: np.ndarray) -> np.ndarray:
    return np.where(logps <= _MINUS_INFINITY, np.float32(-np.inf), logps)
