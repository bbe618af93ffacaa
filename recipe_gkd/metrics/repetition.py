"""Repetition in responses: a student that loops repeats the same tokens until the response is truncated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from recipe_gkd.data.parts import by_response
from recipe_gkd.data.samples import Response, Sample

REPETITION, LOOPING = "seq_rep_4", "looping_fraction"
N_GRAM = 4
LOOPING_REPETITION = 0.5
"""Repetition above which a truncated response loops."""


def batch_repetition(samples: Sequence[Sample]) -> dict[str, float]:
    """Return the metrics of the sampled responses of a batch. Empty without any.

    It takes about 0.1 ms per 1,000 tokens, so the trainer computes it in a thread during the update.
    """
    sampled = by_response([sample for sample in samples if not sample.is_reference])
    return repetition_metrics([_whole(parts) for parts in sampled], "response/") if sampled else {}


def _whole(parts: Sequence[Sample]) -> Response:
    """Return a response whose tokens are those of all its parts."""
    if len(parts) == 1:
        return parts[0].response
    return replace(parts[-1].response, ids=np.concatenate([part.response.ids for part in parts]))


def repetition_metrics(responses: Sequence[Response], prefix: str) -> dict[str, float]:
    """Return the mean repetition of responses, and the fraction of responses that loop until they are truncated.

    Args:
        responses: At least one response.
        prefix: First part of the names of the metrics, with its slash.
    """
    repetition_N = np.array([repeated_share(response.ids) for response in responses])
    is_truncated_N = np.array([response.finish_reason == "length" for response in responses])
    return {
        prefix + REPETITION: float(repetition_N.mean()),
        prefix + LOOPING: float((is_truncated_N & (repetition_N > LOOPING_REPETITION)).mean()),
    }


def repeated_share(ids_T: npt.NDArray[np.integer]) -> float:
    """Return the share of 4-grams that occurred before in the response.

    This is seq-rep-4 of Welleck et al. 2020 (arXiv:1908.04319, section 6): 1 - distinct 4-grams / all 4-grams. It is 0
    for fewer than two 4-grams.

    Args:
        ids_T: Token ids, [T].
    """
    n_grams = len(ids_T) - N_GRAM + 1
    if n_grams < 2:
        return 0.0
    distinct, rank_T = np.unique(ids_T, return_inverse=True)  # 4 ranks fit into 64 bits, unlike 4 ids
    rank_T, base = rank_T.astype(np.uint64), np.uint64(len(distinct))
    codes = rank_T[:n_grams]
    for offset in range(1, N_GRAM):  # exact for up to 65,536 distinct ids; the code wraps around for more
        codes = codes * base + rank_T[offset : offset + n_grams]
    codes.sort()
    n_distinct = 1 + np.count_nonzero(codes[1:] != codes[:-1])
    return float(1 - n_distinct / n_grams)
