"""Which tokens each part of the objective is a mean of, over the global batch, and what a token weighs in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from recipe_gkd.actor.microbatch import PackedBatch

AggMode = Literal["token-mean", "seq-mean-token-mean"]

COMPONENTS = ("distill", "pg", "sft")
"""Tokens with a teacher's opinion; sampled tokens; given tokens that no teacher was asked about."""


def members(batch: PackedBatch) -> dict[str, np.ndarray]:
    """Bool [T], by component."""
    return {
        "distill": batch.has_teacher_T,
        "pg": ~batch.is_reference_T,
        "sft": batch.is_reference_T & ~batch.has_teacher_T & ~batch.is_skipped_T,
    }


@dataclass(frozen=True)
class GlobalDenominators:
    """Over the global batch: number of response tokens, and of each component's tokens and answers."""

    n_tokens: float
    n_tokens_of: dict[str, float]
    n_responses_of: dict[str, float]

    @staticmethod
    def counts(batches: list[PackedBatch]) -> list[float]:
        """Of some micro-batches: numbers to be added up over ranks."""
        tokens = sum(len(batch.uids_T) for batch in batches)
        found = [(members(batch), batch) for batch in batches]
        n_tokens_of = [sum(float(own[name].sum()) for own, _ in found) for name in COMPONENTS]
        n_responses_of = [
            sum(float((own[name] / batch.response_lengths_T).sum()) for own, batch in found) for name in COMPONENTS
        ]
        return [float(tokens), *n_tokens_of, *map(round, n_responses_of)]

    @classmethod
    def of(cls, counts: list[float]) -> GlobalDenominators:
        tokens, *rest = counts
        n = len(COMPONENTS)
        return cls(tokens, dict(zip(COMPONENTS, rest[:n], strict=True)), dict(zip(COMPONENTS, rest[n:], strict=True)))

    def weights(self, batch: PackedBatch, mode: AggMode) -> dict[str, np.ndarray]:
        """float32 [T], by component; 0 for tokens that do not belong to it.

        The sum of weight x loss over the global batch, divided by ``n_tokens``, is the mean over the component's
        tokens, or over its answers of the mean over their tokens. Megatron divides (``calculate_per_token_loss``).
        """
        weights = {}
        for name, own_T in members(batch).items():
            if mode == "token-mean":
                each_T = self.n_tokens / max(self.n_tokens_of[name], 1) * np.ones(len(own_T))
            else:
                each_T = self.n_tokens / max(self.n_responses_of[name], 1) / batch.response_lengths_T
            weights[name] = np.where(own_T, each_T, 0).astype(np.float32)
        return weights
