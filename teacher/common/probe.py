"""The probe: a fixed sequence whose scores tell whether two teachers have the same weights."""

from __future__ import annotations

import numpy as np

from teacher.records import TeacherSequence

PROBE_TOKENS = 16
MAX_PROBE_DIFFERENCE = 0.25
"""Largest difference of log-probabilities between servers of one model, whose batches and kernels differ.

A bfloat16 output layer rounds logits between 16 and 32 to multiples of 1/8."""


def probe_sequence(n_tokens: int, max_model_len: int) -> TeacherSequence:
    """Return the probe: ids that are spread over the vocabulary."""
    length = max(2, min(PROBE_TOKENS, max_model_len))
    return TeacherSequence((np.arange(1, length + 1) * 7919 % n_tokens).astype(np.int32), 1)


def probe_difference(reference_T: np.ndarray, found_T: np.ndarray) -> float:
    """Return the largest difference of log-probabilities of the probe's tokens."""
    with np.errstate(invalid="ignore"):  # of equal infinities
        differences_T = np.where(reference_T == found_T, 0.0, np.abs(reference_T - found_T))
    return float(np.max(differences_T, initial=0.0))
