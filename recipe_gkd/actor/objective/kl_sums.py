"""KL divergences between student and teacher at the responses of a validation, without a gradient.

Shape suffixes: T response tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

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

KlSums = dict[int, tuple[float, float]]
"""Uid of a sample -> sums over its scored tokens of forward KL(teacher || student) and reverse KL(student || teacher),
in nats. The tail outside the support is one outcome."""

_FORWARD, _REVERSE = "forward_kl_T", "reverse_kl_T"


def kl_sums(updater: Updater, gkd: GkdConfig, samples: Sequence[Sample], step: int, n_token_ids: int) -> KlSums:
    """Return the sums of the tokens that this rank computes. Collective.

    The sums over all ranks cover the whole sample. Both models have ``gkd.distill_temperature``.

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
        sums = {
            name: torch.where(batch.has_teacher_T, divergence(buckets), zero)
            for name, divergence in ((_FORWARD, forward_kl), (_REVERSE, reverse_kl))
        }
        return MicroBatchLosses(loss_T=sums[_FORWARD], sums=sums, maxima={})

    found: KlSums = {}
    for report in updater.evaluate(samples, step, measure):
        uids, index_T = np.unique(report["uids_T"], return_inverse=True)
        forward, reverse = (
            np.bincount(index_T, report["sums"][name].double().cpu().numpy()) for name in (_FORWARD, _REVERSE)
        )
        for uid, *sums in zip(uids.tolist(), forward.tolist(), reverse.tolist(), strict=True):
            before = found.get(uid, (0.0, 0.0))  # another part of the same conversation
            found[uid] = before[0] + sums[0], before[1] + sums[1]
    return found
