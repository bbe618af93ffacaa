"""Interface of the formats in which servers score a sequence, and what they share."""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
import numpy as np

from teacher.errors import TeacherProtocolError
from teacher.records import ScoredSequence, TeacherSequence


class ScoringApi(Protocol):
    """Format of requests and responses of one kind of server.

    Attributes:
        path: Path of the endpoint that scores a sequence.
        limit_flag: Option of the server that limits the number of log-probabilities. Empty if there is none.
    """

    path: str
    limit_flag: str

    def body(self, sequence: TeacherSequence, top_k: int, model: str) -> dict[str, Any]:
        """Return the body of the request that scores a sequence.

        Args:
            model: Name of the model at the server.
        """
        ...

    def scores(self, content: bytes, sequence: TeacherSequence, top_k: int) -> ScoredSequence:
        """Return the scores of a response.

        Raises:
            TeacherProtocolError: The response is no valid JSON, or has other positions or fewer ids.
        """
        ...


def decode(content: bytes, decoder: msgspec.json.Decoder[Any]) -> Any:
    """Return a decoded response.

    Raises:
        TeacherProtocolError: It is not the expected JSON, for example because it is truncated.
    """
    try:
        return decoder.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TeacherProtocolError(
            f"the response of {len(content)} bytes is not the expected JSON: {error}", entry="prompt_logprobs"
        ) from None


def as_top_k(logps_N: np.ndarray, ids_N: np.ndarray, n_rows: int, top_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Return flat entries as [T, K] arrays with the log-probabilities in descending order.

    Args:
        logps_N: Log-probabilities of the top-k of all rows, float32.
        ids_N: Their ids, int32.

    Raises:
        TeacherProtocolError: A row has fewer or more entries.
    """
    if len(ids_N) != n_rows * top_k:
        raise TeacherProtocolError(
            f"{len(ids_N)} log-probabilities for {n_rows} positions, expected {top_k} at each", entry="prompt_logprobs"
        )
    logps_TK, ids_TK = logps_N.reshape(n_rows, top_k), ids_N.reshape(n_rows, top_k)
    order_TK = np.argsort(-logps_TK, axis=1, kind="stable")
    return np.take_along_axis(logps_TK, order_TK, 1), np.take_along_axis(ids_TK, order_TK, 1)


def without_padding(scored: ScoredSequence, n_tokens: int) -> ScoredSequence:
    """Return scores in which ids from ``n_tokens`` on, which are rows of padding, are missing entries (-1, -inf).

    Their probability remains in the normalization, because a server of text cannot exclude it.
    """
    is_padding_TK = scored.topk_ids_TK >= n_tokens
    if not is_padding_TK.any():
        return scored
    order_TK = np.argsort(is_padding_TK, axis=1, kind="stable")
    logps_TK = np.where(is_padding_TK, -np.inf, scored.topk_logps_TK).astype(np.float32)
    ids_TK = np.where(is_padding_TK, -1, scored.topk_ids_TK).astype(np.int32)
    return ScoredSequence(
        np.take_along_axis(logps_TK, order_TK, 1), np.take_along_axis(ids_TK, order_TK, 1), scored.sampled_logps_T
    )
