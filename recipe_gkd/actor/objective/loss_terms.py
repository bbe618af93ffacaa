"""Terms of the objective: the tokens that each term averages over, and the weight of a token in it.

Shape suffix: T response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from recipe_gkd.actor.batch.packing import PackedBatch
from recipe_gkd.config.schema import AggregationMode
from recipe_gkd.data.samples import Sample

LOSS_TERMS = ("distill", "pg", "sft")


def loss_term_masks(batch: PackedBatch) -> dict[str, np.ndarray]:
    """Return a mask of the tokens of each loss term, bool [T] by name.

    ``distill`` has the tokens that a teacher scored, ``pg`` the sampled tokens, and ``sft`` the tokens of reference
    responses that are not sent to a teacher.
    """
    is_scored_T = _per_response(batch, batch.has_teacher_T) > 0
    return {
        "distill": batch.has_teacher_T,
        "pg": ~batch.is_reference_T,
        "sft": batch.is_reference_T & ~is_scored_T & ~batch.is_skipped_T,
    }


def _per_response(batch: PackedBatch, mask_T: np.ndarray) -> np.ndarray:
    """Return at each token the number of tokens of its response in the mask, float64 [T]."""
    return np.bincount(batch.sequence_T, weights=mask_T)[batch.sequence_T]


def _tokens_of_terms(sample: Sample) -> dict[str, int]:
    """Return the number of tokens of a sample in each loss term; see :func:`loss_term_masks`."""
    n_tokens, n_scored = len(sample.response.ids), sample.teacher.n_scored
    return {
        "distill": n_scored,
        "pg": 0 if sample.is_reference else n_tokens,
        "sft": n_tokens if sample.is_reference and not n_scored and not sample.is_skipped else 0,
    }


@dataclass(frozen=True)
class GlobalDenominators:
    """Counts over the global batch, by which the loss terms are divided.

    Attributes:
        n_tokens_of: Tokens of each loss term.
        n_responses_of: Responses of each loss term that have tokens.
    """

    n_tokens: float
    n_tokens_of: dict[str, float]
    n_responses_of: dict[str, float]

    @staticmethod
    def counts(samples: Sequence[Sample]) -> list[float]:
        """Return the counts of this rank's samples, to be summed over the data-parallel ranks."""
        n_tokens_of, n_responses_of = dict.fromkeys(LOSS_TERMS, 0), dict.fromkeys(LOSS_TERMS, 0)
        for sample in samples:
            for name, count in _tokens_of_terms(sample).items():
                n_tokens_of[name] += count
                n_responses_of[name] += count > 0
        total = sum(len(sample.response.ids) for sample in samples)
        return [float(count) for count in (total, *n_tokens_of.values(), *n_responses_of.values())]

    @classmethod
    def of(cls, counts: list[float]) -> GlobalDenominators:
        """Return the denominators from the sum of :meth:`counts` over all data-parallel ranks."""
        n_tokens, *others = counts
        n_terms = len(LOSS_TERMS)
        return cls(
            n_tokens,
            dict(zip(LOSS_TERMS, others[:n_terms], strict=True)),
            dict(zip(LOSS_TERMS, others[n_terms:], strict=True)),
        )

    def weights(self, batch: PackedBatch, mode: AggregationMode) -> dict[str, np.ndarray]:
        """Return the weight of each token in each loss term, float32 [T] by name; 0 outside the term.

        The sum of weight x loss over the global batch, divided by ``n_tokens``, is the term's mean over its tokens
        (``token-mean``), or over its responses of the mean over their tokens in the term (``seq-mean-token-mean``).
        Megatron divides by ``n_tokens`` (``calculate_per_token_loss``).
        """
        weights = {}
        for name, mask_T in loss_term_masks(batch).items():
            if mode == "token-mean":
                weights[name] = mask_T * np.float32(self.n_tokens / max(self.n_tokens_of[name], 1))
            else:
                weight = self.n_tokens / max(self.n_responses_of[name], 1)
                n_tokens_T = np.maximum(_per_response(batch, mask_T), 1)
                weights[name] = np.where(mask_T, weight / n_tokens_T, 0).astype(np.float32)
        return weights
