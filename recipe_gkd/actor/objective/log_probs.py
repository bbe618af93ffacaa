"""Log-probabilities of given continuations under the student, to verify the model of a rollout engine.

Shape suffixes: P tokens of a context, T tokens of a continuation, or of all of them, U continuations.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist

from recipe_gkd.actor.backend import Backend
from recipe_gkd.actor.batch.device_batch import DeviceBatch
from recipe_gkd.actor.objective.objective import MicroBatchLosses
from recipe_gkd.actor.update import Updater
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK
from recipe_gkd.errors import DataError
from recipe_gkd.losses.logits_query import LogitsQuery
from recipe_gkd.losses.student_output import StudentOutput

Continuation = tuple[Sequence[int], Sequence[int]]
"""Token ids of a context, [P], and of the tokens that follow it, [T]. Both have at least one."""

_SUM = "logps_by_token"


def continuation_log_probs(
    backend: Backend,
    updater: Updater,
    gkd: GkdConfig,
    continuations: Sequence[Continuation],
    step: int,
    n_token_ids: int,
) -> list[list[float]]:
    """Return the log-probability of each token of each continuation, at temperature 1. Collective.

    Args:
        backend: Model in training. It needs the weights only.
        updater: Its updates, whose limit of the micro-batches holds here too.
        gkd: Options of the objective, which select the kernels.
        continuations: Contexts and continuations, equal on all ranks. The data-parallel ranks share them.
        step: Number of optimizer steps of the weights, for messages.
        n_token_ids: Number of token ids. Larger ids are padding of the output layer and belong to no distribution.

    Returns:
        Float32 values, [T] for each continuation, equal on all ranks.

    Raises:
        DataError: A part is empty, or an id is not in ``[0, n_token_ids)``. Raised on all ranks.
        SecondaryFailure: Another rank ran out of memory.
        WorkerError: This rank ran out of memory.
    """
    for context, continuation in continuations:
        _check_ids(context, continuation, n_token_ids)
    samples = [_sample(uid, *continuation) for uid, continuation in enumerate(continuations)]
    lengths = [len(sample.response.ids) for sample in samples]
    starts_U = torch.tensor(np.cumsum([0, *lengths])[:-1], device=backend.device)

    def score(student: StudentOutput, batch: DeviceBatch) -> MicroBatchLosses:
        query = LogitsQuery(
            ids_TK=batch.ids_TK,
            valid_TK=torch.zeros_like(batch.ids_TK, dtype=torch.bool),
            sampled_T=batch.response_ids_T,
            vocab_size=n_token_ids,
        )
        logp_T = student.compute_log_stats(query, kernel_backend=gkd.kernel_backend).sampled_logp_T
        by_token_T = logp_T.new_zeros(sum(lengths))
        by_token_T.index_copy_(0, starts_U[batch.uids_T] + batch.positions_T, logp_T)
        return MicroBatchLosses(loss_T=logp_T, sums={_SUM: by_token_T}, maxima={})

    layout = backend.layout
    logps_T = torch.zeros(sum(lengths), device=backend.device)
    for report in updater.evaluate(samples[layout.dp_rank :: layout.dp_size], step, score):
        logps_T += report["sums"][_SUM]
    dist.all_reduce(logps_T)  # each token is computed by one of the ranks that count
    return [part.tolist() for part in logps_T.split(lengths)]


def _check_ids(context: Sequence[int], continuation: Sequence[int], n_token_ids: int) -> None:
    ids = [*context, *continuation]
    if not len(context) or not len(continuation) or not 0 <= min(ids) <= max(ids) < n_token_ids:
        raise DataError(
            f"log_probs() received a context of {len(context)} and a continuation of {len(continuation)} ids"
            + (f" from {min(ids)} to {max(ids)}" if ids else "")
            + f"; expected at least 1 id in each, from 0 to {n_token_ids - 1}"
        )


def _sample(uid: int, context: Sequence[int], continuation: Sequence[int]) -> Sample:
    """Return a sample whose response is the continuation, without a teacher's scores."""
    response = np.array(continuation, np.int32)
    return Sample(
        prompt=Prompt(uid=uid, ids=np.array(context, np.int32), row=uid),
        response=Response(
            uid=uid,
            ids=response,
            logprobs=np.zeros(len(response), np.float32),
            finish_reason="stop",
            weights_version=0,
            versions_T=np.zeros(len(response), np.int32),
        ),
        teacher=TeacherTopK.absent(len(response)),
    )
