"""Forward and backward pass of a list of micro-batches, on any parallel layout.

Shape suffixes: N tokens of a packed row, T response tokens in it, W vocabulary columns of one rank, D hidden size, X
either W or D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor

from recipe_gkd.actor.backend import LossFunction
from recipe_gkd.actor.batch.device_batch import to_device
from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan
from recipe_gkd.actor.batch.prefetch import Prefetcher
from recipe_gkd.actor.batch.staging import StagedBatch
from recipe_gkd.actor.megatron.data_parallel import reduced_after
from recipe_gkd.actor.megatron.logit_rows import select_logit_rows
from recipe_gkd.actor.megatron.megatron_model import MegatronModel
from recipe_gkd.actor.megatron.packed_attention import PackedSequences
from recipe_gkd.actor.megatron.parallel import tensor_group
from recipe_gkd.actor.megatron.stage_communicator import communicator_options
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.student_output import student_output


def run_micro_batches(
    model: MegatronModel,
    plan: MicroBatchPlan,
    loss: LossFunction,
    *,
    gkd: GkdConfig,
    timeout_s: float,
    forward_only: bool = False,
) -> list[dict[str, Any]]:
    """Accumulate the gradient of the objective over micro-batches and data-parallel ranks. Collective.

    Args:
        plan: Micro-batches of this rank. Each is packed in a thread while the one before it is computed.
        loss: Computes the losses of one micro-batch.
        gkd: Options of the objective.
        timeout_s: Longest time to wait until a micro-batch is packed, in seconds.
        forward_only: Compute no gradient.

    Returns:
        ``sums``, ``maxima``, ``loss_T`` and ``uids_T`` of each micro-batch on the last pipeline stage; an empty list
        elsewhere.
    """
    device = model.device
    tp_group = tensor_group(model.layout)
    as_student = partial(
        student_output, tp_group=tp_group, chunk_tokens=gkd.chunk_tokens, float32_head=model.float32_head
    )

    def forward(batches: Iterator[StagedBatch], chunk: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        staged = next(batches)
        batch, uids_T = to_device(staged, device), staged.uids_T
        with select_logit_rows(
            chunk, batch.loss_rows_T, skip_lm_head=gkd.fuse_lm_head, float32_head=model.float32_head
        ) as rows:
            row = PackedSequences.of(batch.row, plan.replayed(batch.routed_experts_NX))
            output_1TX = chunk(batch.token_ids_1N, batch.position_ids_1N, None, packed_seq_params=row)
        weight_WD = rows.weight_WD

        def compute_loss(output_1TX: Tensor) -> tuple[Tensor, Tensor, dict[str, Any]]:
            """Return the sum over tokens, their number as int, and the report, as Megatron's schedules expect."""
            losses = loss(as_student(output_1TX.squeeze(0), weight_WD), batch)
            n_tokens = torch.full((), len(losses.loss_T), dtype=torch.int, device=device)
            report = {"sums": losses.sums, "maxima": losses.maxima, "loss_T": losses.loss_T.detach(), "uids_T": uids_T}
            return losses.loss_T.sum(), n_tokens, report

        return output_1TX, compute_loss

    prefetcher = Prefetcher(plan.stage, count=plan.count, n_readers=len(model.wrapped), timeout_s=timeout_s)
    with reduced_after(model.wrapped, plan.before_reduction), prefetcher:
        return get_forward_backward_func()(
            forward_step_func=forward,
            data_iterator=prefetcher.readers,
            model=list(model.wrapped),
            num_microbatches=plan.count,
            seq_length=1,  # has no effect: the communicator has the shapes
            micro_batch_size=1,
            forward_only=forward_only,
            **communicator_options(model, plan),
        )
