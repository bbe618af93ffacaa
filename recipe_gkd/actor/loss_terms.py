"""Terms of the objective: the tokens that each term averages over, and the weight of a token in it.

Shape suffix: T response tokens of a micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from recipe_gkd.actor.microbatch import PackedBatch
from recipe_gkd.config.schema import AggregationMode

LOSS_TERMS = ("distill", "pg", "sft")


def loss_term_masks(batch: PackedBatch) -> dict[str, np.ndarray]:
    """Return a mask of the tokens of each loss term, bool [T] by name.

    ``distill`` has the tokens that a teacher scored, ``pg`` the sampled tokens, and ``sft`` the reference tokens that
    are not sent to a teacher.
    """
    return {
        "distill": batch.has_teacher_T,
        "pg": ~batch.is_reference_T,
        "sft": batch.is_reference_T & ~batch.has_teacher_T & ~batch.is_skipped_T,
    }


@dataclass(frozen=True)
class GlobalDenominators:
    """Counts over the global batch, by which the loss terms are divided.

    Attributes:
        n_tokens: Response tokens.
        n_tokens_of: Tokens of each loss term.
        n_responses_of: Responses of each loss term that have tokens.
    """

    n_tokens: float
    n_tokens_of: dict[str, float]
    n_responses_of: dict[str, float]

    @staticmethod
    def counts(batches: list[PackedBatch]) -> list[float]:
        """Return the counts of this rank's micro-batches, to be summed over the data-parallel ranks."""
        n_tokens = sum(len(batch.uids_T) for batch in batches)
        masks = [(loss_term_masks(batch), batch) for batch in batches]
        n_tokens_of = [sum(float(mask[name].sum()) for mask, _ in masks) for name in LOSS_TERMS]
        n_responses_of = [
            sum(float((mask[name] / batch.response_lengths_T).sum()) for mask, batch in masks) for name in LOSS_TERMS
        ]
        return [float(n_tokens), *n_tokens_of, *map(round, n_responses_of)]

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
        (``token-mean``), or over its responses of the mean over their tokens (``seq-mean-token-mean``). Megatron
        divides by ``n_tokens`` (``calculate_per_token_loss``).
        """
        weights = {}
        for name, mask_T in loss_term_masks(batch).items():
            if mode == "token-mean":
                weight_T = np.full(len(mask_T), self.n_tokens / max(self.n_tokens_of[name], 1))
            else:
                weight_T = self.n_tokens / max(self.n_responses_of[name], 1) / batch.response_lengths_T
            weights[name] = np.where(mask_T, weight_T, 0).astype(np.float32)
        return weights
