"""Forward and backward pass of a list of micro-batches, on any parallel layout.

Shape suffixes: N tokens of a packed row, T response tokens in it, W vocabulary columns of one rank, D hidden size, X
either W or D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from recipe_gkd.actor.device_batch import DeviceBatch, to_device
from recipe_gkd.actor.logit_rows import select_logit_rows
from recipe_gkd.actor.loss_terms import GlobalDenominators
from recipe_gkd.actor.megatron_model import MegatronModel
from recipe_gkd.actor.microbatch import PackedBatch
from recipe_gkd.actor.objective import MicroBatchLosses
from recipe_gkd.actor.parallel import tensor_group
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.student_output import HiddenStates, Logits, Student

LossFunction = Callable[[Student, DeviceBatch], MicroBatchLosses]
"""Function that computes the losses of the rows that predict a response token."""


def run_micro_batches(
    model: MegatronModel,
    batches: Sequence[PackedBatch],
    loss: LossFunction,
    *,
    denominators: GlobalDenominators,
    gkd: GkdConfig,
    forward_only: bool = False,
) -> list[dict[str, Any]]:
    """Accumulate the gradient of the objective over micro-batches and data-parallel ranks. Collective.

    Args:
        model: Model in training.
        batches: Micro-batches of this rank. All data-parallel ranks must pass equally many.
        loss: Computes the losses of one micro-batch.
        denominators: Token counts of the global batch.
        gkd: Options of the objective.
        forward_only: Compute no gradient.

    Returns:
        ``sums``, ``loss_T`` and ``uids_T`` of each micro-batch on the last pipeline stage; an empty list elsewhere.
    """
    device, tp_group, chunk_tokens = model.device, tensor_group(model.layout), gkd.chunk_tokens

    def forward(batches: Iterator[PackedBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        packed = next(batches)
        batch = to_device(packed, denominators.weights(packed, gkd.loss_agg_mode), device)
        with select_logit_rows(chunk, batch.loss_rows_T, skip_lm_head=gkd.fuse_lm_head) as rows:
            output_1TX = chunk(batch.token_ids_1N, batch.position_ids_1N, None, packed_seq_params=batch.row)
        weight_WD = rows.weight_WD

        def compute_loss(output_1TX: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            """Return the sum over tokens, their number as int, and the report, as Megatron's schedules expect."""
            student: Student
            output_TX = output_1TX.squeeze(0)
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

        return output_1TX, compute_loss

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in model.wrapped],
        model=list(model.wrapped),
        num_microbatches=len(batches),
        seq_length=1,  # has no effect: with variable_seq_lengths the stages exchange the shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )
