"""What the student's last layer leaves for the losses: whole logits, or hidden states that become logits on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses.fused_head import compute_log_stats_from_hidden
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats


class Student(Protocol):
    """T positions. All ranks of a tensor-parallel group call the same methods in the same order."""

    def read(self, query: LogitsQuery) -> StudentLogStats:
        """Once: differentiable."""

    def logits(self, rows_R: Tensor) -> Tensor:
        """This rank's columns ``[R, W]`` of the logits at some positions, detached."""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """Their gradient is written over them; see :func:`~recipe_gkd.losses.log_stats.compute_log_stats`."""

    logits_TW: Tensor
    tp_group: ProcessGroup | None
    chunk_tokens: int | None

    def read(self, query: LogitsQuery) -> StudentLogStats:
        return compute_log_stats(
            self.logits_TW, query, tp_group=self.tp_group, chunk_tokens=self.chunk_tokens, in_place=True
        )

    def logits(self, rows_R: Tensor) -> Tensor:
        return self.logits_TW.detach()[rows_R]


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """See :func:`~recipe_gkd.losses.fused_head.compute_log_stats_from_hidden`."""

    hidden_TD: Tensor
    weight_WD: Tensor
    tp_group: ProcessGroup | None
    chunk_tokens: int | None

    def read(self, query: LogitsQuery) -> StudentLogStats:
        return compute_log_stats_from_hidden(
            self.hidden_TD, self.weight_WD, query, tp_group=self.tp_group, chunk_tokens=self.chunk_tokens
        )

    @torch.no_grad()
    def logits(self, rows_R: Tensor) -> Tensor:
        return self.hidden_TD[rows_R] @ self.weight_WD.T
