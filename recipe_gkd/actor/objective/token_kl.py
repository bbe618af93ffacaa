"""KL divergences between student and teacher at the response tokens of a validation, without a gradient.

Shape suffixes: T response tokens, D = 2 divergences (forward, reverse).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from recipe_gkd.actor.batch.device_batch import DeviceBatch
from recipe_gkd.actor.objective.objective import MicroBatchLosses
from recipe_gkd.actor.update import Updater
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.data.samples import Sample
from recipe_gkd.losses.distributions import bucketed_distributions, valid_entries
from recipe_gkd.losses.divergences import forward_kl, reverse_kl
from recipe_gkd.losses.logits_query import LogitsQuery
from recipe_gkd.losses.student_output import StudentOutput

_FORWARD, _REVERSE, _POSITION, _IS_SCORED = "forward_kl_T", "reverse_kl_T", "position_T", "is_scored_T"


@dataclass(frozen=True)
class TokenKl:
    """KL divergences of the scored tokens that a rank computes.

    Attributes:
        uids_T: Uid of the response, int64.
        positions_T: Index of the token in the whole response, int64.
        kl_TD: Forward KL(teacher || student) and reverse KL(student || teacher) in nats, float32. The tail outside the
            support is one outcome.
    """

    uids_T: np.ndarray
    positions_T: np.ndarray
    kl_TD: np.ndarray


def token_kl(updater: Updater, gkd: GkdConfig, samples: Sequence[Sample], step: int, n_token_ids: int) -> TokenKl:
    """Return the divergences of the tokens that this rank computes. Collective.

    Each scored token of the samples is in the result of one rank. Both models have ``gkd.distill_temperature``.

    Args:
        updater: Updates of the model, whose limit of the micro-batches holds here too. The weights suffice.
        gkd: Options of the objective, which select the kernels.
        samples: Scored samples of this data-parallel rank.
        step: Number of optimizer steps of the weights, for messages.
        n_token_ids: Number of token ids. Larger ids are padding of the output layer and belong to no distribution.

    Raises:
        DataError: A sample of this rank is invalid.
        SecondaryFailure: A sample of another rank is invalid, or it ran out of memory.
        WorkerError: This rank ran out of memory.
    """

    def measure(student: StudentOutput, batch: DeviceBatch) -> MicroBatchLosses:
        valid_TK = valid_entries(batch.logps_TK, batch.ids_TK, n_token_ids)
        query = LogitsQuery(
            ids_TK=batch.ids_TK,
            valid_TK=valid_TK,
            sampled_T=batch.response_ids_T,
            vocab_size=n_token_ids,
            temperature=gkd.distill_temperature,
        )
        stats = student.compute_log_stats(query, kernel_backend=gkd.kernel_backend)
        buckets = bucketed_distributions(stats.log_mass_TB, batch.logps_TK, valid_TK, "bucket")
        zero = buckets.log_p_TC.new_zeros(())
        values = {
            name: torch.where(batch.has_teacher_T, divergence(buckets), zero)
            for name, divergence in ((_FORWARD, forward_kl), (_REVERSE, reverse_kl))
        }
        values |= {_POSITION: batch.starts_T + batch.positions_T, _IS_SCORED: batch.has_teacher_T}
        return MicroBatchLosses(loss_T=values[_FORWARD], sums=values, maxima={})

    parts = [TokenKl(np.empty(0, np.int64), np.empty(0, np.int64), np.empty((0, 2), np.float32))]
    for report in updater.evaluate(samples, step, measure):
        values = {name: each.cpu().numpy() for name, each in report["sums"].items()}
        scored_T = values[_IS_SCORED]
        kl_TD = np.stack([values[_FORWARD], values[_REVERSE]], axis=1)
        parts.append(TokenKl(report["uids_T"][scored_T], values[_POSITION][scored_T], kl_TD[scored_T]))
    arrays = zip(*((part.uids_T, part.positions_T, part.kl_TD) for part in parts), strict=True)
    return TokenKl(*map(np.concatenate, arrays))
