"""Scores of a teacher as the rows of a sample. Imported by scoring workers, so it must not import torch.

Shape suffixes: T response tokens, K ids of the support (of the teacher's top k, then J further ids of the sequence).
"""

from __future__ import annotations

import numpy as np

from teacher.records import ScoredSequence, TeacherSequence

_BLOCK_ELEMENTS = 1 << 20
"""Pairs of ids that are compared at a time."""


def rows_of(sequence: TeacherSequence, scored: ScoredSequence) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities [T, K] and ids [T, K] of a response, each id once in a row.

    An id of the sequence that is in the teacher's top k as well is an unused entry: -inf, and id -1.
    """
    support_ids_TJ = sequence.support_ids_TJ
    if support_ids_TJ is None:
        return scored.topk_logps_TK, scored.topk_ids_TK
    support_logps_TJ = scored.support_logps_TJ
    assert support_logps_TJ is not None, "check_scores has passed"
    if not scored.topk_ids_TK.shape[1]:
        return support_logps_TJ, support_ids_TJ
    is_repeated_TJ = _are_in(support_ids_TJ, scored.topk_ids_TK)
    logps_TJ = np.where(is_repeated_TJ, support_logps_TJ.dtype.type(-np.inf), support_logps_TJ)
    ids_TJ = np.where(is_repeated_TJ, np.int32(-1), support_ids_TJ)
    return np.concatenate([scored.topk_logps_TK, logps_TJ], 1), np.concatenate([scored.topk_ids_TK, ids_TJ], 1)


def _are_in(ids_TJ: np.ndarray, of_row_TK: np.ndarray) -> np.ndarray:
    """Return True for the ids that are in the same row of ``of_row_TK``, bool [T, J]."""
    n_rows = max(1, _BLOCK_ELEMENTS // max(1, ids_TJ.shape[1] * of_row_TK.shape[1]))
    blocks = [slice(start, start + n_rows) for start in range(0, len(ids_TJ), n_rows)]
    parts = [(ids_TJ[block, :, None] == of_row_TK[block, None, :]).any(2) for block in blocks]
    return np.concatenate(parts) if parts else np.zeros(ids_TJ.shape, np.bool_)
