"""Forward and backward of a list of micro-batches, on any layout.

Axis names: N tokens of a packed row, T response tokens in it, W vocabulary columns of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.actor.layer_spec import PackedRow
from recipe_gkd.actor.microbatch import PackedBatch, similar_lengths
from recipe_gkd.actor.output_rows import only_rows
from recipe_gkd.losses import forward_kl

LossResult = tuple[Tensor, Tensor, dict[str, Any]]
"""What Megatron's schedules take from a loss: the sum over tokens, their number (int), and what to report."""

LossFunction = Callable[[Tensor, "DeviceBatch"], LossResult]
"""Of the logits [T, W] of the rows that predict a response token, in the dtype of training."""


@dataclass(frozen=True, kw_only=True)
class DeviceBatch:
    """A :class:`PackedBatch` as tensors."""

    token_ids_1N: Tensor
    position_ids_1N: Tensor
    row: PackedRow
    loss_rows_T: Tensor
    logps_TK: Tensor
    ids_TK: Tensor
    packed: PackedBatch


def to_device(packed: PackedBatch, device: torch.device) -> DeviceBatch:
    def tensor(array: Any) -> Tensor:
        return torch.as_tensor(array).to(device, non_blocking=True)

    bounds = torch.tensor([0, *packed.lengths]).cumsum(0).to(torch.int32).to(device)
    longest = max(packed.lengths)
    blocks = similar_lengths(packed.lengths)
    row = PackedRow(
        qkv_format="thd",
        cu_seqlens_q=bounds,
        cu_seqlens_kv=bounds,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        blocks=[tensor(np.maximum(block, 0)) for block in blocks],
        places_N=tensor(_places(blocks)),
    )
    return DeviceBatch(
        token_ids_1N=tensor(packed.token_ids_N)[None],
        position_ids_1N=tensor(packed.position_ids_N)[None],
        row=row,
        loss_rows_T=tensor(packed.loss_rows_T),
        logps_TK=tensor(packed.logps_TK),
        ids_TK=tensor(packed.ids_TK),
        packed=packed,
    )


def _places(blocks: Sequence[np.ndarray]) -> np.ndarray:
    """[N]: where each row of the packed row is in the blocks, flattened and one after the other."""
    rows = np.concatenate([block.ravel() for block in blocks])
    (real,) = np.nonzero(rows >= 0)
    places_N = np.empty(len(real), dtype=np.int64)
    places_N[rows[real]] = real
    return places_N


def run_micro_batches(
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[PackedBatch],
    loss: LossFunction,
    *,
    device: torch.device,
    forward_only: bool = False,
) -> list[dict[str, Any]]:
    """Accumulate the gradient of the token mean over all data-parallel ranks, which must bring equally many batches.

    Returns what ``loss`` reported of each micro-batch: on the last pipeline stage; an empty list on the others.
    """

    def forward(batches: Iterator[PackedBatch], model: torch.nn.Module) -> tuple[Tensor, Callable[..., Any]]:
        batch = to_device(next(batches), device)
        with only_rows(model, batch.loss_rows_T):
            logits_1TW = model(batch.token_ids_1N, batch.position_ids_1N, None, packed_seq_params=batch.row)
        return logits_1TW, lambda output_1TW: loss(output_1TW[0], batch)

    return get_forward_backward_func()(
        forward_step_func=forward,
        data_iterator=[iter(batches) for _ in chunks],
        model=list(chunks),
        num_microbatches=len(batches),
        seq_length=1,  # of no effect: variable_seq_lengths exchanges the shapes
        micro_batch_size=1,
        forward_only=forward_only,
    )


def distillation_loss(vocab_size: int, tp_group: ProcessGroup | None) -> LossFunction:
    """Forward KL to the teacher at the rows that predict a response token."""
    return partial(_distillation_loss, vocab_size=vocab_size, tp_group=tp_group)


def _distillation_loss(
    logits_TW: Tensor, batch: DeviceBatch, *, vocab_size: int, tp_group: ProcessGroup | None
) -> LossResult:
    loss_T, diagnostics = forward_kl(logits_TW, batch.logps_TK, batch.ids_TK, vocab_size=vocab_size, tp_group=tp_group)
    n_tokens = torch.tensor(len(loss_T), dtype=torch.int, device=loss_T.device)
    reported = {"loss": loss_T.detach(), **diagnostics}
    sums = {name: value_T.sum(dtype=torch.float64) for name, value_T in reported.items()}
    sums["n_tokens"] = n_tokens.double()
    return loss_T.sum(), n_tokens, {"sums": sums, "loss_T": reported["loss"], "uids_T": batch.packed.uids_T}
