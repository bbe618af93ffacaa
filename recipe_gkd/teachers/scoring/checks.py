"""Checks of a teacher's results. Imported by scoring workers, so it must not import torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recipe_gkd.config.keys import TEACHER
from teacher.errors import TeacherProtocolError
from teacher.records import ScoredSequence, TeacherSequence


def check_scores(name: str, sequences: Sequence[TeacherSequence], scored: Sequence[ScoredSequence]) -> None:
    """Check the number and the shapes of a teacher's results.

    Args:
        name: Name of the teacher, for the error.
        scored: Results of the request.

    Raises:
        TeacherProtocolError: A result is missing or has a wrong shape.
    """
    if len(scored) != len(sequences):
        raise TeacherProtocolError(f"sent {len(sequences)} sequences, got scores of {len(scored)}", teacher=name)
    for i, (sequence, result) in enumerate(zip(sequences, scored, strict=True)):
        n_rows = sequence.n_scored
        shapes = [np.shape(array) for array in (result.topk_logps_TK, result.topk_ids_TK, result.sampled_logps_T)]
        k = shapes[0][-1] if len(shapes[0]) == 2 else 0
        if (k >= 1) != sequence.with_top_k or shapes != [(n_rows, k), (n_rows, k), (n_rows,)]:
            raise TeacherProtocolError(
                f"{n_rows} scored tokens, got topk_logps_TK, topk_ids_TK and sampled_logps_T of shapes "
                f"{', '.join(map(str, shapes))}, expected [T, K], [T, K] and [T], with K "
                f"{'of at least 1' if sequence.with_top_k else '= 0, because the sequence has with_top_k=False'}",
                teacher=name,
                sequence=i,
            )
        _check_support(name, i, sequence, result)


def _check_support(name: str, i: int, sequence: TeacherSequence, result: ScoredSequence) -> None:
    if sequence.support_ids_TJ is None:
        return
    expected = sequence.support_ids_TJ.shape
    support_TJ = getattr(result, "support_logps_TJ", None)  # a user's class may return other records
    got = None if support_TJ is None else np.shape(support_TJ)
    if got != expected:
        raise TeacherProtocolError(
            f"the sequence has support_ids_TJ of shape {expected}, got support_logps_TJ "
            f"{'None' if got is None else f'of shape {got}'}",
            teacher=name,
            sequence=i,
            options=(f"{TEACHER}.support",),
            remedy=f"return the log-probabilities of these ids, or set {TEACHER}.support=teacher",
        )
