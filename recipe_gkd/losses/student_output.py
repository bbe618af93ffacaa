"""Output of the student's forward pass: whole logits, or hidden states that the loss multiplies by the output layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses.float32_head import matmul_float32
from recipe_gkd.losses.fused_head import compute_log_stats_from_hidden
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats


class StudentOutput(Protocol):
    """The student's output at T positions.

    All ranks of a tensor-parallel group call the same methods in the same order.
    """

    def compute_log_stats(self, query: LogitsQuery, *, kernel_backend: str) -> StudentLogStats:
        """Return the requested statistics, differentiable. Call it once, after :meth:`logits`. Collective."""

    def logits(self, rows_R: Tensor) -> Tensor:
        """Return this rank's columns of the logits at the given positions, detached, [R, W]."""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """Whole logits. The backward pass writes their gradient over them.

    Attributes:
        logits_TW: This rank's columns of the logits.
        tp_group: Group over which the vocabulary is sharded; None if it is whole.
        chunk_tokens: ``gkd.chunk_tokens``.
    """

    logits_TW: Tensor
    tp_group: ProcessGroup | None
    chunk_tokens: int | None

    def compute_log_stats(self, query: LogitsQuery, *, kernel_backend: str) -> StudentLogStats:
        """Return the requested statistics; see :func:`~recipe_gkd.losses.log_stats.compute_log_stats`."""
        return compute_log_stats(
            self.logits_TW,
            query,
            tp_group=self.tp_group,
            chunk_tokens=self.chunk_tokens,
            in_place=True,
            kernel_backend=kernel_backend,
        )

    def logits(self, rows_R: Tensor) -> Tensor:
        """Return this rank's columns of the logits at the given positions, detached, [R, W]."""
        return self.logits_TW.detach()[rows_R]


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """Hidden states before the output layer, and its weights.

    Attributes:
        hidden_TD: Hidden states, whole on every tensor-parallel rank.
        weight_WD: This rank's rows of the output layer.
        tp_group: Group over which the vocabulary is sharded; None if it is whole.
        chunk_tokens: ``gkd.chunk_tokens``.
        float32_head: Compute float32 logits from 16-bit factors; see :mod:`~recipe_gkd.losses.float32_head`.
    """

    hidden_TD: Tensor
    weight_WD: Tensor
    tp_group: ProcessGroup | None
    chunk_tokens: int | None
    float32_head: bool = False

    def compute_log_stats(self, query: LogitsQuery, *, kernel_backend: str) -> StudentLogStats:
        """Return the requested statistics; see :func:`~recipe_gkd.losses.fused_head.compute_log_stats_from_hidden`."""
        return compute_log_stats_from_hidden(
            self.hidden_TD,
            self.weight_WD,
            query,
            tp_group=self.tp_group,
            chunk_tokens=self.chunk_tokens,
            kernel_backend=kernel_backend,
            float32_head=self.float32_head,
        )

    @torch.no_grad()
    def logits(self, rows_R: Tensor) -> Tensor:
        """Return this rank's columns of the logits at the given positions, detached, [R, W]."""
        hidden_RD = self.hidden_TD[rows_R]
        return matmul_float32(hidden_RD, self.weight_WD) if self.float32_head else hidden_RD @ self.weight_WD.T


def student_output(
    output_TX: Tensor,
    weight_WD: Tensor | None,
    *,
    tp_group: ProcessGroup | None,
    chunk_tokens: int | None,
    float32_head: bool,
) -> StudentOutput:
    """Return the output of a model whose output layer may have been skipped.

    Args:
        output_TX: Logits [T, W], or hidden states [T, D].
        weight_WD: This rank's rows of the output layer if ``output_TX`` are hidden states; else None.
        tp_group: Group over which the vocabulary is sharded; None if it is whole.
        chunk_tokens: ``gkd.chunk_tokens``.
        float32_head: See :class:`HiddenStates`.
    """
    if weight_WD is None:
        return Logits(logits_TW=output_TX, tp_group=tp_group, chunk_tokens=chunk_tokens)
    return HiddenStates(
        hidden_TD=output_TX,
        weight_WD=weight_WD,
        tp_group=tp_group,
        chunk_tokens=chunk_tokens,
        float32_head=float32_head,
    )
