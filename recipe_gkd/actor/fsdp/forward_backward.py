"""Forward and backward pass of a list of micro-batches on a sharded model.

Shape suffixes: T response tokens of a micro-batch, V vocabulary, D hidden size, X either V or D.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from recipe_gkd.actor.backend import LossFunction
from recipe_gkd.actor.batch.device_batch import DeviceBatch, to_device
from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan
from recipe_gkd.actor.batch.prefetch import Prefetcher
from recipe_gkd.actor.fsdp.fsdp_model import FsdpModel
from recipe_gkd.actor.fsdp.loading import resharded
from recipe_gkd.actor.fsdp.output_layer import select_rows
from recipe_gkd.actor.fsdp.packed_attention import attending
from recipe_gkd.actor.fsdp.packing import model_input
from recipe_gkd.actor.fsdp.routing_replay import replaying
from recipe_gkd.actor.objective.objective import MicroBatchLosses
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.student_output import StudentOutput, student_output


def run_micro_batches(
    model: FsdpModel, plan: MicroBatchPlan, loss: LossFunction, *, gkd: GkdConfig, timeout_s: float
) -> list[dict[str, Any]]:
    """Accumulate the gradient of the objective over micro-batches and ranks. Collective.

    Args:
        plan: Micro-batches of this rank. Each is packed in a thread while the one before it is computed.
        loss: Computes the losses of one micro-batch.
        gkd: Options of the objective.
        timeout_s: Longest time to wait until a micro-batch is packed, in seconds.

    Returns:
        ``sums``, ``maxima``, ``loss_T`` and ``uids_T`` of each micro-batch.
    """
    reports = []
    n_tokens = max(plan.denominators.n_tokens, 1)
    # FSDP reduces gradients only in a backward pass, so the pass that does it is one more, of an empty micro-batch.
    has_copies = plan.before_reduction is not None and model.mesh.ndim > 1
    n_passes = plan.count + has_copies
    prefetcher = Prefetcher(plan.stage, count=n_passes, n_readers=1, timeout_s=timeout_s)
    # `resharded`: even if a loss raises an error before its backward pass
    with resharded(model.module), _reset_after_error(model.module), prefetcher:
        [batches] = prefetcher.readers
        for index, staged in enumerate(batches):
            if index == plan.count and plan.before_reduction is not None:
                plan.before_reduction()
            model.module.set_requires_all_reduce(index == n_passes - 1)  # once among copies of the model
            batch = to_device(staged, model.device)
            # The backward pass too: with gradient checkpointing it calls the attention again.
            with attending(batch.row, plan.attention), replaying(plan.replayed(batch.routed_experts_NX)):
                losses = loss(run_model(model, batch, gkd), batch)
                (losses.loss_T.sum() / n_tokens).backward()
            reports.append(_report(losses, staged.uids_T))
    return reports


@torch.no_grad()
def evaluate_micro_batches(
    model: FsdpModel, plan: MicroBatchPlan, loss: LossFunction, *, gkd: GkdConfig
) -> list[dict[str, Any]]:
    """Compute the losses of micro-batches without a gradient. Collective.

    Args:
        plan: Micro-batches of this rank.
        loss: Computes the losses of one micro-batch.
        gkd: Options of the objective.

    Returns:
        ``sums``, ``maxima``, ``loss_T`` and ``uids_T`` of each micro-batch.
    """
    reports = []
    with resharded(model.module):
        for index in range(plan.count):
            staged = plan.stage(index)
            batch = to_device(staged, model.device)
            with attending(batch.row, plan.attention), replaying(plan.replayed(batch.routed_experts_NX)):
                reports.append(_report(loss(run_model(model, batch, gkd), batch), staged.uids_T))
    return reports


@contextmanager
def _reset_after_error(module: Any) -> Iterator[None]:
    """Discard what a pass that did not end leaves in FSDP's state: gathered weights, gradients, positions."""
    try:
        yield
    except BaseException:
        for parameter in module.parameters():  # also of the layer whose backward pass did not end, which is gathered
            parameter.grad = None
        if module._get_fsdp_state()._is_root:  # None before the first forward pass
            module.reset_iter_state()
        raise


def run_model(model: FsdpModel, batch: DeviceBatch, gkd: GkdConfig) -> StudentOutput:
    """Return the output of the model at the rows with a loss: logits, or hidden states if the layer was skipped."""
    given = model_input(batch, model.style)
    with select_rows(model.module, given.rows_T, skip=gkd.fuse_lm_head, float32_head=model.float32_head) as rows:
        output_TX: Tensor = model.module(**given.inputs).logits[0]
    return student_output(
        output_TX,
        rows.weight_VD,
        tp_group=None,
        chunk_tokens=gkd.chunk_tokens,
        float32_head=model.float32_head,
    )


def _report(losses: MicroBatchLosses, uids_T: np.ndarray) -> dict[str, Any]:
    return {"sums": losses.sums, "maxima": losses.maxima, "loss_T": losses.loss_T.detach(), "uids_T": uids_T}
