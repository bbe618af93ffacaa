"""Runs of the losses on the cases, in this process or on one rank of a tensor-parallel group."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses import Divergence, topk_divergence
from tests._support.dense_losses import dense_divergence
from tests._support.loss_cases import VOCABULARY, Case, make_case, matrix, row_weights

# Loss of each position, and the gradient in the logits of their weighted sum.
Result = tuple[Tensor, Tensor]

cached_case = functools.cache(make_case)


def loss_and_gradient(
    case: Case,
    divergence: Divergence,
    dtype: torch.dtype = torch.float32,
    chunk_tokens: int | None = None,
    in_place: bool = False,
    tp_group: ProcessGroup | None = None,
) -> Result:
    """Return loss and gradient of the code under test; the gradient in this rank's columns."""
    shards = (case.logits_TW,) if tp_group is None else case.logits_TW.chunk(tp_group.size(), dim=1)
    leaf = shards[0 if tp_group is None else tp_group.rank()].to(dtype, copy=True).requires_grad_()
    loss, _ = topk_divergence(
        leaf.clone(),
        case.logps_TK,
        case.ids_TK,
        divergence,
        vocab_size=VOCABULARY,
        chunk_tokens=chunk_tokens,
        in_place=in_place,
        tp_group=tp_group,
    )
    (loss * row_weights(len(loss)).to(loss.dtype)).sum().backward()
    assert leaf.grad is not None and leaf.grad.dtype == dtype
    return loss.detach(), leaf.grad


def dense_loss_and_gradient(case: Case, divergence: Divergence) -> Result:
    """Return loss and gradient of the dense reference."""
    logits = case.logits_TW.double().requires_grad_()
    loss = dense_divergence(logits, case.logps_TK, case.ids_TK, divergence, VOCABULARY)
    (loss * row_weights(len(loss))).sum().backward()
    assert logits.grad is not None
    return loss.detach(), logits.grad


@functools.cache
def dense_of_matrix(k: int, divergence: Divergence) -> Result:
    """Return loss and gradient of the dense reference for one entry of the matrix."""
    return dense_loss_and_gradient(cached_case(k, divergence.temperature), divergence)


def matrix_shard(rank: int, world_size: int, port: int, dtype: torch.dtype) -> tuple[np.ndarray, np.ndarray]:
    """Job of one rank: losses [N, T] and its columns of the gradients [N, T, W] of the whole matrix, float64."""
    with process_group(rank, world_size, port) as tp_group:
        results = []
        for number, (k, divergence) in enumerate(matrix()):
            case = cached_case(k, divergence.temperature)
            chunk_tokens, in_place = (None, 5)[number % 2], number % 3 == 0
            results.append(loss_and_gradient(case, divergence, dtype, chunk_tokens, in_place, tp_group))
    return tuple(torch.stack(parts).double().numpy() for parts in zip(*results, strict=True))  # type: ignore[return-value]


@contextmanager
def process_group(rank: int, world_size: int, port: int) -> Iterator[ProcessGroup]:
    """Join a gloo group and leave it at the end."""
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=world_size)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()
