"""Forward and backward of a list of micro-batches, on any layout.

Axis names: N tokens of a packed row, T response tokens in it, W vocabulary columns of one rank, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.actor.device_batch import DeviceBatch, to_device
from recipe_gkd.actor.logit_rows import select_logit_rows
from recipe_gkd.actor.loss_terms import GlobalDenominators
from recipe_gkd.actor.microbatch import PackedBatch
from recipe_gkd.actor.objective import Losses
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.student_output import HiddenStates, Logits, Student

LossFunction = Callable[[Student, DeviceBatch], Losses]
"""Of the rows that predict a response token, in the dtype of training."""


def run_micro_batches(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[PackedBatch],
    loss: LossFunction,
    *,
    denominators: GlobalDenominators,
    gkd: GkdConfig,
    tp_group: ProcessGroup | None,
    device: torch.device,
    forward_only: bool = False,
) -> list[dict[str, Any]]:
    """Accumulate the gradient of the objective over all data-parallel ranks, which must bring equally many batches.

    Returns `sums`, `loss_T` and `uids_T` of each micro-batch: on the last pipeline stage; an empty list on the others.
    """

    def forward(batches: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        packed = next(batches)
        batch = to_device(packed, denominators.weights(packed, gkd.loss_agg_mode), device)
        with select_logit_rows(model, batch.loss_rows_T, skip_lm_head=gkd.fuse_lm_head) as rows:
            output_1TX = model(batch.token_ids_1N, batch.position_ids_1N, None, packed_seq_params=batch.row)
        weight_WD = rows.weight_WD

        def loss_of_output(output_1TX: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            """What Megatron's schedules take: the sum over tokens, their number (int), and what to report."""
            student: Student
            output_TX, chunk_tokens = output_1TX.squeeze(0), gkd.chunk_tokens
            if weight_WD is None:
                student = Logits(logits_TW=output_TX, tp_group=tp_group, chunk_tokens=chunk_tokens)
            else:
                student = HiddenStates(
                    hidden_TD=output_TX, weight_WD=weight_WD, tp_group=tp_group, chunk_tokens=chunk_tokens
                )
            losses = loss(student, batch)
            n_tokens = torch.full((), len(losses.loss_T), dtype=torch.int, device=device)
            report = {"sums": losses.sums, "loss_T": losses.loss_T.detach(), "uids_T": packed.uids_T}
            return losses.loss_T.sum(), n_tokens, report

        return output_1TX, loss_of_output

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=1,  # of no effect: variable_seq_lengths exchanges the shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )
