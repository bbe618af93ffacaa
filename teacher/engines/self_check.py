"""Checks of the scores of a short probe sequence. An engine runs them at start-up and after a wake-up."""

from __future__ import annotations

import numpy as np

from teacher.records import ScoredSequence

PROBE_TEMPERATURE = 1 / 16


def check_top_k(scored: ScoredSequence) -> None:
    """Check that the top-k rows are sorted log-probabilities.

    Raises:
        RuntimeError: They are not.
    """
    mass_T = _mass(scored)
    if not (np.diff(scored.topk_logps_TK, axis=1) <= 0).all() or not (mass_T < 1.001).all():
        raise RuntimeError(f"top-k rows are not sorted log-probabilities; their mass is {mass_T.tolist()}")


def check_padding(scored: ScoredSequence, k: int) -> None:
    """Check that padding ids get no probability.

    Args:
        scored: Scores computed while all ids from ``k`` on were declared padding.
        k: Log-probabilities per position. The top k must be the ids below ``k``, with a mass of 1.

    Raises:
        RuntimeError: A padding id was returned, or has mass.
    """
    if not (scored.topk_ids_TK < k).all() or not (abs(_mass(scored) - 1) < 0.001).all():
        raise RuntimeError(
            f"padding of the output layer is not excluded: expected ids below {k} with a mass of 1, got id "
            f"{scored.topk_ids_TK.max()} and a mass of {_mass(scored).tolist()}"
        )


def check_temperature(unscaled: ScoredSequence, scored: ScoredSequence) -> None:
    """Check that differences between log-probabilities at temperature T are those at 1, divided by T.

    Args:
        unscaled: Scores at temperature 1.
        scored: Scores of the same sequence at `PROBE_TEMPERATURE`.

    Raises:
        RuntimeError: They are not.
    """
    expected, got = _spread(unscaled) / PROBE_TEMPERATURE, _spread(scored)
    # A wide tolerance, because bfloat16 results vary on a GPU. An ignored temperature is wrong by a factor of 16.
    if not abs(got - expected) <= 0.5 * expected + 1e-3:
        raise RuntimeError(
            f"log-probabilities at temperature {PROBE_TEMPERATURE:g} differ by {got:.4g}, expected {expected:.4g}"
        )


def check_unchanged(before: ScoredSequence, after: ScoredSequence, tolerance: float) -> None:
    """Check that the scores of a sequence are still the same.

    Args:
        before: Earlier scores.
        after: Scores now.
        tolerance: Largest difference of a log-probability, in nats.

    Raises:
        RuntimeError: They differ.
    """
    old, new = (np.column_stack([each.topk_logps_TK, each.sampled_logps_T]) for each in (before, after))
    with np.errstate(invalid="ignore"):
        differences = np.where(old == new, 0.0, np.abs(old - new))  # equal infinities have no difference
    if not differences.max() <= tolerance:  # also true for NaN
        raise RuntimeError(
            f"log-probabilities of the probe differ from earlier ones by {differences.max():.3g}, expected at "
            f"most {tolerance:g}"
        )


def _mass(scored: ScoredSequence) -> np.ndarray:
    """Return the probability mass of the top k, float64 [T]."""
    return np.exp(scored.topk_logps_TK.astype(np.float64)).sum(axis=1)


def _spread(scored: ScoredSequence) -> float:
    """Return the sum of the differences between the first log-probability of each row and the others."""
    logps = np.column_stack([scored.topk_logps_TK, scored.sampled_logps_T]).astype(np.float64)
    below = logps[:, :1] - logps
    return float(below[np.isfinite(below)].sum())
