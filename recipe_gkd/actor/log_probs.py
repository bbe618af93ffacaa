"""Log-probabilities of one sequence under the student, to verify the weights of a rollout engine.

Shape suffixes: T tokens that are predicted.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from recipe_gkd.actor.backend import Backend
from recipe_gkd.actor.device_batch import DeviceBatch
from recipe_gkd.actor.loss_terms import GlobalDenominators
from recipe_gkd.actor.micro_batch_plan import MicroBatchPlan
from recipe_gkd.actor.objective import MicroBatchLosses
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK
from recipe_gkd.errors import DataError
from recipe_gkd.losses.logits_query import LogitsQuery
from recipe_gkd.losses.student_output import Student

_SUM = "logps_by_position"


def sequence_log_probs(backend: Backend, gkd: GkdConfig, ids: Sequence[int], n_token_ids: int) -> list[float]:
    """Return the log-probability of each token of a sequence after the first, at temperature 1. Collective.

    Args:
        backend: Model in training. It needs the weights only.
        gkd: Options of the objective, which select the kernels.
        ids: Token ids of the sequence, equal on all ranks.
        n_token_ids: Number of token ids. Larger ids are padding of the output layer and belong to no distribution.

    Returns:
        Float32 values, one less than ``ids``, equal on all ranks.

    Raises:
        DataError: There are fewer than two ids, or one is not in ``[0, n_token_ids)``. Raised on all ranks.
    """
    if len(ids) < 2 or not 0 <= min(ids) <= max(ids) < n_token_ids:
        raise DataError(
            f"log_probs() received {len(ids)} ids"
            + (f" from {min(ids)} to {max(ids)}" if len(ids) else "")
            + f"; expected at least 2 ids from 0 to {n_token_ids - 1}"
        )
    n_predicted = len(ids) - 1

    def score(student: Student, batch: DeviceBatch) -> MicroBatchLosses:
        query = LogitsQuery(
            ids_TK=batch.ids_TK,
            valid_TK=torch.zeros_like(batch.ids_TK, dtype=torch.bool),
            sampled_T=batch.response_ids_T,
            vocab_size=n_token_ids,
        )
        logp_T = student.compute_log_stats(query, kernel_backend=gkd.kernel_backend).sampled_logp_T
        by_position_T = logp_T.new_zeros(n_predicted).index_copy_(0, batch.positions_T, logp_T)
        return MicroBatchLosses(loss_T=logp_T, sums={_SUM: by_position_T}, maxima={})

    layout = backend.layout
    # One data-parallel rank computes the sequence; the others compute an empty micro-batch, as in an update.
    groups = [[_sample(ids)]] if layout.dp_rank == 0 else []
    plan = MicroBatchPlan(
        groups=groups,
        count=backend.micro_batch_multiple,
        denominators=GlobalDenominators.of(GlobalDenominators.counts([_sample(ids)])),
        loss_agg_mode=gkd.loss_agg_mode,
        layout=layout,
        row_multiple=backend.row_multiple,
        device=backend.device,
        attention=backend.attention,
    )
    reports = backend.evaluate(plan, score)
    logps_T = torch.zeros(n_predicted, device=backend.device)
    if layout.counts_tokens:
        for report in reports:
            logps_T += report["sums"][_SUM]
    dist.all_reduce(logps_T)  # each token is computed by one of the ranks that count
    return logps_T.tolist()


def _sample(ids: Sequence[int]) -> Sample:
    """Return a sample whose prompt is the first token and whose response is the rest, without a teacher's scores."""
    prompt, response = np.array(ids[:1], np.int32), np.array(ids[1:], np.int32)
    zeros = np.zeros(len(response), np.float32)
    return Sample(
        prompt=Prompt(uid=0, ids=prompt, row=0),
        response=Response(
            uid=0,
            ids=response,
            logprobs=zeros,
            finish_reason="stop",
            weights_version=0,
            versions_T=np.zeros(len(response), np.int32),
        ),
        teacher=TeacherTopK.absent(len(response)),
    )
