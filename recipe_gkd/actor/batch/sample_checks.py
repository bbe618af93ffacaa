"""Checks of the samples of a batch, before any of them is trained on.

Shape suffixes: T response tokens, K teacher top-k, R rows of a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import DataError

TEACHER_MASS_TOLERANCE = 5e-3
"""Amount by which the probabilities of a teacher's row may sum to more than 1.

1e-3 of it is for bfloat16 engines. The rest is for ``teacher.wire_dtype=float16``: it changes log-probabilities above
-16 by at most 2^-8, and their sum therefore by at most 0.4 %. The losses divide such a row by its sum.
"""
BLOCK_ELEMENTS = 1 << 16
"""Log-probabilities that are summed at once. Their float32 copy fits into the processor's cache."""


def check_samples(samples: Sequence[Sample]) -> None:
    """Check that samples can be trained on.

    Args:
        samples: Samples to check. The arrays of all of them are read once.

    Raises:
        DataError: A sample has no prompt token, or its log-probabilities are invalid.
    """
    if not (_have_prompts(samples) and _logps_are_valid(samples) and _masses_are_valid(samples)):
        for sample in samples:  # slower and more precise; it finds the sample and the position
            _check_sample(sample)


def _have_prompts(samples: Sequence[Sample]) -> bool:
    return all(len(sample.prompt.ids) for sample in samples)


def _logps_are_valid(samples: Sequence[Sample]) -> bool:
    """Return True if no log-probability of a response token is positive or NaN."""
    logps = [each for sample in samples for each in (sample.teacher.sampled_logps_T, sample.response.logprobs)]
    return not samples or bool(np.max(np.concatenate(logps), initial=-np.inf) <= TEACHER_MASS_TOLERANCE)


def _masses_are_valid(samples: Sequence[Sample]) -> bool:
    """Return True if every row of a teacher sums to at most 1. False if there is a NaN."""
    buffer = np.empty(BLOCK_ELEMENTS, np.float32)
    for blocks in _blocks(samples):
        n_rows, k = sum(map(len, blocks)), blocks[0].shape[1]
        if n_rows * k > len(buffer):  # one row can be longer
            buffer = np.empty(n_rows * k, np.float32)
        probs_RK = buffer[: n_rows * k].reshape(n_rows, k)
        np.concatenate(blocks, out=probs_RK, casting="same_kind")
        np.exp(probs_RK, out=probs_RK)
        if not probs_RK.sum(1).max(initial=0.0) <= 1 + TEACHER_MASS_TOLERANCE:
            return False
    return True


def _blocks(samples: Sequence[Sample]) -> Iterator[list[np.ndarray]]:
    """Yield the rows of all samples, in lists of arrays [R, K] with the same K that have ``BLOCK_ELEMENTS`` or less."""
    pending: list[np.ndarray] = []
    free = 0
    for sample in samples:
        logps_TK = sample.top_k.logps_TK
        k = max(logps_TK.shape[1], 1)
        start = 0
        while start < len(logps_TK):
            if pending and (free < k or pending[0].shape[1] != logps_TK.shape[1]):
                yield pending
                pending = []
            if not pending:
                free = BLOCK_ELEMENTS
            end = min(len(logps_TK), start + max(free // k, 1))
            pending.append(logps_TK[start:end])
            free -= (end - start) * k
            start = end
    if pending:
        yield pending


def _check_sample(sample: Sample) -> None:
    if not len(sample.prompt.ids):
        raise DataError(
            f"sample {sample.prompt.uid} has no prompt token; expected at least 1, because the first response token is "
            "predicted from it",
            uid=sample.prompt.uid,
            row=sample.prompt.row,
        )
    mass_T = np.exp(sample.top_k.logps_TK.astype(np.float64)).sum(1)
    if not (mass_T <= 1 + TEACHER_MASS_TOLERANCE).all():  # also true for NaN
        position = int(np.argmax(np.nan_to_num(mass_T, nan=np.inf)))
        raise DataError(
            f"sample {sample.prompt.uid}: the teacher's top-k has probability {mass_T.max():.4g} at response position "
            f"{position}; expected log-probabilities that sum to at most 1",
            uid=sample.prompt.uid,
            row=sample.prompt.row,
            position=position,
        )
    for model, logps_T in (("teacher", sample.teacher.sampled_logps_T), ("student", sample.response.logprobs)):
        if not (logps_T <= TEACHER_MASS_TOLERANCE).all():
            raise DataError(
                f"sample {sample.prompt.uid}: the {model}'s log-probability of a response token is "
                f"{np.max(logps_T):.4g}; expected at most 0",
                uid=sample.prompt.uid,
                row=sample.prompt.row,
                position=int(np.argmax(np.nan_to_num(logps_T, nan=np.inf))),
            )
